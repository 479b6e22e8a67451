"""Collects the state of all objects of a training as one dictionary, and divides it by object again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dynaquant.errors import StateError
from dynaquant.state import wrappers
from dynaquant.state.plain_objects import has_method, packages_of, taken_apart
from dynaquant.training import optimizers, rng
from dynaquant.training.objects import (
    CHECKED,
    CLASSES,
    GENERATOR,
    MAIN,
    PARAMETERS,
    RESERVED,
    RNG,
    class_of,
    first_names_in,
    generator_state,
    generator_states,
    optimizers_of,
)
from dynaquant.training.packed import count, unpacked
from dynaquant.training.supported import LOADER_ADVICE


def collect(objects: Mapping[str, Any], other_ranks: torch.Tensor | None = None) -> dict[str, Any]:
    """Return the state of every object by name, and the entries ``RESERVED``.

    other_ranks: ``rank_rng_state`` of every rank but the first, in order, packed and joined (``training.packed``); kept
    in ``"rng"`` under ``"ranks"``. Raises StateError, with the extra's name, if its ``state_dict`` fails.
    """
    classes = {name: kind for name, thing in objects.items() if (kind := class_of(thing)) is not None}
    parameters = parameter_names(objects)
    return {
        **_by_kind({name: _checked_state_of(name, thing, parameters.get(name)) for name, thing in objects.items()}),
        CLASSES: classes,
        PARAMETERS: parameters,
        RNG: rng.get_state() if other_ranks is None else {**rng.get_state(), "ranks": other_ranks},
    }


def collect_to_compare(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``collect`` of the modules and optimizers alone. A restore compares it with the stored state."""
    return collect({name: thing for name, thing in objects.items() if isinstance(thing, CHECKED)})


def state_by_object(state: Mapping[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of each object by its name. That of several models or optimizers is divided, as the objects."""
    found: dict[str, Any] = {}
    for name, own in state.items():
        if name in MAIN and isinstance(own, Mapping) and any(other.startswith(f"{name}.") for other in objects):
            found.update({f"{name}.{key}": inner for key, inner in own.items()})
        elif name not in RESERVED:
            found[name] = own
    return found


def rank_rng_state(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of all random number generators, which differ between the ranks of a data-parallel training."""
    return {**rng.get_state(), "sources": generator_states(objects)}


def stored_rng_state(state: Mapping[str, Any], rank: int) -> dict[str, Any] | None:
    """Return the stored ``rank_rng_state`` of a rank; None if fewer ranks were saved.

    Rank 0 has only the global generators here; its other generators are parts of the state.
    """
    if rank == 0:
        return state[RNG]  # type: ignore[no-any-return]
    ranks = state[RNG].get("ranks", [])
    if isinstance(ranks, torch.Tensor):
        return unpacked(ranks, rank - 1)  # type: ignore[no-any-return]
    return ranks[rank - 1] if rank <= len(ranks) else None  # checkpoints of early versions hold a list


def number_of_ranks(state: Mapping[str, Any]) -> int:
    """Return how many ranks have saved a state. Raises ValueError if it is damaged."""
    ranks = state[RNG].get("ranks", [])
    return 1 + (count(ranks) if isinstance(ranks, torch.Tensor) else len(ranks))


def state_of(thing: Any, parameters: Sequence[Sequence[str]] | None = None) -> Any:
    """Return the state of one object. parameters: those of an optimizer by group, for names instead of numbers."""
    if isinstance(thing, GENERATOR):
        return generator_state(thing)
    if isinstance(thing, nn.Module):
        return wrappers.state_dict(thing)
    if has_method(thing, "state_dict"):
        state = thing.state_dict()
        if isinstance(thing, torch.optim.Optimizer):
            state = taken_apart(state, packages_of(thing))
        return state if parameters is None else optimizers.by_name(state, optimizers.keys_of(parameters))
    if isinstance(thing, dict | list):
        return thing
    return {field.name: getattr(thing, field.name) for field in fields(thing) if hasattr(thing, field.name)}


def _checked_state_of(name: str, thing: Any, parameters: Sequence[Sequence[str]] | None) -> Any:
    """Return the state of one object. Raises StateError, with its name, if an extra's ``state_dict`` fails."""
    try:
        return state_of(thing, parameters)
    except StateError as error:
        raise StateError(f"{name}: {error}") from error
    except Exception as error:
        if isinstance(thing, CHECKED):
            raise  # modules and optimizers always have a state, so this is an error in the user's own code
        raise StateError(
            f"{name}: state_dict() of {type(thing).__qualname__} failed ({type(error).__name__}: {error}); "
            f"{LOADER_ADVICE if isinstance(thing, DataLoader) else 'prepare it before you pass it as an extra'}"
        ) from error


def _by_kind(states: Mapping[str, Any]) -> dict[str, Any]:
    """Reverse ``state_by_object``: return several models, or several optimizers, in one dictionary."""
    state: dict[str, Any] = {}
    for name, part in states.items():
        kind, dot, key = name.partition(".")
        if dot and kind in MAIN:
            state.setdefault(kind, {})[key] = part
        else:
            state[name] = part
    return state


def parameter_names(objects: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """Return the names of every optimizer's parameters, by group; ``""`` if no saved module has the parameter."""
    names = first_names_in(objects)
    return {name: optimizers.names_of(optimizer, names) for name, optimizer in optimizers_of(objects).items()}
