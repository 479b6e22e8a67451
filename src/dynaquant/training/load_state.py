"""Loads a stored state into one object of the training, in place where the training may hold references."""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dynaquant.state import wrappers
from dynaquant.state.flatten import flatten
from dynaquant.state.plain_objects import converted, has_method
from dynaquant.state.subclasses import descriptions_in, owner_of, set_packed
from dynaquant.state.tree import dict_items, tensor_name, with_items
from dynaquant.training.expanded import can_hold, copy_into, is_expanded
from dynaquant.training.objects import GENERATOR, set_generator_state


class StatesOfRanks(tuple[Any, ...]):
    """The states of an extra on all ranks that saved it, for ``load_state_of_ranks``, a method of the extra."""


def divides_its_state(thing: Any) -> bool:
    """Whether an object can load the states of another number of ranks."""
    return has_method(thing, "load_state_of_ranks")


def load_state(thing: Any, state: Any) -> None:
    """Load a state into an object. The state must fit it (``restore/fitting.py``)."""
    if isinstance(state, StatesOfRanks):
        thing.load_state_of_ranks(list(state))
    elif isinstance(thing, nn.Module):
        _load_module(thing, state)
    elif isinstance(thing, torch.optim.Optimizer):
        _load_optimizer(thing, state)
    elif isinstance(thing, GENERATOR):
        set_generator_state(thing, state)
    elif has_method(thing, "load_state_dict"):
        thing.load_state_dict(state)
    elif isinstance(thing, dict | list):
        _update(thing, state)
    else:
        for name, value in state.items():
            setattr(thing, name, _updated(getattr(thing, name, None), value))


def fill_in_omitted(now: Mapping[str, Any], state: dict[str, Any], omitted: Collection[str]) -> None:
    """Add the omitted tensors, given by name, to a stored state. now: the present state of the modules."""
    if omitted:
        _fill_in(flatten(now)[0], now, state, omitted)


def _fill_in(node: Any, now: Any, state: Any, omitted: Collection[str]) -> None:
    """Add the omitted tensors below one node. node: the tree of ``now``."""
    for key, value in dict_items(node):
        if tensor_name(value) in omitted:
            state.setdefault(key, now[key])
        elif isinstance(state.get(key), dict):
            _fill_in(value, now[key], state[key], omitted)


def _load_module(module: nn.Module, state: Any) -> None:
    own = wrappers.state_dict(module)
    described = descriptions_in(getattr(own, "_metadata", None))
    packed: dict[str, dict[str, Tensor]] = {}
    alone = set()  # what PyTorch refuses to fill, or does not know
    for name, tensor in own.items():
        owner = owner_of(name, described)
        if name not in state or not (owner or (isinstance(tensor, Tensor) and is_expanded(tensor))):
            continue
        alone.add(name)
        if owner is not None and owner in own:
            packed.setdefault(owner, {})[name.removeprefix(f"{owner}.")] = state[name]
        else:
            copy_into(tensor, state[name])
    if alone:
        state = _with_content(state, {name: value for name, value in state.items() if name not in alone})
    wrappers.load_state_dict(module, state, strict=state.keys() == own.keys())
    set_packed(module, packed, wrappers.bare_paths(module))


def _with_content(state: Any, content: dict[str, Any]) -> Any:
    """Return a state dict with this content and the metadata of ``state``."""
    result = OrderedDict(content)
    if hasattr(state, "_metadata"):
        result._metadata = state._metadata  # type: ignore[attr-defined]
    return result


def _updated(own: Any, stored: Any) -> Any:
    """Return the stored value, in the training's own container or tensor if it can be: others may refer to it."""
    if type(own) is type(stored) and isinstance(own, dict | list | deque):
        _update(own, stored)
        return own
    if isinstance(own, Tensor) and isinstance(stored, Tensor):
        if (own.shape, own.dtype) != (stored.shape, stored.dtype) or not can_hold(own, stored.to(own.device)):
            return stored.to(own.device)
        copy_into(own, stored)
        return own
    return stored


def _update(own: Any, stored: Any) -> None:
    if isinstance(own, dict):
        refill(own, {key: _updated(own.get(key), value) for key, value in stored.items()})
    else:
        refill(own, [_updated(own[i] if i < len(own) else None, value) for i, value in enumerate(stored)])


def refill(container: Any, content: Any) -> None:
    """Replace the content of a dictionary, set, list or deque, in place."""
    container.clear()
    (container.update if isinstance(container, dict | set) else container.extend)(content)


def _load_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
    of_parameters = state.get("state") if isinstance(state, dict) else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values to real")  # by the cast, which is undone below
        optimizer.load_state_dict(state if of_parameters is None else {**state, "state": _castable(of_parameters)})
    # PyTorch casts an optimizer's tensors to the dtype of their parameter: float32 moments of a bfloat16 parameter,
    # and even bytes of a float32 one. It damages texts, and makes plain dictionaries of subclasses.
    # state_dict() shares its tensors and dictionaries with the optimizer, so changing it changes the optimizer. If the
    # optimizer's own methods convert both ways, dtypes are right already.
    loaded = optimizer.state_dict()
    before = dict(loaded["state"]) if isinstance(loaded.get("state"), dict) else {}
    _as_stored(loaded, state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number in (n for n, own in before.items() if loaded["state"][n] is not own):
        optimizer.state[parameters[number] if isinstance(number, int) else number] = loaded["state"][number]


def _castable(value: Any) -> Any:
    """Return the states of parameters with tensors in place of arrays, which PyTorch's cast cannot build."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else converted(value, _castable)


def _as_stored(loaded: Any, stored: Any) -> Any:
    """Return what was loaded, with the stored value wherever PyTorch has cast it. Changes dictionaries and lists.

    What an optimizer itself has converted, such as a number to a tensor, stays.
    """
    if isinstance(loaded, Tensor) and isinstance(stored, Tensor):
        cast = loaded.dtype != stored.dtype and loaded.shape == stored.shape
        return stored.to(loaded.device) if cast else loaded
    if isinstance(stored, np.ndarray):
        return stored if isinstance(loaded, Tensor | np.ndarray) else loaded
    if isinstance(loaded, dict) and isinstance(stored, dict):
        values = {key: _as_stored(value, stored[key]) if key in stored else value for key, value in loaded.items()}
        result = loaded if type(stored) is dict or type(loaded) is not dict else type(stored)()
        for key, value in values.items():  # update() of a Counter would add
            result[key] = value
        return result
    if isinstance(loaded, list | tuple | deque) and type(loaded) is type(stored) and len(loaded) == len(stored):
        items = [_as_stored(*both) for both in zip(loaded, stored, strict=True)]
        if not isinstance(loaded, list):
            return with_items(stored, items)
        loaded[:] = items
        return loaded
    return stored if isinstance(stored, str | bytes | set | frozenset) and type(loaded) is type(stored) else loaded
