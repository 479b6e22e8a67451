"""Shares the writing of a state among replicas: ranks that all hold it as a whole."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from blake3 import blake3
from torch import Tensor

from dynaquant.saving.division import Division, Writers
from dynaquant.state.roles import Label
from dynaquant.tensors.shard import Shard
from dynaquant.training.hash_cache import sample_of
from dynaquant.training.objects import MAIN
from dynaquant.training.ranks import Group
from dynaquant.training.reduction import Numbers
from dynaquant.training.shards import Shards

LEAST_BYTES = 1 << 22
"""Ranks share the writing if each has at least so many bytes of the state to write. Each part costs a file and a
header."""
_DIGITS = 6
"""Bytes of a digest that a float64 holds."""


def share_writing(tensors: Mapping[str, Tensor], labels: Mapping[str, Label], group: Group) -> Division | None:
    """Return which rank writes which tensors, balanced by bytes; None if rank 0 should write all. Collective.

    Any rank may write parameters, and what optimizers keep of them, if all ranks hold the same values, as a sample of
    them tells. Rank 0 writes all else, and what differs: replicas may be synchronised only now and then. All tensors of
    a parameter in an optimizer's state have the same writer, since one is stored in units of another.
    """
    main = tuple(f"{name}." for name in MAIN)
    shared = {n: t for n, t in tensors.items() if n.startswith(main) and labels[n].role != "buffer" and t.ndim}
    heads = repr([(name, tensor.dtype, tensor.shape) for name, tensor in shared.items()])
    others = sum(tensor.nbytes for name, tensor in tensors.items() if name not in shared)
    # All ranks must decide alike, so only what all know counts: the heads if they are the same, and rank 0's others.
    answers = group.all_gather((blake3(heads.encode()).digest(), others))
    of_shared = sum(tensor.nbytes for tensor in shared.values())
    if len({digest for digest, _ in answers}) > 1 or of_shared + answers[0][1] < LEAST_BYTES * group.size:
        return None
    same = set(_same_on_all_ranks(shared, group))
    bytes_of_rank = np.zeros(group.size, dtype=np.int64)
    bytes_of_rank[0] = answers[0][1] + sum(tensor.nbytes for name, tensor in shared.items() if name not in same)
    rank_of: dict[str, int] = {}
    for name in (name for name in shared if name in same):
        owner = name.rpartition(".")[0]
        rank = rank_of.setdefault(owner, int(bytes_of_rank.argmin()))
        bytes_of_rank[rank] += tensors[name].nbytes
    known: dict[Writers, Writers] = {}
    writers = {}
    for name, tensor in tensors.items():
        rank = rank_of[name.rpartition(".")[0]] if name in same else 0
        each = ((rank, Shard.whole(tensor.shape)),)
        writers[name] = known.setdefault(each, each)
    elsewhere = {name for name, ((rank, _),) in writers.items() if rank != group.rank}
    return Division(tensors, Shards({}, elsewhere), writers)


def _same_on_all_ranks(tensors: Mapping[str, Tensor], group: Group) -> list[str]:
    """Return the names of tensors whose samples are the same on all ranks."""
    digests = [int.from_bytes(blake3(sample_of(tensor)).digest(_DIGITS)) for tensor in tensors.values()]
    own = np.array(digests, dtype=np.float64)
    extremes = group.reduce(Numbers(highest=np.concatenate([own, -own]))).highest
    same = extremes[: len(own)] == -extremes[len(own) :]
    return [name for name, equal in zip(tensors, same, strict=True) if equal]
