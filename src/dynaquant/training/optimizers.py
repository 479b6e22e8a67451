"""An optimizer's state by the names of its parameters, and what of it goes into an optimizer with other groups."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Key = str | int
"""What an optimizer's parameter is known by: its name, or its position if no saved module has it."""
Keys = Sequence[Sequence[Key]]
"""Those of every group."""

_LIKE_PARAMETER = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
    *("acc_delta", "sum", "prev", "step_size", "ax"),
}
"""Tensors in the state of the optimizers of ``torch.optim`` that have their parameter's shape."""


def names_of(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The names of an optimizer's parameters by group, ``""`` where there is none. names: by the parameter's ``id``."""
    return [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]


def keys_of(names: Sequence[Sequence[str]]) -> Keys:
    """What parameters of these names are known by. Raises TypeError for names that are none, of a broken file."""
    if not all(isinstance(name, str) for group in names for name in group):
        raise TypeError("the name of a parameter is no text")
    positions = itertools.count()
    return [[name or position for name, position in zip(group, positions, strict=False)] for group in names]


def by_name(state: Any, keys: Keys) -> Any:
    """The ``state_dict()`` of an optimizer with keys in place of its parameters' numbers.

    One that does not have the form of ``torch.optim`` is returned as it is.
    """
    numbers = _numbers(state)
    if numbers is None or [len(group) for group in numbers] != [len(group) for group in keys]:
        return state
    key_of = dict(zip(_flat(numbers), _flat(keys), strict=True))
    return {
        **state,
        "state": {key_of.get(number, number): of for number, of in state["state"].items()},
        "param_groups": [{**g, "params": list(ks)} for g, ks in zip(state["param_groups"], keys, strict=True)],
    }


@dataclass(frozen=True)
class Fit:
    """What can be loaded of a stored state. None: nothing. problems: what cannot. notes: what a user should know."""

    state: Any
    problems: list[str]
    notes: list[str]


def fit(name: str, optimizer: Optimizer, own_keys: Keys, stored: Any, stored_keys: Keys) -> Fit:
    """What ``optimizer.load_state_dict`` takes so that each parameter gets the state stored for its key.

    name: of the optimizer, for messages. A group of the same parameters as a stored one gets its hyperparameters. Any
    other group gets those on which the stored groups of its parameters agree, but keeps its own where the groups that
    these were divided into have been given different ones. Parameters for which nothing fits keep their state.

    Raises ValueError or TypeError when what is stored has no form that an optimizer can have.
    """
    own = optimizer.state_dict()
    numbers = _numbers(own)
    if numbers is None or [len(group) for group in numbers] != [len(group) for group in own_keys]:
        if stored_keys != own_keys:
            return Fit(None, [f"{name} had its parameters in another order"], [])
        return Fit(stored, [], [])
    stored = by_name(stored, stored_keys)
    if _numbers(stored) != [list(group) for group in stored_keys]:
        raise ValueError(f"{name} has no state and groups of parameters")
    mine = dict(zip(_flat(own_keys), _flat(numbers), strict=True))
    theirs = set(_flat(stored_keys))
    if own_keys != stored_keys:
        if any(isinstance(key, int) for key in mine.keys() | theirs):
            what = "works on parameters that are in no saved module and are told by their order, which has changed"
            return Fit(None, [f"{name} {what}"], [])
        if isinstance(optimizer, torch.optim.LBFGS):
            return Fit(None, [f"{name} has one state for all its parameters in their order, which has changed"], [])
    problems = [f"{name} had no parameter {key}" for key in mine if key not in theirs]
    problems += [
        f"{name} had the parameter {key}, which it does not have now" for key in _flat(stored_keys) if key not in mine
    ]
    parameter_of = dict(zip(_flat(own_keys), _flat([group["params"] for group in optimizer.param_groups]), strict=True))
    known = type(optimizer).__module__.startswith("torch.optim.")
    state = {}
    for key, of in stored["state"].items():
        if key in mine and key in theirs:
            before = own["state"].get(mine[key])
            wrong = _problems(f"{name}.state.{key}", parameter_of[key], before, of, known)
            problems += wrong
            if not wrong or before is not None:
                state[mine[key]] = deepcopy(before) if wrong else of  # a copy: what is its own is filled
        elif key not in theirs:
            state[key] = of
    state.update({n: own["state"][n] for key, n in mine.items() if key not in theirs and n in own["state"]})
    groups, notes = [], []
    for group, merged, chosen in _merged(own["param_groups"], own_keys, stored["param_groups"], stored_keys):
        wrong = [
            f"{name} has {group[key]!r} for {key} and had {value!r}"
            for key, value in merged.items()
            if key in group and not _alike(group[key], value)
        ]
        problems += wrong
        groups.append(deepcopy(group) if wrong else {**_where(group, merged), "params": group["params"]})
        notes += [f"{name} has other groups than were saved, which keep their own {key}" for key in chosen]
    return Fit({**stored, "state": state, "param_groups": groups}, problems, list(dict.fromkeys(notes)))


def _where(own: Mapping[str, Any], merged: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters to be, tensors on the devices and in the dtypes of those that a group has."""
    return {
        key: value.to(before.device, before.dtype)
        if isinstance(value, Tensor) and isinstance(before := own.get(key), Tensor)
        else value
        for key, value in merged.items()
    }


def _flat(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [each for group in groups for each in group]


def _numbers(state: Any) -> list[list[Any]] | None:
    """What a state dict of the form of ``torch.optim`` has for its parameters, by group; None for other forms."""
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return None
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
    ):
        return None
    return [list(group["params"]) for group in groups]


def _problems(name: str, parameter: Tensor, before: Any, stored: Any, known: bool) -> list[str]:
    """Why the next step could not use the stored state of a parameter.

    before: what the optimizer has now. known: whether it is one of ``torch.optim``. Of another one only tensors that
    have the parameter's shape now are known to need it: those of a history may grow.
    """
    if stored is None:
        return []
    if not isinstance(stored, dict):
        return [f"{name} is a {type(stored).__name__}"] if known or isinstance(before, dict) else []
    problems = []
    now = before if isinstance(before, dict) else {}
    for slot, value in stored.items():
        own = now.get(slot)
        shape = own.shape if isinstance(own, Tensor) and (known or own.shape == parameter.shape) else None
        if known and slot in _LIKE_PARAMETER:
            shape = parameter.shape
        elif known and slot == "step":
            shape = torch.Size([])
        if shape is None:
            continue
        if not isinstance(value, Tensor):
            if not (shape.numel() == 1 and isinstance(value, int | float)) and value is not None:
                problems.append(f"{name}.{slot} is a {type(value).__name__}, not a tensor of {list(shape)}")
        elif value.shape != shape and not value.numel() == shape.numel() == 1:
            problems.append(f"{name}.{slot} is {list(value.shape)} in it, where {list(shape)} is needed")
        elif known and slot in _LIKE_PARAMETER and not (value.is_floating_point() or value.is_complex()):
            problems.append(f"{name}.{slot} is {value.dtype} in it, where floats are needed")
    return problems


def _merged(
    own_groups: Sequence[dict[str, Any]], own_keys: Keys, stored_groups: Sequence[dict[str, Any]], stored_keys: Keys
) -> list[tuple[dict[str, Any], dict[str, Any], list[str]]]:
    """For every group of an optimizer: as it is, as it is to be, and the hyperparameters that stay its own although the
    stored ones say otherwise."""
    sets = [frozenset(keys) for keys in stored_keys]
    origins = [[i for i, stored in enumerate(sets) if stored & frozenset(keys)] for keys in own_keys]
    result: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = []
    for i, (group, keys) in enumerate(zip(own_groups, own_keys, strict=True)):
        same = [j for j, stored in enumerate(sets) if stored == frozenset(keys)]
        if same:
            source = stored_groups[i if i in same else same[0]]
            result.append((group, {**group, **_without_names(source)}, []))
            continue
        sources = [_without_names(stored_groups[j]) for j in origins[i]]
        siblings = [g for g, of in zip(own_groups, origins, strict=True) if set(of) & set(origins[i])]
        merged, chosen = dict(group), []
        for key in dict.fromkeys(key for source in sources for key in source):
            values = [source[key] for source in sources if key in source]
            divided = any(not _equal(group.get(key), sibling.get(key)) for sibling in siblings)
            if not divided and all(_equal(value, values[0]) for value in values):
                merged[key] = values[0]
            elif any(not _equal(value, group.get(key)) for value in values):
                chosen.append(key)
        result.append((group, merged, chosen))
    return result


def _without_names(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _alike(own: Any, stored: Any) -> bool:
    """Whether one value of a hyperparameter can stand for another: two numbers, or sequences of as many."""
    if own is None or stored is None:
        return True
    if isinstance(own, list | tuple):
        return isinstance(stored, list | tuple) and len(own) == len(stored) and all(map(_alike, own, stored))
    if isinstance(own, bool | int | float | Tensor):
        one = isinstance(stored, Tensor) and stored.numel() == 1
        return isinstance(stored, bool | int | float) or one
    return True


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        return a.shape == b.shape and bool((a.cpu() == b.cpu()).all())
    return bool(a == b)
