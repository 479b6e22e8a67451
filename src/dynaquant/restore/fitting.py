"""Compares a stored state with the objects of a training: what each can load, and what does not fit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from dynaquant.engine.tensors.dtypes import dtype_name
from dynaquant.engine.tensors.hashing import tensor_hash
from dynaquant.errors import StateError
from dynaquant.formatting import plural
from dynaquant.ranks.dtensors import tied_keys
from dynaquant.restore.model_tensors import expanded_error, listed, renaming_problem, tied_problem
from dynaquant.state import wrappers
from dynaquant.state.plain_objects import PlainObject, has_method, leaves
from dynaquant.state.subclasses import description_problem, descriptions_in, owner_of
from dynaquant.training import optimizers
from dynaquant.training.collect import state_by_object, stored_rng_state
from dynaquant.training.expanded import can_hold
from dynaquant.training.objects import CLASSES, GENERATOR, MAIN, PARAMETERS, RNG, class_of

MOST_IN_SHORT = 3
"""Differences that a warning shows."""


@dataclass
class FittingState:
    """A stored state compared with the objects of a training.

    states: what each object can load, by its name. problems: what does not fit. notes: texts for the user.
    """

    states: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def selected_objects(objects: Mapping[str, Any], only: str | Collection[str] | None) -> tuple[list[str], bool]:
    """Return the names of the objects to restore, and whether to restore the global random number generators.

    only: names; ``"model"`` stands for all models, ``"optimizer"`` for all optimizers; None: everything. Raises
    ValueError for an unknown name.
    """
    if only is None:
        return list(objects), True
    wanted = {only} if isinstance(only, str) else set(only)
    chosen = [name for name in objects if name in wanted or name.partition(".")[0] in wanted & set(MAIN)]
    unknown = wanted - set(chosen) - {name.partition(".")[0] for name in chosen} - {RNG}
    if unknown or not wanted:
        what = f"there is no {sorted(map(str, unknown))[0]!r} to restore" if unknown else "only is empty"
        raise ValueError(f"{what}; there are {', '.join([*objects, RNG])}")
    return chosen, RNG in wanted


def fit_state(
    objects: Mapping[str, Any],
    now: Mapping[str, Any],
    state: Mapping[str, Any],
    rank: int = 0,
    only: Collection[str] | None = None,
    hash_of: Callable[[Tensor], str] = tensor_hash,
) -> FittingState:
    """Compare a stored state with the objects. Changes nothing.

    now: the objects' state (``collect_to_compare``). rank: the rank whose generators are restored. only: names of the
    objects to restore; None: all. hash_of: returns the stored hash of a tensor in ``state``. Raises ValueError,
    TypeError, KeyError or the like for a malformed state.
    """
    found = FittingState()
    stored = state_by_object(state, objects)
    present = state_by_object(now, objects)
    random = stored_rng_state(state, rank)
    wanted = objects.keys() if only is None else only
    found.problems += [f"the checkpoint has no {_in_words(name)}" for name in sorted(set(wanted) - set(stored))]
    if only is None:
        found.problems += [
            f"the checkpoint has {_in_words(name, 'an ')}, which was not given"
            for name in sorted(set(stored) - set(objects))
        ]
    malformed = _objects_outside_optimizers({name: objects[name] for name in wanted}, stored)
    found.problems += malformed.values()
    for name in sorted(set(wanted) & set(stored) - set(malformed)):
        thing, given = objects[name], stored[name]
        before, kind = state[CLASSES].get(name), class_of(thing)
        if before != kind:
            was = f"{name} was {before or 'something else'} and is {kind or type(thing).__qualname__}"
            found.problems.append(was)
        elif isinstance(thing, nn.Module):
            _fit_module(found, name, present[name], given, wrappers.own_loading(thing))
            found.problems[:0] = renaming_problem(thing, present[name], given)
        elif isinstance(thing, torch.optim.Optimizer):
            own_keys, stored_keys = (optimizers.keys_of(of[PARAMETERS][name]) for of in (now, state))
            fit = optimizers.fit(name, thing, own_keys, given, stored_keys, _dtypes(present, stored))
            found.problems += fit.problems
            found.notes += fit.notes
            if fit.state is not None:
                found.states[name] = fit.state
        elif isinstance(thing, GENERATOR):
            if rank > 0:
                given = (random or {}).get("sources", {}).get(name)
            if given is not None:
                try:
                    _check_generator(thing, given)
                    found.states[name] = given
                except RuntimeError as error:  # from PyTorch, for the state of a generator of another device
                    found.problems.append(f"{name} cannot take the state of the generator that was saved ({error})")
        elif has_method(thing, "load_state_dict"):
            found.states[name] = given
        else:
            _fit_plain(found, name, thing, given)
    modules = {name: present[name] for name in found.states if isinstance(objects[name], nn.Module)}
    _leave_out_other_values_of_tied(found, modules, hash_of)
    return found


def _in_words(name: str, article: str = "") -> str:
    return f"{name!r}" if name.partition(".")[0] in MAIN else f"{article}extra {name!r}"


def _dtypes(present: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str | int, torch.dtype]:
    """Return the stored dtypes of tensors of modules that have another one now, by keys of an optimizer's parameters.

    States are compared, not parameters: a hook of a module may give them in another dtype than its parameters have.
    """
    return {
        f"{name}.{key}": value.dtype
        for name, state in present.items()
        if isinstance(state, Mapping) and isinstance(stored.get(name), Mapping)
        for key, value in stored[name].items()
        if isinstance(value, Tensor) and isinstance(now := state.get(key), Tensor) and now.dtype != value.dtype
    }


def _leave_out_other_values_of_tied(
    found: FittingState, modules: Mapping[str, Any], hash_of: Callable[[Tensor], str]
) -> None:
    """Leave out stored tensors that differ from another one which fills the same tensor. modules: present states."""
    own = {(name, key): state[key] for name, state in modules.items() for key in found.states[name]}
    for (name, key), *others in tied_keys(own):
        first = found.states[name][key]
        for other, other_key in others:
            tensor = found.states[other][other_key]
            if tensor is not first and hash_of(tensor) != hash_of(first):
                found.problems.append(tied_problem(f"{name}.{key}", f"{other}.{other_key}"))
                del found.states[other][other_key]


def raise_if_any(problems: list[str], what: str, advice: str) -> None:
    """Raise StateError with the list of problems, if there are any. what: the checkpoint, in words."""
    if problems:
        shown = listed(problems)
        raise StateError(f"{what} does not fit the objects to restore:\n  {shown}\nNothing was changed. {advice}")


def in_short(problems: Sequence[str]) -> str:
    """Return the count of problems and the first three: ``8 differences: …; …; …; and 5 more (…)``."""
    rest = len(problems) - MOST_IN_SHORT
    more = [f"and {rest} more (not_restored lists them, and the log at level INFO)"] if rest > 0 else []
    return f"{plural(len(problems), 'difference')}: {'; '.join([*problems[:MOST_IN_SHORT], *more])}"


def _fit_module(
    found: FittingState, name: str, own: Mapping[str, Any], stored: Any, own_loading: Collection[str]
) -> None:
    """Compare the states of a module. own_loading: prefixes of keys that modules load by code of their own."""
    if not isinstance(stored, Mapping) or not isinstance(getattr(stored, "_metadata", {}), Mapping):
        raise TypeError(f"{name} has no state dict")
    now, before = ({key: _form(value) for key, value in of.items()} for of in (own, stored))
    found.problems += [f"{name}.{key} is not in the checkpoint" for key in now if key not in before]
    found.problems += [f"{name}.{key} is in the checkpoint, but not in the model" for key in before if key not in now]
    fitting: OrderedDict[str, Any] = OrderedDict()
    described, earlier = (descriptions_in(getattr(of, "_metadata", None)) for of in (own, stored))
    wrong = {
        path: problem
        for path in sorted(described.keys() & earlier.keys())
        if (problem := description_problem(f"{name}.{path}", described[path], earlier[path]))
    }
    found.problems += wrong.values()
    for key, form in now.items():
        if key not in before:
            continue
        owner = owner_of(key, described)
        # A packed parameter gets the rest of its state whatever its shapes.
        decides = key.rpartition(".")[0] in own_loading or (owner in own and owner in before)
        if key.rpartition(".")[2] == "_extra_state" or decides:
            fitting[key] = stored[key]  # the module itself decides; if it fails, everything is put back
        elif before[key] != form:
            found.problems.append(f"{name}.{key} was {before[key]} and is {form}")
        elif isinstance(own[key], Tensor) and not can_hold(own[key], stored[key]):
            found.problems.append(str(expanded_error(f"{name}.{key}")))
        else:
            fitting[key] = stored[key]
    # What belongs to one tensor is restored together or not at all.
    whole = {key: key if key in described else owner_of(key, described) for key in (*now, *before)}
    incomplete = ({whole[key] for key in whole if key not in fitting} | wrong.keys()) - {None}
    fitting = OrderedDict((key, value) for key, value in fitting.items() if whole[key] not in incomplete)
    if hasattr(stored, "_metadata"):
        fitting._metadata = stored._metadata  # type: ignore[attr-defined]
    found.states[name] = fitting


def _objects_outside_optimizers(objects: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, str]:
    """Return problems with objects that a damaged file has where a save stores none, by the name of the state."""
    return {
        name: f"{name} has an object of the class {each.kind}, which only the state of an optimizer may have"
        for name, thing in objects.items()
        if not isinstance(thing, torch.optim.Optimizer)
        for each in leaves(stored.get(name))
        if isinstance(each, PlainObject)
    }


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)}{list(value.shape)}"
    return type(value).__qualname__


def _fit_plain(found: FittingState, name: str, thing: Any, stored: Any) -> None:
    has_fields = not isinstance(thing, dict | list)
    if not (isinstance(stored, dict) if has_fields else type(stored) is type(thing)):
        found.problems.append(f"{name} was a {type(stored).__name__} and is a {type(thing).__name__}")
        return
    if has_fields:
        known = {each.name for each in fields(thing)}
        lost = [key for key in stored if key not in known]
        found.problems += [f"{name} had a field {key!r}, which it does not have now" for key in lost]
        stored = {key: value for key, value in stored.items() if key in known}
    found.states[name] = stored


def _check_generator(thing: Any, state: Any) -> None:
    """Raise the error that setting the generator's state would raise."""
    if isinstance(thing, torch.Generator):
        torch.Generator(thing.device).set_state(state)
    else:
        type(thing.bit_generator)().state = state
