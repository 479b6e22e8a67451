"""Refuses objects that cannot be saved: before training begins, or after an optimizer's first step at the latest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dynaquant.engine.tensors.dtypes import dtype_name
from dynaquant.errors import StateError
from dynaquant.ranks.dtensors import is_sharded, local_of, memory_of, named_shard, part_problem
from dynaquant.ranks.group import Group
from dynaquant.state import wrappers
from dynaquant.state.flatten import flatten
from dynaquant.state.plain_objects import has_method, leaves, packages_of, taken_apart
from dynaquant.state.subclasses import check_subclasses, is_wrapper
from dynaquant.training.hooks import not_compiled
from dynaquant.training.objects import models_of, named_parameters_in, parameters_of

log = logging.getLogger("dynaquant")
LOADER_ADVICE = (
    "give a loader that saves its position, such as torchdata's StatefulDataLoader (with Accelerate, "
    "DataLoaderConfiguration(use_stateful_dataloader=True)), or the generator of its sampler"
)
"""Advice for a data loader that has no state."""
_DTENSORS = (
    "shard it with FSDP2 (torch.distributed.fsdp.fully_shard) or tensor parallel, whose parameters are DTensors, or "
    "save with torch.distributed.checkpoint, through dynaquant.interop.dcp"
)
_UNSUPPORTED = {
    "torch.distributed.fsdp.fully_sharded_data_parallel": ("is the first version of FSDP", _DTENSORS),
    "torch.distributed._shard": ("is sharded over several devices", _DTENSORS),
    "torch.distributed.optim.zero_redundancy_optimizer": (
        "has only a part of the state on each rank",
        "use the optimizer that it wraps, on every rank",
    ),
    "deepspeed.runtime": ("shards the training", _DTENSORS),
    "accelerate.utils.deepspeed": ("shards the training", _DTENSORS),
    "fairscale.nn.data_parallel": ("shards the training", _DTENSORS),
    "fairscale.optim.oss": ("has only a part of the state on each rank", _DTENSORS),
    "torchao.optim": (
        "keeps its state in its own tensor classes, which cannot be stored",
        "use an optimizer whose state has plain tensors, e.g. one of torch.optim",
    ),
}
"""Python modules whose classes are refused, each with the problem and what to do instead."""


def check(objects: Mapping[str, Any]) -> None:
    """Raise StateError, with advice, for an object whose state cannot be saved or restored."""
    for name, thing in objects.items():
        if isinstance(thing, nn.Module):
            _check_module(name, thing)
        elif isinstance(thing, Optimizer):
            _check_optimizer(name, thing)
        elif not isinstance(thing, torch.Generator | np.random.Generator):
            _check_other(name, thing)


def check_replicas(tensors: Mapping[str, Tensor], group: Group) -> None:
    """Raise StateError if names or shapes of the ranks' models differ, as in pipeline parallelism. Collective."""
    own = sorted((n, str(t.dtype), tuple(t.shape)) for n, t in tensors.items() if n.partition(".")[0] == "model")
    digests = group.all_gather(blake3(repr(own).encode()).hexdigest())
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise StateError(
            f"the model of rank {other} differs from that of rank 0 in names or shapes of tensors, as in pipeline "
            "parallelism, which is not supported; give every rank the whole model, sharded or not"
        )


def _advice_on(unknown: Sequence[Tensor], saved: Sequence[Tensor]) -> str:
    """Return what to do about tensors that an optimizer updates: master weights, or the weights of another model."""
    halves = {tensor.shape for tensor in saved if tensor.is_floating_point() and tensor.itemsize < 4}
    if all(local_of(each).itemsize == 4 and local_of(each).shape in halves for each in unknown):
        return "they seem to be master weights: give them as an extra, extras={'masters': torch.nn.ParameterList(…)}"
    return (
        "if they belong to another model, give that too, model={'a': …, 'b': …}; otherwise give an object that holds "
        "them as an extra, e.g. extras={'others': torch.nn.ParameterList(…)}"
    )


def _others_of_modules(objects: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of tensors of modules' states that are no parameters or buffers."""
    modules = {name: thing for name, thing in objects.items() if isinstance(thing, nn.Module)}
    parameters = {name for name, _ in named_parameters_in(objects)}
    buffers = {f"{name}.{path}" for name, module in modules.items() for path, _ in module.named_buffers()}
    return {name for name in tensors if name.startswith(tuple(f"{each}." for each in modules))} - parameters - buffers


def warn_of_unsaved(objects: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Log a warning for every optimizer that updates a tensor that is not among the saved ones, or not as itself."""
    saved = {local_of(tensor).data_ptr() for tensor in tensors.values()}
    of_models = {id(parameter): name for name, parameter in named_parameters_in(objects)}
    for name, thing in objects.items():
        groups = thing.param_groups if isinstance(thing, Optimizer) else []
        updated = [p for group in groups for p in group["params"] if not is_wrapper(p)]  # a wrapper's parts are saved
        unsaved = [each for each in updated if (own := local_of(each)).numel() and own.data_ptr() not in saved]
        if unknown := [each for each in unsaved if id(each) not in of_models]:
            log.warning(
                "%s updates tensors that are not saved, so a restore would not restore them; %s",
                name,
                _advice_on(unknown, [local_of(tensor) for tensor in tensors.values()]),
            )
        hidden = {of_models[id(each)]: each for each in unsaved if id(each) in of_models}
        hidden = {path: each for path, each in hidden.items() if not _is_copy(tensors.get(path), each)}
        if hidden:
            path = next(iter(hidden))
            if path in tensors:
                given = dtype_name(tensors[path].dtype)
                what = f"gives other values in its place ({given}). A restore loads these; without the hook it is exact"
            elif _others_of_modules(objects, tensors):
                what = "gives something else in its place. What it gives is stored exactly, which takes more space"
            else:
                what = "drops it, so a restore would not restore it; make the hook keep it"
            more = f" and {len(hidden) - 1} other parameters" if len(hidden) > 1 else ""
            log.warning("state_dict() does not have %s%s: a hook of the module %s", path, more, what)


def _is_copy(given: Tensor | None, parameter: Tensor) -> bool:
    """Whether a tensor of a state dict has the dtype and the values of a parameter."""
    if given is None or given.dtype != parameter.dtype:
        return False
    own = local_of(parameter)
    return torch.equal(local_of(given).to(own.device), own)


_OWN = ("state", "param_groups", "defaults")
"""What every optimizer has. It holds tensors, thousands of them in a large model."""


def notes_on_inner_optimizers(objects: Mapping[str, Any]) -> list[str]:
    """Return a note for each optimizer inside another one, as in SAM, whose state is in no state dict."""
    given = {id(thing) for thing in objects.values()}
    return [
        f"the state of the {type(inner).__qualname__} inside {name} is not saved, as state_dict() of "
        f"{type(thing).__qualname__} does not have it, so a restore would lose it; give both, the inner one first: "
        "optimizer={'inner': …, 'outer': …}"
        for name, thing in objects.items()
        if isinstance(thing, Optimizer) and type(thing).state_dict is Optimizer.state_dict
        for inner in leaves({key: value for key, value in vars(thing).items() if key not in _OWN})
        if isinstance(inner, Optimizer) and inner.state and inner.state is not thing.state and id(inner) not in given
    ]


def check_after_first_step(objects: Mapping[str, Any]) -> Callable[[], None]:
    """Raise StateError after an optimizer's first step if its state cannot be stored. Returns what ends the check."""
    hooks: list[Any] = []
    checked: set[str] = set()

    def hook(name: str) -> Callable[..., None]:
        def after_step(optimizer: Optimizer, *_: Any) -> None:
            if optimizer.state and name not in checked:
                # The hook itself stays: PyTorch goes through the hooks just now, and they must not change meanwhile.
                checked.add(name)
                state = taken_apart(optimizer.state_dict(), packages_of(optimizer))
                flatten({name: state})  # raises StateError, with advice

        return after_step

    for name, thing in objects.items():
        if isinstance(thing, Optimizer) and not thing.state:
            hooks.append(thing.register_step_post_hook(not_compiled(hook(name))))

    def remove() -> None:
        while hooks:
            hooks.pop().remove()

    return remove


def _check_module(name: str, module: nn.Module) -> None:
    for path, child in module.named_modules(prefix=name):
        if isinstance(child, torch.jit.ScriptModule):
            raise StateError(
                f"{path} is a module of torch.jit; give the module that was scripted, whose parameters are the same "
                "tensors, or compile it with torch.compile instead"
            )
        _refuse(path, child)
    for path, tensor in (*module.named_parameters(prefix=name), *module.named_buffers(prefix=name)):
        _refuse(path, tensor)
        if is_sharded(tensor):
            if is_wrapper(local := local_of(tensor)):
                raise StateError(
                    f"{path} is divided among ranks, and each holds a {type(local).__qualname__} of it, which cannot "
                    "be stored; keep what does not train on every rank, or shard plain tensors"
                )
            named_shard(path, tensor)  # raises StateError if it cannot be stored
        elif (problem := part_problem(tensor)) is not None:
            raise StateError(f"{path}: {problem}; {_DTENSORS}")
    check_subclasses(name, module, wrappers.own_loading(module))


def _check_optimizer(name: str, optimizer: Optimizer) -> None:
    _refuse(name, optimizer)
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        raise StateError(
            f"{name}: {type(optimizer).__qualname__} never called torch.optim.Optimizer.__init__; call it there, or "
            "give the optimizer that it wraps"
        ) from None


def _check_other(name: str, thing: Any) -> None:
    _refuse(name, thing)
    if has_method(thing, "state_dict") and has_method(thing, "load_state_dict"):
        return
    if isinstance(thing, dict | list) or (is_dataclass(thing) and not isinstance(thing, type)):
        if is_dataclass(thing) and type(thing).__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise StateError(f"{name}: {type(thing).__qualname__} is frozen, so a restore could not set its fields")
        return
    if isinstance(thing, str | bytes | int | float | complex | tuple | frozenset | None):
        raise StateError(
            f"{name} is {thing!r}, a plain value, and a restore cannot assign to your variable; give a dictionary "
            f"that holds it, e.g. extras={{'progress': {{{name!r}: {thing!r}}}}}: a restore updates it in place"
        )
    raise StateError(
        f"{name}: {type(thing).__qualname__} has no state_dict() and load_state_dict(); "
        f"{LOADER_ADVICE if isinstance(thing, DataLoader) else 'wrap it in an object that has both'}"
    )


def _refuse(where: str, thing: Any) -> None:
    for kind in type(thing).__mro__:
        for module, (problem, instead) in _UNSUPPORTED.items():
            if f"{kind.__module__}.".startswith(f"{module}."):
                raise StateError(f"{where}: {kind.__qualname__} {problem}; {instead}")


def notes_on_other_names(
    parameters: Mapping[str, Iterable[Iterable[str]]], tensors: Mapping[str, Tensor], objects: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a note if the state of a model has its trained parameters under other names, so that they are exact.

    parameters: names of those of every optimizer, by group. tensors: of the state, by name.
    """
    trained = {name for groups in parameters.values() for group in groups for name in group if name}
    if trained <= tensors.keys():
        return
    own = parameters_of(models_of(objects))
    names = {memory_of(tensor): name for name, tensor in tensors.items()}
    missing = (name for name in trained - tensors.keys() if name in own and not is_wrapper(own[name]))
    if other := sorted(name for name in missing if names.get(memory_of(own[name])) not in trained):
        more = f" and {len(other) - 1} other parameters" if len(other) > 1 else ""
        yield (
            f"{other[0]}{more} train, but state_dict() gives them other names, so they are stored exactly: "
            "give the module inside the wrapper, or let state_dict() have the names of named_parameters()"
        )
