"""Finds what differs between the ranks, apart from DTensors. What is the same on all ranks is stored once; what is not
is stored for each rank.

Examples: the experts of expert parallelism, parameters that FSDP2 ignores, the momentum of local SGD, the position of a
data loader. Tensors are compared by hashes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from dynaquant.engine.label import Label
from dynaquant.engine.reduction import Numbers
from dynaquant.engine.shards import Shards
from dynaquant.engine.tensors.dtypes import dtype_name
from dynaquant.engine.tensors.hashing import tensor_hash
from dynaquant.engine.tensors.shard import Shard
from dynaquant.ranks.group import Group
from dynaquant.saving.assemble import Compressed, copied
from dynaquant.saving.division import Division, Writers
from dynaquant.state.of_ranks import OfRank, stored_name
from dynaquant.state.tree import dict_items, renamed, tensor_names_in
from dynaquant.training.hash_cache import sample_of
from dynaquant.training.objects import GENERATOR, MAIN, RESERVED

_DIGITS = 6
"""Bytes of a digest that a float64 holds."""


@dataclass(frozen=True)
class _Stored:
    """A tensor that is stored for a rank, and for all with a higher number that hold the same."""

    rank: int
    name: str
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True)
class Differences:
    """What the ranks hold otherwise than rank 0.

    The same on all ranks, but for ``own`` and the objects of ``ranks``, which only rank 0 has.

    names: the tensors that differ between ranks, by their name in the state. ranks: what each rank holds; empty if
    nothing differs. stored: the tensors that are stored for ranks other than 0, by their stored name. own: the
    training's tensors of which this rank's values are stored so.
    """

    names: frozenset[str] = frozenset()
    ranks: Sequence[OfRank] = ()
    stored: Mapping[str, _Stored] = field(default_factory=dict)
    own: Mapping[str, Tensor] = field(default_factory=dict)

    def note(self, labels: Mapping[str, Label]) -> list[str]:
        """Return a note if weights or moments differ, as they take more space than a user would expect.

        labels: of the tensors, before those that differ were made exact.
        """
        large = [name for name in sorted(self.names) if name in labels and labels[name].role not in ("buffer", "exact")]
        if not large:
            return []
        return [
            f"{len(large)} weights or moments differ between ranks, such as {large[0]}: they are stored exactly, for "
            "each rank. If they should be the same, synchronise them before the save"
        ]

    def exact(self, labels: Mapping[str, Label]) -> dict[str, Label]:
        """Return the labels, with those of tensors that differ made exact."""
        if not self.names:
            return dict(labels)
        return {n: Label("exact", label.layer_type) if n in self.names else label for n, label in labels.items()}

    def add(self, compressed: Compressed, group: Group) -> Compressed:
        """Add what is stored for ranks to what rank 0 writes, or to the parts of the ranks. Collective."""
        if not self.stored:
            return compressed
        assembled, division = compressed.assembled, compressed.division
        own = group.run_on_all_ranks(lambda: {name: copied(tensor) for name, tensor in self.own.items()})
        labels = {**compressed.labels, **dict.fromkeys(self.stored, Label("exact"))}
        if division is None:
            found = {name: tensor for each in group.gather_to_rank_0(own) for name, tensor in each.items()}
            copy = assembled.lossless_copy
            copy = None if copy is None else {**copy, **found}
            assembled = replace(assembled, tensors={**assembled.tensors, **found}, lossless_copy=copy)
            return replace(compressed, assembled=assembled, labels=labels)
        shared: dict[tuple[int, torch.Size], Writers] = {}
        added = {
            name: shared.setdefault((each.rank, each.shape), ((each.rank, Shard.whole(each.shape)),))
            for name, each in self.stored.items()
        }
        # The plan needs only dtypes and shapes of what other ranks hold.
        elsewhere = {
            name: torch.empty(each.shape, dtype=each.dtype, device="meta")
            for name, each in self.stored.items()
            if name not in own
        }
        shards = division.shards
        together = Division(
            {**division.local, **own, **elsewhere},
            Shards(shards.held, {*shards.others_count, *elsewhere}, shards.reduce),
            {**division.writers, **added},
        )
        assembled = replace(assembled, tensors={**assembled.tensors, **own})
        return replace(compressed, assembled=assembled, division=together, labels=labels)


def find_differences(
    tree: Any,
    tensors: Mapping[str, Tensor],
    leave_out: Collection[str],
    objects: Mapping[str, Any],
    known: Collection[str] | None,
    group: Group,
) -> Differences:
    """Compare the states of all ranks. Collective.

    tree, tensors: of this rank's state. leave_out: names of tensors that are not compared. objects: of the training.
    Random number generators are not compared: their states are always stored for each rank. known: names of the
    tensors that differed at the last save, the same on all ranks. Those, and tensors of extras, are hashed as a whole,
    and of all others a sample; None: all are hashed as a whole.
    """
    if group.size == 1:
        return Differences()
    nodes = {
        key: node
        for key, node in dict_items(tree)
        if key not in RESERVED and not isinstance(objects.get(key), GENERATOR)
    }
    names = {
        key: [n for n in dict.fromkeys(tensor_names_in(node)) if n in tensors and n not in leave_out]
        for key, node in nodes.items()
    }
    forms = group.all_gather({key: _digest_of_form(node, names[key], tensors) for key, node in nodes.items()})
    changed = {key for each in forms for key in (*each, *forms[0]) if each.get(key) != forms[0].get(key)}
    alike = list(dict.fromkeys(name for key in nodes if key not in changed for name in names[key]))

    def digest(name: str) -> bytes:
        whole = known is None or name in known or name.partition(".")[0] not in MAIN
        return bytes.fromhex(tensor_hash(tensors[name])) if whole else blake3(sample_of(tensors[name])).digest()

    digests = group.run_on_all_ranks(lambda: [digest(name) for name in alike])
    compared = [name for name, same in zip(alike, _same_on_all_ranks(digests, group), strict=True) if not same]
    compared += [name for key in nodes if key in changed for name in names[key] if name not in compared]
    own = group.run_on_all_ranks(lambda: {name: tensor_hash(tensors[name]) for name in compared})
    heads = {name: (digest, tensors[name].dtype, tensors[name].shape) for name, digest in own.items()}
    found = _differences(group.all_gather(heads), nodes, changed, forms, group)
    return replace(found, own={n: tensors[each.name] for n, each in found.stored.items() if each.rank == group.rank})


def _differences(
    hashes: Sequence[Mapping[str, tuple[str, torch.dtype, torch.Size]]],
    nodes: Mapping[str, Any],
    changed: Collection[str],
    forms: Sequence[Mapping[str, str]],
    group: Group,
) -> Differences:
    """Return the differences. hashes, forms: of the ranks. nodes: of this rank. changed: keys of those that differ."""
    first: dict[tuple[str, str], int] = {}  # the first rank that holds these values
    stored: dict[str, _Stored] = {}
    tensors: list[dict[str, str]] = [{} for _ in hashes]
    for rank, each in enumerate(hashes):
        for name, (digest, dtype, shape) in each.items():
            holder = first.setdefault((name, digest), rank)
            if holder > 0:
                tensors[rank][name] = stored_name(holder, name)
                stored[stored_name(holder, name)] = _Stored(holder, name, dtype, shape)
    other = [key for key in nodes if key in changed and forms[group.rank].get(key) != forms[0].get(key)]
    own = {key: renamed(nodes[key], tensors[group.rank]) for key in other}
    gathered = group.gather_to_rank_0(own) or [{} for _ in hashes]
    ranks = [OfRank(*both) for both in zip(tensors, gathered, strict=True)]
    names = frozenset(each.name for each in stored.values())
    return Differences(names, ranks, stored) if names or changed else Differences()


def _digest_of_form(node: Any, names: Sequence[str], tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of an object's tree, and of the dtypes and shapes of its tensors."""
    heads = [[name, dtype_name(tensors[name].dtype), list(tensors[name].shape)] for name in names]
    return blake3(json.dumps([node, heads]).encode()).hexdigest()


def _same_on_all_ranks(digests: Sequence[bytes], group: Group) -> list[bool]:
    """Return which digests are the same on all ranks, which give as many. Collective."""
    halves = [int.from_bytes(digest[i : i + _DIGITS]) for digest in digests for i in (0, _DIGITS)]
    own = np.array(halves, dtype=np.float64)
    extremes = group.reduce(Numbers(highest=np.concatenate([own, -own]))).highest
    same = (extremes[: len(own)] == -extremes[len(own) :]).reshape(-1, 2)
    return [bool(each) for each in same.all(axis=1)]
