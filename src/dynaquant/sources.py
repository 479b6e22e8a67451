"""The objects a state is collected from and restored into: modules, optimizers, schedulers, generators, …"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dynaquant import rng
from dynaquant.errors import StateError
from dynaquant.state import dtype_name, flatten, pairs_of, tensor_name

LAST = ("model", "optimizer")
"""Sources that are restored after the others."""
RNG, CLASSES, PARAMETERS = "rng", "classes", "parameters"
RESERVED = (RNG, CLASSES, PARAMETERS)
"""Names in a state that are not sources: the random number generators; the classes of optimizers and generators; the
names of the parameters in each group of an optimizer, which knows them only by their order."""


def check(sources: Mapping[str, Any]) -> None:
    """Raises StateError, naming it, for an object whose state cannot be taken or put back."""
    for name, source in sources.items():
        if isinstance(source, torch.Generator | np.random.Generator):
            continue
        if not (hasattr(source, "state_dict") and hasattr(source, "load_state_dict")):
            raise StateError(
                f"{name}: {type(source).__qualname__} has no state_dict() and load_state_dict(); "
                "wrap it in an object that has both"
            )


def left_out(sources: Mapping[str, Any], tensors: Iterable[Tensor]) -> list[str]:
    """The optimizers among the sources that work on memory in which none of the tensors lies.

    tensors: all that is saved. What else an optimizer works on does not come back with a restore.
    """
    saved = {tensor.data_ptr() for tensor in tensors}
    return [
        name
        for name, source in sources.items()
        if isinstance(source, torch.optim.Optimizer)
        and any(place not in saved for group in source.param_groups for p in group["params"] if (place := p.data_ptr()))
    ]


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
    classes = {name: kind for name, source in sources.items() if (kind := _class(source)) is not None}
    return {
        **{name: _state_of(source) for name, source in sources.items()},
        CLASSES: classes,
        PARAMETERS: _parameters(sources),
        RNG: {**rng.get_state(), "ranks": list(other_ranks)} if other_ranks else rng.get_state(),
    }


def collect_to_compare(sources: Mapping[str, Any]) -> dict[str, Any]:
    """As ``collect``, of what a stored state is compared with or put into: modules and optimizers."""
    compared = nn.Module | torch.optim.Optimizer
    return collect({name: source for name, source in sources.items() if name in LAST or isinstance(source, compared)})


def fill_in_omitted(now: Mapping[str, Any], state: dict[str, Any], omitted: Collection[str]) -> None:
    """Puts the tensors that a stored state omits into it, as the modules have them.

    now: ``collect_to_compare`` of the sources. omitted: names of tensors.
    """
    if not omitted:
        return
    for name, node in pairs_of(flatten(now)[0]):
        if isinstance(state.get(name), dict) and any(tensor_name(value) in omitted for _, value in pairs_of(node)):
            stored = state[name]
            own = {key: now[name][key] for key, value in pairs_of(node) if tensor_name(value) in omitted}
            stored.update({key: value for key, value in own.items() if key not in stored})


def check_fit(
    sources: Mapping[str, Any],
    now: Mapping[str, Any],
    state: Mapping[str, Any],
    what: str,
    changed: Collection[str] = (),
) -> None:
    """Raises StateError, listing what differs, when a stored state does not fit the sources. Changes nothing.

    now: ``collect_to_compare`` of the sources. what: the checkpoint, for messages. changed: the omitted tensors whose
    values are not those that the model has.
    """
    problems = [f"{name} was omitted when it was saved, and the model's is another one" for name in sorted(changed)]
    given, stored = set(sources), set(state) - set(RESERVED)
    problems += [f"it holds no {name!r}" for name in sorted(given - stored)]
    problems += [f"it holds {name!r}, which was not given" for name in sorted(stored - given)]
    for name in sorted(given & stored):
        source = sources[name]
        before, kind = state[CLASSES].get(name), _class(source)
        if before != kind:
            problems.append(f"{name} was {before or 'something else'} and is {kind or type(source).__qualname__}")
        elif isinstance(source, nn.Module):
            problems += _module_differences(name, now[name], state[name])
        elif isinstance(source, torch.optim.Optimizer):
            groups_before = [len(group["params"]) for group in state[name]["param_groups"]]
            groups = [len(group["params"]) for group in source.param_groups]
            if groups_before != groups:
                problems.append(f"{name} had parameter groups of {groups_before} tensors and has groups of {groups}")
            elif state[PARAMETERS][name] != now[PARAMETERS][name]:
                problems.append(f"{name} had its parameters in another order")
    if problems:
        shown = "\n  ".join(problems[:10] + ([f"… and {len(problems) - 10} more"] if len(problems) > 10 else []))
        raise StateError(
            f"{what} does not fit the objects to restore:\n  {shown}\n"
            "Nothing was changed. Build the objects as they were when it was saved, use another folder for another "
            "training, or take the parts you want from dynaquant.load(folder, step)."
        )


def randomness_of(state: Mapping[str, Any], rank: int) -> dict[str, Any] | None:
    """The state of a rank's global generators; None when the checkpoint comes from fewer ranks."""
    if rank == 0:
        return state[RNG]  # type: ignore[no-any-return]
    ranks = state[RNG].get("ranks", [])
    return ranks[rank - 1] if rank <= len(ranks) else None


def restore(
    sources: Mapping[str, Any], state: Mapping[str, Any], rank: int = 0, fill: Callable[[], None] = lambda: None
) -> None:
    """Puts a state that fits into the sources and the global random number generators; model and optimizer last.

    fill: called just before these, to complete the tensors that are theirs already (``places``).
    A rank that the checkpoint knows nothing of keeps its own random numbers.
    """
    own = randomness_of(state, rank)
    set_generators(sources, state if rank == 0 else (own or {}).get("sources", {}))
    stateful = [n for n, source in sources.items() if not isinstance(source, torch.Generator | np.random.Generator)]
    for name in stateful:
        if name not in LAST:
            _load(sources[name], state[name])
    fill()
    for name in stateful:
        if name in LAST:
            _load(sources[name], state[name])
    if own is not None:
        rng.set_state(own)


def _load(source: Any, state: Any) -> None:
    """Loads a state, that of an optimizer in the dtypes that it has: PyTorch casts an optimizer's tensors to the dtype
    of their parameter, float32 moments of a bfloat16 parameter as well as bytes of a float32 one."""
    source.load_state_dict(state)
    if isinstance(source, torch.optim.Optimizer):
        # state_dict() copies no tensors and no parameter's dictionary, so this changes the optimizer. Where methods of
        # its own convert in both directions, it has the dtypes of what is stored already.
        _undo_casts(source.state_dict(), state)


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
    return {
        name: _state_of(source)
        for name, source in sources.items()
        if isinstance(source, torch.Generator | np.random.Generator)
    }


def set_generators(sources: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Puts the generators among the sources into these states, as far as there are any."""
    for name, source in sources.items():
        if name in states and isinstance(source, torch.Generator):
            source.set_state(states[name])
        elif name in states and isinstance(source, np.random.Generator):
            source.bit_generator.state = states[name]


def _state_of(source: Any) -> Any:
    if isinstance(source, torch.Generator):
        return source.get_state()
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    return source.state_dict()


def _parameters(sources: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    names = {
        id(parameter): f"{name}.{path}"
        for name, source in sources.items()
        if isinstance(source, nn.Module)
        for path, parameter in source.named_parameters()
    }
    return {
        name: [[names.get(id(parameter), "") for parameter in group["params"]] for group in source.param_groups]
        for name, source in sources.items()
        if isinstance(source, torch.optim.Optimizer)
    }


def _class(source: Any) -> str | None:
    """What an optimizer or generator is; None for other sources, whose state says all that is needed."""
    if isinstance(source, np.random.Generator):
        source = source.bit_generator
    elif not isinstance(source, torch.optim.Optimizer | torch.Generator):
        return None
    return f"{type(source).__module__}.{type(source).__qualname__}"


def _module_differences(source: str, own: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    def form(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{dtype_name(value.dtype)}{list(value.shape)}"
        return type(value).__qualname__

    now = {name: form(value) for name, value in own.items()}
    before = {name: form(value) for name, value in stored.items()}
    return (
        [f"{source}.{name} is not in it" for name in now if name not in before]
        + [f"{source}.{name} is in it, and the model has no such tensor" for name in before if name not in now]
        + [
            f"{source}.{name} was {before[name]} and is {now[name]}"
            for name in now
            if name in before and now[name] != before[name]
        ]
    )
