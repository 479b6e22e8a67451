"""How the tensors of a state are divided among the ranks, and which rank writes what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dynaquant.errors import StateError
from dynaquant.quantize.knobs import Method
from dynaquant.state.sharding import is_sharded, local_of, named_shard
from dynaquant.store.layout import Layout, Place
from dynaquant.tensors.box import Box
from dynaquant.tensors.shard import Shard
from dynaquant.training.ranks import Group
from dynaquant.training.shards import Shards

Writers = tuple[tuple[int, Shard], ...]
"""The ranks that write a tensor, each with what it writes."""


@dataclass(frozen=True)
class Division:
    """The tensors of a state on this rank.

    local: what this rank holds of each. shards: of the divided ones. writers: of each tensor. The same on all ranks,
    except for ``local`` and what ``shards`` says of this rank.
    """

    rank: int
    local: Mapping[str, Tensor]
    shards: Shards
    writers: Mapping[str, Writers]

    def writes(self, name: str) -> bool:
        """Whether this rank writes what it holds of a tensor."""
        return name not in self.shards.others_count

    def without_copies(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Shards]:
        """Return what this rank writes of tensors, and nothing of those that other ranks write.

        So every element is on one rank. Scalars, which cannot be nothing, are left out.
        """
        held = dict(self.shards.held)
        found = {}
        for name, tensor in tensors.items():
            if self.writes(name):
                found[name] = tensor
            elif tensor.ndim:
                found[name] = tensor.new_empty([0] * tensor.ndim)
                held[name] = Shard.nothing(self.writers[name][0][1].shape)
        found = {name: tensor for name, tensor in found.items() if tensor.ndim}
        return found, Shards(held, frozenset(), self.shards.reduce)

    def layouts(self) -> tuple[dict[str, int], tuple[Layout, ...], int]:
        """Return the number of each tensor's layout, the layouts, and how many parts there are.

        Ranks that write nothing have no part.
        """
        by_writers: dict[Writers, int] = {}
        numbers = {name: by_writers.setdefault(writers, len(by_writers)) for name, writers in self.writers.items()}
        part_of = self.parts
        layouts = tuple(
            tuple(Place(part_of[rank], box) for rank, shard in writers for box in boxes_of(shard))
            for writers in by_writers
        )
        return numbers, layouts, len(part_of)

    @property
    def parts(self) -> dict[int, int]:
        """The number of each rank's part, by rank."""
        ranks = sorted({rank for writers in set(self.writers.values()) for rank, _ in writers})
        return {rank: number for number, rank in enumerate(ranks)}


def boxes_of(shard: Shard) -> list[Box]:
    """Return the boxes that a rank writes of a tensor. A tensor without elements is one box."""
    return [box for box, _ in shard.boxes] or [Box.whole(shard.shape)]


def divide(tensors: Mapping[str, Tensor], group: Group) -> Division | None:
    """Return how the tensors of a state are divided; None if every rank holds all of them as a whole. Collective.

    tensors: of the state, DTensors if they are divided. All ranks have the same shapes under the same names. Raises
    StateError if ranks hold different parts of a state, or a DTensor cannot be stored.
    """
    divided = any(is_sharded(tensor) for tensor in tensors.values())
    if group.size == 1 or not any(group.all_gather(divided)):
        return None
    names = group.from_rank_0(list(tensors))
    if missing := [name for name in names if name not in tensors]:
        raise StateError(f"rank {group.rank} has no {missing[0]}, which rank 0 has; give every rank the whole model")
    held = {name: named_shard(name, tensors[name]) for name in names}
    shards_of_ranks = _of_all_ranks(held, tensors, group)
    local = {name: local_of(tensors[name]) for name in names}
    writers = _writers(held, tensors, shards_of_ranks, group.size)
    others = {name for name in names if all(rank != group.rank for rank, _ in writers[name])}
    sharded = {name: shard for name, shard in held.items() if is_sharded(tensors[name])}
    return Division(group.rank, local, Shards(sharded, others, group.reduce), writers)


def _of_all_ranks(held: Mapping[str, Shard], tensors: Mapping[str, Tensor], group: Group) -> dict[str, list[Shard]]:
    """Return the shards that the ranks hold of each tensor. Tensors that are divided alike travel once."""
    distinct: dict[object, str] = {}
    alike = {}
    for name, tensor in tensors.items():
        if name in held:
            kind = (tensor.shape, tensor.device_mesh, tensor.placements) if is_sharded(tensor) else tensor.shape
            alike[name] = distinct.setdefault(kind, name)
    gathered = group.all_gather([held[name] for name in distinct.values()])
    found = {name: [own[i] for own in gathered] for i, name in enumerate(distinct.values())}
    return {name: found[first] for name, first in alike.items()}


def _writers(
    held: Mapping[str, Shard],
    tensors: Mapping[str, Tensor],
    shards_of_ranks: Mapping[str, Sequence[Shard]],
    ranks: int,
) -> dict[str, Writers]:
    """Return who writes each tensor: of the ranks that hold the same, the one that has the fewest bytes to write.

    What is no DTensor is written by rank 0, as ranks may hold different values. All tensors of a parameter in an
    optimizer's state have the same writers, since one is stored in units of another.
    """
    bytes_of_rank = [0] * ranks
    found: dict[str, Writers] = {}
    of_parameter: dict[tuple[str, tuple[int, ...]], Writers] = {}
    for name, tensor in tensors.items():
        if name not in held:
            continue
        shards = shards_of_ranks[name]
        key = name.rpartition(".")[0], tuple(tensor.shape)
        if not is_sharded(tensor) or not tensor.numel():
            found[name] = ((0, shards[0]),)
        elif (known := of_parameter.get(key)) is not None and all(shards[rank] == shard for rank, shard in known):
            found[name] = known
        else:
            copies: dict[Shard, list[int]] = {}
            for rank, shard in enumerate(shards):
                if shard.local_shape.numel():
                    copies.setdefault(shard, []).append(rank)
            found[name] = tuple((min(own, key=bytes_of_rank.__getitem__), shard) for shard, own in copies.items())
            of_parameter[key] = found[name]
        for rank, shard in found[name]:
            bytes_of_rank[rank] += shard.local_shape.numel() * tensor.element_size()
    return found


def holds_shards(objects: Mapping[str, Any], group: Group) -> bool:
    """Whether the ranks hold parts of one model. Collective."""
    own = any(
        is_sharded(parameter)
        for thing in objects.values()
        if isinstance(thing, nn.Module)
        for parameter in thing.parameters()
    )
    return group.size > 1 and any(group.all_gather(own))


def check_arguments(method: Method, exact: str | None) -> None:
    """Raise ValueError for arguments of a Checkpointer that sharded training does not support."""
    if method != "grid":
        raise ValueError(f'method="{method}" needs whole tensors; sharded training supports method="grid"')
    if exact is not None:
        raise ValueError('exact="latest" is not supported for sharded training; use quality="lossless"')
