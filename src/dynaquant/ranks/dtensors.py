"""DTensors: what this rank holds of a sharded tensor, and which of its memory that is."""

# Importing the modules for DTensors takes half as long as importing PyTorch, so only trainings that use them do it.
# ruff: noqa: PLC0415

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from blake3 import blake3
from torch import Tensor, nn

from dynaquant.engine.tensors.shard import Shard, Span, spans_of
from dynaquant.errors import StateError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

K = TypeVar("K")

_CHECKPOINTABLE_TENSOR = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""The attributes by which DCP knows a plain tensor that holds parts of a larger one (since PyTorch 2.14)."""


def _class(module: str, name: str) -> Any:
    """Return a class of PyTorch; if its module was not imported, so that it has no instances, an empty tuple."""
    return getattr(sys.modules.get(module), name, ())


def is_sharded(tensor: Any) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, of which a rank may hold a part or a copy."""
    if type(tensor) in (Tensor, nn.Parameter):  # a state is asked some ten times for each of its tensors
        return False
    return isinstance(tensor, _class("torch.distributed.tensor", "DTensor"))


def part_problem(tensor: Tensor) -> str | None:
    """Return why a rank's tensor alone cannot stand for the whole one; None if it is whole."""
    if is_sharded(tensor):
        return "is a DTensor, of which a rank holds only a part"
    if hasattr(tensor, _CHECKPOINTABLE_TENSOR[0]) and all(hasattr(tensor, each) for each in _CHECKPOINTABLE_TENSOR):
        return "is a CheckpointableTensor, which holds parts of a larger tensor"
    return None


def local_of(tensor: Tensor) -> Tensor:
    """Return the part that this rank holds, detached and in the same memory; a plain tensor itself, detached."""
    if not is_sharded(tensor):
        return tensor.detach()
    if tensor.device_mesh.get_coordinate() is None:
        return torch.empty(shard_of(tensor).local_shape, dtype=tensor.dtype)
    return _part(tensor)


def _part(tensor: DTensor) -> Tensor:
    with torch.no_grad():  # several times faster than to detach a DTensor
        local: Tensor = tensor.to_local()
    return local.detach()


def shard_of(tensor: Tensor) -> Shard:
    """Return which elements of a tensor this rank holds.

    Raises StateError if the tensor's values are sums over ranks (``Partial``), or it is divided in an unknown way.
    """
    if not is_sharded(tensor):
        return Shard.whole(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise StateError(
            f"a DTensor with the placements {tensor.placements} is a sum that the ranks have not added yet; "
            "redistribute it before it is saved"
        )
    from torch.distributed.tensor import Replicate

    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return Shard.nothing(tensor.shape)
    spans = []
    for dimension, size in enumerate(tensor.shape):
        own = tuple(p if getattr(p, "dim", None) == dimension else Replicate() for p in tensor.placements)
        spans.append(_spans(tensor.device_mesh, tuple(coordinate), own, dimension, size))
    shard = Shard(tensor.shape, tuple(spans))
    if shard.local_shape != tensor.to_local().shape:
        raise StateError(
            f"a DTensor of {list(tensor.shape)} with the placements {tensor.placements} has an unusual local tensor of "
            f"{list(tensor.to_local().shape)}; divide it as distribute_tensor does"
        )
    return shard


@lru_cache(maxsize=1024)
def _spans(
    mesh: Any,
    coordinate: tuple[int, ...],  # noqa: ARG001 - for the cache: meshes of other ranks are equal
    placements: Sequence[Any],
    dimension: int,
    size: int,
) -> tuple[Span, ...]:
    """Return the indices of one dimension that this rank holds. PyTorch itself divides a tensor of indices."""
    if all(placement.is_replicate() for placement in placements):
        return ((0, size),) if size else ()
    from torch.distributed.tensor import distribute_tensor

    # As many dimensions as the tensor has before this one, so that the placements count for the right one.
    indices = torch.arange(size, device="cpu").reshape([1] * dimension + [size])
    divided = distribute_tensor(indices.to(mesh.device_type), mesh, placements, src_data_rank=None)
    return spans_of(divided.to_local().flatten().tolist())


def mesh_of(tensor: Tensor) -> bytes:
    """Identify the ranks of the mesh on which a tensor is divided. So a rank need not gather all ranks of all ranks."""
    return _digest_of_mesh(tensor.device_mesh) if is_sharded(tensor) else b""


@lru_cache(maxsize=64)
def _digest_of_mesh(mesh: Any) -> bytes:
    return blake3(repr(mesh.mesh.flatten().tolist()).encode()).digest(8)


def ranks_of_one_copy(tensors: Iterable[Tensor]) -> set[int] | None:
    """Return the ranks among which DTensors are divided where this rank is, by any of them; None if it holds nothing.

    Ranks that only hold copies of what this rank holds are not among them. Plain tensors count for nothing.
    """
    found: set[int] = set()
    for mesh, placements in {(t.device_mesh, t.placements) for t in tensors if is_sharded(t)}:
        if mesh.get_coordinate() is None:
            return None
        for dimension, placement in enumerate(placements):
            if not placement.is_replicate():
                found.update(torch.distributed.get_process_group_ranks(mesh.get_group(dimension)))
    return found


def named_shard(name: str, tensor: Tensor) -> Shard:
    """Return ``shard_of``. Its error begins with the name of the tensor."""
    try:
        return shard_of(tensor)
    except StateError as error:
        raise StateError(f"{name}: {error}") from None


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """Return a tensor that is divided like another one, and of which this rank holds ``local``."""
    if not is_sharded(like):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Identify a tensor by its memory and shape. Its first slice has the same address, so the shape counts, too.

    A shard without elements has no memory. The object itself identifies it.
    """
    if not is_sharded(tensor):
        return tensor.data_ptr(), tensor.shape
    local = _part(tensor)
    return (local.data_ptr() if local.numel() else ("nothing", id(tensor))), tensor.shape


def tied_keys(tensors: Mapping[K, Any]) -> list[list[K]]:
    """Return the keys whose values are one tensor, for each such tensor. Other values are skipped."""
    groups: dict[tuple[Any, ...], list[K]] = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, Tensor) and not tensor.is_nested and not tensor.is_meta and tensor.numel():
            groups.setdefault((memory_of(tensor), tensor.stride(), tensor.dtype), []).append(key)
    return [keys for keys in groups.values() if len(keys) > 1]


def _sharded_modules(module: nn.Module) -> list[Any]:
    """Return the modules that FSDP2 has sharded, outer ones first."""
    sharded_module = _class("torch.distributed.fsdp", "FSDPModule")
    return [child for child in module.modules() if isinstance(child, sharded_module)] if sharded_module else []


def abandon_forward(module: nn.Module) -> None:
    """Let FSDP2 forget a forward pass that an exception has ended, with the parameters that it has gathered ahead."""
    inside: set[nn.Module] = set()
    for child in _sharded_modules(module):
        if child not in inside:
            inside.update(child.modules())
            if hasattr(child, "reset_iter_state"):  # since PyTorch 2.13
                child.reset_iter_state()


def reshard(module: nn.Module) -> None:
    """Free the parameters that FSDP2 has gathered, so that modules have their sharded ones, as the optimizer does.

    Modules keep gathered parameters after a forward pass without a backward pass. This does not communicate.
    """
    for child in _sharded_modules(module):
        child.reshard()


def holds_unreduced_gradients(module: nn.Module) -> bool:
    """Whether FSDP2 holds gradients that it has not added up over the ranks (``set_requires_gradient_sync(False)``).

    They are not in ``parameter.grad``. PyTorch has no public function for this.
    """
    for child in _sharded_modules(module):
        with suppress(AttributeError, RuntimeError):
            for each in child._get_fsdp_state()._fsdp_param_group.fsdp_params:
                gathered = getattr(each, "_unsharded_param", None)
                if each.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None):
                    return True
    return False
