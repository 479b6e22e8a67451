"""The objects a state is collected from and restored into: modules, optimizers, schedulers, generators, values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dynaquant.errors import StateError
from dynaquant.state import names
from dynaquant.state.tree import flatten, pairs_of, tensor_name, unflatten
from dynaquant.training import optimizers, rng
from dynaquant.training.supported import LOADER_ADVICE

LAST = ("model", "optimizer")
"""Sources that are restored after the others. Several of them are called ``"model.<name>"``, and together stand in the
state as a dictionary."""
RNG, CLASSES, PARAMETERS = "rng", "classes", "parameters"
RESERVED = (RNG, CLASSES, PARAMETERS)
"""Names in a state that are not sources: the random number generators; the classes of optimizers and generators; the
names of the parameters in each group of an optimizer."""

GENERATOR = torch.Generator | np.random.Generator
CHECKED = nn.Module | torch.optim.Optimizer
"""Sources of which it is known beforehand whether they can load a state."""


def sources_of(model: Any, optimizer: Any, extras: Mapping[str, Any]) -> dict[str, Any]:
    """The objects of a training by name, without their wrappers.

    model, optimizer: one, or several by name (of optimizers a sequence, too). Raises TypeError for extras that are no
    dictionary, ValueError for names that cannot be used, StateError for what is no module or optimizer.
    """
    if not isinstance(extras, Mapping):
        raise TypeError(f"extras must be a dictionary of objects by name, not a {type(extras).__qualname__}")
    sources = _one_or_several("model", model)
    for name, module in sources.items():
        if not isinstance(module, nn.Module):
            raise StateError(f"{name} must be a torch.nn.Module, not a {type(module).__qualname__}")
    if optimizer is not None:
        if isinstance(optimizer, Sequence):
            optimizer = {str(i): one for i, one in enumerate(optimizer)}
        given = _one_or_several("optimizer", optimizer)
        for name, one in given.items():
            if not hasattr(one, "param_groups"):
                raise StateError(f"{name} must be an optimizer, not a {type(one).__qualname__}; give it as an extra")
        sources.update(given)
    taken = {name for name in extras if name in RESERVED or str(name).partition(".")[0] in LAST}
    if taken:
        raise ValueError(f"extras cannot be called {' or '.join(sorted(taken))}; those names are taken")
    return {name: names.bare(source) for name, source in {**sources, **extras}.items()}


def models_of(sources: Mapping[str, Any]) -> nn.Module:
    """The model among the sources, or several as a module of which each is a part."""
    several = {name.partition(".")[2]: model for name, model in sources.items() if name.startswith("model.")}
    return nn.ModuleDict(several) if several else sources["model"]


def _one_or_several(kind: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        return {kind: given}
    if not given:
        raise ValueError(f"{kind} is an empty dictionary")
    for name in given:
        if not isinstance(name, str) or not name or "." in name or hasattr(nn.ModuleDict(), name):
            raise ValueError(f"{kind}: {name!r} cannot be a name; take a word without dots")
    return {f"{kind}.{name}": one for name, one in given.items()}


def randomness(sources: Mapping[str, Any]) -> dict[str, Any]:
    """What is different on every rank of a data-parallel training: the states of the global random number generators,
    and as ``"sources"`` those of the generators among the sources."""
    return {**rng.get_state(), "sources": generators(sources)}


def collect(sources: Mapping[str, Any], other_ranks: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The state of every source by name; that of the global random number generators as ``"rng"``; as ``"classes"``
    the class of every optimizer and generator, and as ``"parameters"`` the names of every optimizer's parameters, since
    states of different ones look alike but do not fit.

    other_ranks: the ``randomness`` of every rank but the first, in their order; kept in ``"rng"`` as ``"ranks"``.
    """
    classes = {name: kind for name, source in sources.items() if (kind := class_of(source)) is not None}
    parameters = _parameters(sources)
    return {
        **_together({name: _taken(name, source, parameters.get(name)) for name, source in sources.items()}),
        CLASSES: classes,
        PARAMETERS: parameters,
        RNG: {**rng.get_state(), "ranks": list(other_ranks)} if other_ranks else rng.get_state(),
    }


def collect_to_compare(sources: Mapping[str, Any]) -> dict[str, Any]:
    """As ``collect``, of what a stored state is compared with or put into: modules and optimizers."""
    return collect({name: source for name, source in sources.items() if isinstance(source, CHECKED)})


def parts(sources: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a state by the names of sources; several models or optimizers are taken apart as the sources are."""
    found: dict[str, Any] = {}
    for name, part in state.items():
        if name in LAST and isinstance(part, Mapping) and any(source.startswith(f"{name}.") for source in sources):
            found.update({f"{name}.{key}": of for key, of in part.items()})
        elif name not in RESERVED:
            found[name] = part
    return found


def fill_in_omitted(now: Mapping[str, Any], state: dict[str, Any], omitted: Collection[str]) -> None:
    """Puts the tensors that a stored state omits into it, as the modules have them.

    now: ``collect_to_compare`` of the modules. omitted: names of tensors.
    """
    if omitted:
        _fill_in(flatten(now)[0], now, state, omitted)


def _fill_in(node: Any, now: Any, state: Any, omitted: Collection[str]) -> None:
    """node: of ``now`` in its tree."""
    for key, value in pairs_of(node):
        if tensor_name(value) in omitted:
            state.setdefault(key, now[key])
        elif isinstance(state.get(key), dict):
            _fill_in(value, now[key], state[key], omitted)


def randomness_of(state: Mapping[str, Any], rank: int) -> dict[str, Any] | None:
    """The state of a rank's global generators; None when the checkpoint comes from fewer ranks."""
    if rank == 0:
        return state[RNG]  # type: ignore[no-any-return]
    ranks = state[RNG].get("ranks", [])
    return ranks[rank - 1] if rank <= len(ranks) else None


def load(source: Any, part: Any) -> None:
    """Puts a part of a state that fits (``fitting``) into its source."""
    if isinstance(source, nn.Module):
        _load_module(source, part)
    elif isinstance(source, torch.optim.Optimizer):
        source.load_state_dict(part)
        # PyTorch casts an optimizer's tensors to the dtype of their parameter, float32 moments of a bfloat16 parameter
        # as well as bytes of a float32 one. state_dict() copies no tensors and no parameter's dictionary, so this
        # changes the optimizer. Where methods of its own convert both ways, it has the stored dtypes already.
        _undo_casts(source.state_dict(), part)
    elif isinstance(source, torch.Generator):
        source.set_state(part)
    elif isinstance(source, np.random.Generator):
        source.bit_generator.state = part
    elif hasattr(source, "load_state_dict"):
        source.load_state_dict(part)
    elif isinstance(source, dict | list):
        _update(source, part)
    else:
        for name, value in part.items():
            setattr(source, name, _updated(getattr(source, name, None), value))


def undo_of(source: Any) -> Callable[[], None]:
    """What puts a source back to its present state, of which it keeps a copy. Raises StateError where there is none."""
    tree, tensors = flatten(_state_of(source, None))
    state = unflatten(tree, {name: tensor.clone() for name, tensor in tensors.items()})
    return lambda: load(source, state)


def can_hold(tensor: Tensor, values: Tensor) -> bool:
    """Whether a tensor can take values of its shape: after ``expand`` those that share a place have to be the same."""
    if not (shared := _shared(tensor)):
        return True
    alike = _first_along(values, shared).expand(values.shape)
    return torch.equal(alike.contiguous().view(torch.uint8), values.contiguous().view(torch.uint8))


def copy_into(tensor: Tensor, values: Tensor) -> None:
    """Copies values that a tensor can hold, also where PyTorch refuses to since several elements share a place."""
    shared = _shared(tensor)
    with torch.no_grad():
        _first_along(tensor, shared).copy_(_first_along(values, shared))


def _shared(tensor: Tensor) -> list[int]:
    """The dimensions along which all elements of a tensor are the same memory."""
    return [i for i, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if n > 1 and stride == 0]


def _first_along(tensor: Tensor, dimensions: Sequence[int]) -> Tensor:
    """The first elements along the dimensions, which stay, with a length of 1."""
    for dimension in dimensions:
        tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _load_module(module: nn.Module, state: Any) -> None:
    own = names.state_dict(module)
    expanded = {n: t for n, t in own.items() if n in state and isinstance(t, Tensor) and _shared(t)}
    for name, tensor in expanded.items():
        copy_into(tensor, state[name])
    if expanded:
        state = _like(state, {name: value for name, value in state.items() if name not in expanded})
    names.load_state_dict(module, state, strict=state.keys() == own.keys())


def _like(state: Any, content: dict[str, Any]) -> Any:
    """A state dict with some of the content of another, and all of its metadata."""
    chosen = OrderedDict(content)
    if hasattr(state, "_metadata"):
        chosen._metadata = state._metadata  # type: ignore[attr-defined]
    return chosen


def _updated(own: Any, stored: Any) -> Any:
    """The stored value: in place where dictionaries, lists and tensors are, as the training may hold them; else as it
    is, tensors on the device where one was."""
    if type(own) is type(stored) and isinstance(own, dict | list):
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
        values = {key: _updated(own.get(key), value) for key, value in stored.items()}
        own.clear()
        own.update(values)
    else:
        own[:] = [_updated(own[i] if i < len(own) else None, value) for i, value in enumerate(stored)]


def _undo_casts(loaded: Any, stored: Any) -> Any:
    """What was loaded, with the stored tensors, on its devices, for those of another dtype. Dictionaries and lists are
    changed in place."""
    if isinstance(loaded, Tensor) and isinstance(stored, Tensor):
        cast = loaded.dtype != stored.dtype and loaded.shape == stored.shape
        return stored.to(loaded.device) if cast else loaded
    if isinstance(loaded, dict) and isinstance(stored, dict):
        loaded.update({key: _undo_casts(value, stored[key]) for key, value in loaded.items() if key in stored})
    elif isinstance(loaded, list | tuple) and type(loaded) is type(stored) and len(loaded) == len(stored):
        values = [_undo_casts(*both) for both in zip(loaded, stored, strict=True)]
        if isinstance(loaded, tuple):
            return type(loaded)(values)
        loaded[:] = values
    return loaded


def generators(sources: Mapping[str, Any]) -> dict[str, Any]:
    """The states of the generators among the sources, by name."""
    return {name: _state_of(source, None) for name, source in sources.items() if isinstance(source, GENERATOR)}


def set_generators(sources: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Puts the generators among the sources into these states, as far as there are any."""
    for name, source in sources.items():
        if name in states and isinstance(source, torch.Generator):
            source.set_state(states[name])
        elif name in states and isinstance(source, np.random.Generator):
            source.bit_generator.state = states[name]


def _taken(name: str, source: Any, parameters: Sequence[Sequence[str]] | None) -> Any:
    """The state of a source. Raises StateError, naming it, where an extra has none to give."""
    try:
        return _state_of(source, parameters)
    except Exception as error:
        if isinstance(source, CHECKED):
            raise  # a mistake of its own: these have a state from the beginning
        raise StateError(
            f"{name}: state_dict() of {type(source).__qualname__} failed ({type(error).__name__}: {error}); "
            f"{LOADER_ADVICE if isinstance(source, DataLoader) else 'prepare it before it is given as an extra'}"
        ) from error


def _state_of(source: Any, parameters: Sequence[Sequence[str]] | None) -> Any:
    """parameters: their names in each group of an optimizer; None: its state is to have numbers."""
    if isinstance(source, torch.Generator):
        return source.get_state()
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    if isinstance(source, nn.Module):
        return names.state_dict(source)
    if hasattr(source, "state_dict"):
        state = source.state_dict()
        return state if parameters is None else optimizers.by_name(state, optimizers.keys_of(parameters))
    if isinstance(source, dict | list):
        return source
    return {field.name: getattr(source, field.name) for field in fields(source) if hasattr(source, field.name)}


def _together(states: Mapping[str, Any]) -> dict[str, Any]:
    """The states of sources by name, several models or optimizers as a dictionary. The inverse of ``parts``."""
    state: dict[str, Any] = {}
    for name, part in states.items():
        kind, dot, key = name.partition(".")
        if dot and kind in LAST:
            state.setdefault(kind, {})[key] = part
        else:
            state[name] = part
    return state


def _parameters(sources: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    named: dict[int, str] = {}
    for name, source in sources.items():
        if isinstance(source, nn.Module):
            for path, parameter in names.named_parameters(source):
                named.setdefault(id(parameter), f"{name}.{path}")
    return {
        name: optimizers.names_of(source, named)
        for name, source in sources.items()
        if isinstance(source, torch.optim.Optimizer)
    }


def class_of(source: Any) -> str | None:
    """What an optimizer or generator is; None for other sources, whose state says all that is needed."""
    if isinstance(source, np.random.Generator):
        source = source.bit_generator
    elif not isinstance(source, torch.optim.Optimizer | torch.Generator):
        return None
    return f"{type(source).__module__}.{type(source).__qualname__}"
