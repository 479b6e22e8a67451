"""How the tensors of a state are divided among the ranks, and which rank writes what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor, nn

from dynaquant.cached import cached_property
from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.forms.stored import cut
from dynaquant.engine.label import Label
from dynaquant.engine.shards import Shards
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.dtypes import dtype_name
from dynaquant.engine.tensors.shard import Shard
from dynaquant.errors import StateError
from dynaquant.ranks.dtensors import is_sharded, local_of, mesh_of, named_shard, ranks_of_one_copy
from dynaquant.ranks.group import Group
from dynaquant.store.layout import Layout, Place, Plan
from dynaquant.store.writing import Base, planned
from dynaquant.training.hash_cache import samples_of
from dynaquant.training.objects import MAIN

Writers = tuple[tuple[int, Shard], ...]
"""The ranks that write a tensor, each with what it writes."""


@dataclass(frozen=True)
class Division:
    """The tensors of a state on this rank.

    local: what this rank holds of each. shards: of the divided ones. writers: of each tensor; one object for all that
    are written alike. The same on all ranks, except for ``local`` and what ``shards`` says of this rank.
    """

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

    @cached_property
    def layouts(self) -> tuple[dict[str, int], tuple[Layout, ...]]:
        """The number of each tensor's layout, and the layouts."""
        by_writers: dict[int, int] = {}  # tensors that are written alike share one object
        numbers = {name: by_writers.setdefault(id(writers), len(by_writers)) for name, writers in self.writers.items()}
        part_of = self.parts
        layouts = tuple(
            tuple(Place(part_of[rank], box) for rank, shard in writers for box in boxes_of(shard))
            for writers in self._distinct
        )
        return numbers, layouts

    @cached_property
    def parts(self) -> dict[int, int]:
        """The number of each rank's part, by rank. Ranks that write nothing have none."""
        ranks = sorted({rank for writers in self._distinct for rank, _ in writers})
        return {rank: number for number, rank in enumerate(ranks)}

    @property
    def _distinct(self) -> list[Writers]:
        return list({id(writers): writers for writers in self.writers.values()}.values())

    def plan(self, labels: Mapping[str, Label], depends_on: Mapping[str, str]) -> Plan:
        """Return which part holds which boxes. The same on all ranks.

        depends_on: names of the tensors that others must be decoded after.
        """
        numbers, layouts = self.layouts
        entries = tuple(
            planned(
                name,
                labels[name],
                dtype_name(self.local[name].dtype),
                self.shards.of(name, self.local[name]).shape,
                number,
                depends_on.get(name, ""),
            )
            for name, number in numbers.items()
        )
        return Plan(entries, layouts, len(self.parts))

    def boxes(self, stored: Mapping[str, StoredTensor]) -> dict[tuple[str, Box], StoredTensor]:
        """Return the boxes that this rank writes. stored: what it holds of tensors; others are left out."""
        found = {}
        for name, tensor in stored.items():
            if name not in self.writers or not self.writes(name):
                continue
            shard = self.shards.of(name, self.local[name])
            if tensor.shape != shard.local_shape:
                continue
            for box, local in shard.boxes:
                found[name, box] = cut(tensor, local)
            if not shard.boxes and not shard.shape.numel():
                found[name, boxes_of(shard)[0]] = tensor
        return found

    def base_of_part(self, base: Base) -> Base:
        """Return the base of this rank's part: boxes by their name there. base: a restored checkpoint.

        A tensor that had another shape is none of the present one's.
        """
        alike = {
            name: stored
            for name, stored in base.tensors.items()
            if name in self.local and base.shapes.get(name) == self.shards.of(name, self.local[name]).shape
        }
        return Base.of_boxes(base.parent, self.boxes(alike))


def boxes_of(shard: Shard) -> list[Box]:
    """Return the boxes that a rank writes of a tensor. A tensor without elements is one box."""
    return [box for box, _ in shard.boxes] or [Box.whole(shard.shape)]


def divide(tensors: Mapping[str, Tensor], group: Group) -> Division | None:
    """Return how the tensors of a state are divided; None if every rank holds all of them as a whole. Collective.

    tensors: of the state, DTensors if they are divided. All ranks have the same shapes under the same names. Raises
    StateError if ranks hold different parts of a state, or a DTensor cannot be stored.
    """
    divided = any(is_sharded(tensor) for tensor in tensors.values())
    names = list(tensors)
    digest = blake3(repr(names).encode()).digest()
    answers = group.all_gather((divided, digest)) if group.size > 1 else []
    if not any(divided for divided, _ in answers):
        return None
    if any(other != digest for _, other in answers):
        names = group.from_rank_0(names)
    held = group.run_on_all_ranks(lambda: _held(names, tensors, group.rank))
    local = {name: local_of(tensors[name]) for name in held}
    holders = _holders(held, tensors, group)
    _check_copies(local, holders, group)
    writers = _writers({name: tensors[name] for name in held}, holders, group.size)
    own = {id(each) for each in writers.values() if any(rank == group.rank for rank, _ in each)}
    others = {name for name in held if id(writers[name]) not in own}
    sharded = {name: shard for name, shard in held.items() if is_sharded(tensors[name])}
    return Division(local, Shards(sharded, others, group.reduce), writers)


def _held(names: Sequence[str], tensors: Mapping[str, Tensor], rank: int) -> dict[str, Shard]:
    """Return what this rank holds. Extras may have other tensors than on rank 0; tied tensors may have other names."""
    if missing := [name for name in names if name not in tensors and name.partition(".")[0] in MAIN]:
        raise StateError(f"rank {rank} has no {missing[0]}, which rank 0 has; give every rank the whole model")
    return {name: named_shard(name, tensors[name]) for name in names if name in tensors}


@dataclass(frozen=True, eq=False)
class _Holders:
    """What every rank holds of tensors that are divided alike. shards, meshes (``mesh_of``): by rank."""

    shards: tuple[Shard, ...]
    meshes: tuple[bytes, ...]

    @cached_property
    def copies(self) -> tuple[list[Shard], NDArray[np.int64]]:
        """The different shards that have elements, and for each a row of the ranks that hold it.

        Rows are equally long: the first rank of a row fills it up.
        """
        ranks: dict[Shard, list[int]] = {}
        for rank, shard in enumerate(self.shards):
            if shard.local_shape.numel():
                ranks.setdefault(shard, []).append(rank)
        longest = max(map(len, ranks.values()), default=0)
        rows = [own + own[:1] * (longest - len(own)) for own in ranks.values()]
        return list(ranks), np.array(rows, dtype=np.int64).reshape(len(ranks), longest)

    @cached_property
    def elements(self) -> NDArray[np.int64]:
        """The number of elements of each different shard."""
        return np.array([shard.local_shape.numel() for shard in self.copies[0]], dtype=np.int64)


def _holders(held: Mapping[str, Shard], tensors: Mapping[str, Tensor], group: Group) -> dict[str, _Holders]:
    """Return what all ranks hold of each DTensor. Of those that are divided alike, it travels once."""
    distinct: dict[object, str] = {}
    alike = {}
    for name in held:
        if is_sharded(tensor := tensors[name]):
            alike[name] = distinct.setdefault((tensor.shape, tensor.device_mesh, tensor.placements), name)
    gathered = group.all_gather([(held[name].spans, mesh_of(tensors[name])) for name in distinct.values()])
    known: dict[Any, _Holders] = {}
    found = {}
    for i, name in enumerate(distinct.values()):
        shards = tuple(Shard(held[name].shape, own[i][0]) for own in gathered)
        meshes = tuple(own[i][1] for own in gathered)
        found[name] = known.setdefault((shards, meshes), _Holders(shards, meshes))
    return {name: found[first] for name, first in alike.items()}


def _check_copies(local: Mapping[str, Tensor], holders: Mapping[str, _Holders], group: Group) -> None:
    """Raise StateError if ranks of different meshes hold other values of the same elements, by a sample. Collective.

    On one mesh, PyTorch keeps copies equal. On several, as with tensor parallelism inside data parallelism, it is left
    to the training.
    """
    apart = {name: each for name, each in holders.items() if len(set(each.meshes)) > 1}
    if not apart:
        return
    samples = samples_of({name: local[name] for name in apart})
    answers = group.all_gather({name: blake3(sample).digest() for name, sample in samples.items()})
    for name, each in apart.items():
        for ranks in each.copies[1].tolist():
            other = next((r for r in ranks if answers[r].get(name) != answers[ranks[0]].get(name)), None)
            if other is not None:
                raise StateError(
                    f"{name} has other values on rank {other} than on rank {ranks[0]}, which holds the same part of it "
                    "on another device mesh: one checkpoint cannot hold both. Save when they are the same, as after an "
                    "average, divide all experts as one tensor on one mesh, or save each mesh by DCP: "
                    "torch.distributed.checkpoint.save(…, storage_writer=…, process_group=…)"
                )


def _writers(tensors: Mapping[str, Tensor], holders: Mapping[str, _Holders], ranks: int) -> dict[str, Writers]:
    """Return who writes each tensor: of the ranks that hold the same, the one that has the fewest bytes to write.

    What is no DTensor is written by rank 0, as ranks may hold different values. All tensors of a parameter in an
    optimizer's state have the same writers, since one is stored in units of another.
    """
    bytes_of_rank = np.zeros(ranks, dtype=np.int64)
    found: dict[str, Writers] = {}
    by_ranks: dict[tuple[_Holders, bytes], Writers] = {}
    of_parameter: dict[tuple[str, tuple[int, ...]], tuple[_Holders, NDArray[np.int64]]] = {}
    plain: dict[torch.Size, Writers] = {}
    for name, tensor in tensors.items():
        own = holders.get(name)
        if own is None or not tensor.numel():
            # Not counted as bytes of rank 0: other ranks may hold other plain tensors, and must decide alike.
            found[name] = plain.setdefault(tensor.shape, ((0, Shard.whole(tensor.shape)),))
            continue
        key = name.rpartition(".")[0], tuple(tensor.shape)
        shards, rows = own.copies
        known, writing = of_parameter.get(key, (None, None))
        if known is not own or writing is None:
            writing = rows[np.arange(len(rows)), bytes_of_rank[rows].argmin(axis=1)]
            of_parameter[key] = own, writing
        if (each := by_ranks.get((own, writing.tobytes()))) is None:
            each = by_ranks[own, writing.tobytes()] = tuple(zip(writing.tolist(), shards, strict=True))
        found[name] = each
        bytes_of_rank[writing] += own.elements * tensor.element_size()
    return found


def holds_shards(objects: Mapping[str, Any], group: Group) -> bool:
    """Whether the ranks hold parts of one model. Collective."""
    return group.size > 1 and any(group.all_gather(any(map(is_sharded, _parameters(objects)))))


def replicas_of(objects: Mapping[str, Any], group: Group) -> list[list[int]]:
    """Return the ranks of each replica of a sharded model: those that hold one copy of it between them. Collective.

    All ranks are one replica unless all replicas have equally many.
    """
    everybody = [list(range(group.size))]
    answers = group.all_gather(ranks_of_one_copy(_parameters(objects)))
    found: list[set[int]] = []
    for rank, ranks in enumerate(answers):
        if ranks is None:
            return everybody
        joined = {rank, *ranks}.union(*(each for each in found if each & {rank, *ranks}))
        found = [*(each for each in found if not each & joined), joined]
    return sorted(map(sorted, found)) if len(set(map(len, found))) == 1 else everybody


def _parameters(objects: Mapping[str, Any]) -> Iterator[nn.Parameter]:
    return (p for thing in objects.values() if isinstance(thing, nn.Module) for p in thing.parameters())


def check_sharded_before(sharded: bool, objects: Mapping[str, Any], group: Group) -> None:
    """Raise StateError if the model was sharded after its Checkpointer was made. Collective.

    sharded: whether it was sharded then.
    """
    if not sharded and holds_shards(objects, group):
        raise StateError(
            "the model was sharded after this Checkpointer was made; shard it first, then make the optimizer from its "
            "parameters, then the Checkpointer"
        )
