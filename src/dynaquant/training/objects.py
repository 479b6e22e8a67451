"""The objects of a training by name: models, optimizers, and extras such as schedulers and generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from dynaquant.errors import StateError
from dynaquant.state.of_ranks import RANKS
from dynaquant.state.wrappers import bare, broadcast_buffers, named_parameters

MAIN = ("model", "optimizer")
"""Objects that are not extras. They are restored last. Several models are named ``"model.<name>"``; in the
state they are one dictionary. The same holds for optimizers."""
RNG, CLASSES, PARAMETERS = "rng", "classes", "parameters"
RESERVED = (RNG, CLASSES, PARAMETERS)
"""Entries of a state that belong to no single object: states of the global random number generators; classes of
optimizers and generators; parameter names in each group of an optimizer. A restore compares classes and names."""

GENERATOR = torch.Generator | np.random.Generator
CHECKED = nn.Module | torch.optim.Optimizer
"""Objects for which a restore can check in advance whether they can load a state."""


def objects_of(model: Any, optimizer: Any, extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects of a training by name, without their wrappers.

    model, optimizer: one object, or several by name; optimizers may also be a sequence. Raises TypeError if extras is
    not a dictionary, ValueError for a name that cannot be used, StateError if ``model`` is not a module or
    ``optimizer`` not an optimizer.
    """
    if not isinstance(extras, Mapping):
        raise TypeError(f"extras must be a dictionary of objects by name, not a {type(extras).__qualname__}")
    if unnamed := [name for name in extras if not isinstance(name, str)]:
        raise TypeError(
            f"extras must be a dictionary of objects by name; {unnamed[0]!r} is no name, but {str(unnamed[0])!r} is"
        )
    objects = _one_or_several("model", model)
    for name, module in objects.items():
        if not isinstance(module, nn.Module):
            raise StateError(f"{name} must be a torch.nn.Module, not a {type(module).__qualname__}")
    if optimizer is not None:
        if isinstance(optimizer, Sequence):
            optimizer = {str(i): each for i, each in enumerate(optimizer)}
        optimizers = _one_or_several("optimizer", optimizer)
        for name, each in optimizers.items():
            if not hasattr(each, "param_groups"):
                raise StateError(f"{name} must be an optimizer, not a {type(each).__qualname__}; give it as an extra")
        objects.update(optimizers)
    taken = {name for name in extras if name in RESERVED or str(name).partition(".")[0] in (*MAIN, RANKS)}
    if taken:
        raise ValueError(f"extras cannot be called {' or '.join(sorted(taken))}; those names are taken")
    return {name: bare(thing) for name, thing in {**objects, **extras}.items()}


def buffers_of_rank_0(model: Any) -> frozenset[str]:
    """Return the names, in the state, of the buffers that every forward pass sets to those of rank 0 on all ranks.

    model: one module, or several by name, with their wrappers.
    """
    named = _one_or_several("model", model).items()
    return frozenset(f"{name}.{path}" for name, module in named for path in broadcast_buffers(module))


def models_of(objects: Mapping[str, Any]) -> nn.Module:
    """Return the model; several models as the parts of one module."""
    several = {name.partition(".")[2]: model for name, model in objects.items() if name.startswith("model.")}
    return nn.ModuleDict(several) if several else objects["model"]


def named_parameters_in(objects: Mapping[str, Any]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of all modules among the objects with their names in the state; tied ones once in each."""
    for name, thing in objects.items():
        if isinstance(thing, nn.Module):
            for path, parameter in named_parameters(thing):
                yield f"{name}.{path}", parameter


def first_names_in(objects: Mapping[str, Any]) -> dict[int, str]:
    """Return the first name of each parameter of the modules among the objects, by its ``id``."""
    return {id(parameter): name for name, parameter in reversed([*named_parameters_in(objects)])}


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the model by their names in the state. model: as ``models_of`` returns it."""
    return {f"model.{name}": parameter for name, parameter in named_parameters(model)}


def optimizers_of(objects: Mapping[str, Any]) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers among the objects by name, also those that are extras."""
    return {name: thing for name, thing in objects.items() if isinstance(thing, torch.optim.Optimizer)}


def class_of(thing: Any) -> str | None:
    """Return the full class name of an optimizer or generator; None for other objects.

    States of different optimizers, or of different generators, may look alike and still not fit.
    """
    if isinstance(thing, np.random.Generator):
        thing = thing.bit_generator
    elif not isinstance(thing, torch.optim.Optimizer | torch.Generator):
        return None
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def generator_states(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of those objects that are random number generators, by name."""
    return {name: generator_state(thing) for name, thing in objects.items() if isinstance(thing, GENERATOR)}


def generator_state(generator: GENERATOR) -> Any:
    """Return the state of a random number generator of PyTorch or NumPy."""
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.bit_generator.state


def set_generator_states(objects: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Set those generators among the objects that have an entry in ``states``."""
    for name, thing in objects.items():
        if name in states and isinstance(thing, GENERATOR):
            set_generator_state(thing, states[name])


def set_generator_state(generator: GENERATOR, state: Any) -> None:
    """Set a random number generator of PyTorch or NumPy to a state."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _one_or_several(kind: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        return {kind: given}
    if not given:
        raise ValueError(f"{kind} is an empty dictionary")
    if any(isinstance(each, torch.Tensor) for each in given.values()):
        raise StateError(f"{kind} is a dictionary of tensors, as a state_dict; give the {kind} itself")
    for name in given:
        if not isinstance(name, str) or not name or "." in name or hasattr(nn.ModuleDict(), name):
            raise ValueError(f"{kind}: {name!r} cannot be a name; use a word without dots")
    return {f"{kind}.{name}": each for name, each in given.items()}
