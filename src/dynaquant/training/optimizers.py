"""Keys an optimizer's state and ε by parameter name, and fits a stored state to other parameter groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from dynaquant.engine.tensors.dtypes import dtype_name
from dynaquant.errors import StateError
from dynaquant.state.plain_objects import packages_of, put_together

Key = str | int
"""Identifies an optimizer's parameter: its name, or its position if no saved module has it."""
Keys = Sequence[Sequence[Key]]
"""The keys of the parameters in each group."""

PARAMETER_SHAPED = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
    *("acc_delta", "sum", "prev", "step_size", "ax"),
}
"""Tensors in the states of ``torch.optim`` that have the shape of their parameter."""


def names_of(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of an optimizer's parameters by group, ``""`` for none. names: by ``id`` of the parameter."""
    return [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]


def keys_of(names: Sequence[Sequence[str]]) -> Keys:
    """Return the keys of parameters with these names. Raises TypeError if a name is not text (a damaged file)."""
    if not all(isinstance(name, str) for group in names for name in group):
        raise TypeError("the name of a parameter is not text")
    positions = itertools.count()
    return [[name or position for name, position in zip(group, positions, strict=False)] for group in names]


def epsilons_of(objects: Mapping[str, Any], parameters: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, float]:
    """Return the ε of each parameter's updates by the name of its optimizer state, as far as its group has one.

    objects: of the training, by name. parameters: the names of every optimizer's parameters, by group.
    """
    found: dict[str, float] = {}
    for name, names in parameters.items():
        for group, keys in zip(objects[name].param_groups, keys_of(names), strict=True):
            if epsilon := epsilon_in(group):
                found |= {f"{name}.state.{key}": epsilon for key in keys}
    return found


def epsilon_in(group: Mapping[str, Any]) -> float:
    """Return the ε of a parameter group; 0 if it has none, or something else than one number."""
    epsilon = group.get("eps")
    return float(epsilon) if isinstance(epsilon, int | float) and epsilon > 0 else 0.0


def by_name(state: Any, keys: Keys) -> Any:
    """Return the ``state_dict()`` of an optimizer with keys instead of numbers, if it is like those of PyTorch."""
    numbers = _numbers(state)
    if numbers is None or [len(group) for group in numbers] != [len(group) for group in keys]:
        return state
    return _rekeyed(state, numbers, keys)


def by_number(state: Any) -> Any:
    """Reverse ``by_name``: return a state with numbers, as ``state_dict()`` has them."""
    keys = _numbers(state)
    if keys is None:
        return state
    positions = itertools.count()
    return _rekeyed(state, keys, [[next(positions) for _ in group] for group in keys])


def _rekeyed(state: Any, before: Keys, after: Keys) -> Any:
    after_of = dict(zip(_flat(before), _flat(after), strict=True))
    return {
        **state,
        "state": {after_of.get(key, key): slots for key, slots in state["state"].items()},
        "param_groups": [{**g, "params": list(own)} for g, own in zip(state["param_groups"], after, strict=True)],
    }


@dataclass(frozen=True)
class Fit:
    """state: for ``load_state_dict``, None if nothing fits. problems: what does not fit. notes: for the user."""

    state: Any
    problems: list[str]
    notes: list[str]


def fit(
    name: str,
    optimizer: Optimizer,
    own_keys: Keys,
    stored: Any,
    stored_keys: Keys,
    dtypes: Mapping[Key, torch.dtype] = MappingProxyType({}),
) -> Fit:
    """Return a state for ``optimizer.load_state_dict`` that gives each parameter the state stored for its key.

    A group with the same parameters as a stored group gets its hyperparameters. For any other group, look at the stored
    groups of its parameters: it gets each hyperparameter on which these agree. If a stored group was divided, and the
    new groups differ in a hyperparameter, they keep their own. Parameters without a fitting state keep theirs.

    name: of the optimizer, for messages. dtypes: of the stored parameters, as far as known; a state does not fit a
    parameter of another dtype. Raises ValueError or TypeError if the stored state is malformed.
    """
    own = optimizer.state_dict()
    numbers = _numbers(own)
    try:
        stored = _with_objects(optimizer, stored, own_keys)
    except StateError as error:
        return Fit(None, [f"{name} cannot take its state: {error}"], [])
    if numbers is None or [len(group) for group in numbers] != [len(group) for group in own_keys]:
        if stored_keys != own_keys:
            return Fit(None, [f"the parameters of {name} are in another order than in the checkpoint"], [])
        return Fit(stored, [], [])
    stored = by_name(stored, stored_keys)
    if _numbers(stored) != [list(group) for group in stored_keys]:
        raise ValueError(f"the stored {name} has no 'state' and 'param_groups'")
    own_number = dict(zip(_flat(own_keys), _flat(numbers), strict=True))
    stored_set = set(_flat(stored_keys))
    if own_keys != stored_keys:
        if any(isinstance(key, int) for key in own_number.keys() | stored_set):
            what = "updates parameters that no saved module has; only their order identifies them, and it has changed"
            return Fit(None, [f"{name} {what}"], [])
        if isinstance(optimizer, torch.optim.LBFGS):
            what = "keeps one state for all its parameters in order, and that order has changed"
            return Fit(None, [f"{name} {what}"], [])
    problems = [f"{name} had no parameter {key}" for key in own_number if key not in stored_set]
    problems += [
        f"{name} had the parameter {key}, which it does not have now"
        for key in _flat(stored_keys)
        if key not in own_number
    ]
    parameter_of = _parameters(optimizer, own_keys)
    known = type(optimizer).__module__.startswith("torch.optim.")
    state = {}
    for key, slots in stored["state"].items():
        if key in own_number and key in stored_set:
            before = own["state"].get(own_number[key])
            wrong = _problems(f"{name}.state.{key}", parameter_of[key], before, slots, known, dtypes.get(key))
            problems += wrong
            if not wrong or before is not None:
                state[own_number[key]] = deepcopy(before) if wrong else slots  # a copy: a restore fills the original
        elif key not in stored_set:
            state[key] = slots
    state.update({n: own["state"][n] for key, n in own_number.items() if key not in stored_set and n in own["state"]})
    groups, notes = [], []
    for group, merged, kept in _merged(own["param_groups"], own_keys, stored["param_groups"], stored_keys):
        wrong = [
            f"{name} has {key}={group[key]!r}, and the checkpoint has {key}={value!r}, which cannot replace it"
            for key, value in merged.items()
            if key in group and not _interchangeable(group[key], value)
        ]
        problems += wrong
        groups.append(deepcopy(group) if wrong else {**_on_own_devices(group, merged), "params": group["params"]})
        notes += [
            f"the parameter groups of {name} differ from the saved ones, and the changed groups keep their own {key}"
            for key in kept
        ]
    return Fit({**stored, "state": state, "param_groups": groups}, problems, list(dict.fromkeys(notes)))


def _parameters(optimizer: Optimizer, keys: Keys) -> dict[Key, Tensor]:
    return dict(zip(_flat(keys), _flat([group["params"] for group in optimizer.param_groups]), strict=True))


def _with_objects(optimizer: Optimizer, stored: Any, own_keys: Keys) -> Any:
    """Return a stored state with its objects put together, on the device of their parameter, or of the first one."""
    packages = packages_of(optimizer)
    devices = {key: parameter.device for key, parameter in _parameters(optimizer, own_keys).items()}
    first = next(iter(devices.values()), None)
    if _numbers(stored) is None:
        return put_together(stored, packages, first)
    slots = {key: put_together(each, packages, devices.get(key, first)) for key, each in stored["state"].items()}
    others = {key: put_together(each, packages, first) for key, each in stored.items() if key != "state"}
    return {**others, "state": slots}


def _on_own_devices(own: Mapping[str, Any], merged: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merged hyperparameters. Tensors get the device and dtype of the group's own."""
    return {
        key: value.to(before.device, before.dtype)
        if isinstance(value, Tensor) and isinstance(before := own.get(key), Tensor)
        else value
        for key, value in merged.items()
    }


def _flat(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [each for group in groups for each in group]


def _numbers(state: Any) -> list[list[Any]] | None:
    """Return the parameter numbers in each group of a state; None if it does not have the form of ``torch.optim``."""
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return None
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
    ):
        return None
    return [list(group["params"]) for group in groups]


def _problems(
    name: str, parameter: Tensor, before: Any, stored: Any, known: bool, dtype: torch.dtype | None
) -> list[str]:
    """Return the reasons why the next step could not use the stored state of a parameter. dtype: of it when stored.

    before: the state now. known: whether the optimizer is one of ``torch.optim``. For others, a tensor must have the
    parameter's shape only if it has that shape now: a history, for instance, may grow.
    """
    if stored is None:
        return []
    if not isinstance(stored, dict):
        return [f"{name} is a {type(stored).__name__}"] if known or isinstance(before, dict) else []
    if stored and dtype is not None and dtype != parameter.dtype:
        present = dtype_name(parameter.dtype)
        return [f"{name} is that of a parameter in {dtype_name(dtype)}, which is in {present} now"]
    problems = []
    now = before if isinstance(before, dict) else {}
    for slot, value in stored.items():
        own = now.get(slot)
        shape = own.shape if isinstance(own, Tensor) and (known or own.shape == parameter.shape) else None
        if known and slot in PARAMETER_SHAPED:
            shape = parameter.shape
        elif known and slot == "step":
            shape = torch.Size([])
        if shape is None:
            continue
        if not isinstance(value, Tensor):
            if not (shape.numel() == 1 and isinstance(value, int | float)) and value is not None:
                problems.append(f"{name}.{slot} is a {type(value).__name__}, not a tensor of {list(shape)}")
        elif value.shape != shape and not value.numel() == shape.numel() == 1:
            problems.append(f"{name}.{slot} is {list(value.shape)} in the checkpoint, but must be {list(shape)}")
        elif known and slot in PARAMETER_SHAPED and not (value.is_floating_point() or value.is_complex()):
            problems.append(f"{name}.{slot} is {value.dtype} in the checkpoint, but must be floating point")
    return problems


def _merged(
    own_groups: Sequence[dict[str, Any]], own_keys: Keys, stored_groups: Sequence[dict[str, Any]], stored_keys: Keys
) -> Iterator[tuple[dict[str, Any], dict[str, Any], list[str]]]:
    """Yield every group, its new hyperparameters, and the keys of those that it keeps, unlike the stored ones."""
    sets = [frozenset(keys) for keys in stored_keys]
    origins = [[i for i, stored in enumerate(sets) if stored & frozenset(keys)] for keys in own_keys]
    for i, (group, keys) in enumerate(zip(own_groups, own_keys, strict=True)):
        same = [j for j, stored in enumerate(sets) if stored == frozenset(keys)]
        if same:
            stored_group = stored_groups[i if i in same else same[0]]
            yield group, {**group, **_hyperparameters(stored_group)}, []
            continue
        stored_values = [_hyperparameters(stored_groups[j]) for j in origins[i]]
        siblings = [g for g, indices in zip(own_groups, origins, strict=True) if set(indices) & set(origins[i])]
        merged, kept = dict(group), []
        for key in dict.fromkeys(key for each in stored_values for key in each):
            values = [each[key] for each in stored_values if key in each]
            divided = any(not _equal(group.get(key), sibling.get(key)) for sibling in siblings)
            if not divided and all(_equal(value, values[0]) for value in values):
                merged[key] = values[0]
            elif any(not _equal(value, group.get(key)) for value in values):
                kept.append(key)
        yield group, merged, kept


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _interchangeable(own: Any, stored: Any) -> bool:
    """Whether one value of a hyperparameter can replace another: numbers, tensors of a shape, or sequences of these."""
    if own is None or stored is None:
        return True
    if isinstance(own, Tensor) and isinstance(stored, Tensor) and own.shape == stored.shape:
        return True
    if isinstance(own, list | tuple):
        return isinstance(stored, list | tuple) and len(own) == len(stored) and all(map(_interchangeable, own, stored))
    numbers = bool | int | float | np.number | np.bool_
    if isinstance(own, numbers | Tensor):
        return isinstance(stored, numbers) or (isinstance(stored, Tensor) and stored.numel() == 1)
    return True


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        return a.shape == b.shape and bool((a.cpu() == b.cpu()).all())
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    return bool(a == b)
