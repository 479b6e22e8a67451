"""Refuses what cannot be saved before training begins, or at the latest after an optimizer's first step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dynaquant.errors import StateError
from dynaquant.state.tree import flatten
from dynaquant.training.ranks import Group

log = logging.getLogger("dynaquant")
LOADER_ADVICE = (
    "give a loader that knows where it is, as torchdata's StatefulDataLoader (with Accelerate, "
    "DataLoaderConfiguration(use_stateful_dataloader=True)), or the generator of its sampler"
)
"""What a user can do about a loader that has no state."""
_REPLICAS = (
    "sharded training is not supported yet: train replicas (DistributedDataParallel), or save with "
    "torch.distributed.checkpoint"
)
_OTHERS = {
    "torch.distributed.fsdp": ("shards the model", _REPLICAS),
    "torch.distributed.tensor": ("is a tensor over several devices", _REPLICAS),
    "torch.distributed._shard": ("is a tensor over several devices", _REPLICAS),
    "torch.distributed.optim.zero_redundancy_optimizer": (
        "has only a part of the state on each rank",
        "take the optimizer that it wraps, on every rank",
    ),
    "deepspeed.runtime": ("shards the training", _REPLICAS),
    "accelerate.utils.deepspeed": ("shards the training", _REPLICAS),
    "fairscale.nn.data_parallel": ("shards the training", _REPLICAS),
    "fairscale.optim.oss": ("has only a part of the state on each rank", _REPLICAS),
    "torchao.optim": (
        "keeps its state in tensors of classes of its own, which cannot be stored",
        "take an optimizer whose state is of plain tensors, as those of torch.optim",
    ),
}
"""Classes by where they are defined: what is wrong with them, and what to do instead."""


def check(sources: Mapping[str, Any]) -> None:
    """Raises StateError, with advice, for an object whose state cannot be saved or restored."""
    for name, source in sources.items():
        if isinstance(source, nn.Module):
            _check_module(name, source)
        elif isinstance(source, Optimizer):
            _check_optimizer(name, source)
        elif not isinstance(source, torch.Generator | np.random.Generator):
            _check_other(name, source)


def check_replicas(tensors: Mapping[str, Tensor], group: Group) -> None:
    """Raises StateError if names or shapes of the ranks' models differ, as in pipeline parallelism. Collective."""
    own = sorted((n, str(t.dtype), tuple(t.shape)) for n, t in tensors.items() if n.partition(".")[0] == "model")
    digests = group.all_gather(blake3(repr(own).encode()).hexdigest())
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise StateError(f"the model of rank {other} has other names or shapes than that of rank 0; {_REPLICAS}")


def warn_of_left_out(sources: Mapping[str, Any], tensors: Iterable[Tensor]) -> None:
    """Logs a warning for every optimizer that updates a tensor that is not saved.

    tensors: everything that is saved. A restore cannot bring back any other tensor.
    """
    saved = {tensor.data_ptr() for tensor in tensors}
    for name, source in sources.items():
        groups = source.param_groups if isinstance(source, Optimizer) else []
        if any(place not in saved for group in groups for p in group["params"] if (place := p.data_ptr())):
            log.warning(
                "%s works on tensors that are in no state to be saved, so they would not be restored; give what "
                "holds them as an extra, e.g. extras={'masters': torch.nn.ParameterList(masters)}",
                name,
            )


def check_after_first_step(sources: Mapping[str, Any]) -> Callable[[], None]:
    """Makes the first step of every optimizer raise StateError if the state that it has made cannot be stored.

    Returns a function that removes the hooks.
    """
    hooks: dict[str, Any] = {}

    def hook(name: str) -> Callable[..., None]:
        def after_step(optimizer: Optimizer, *_: Any) -> None:
            if optimizer.state:
                hooks.pop(name).remove()
                flatten({name: optimizer.state_dict()})  # raises StateError, with advice

        return after_step

    for name, source in sources.items():
        if isinstance(source, Optimizer) and not source.state:
            hooks[name] = source.register_step_post_hook(hook(name))

    def remove() -> None:
        while hooks:
            hooks.popitem()[1].remove()

    return remove


def _check_module(name: str, module: nn.Module) -> None:
    for path, child in module.named_modules():
        _refuse(f"{name}.{path}" if path else name, child)
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        _refuse(f"{name}.{path}", tensor)


def _check_optimizer(name: str, optimizer: Optimizer) -> None:
    _refuse(name, optimizer)
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        raise StateError(
            f"{name}: {type(optimizer).__qualname__} was not initialised as a torch.optim.Optimizer is; give the "
            "optimizer that it wraps, or let its __init__ call that of Optimizer"
        ) from None


def _check_other(name: str, source: Any) -> None:
    _refuse(name, source)
    if hasattr(source, "state_dict") and hasattr(source, "load_state_dict"):
        return
    if isinstance(source, dict | list) or (is_dataclass(source) and not isinstance(source, type)):
        if is_dataclass(source) and type(source).__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise StateError(f"{name}: {type(source).__qualname__} is frozen, so a restore could not set its fields")
        return
    if isinstance(source, str | bytes | int | float | complex | tuple | frozenset | None):
        raise StateError(
            f"{name} is {source!r}, a plain value, which a restore cannot put back into your variable; give a "
            f"dictionary that holds it, e.g. extras={{'progress': {{{name!r}: {source!r}}}}}, which it updates in place"
        )
    raise StateError(
        f"{name}: {type(source).__qualname__} has no state_dict() and load_state_dict(); "
        f"{LOADER_ADVICE if isinstance(source, DataLoader) else 'wrap it in an object that has both'}"
    )


def _refuse(where: str, thing: Any) -> None:
    for kind in type(thing).__mro__:
        for module, (problem, instead) in _OTHERS.items():
            if f"{kind.__module__}.".startswith(f"{module}."):
                raise StateError(f"{where}: {kind.__qualname__} {problem}; {instead}")
