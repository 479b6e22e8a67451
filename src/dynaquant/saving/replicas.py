"""Shares the writing of a state among replicas: ranks that all hold it as a whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from blake3 import blake3
from torch import Tensor

from dynaquant.engine.label import Label
from dynaquant.engine.shards import Shards
from dynaquant.engine.tensors.shard import Shard
from dynaquant.ranks.group import Group
from dynaquant.saving.division import Division, Writers
from dynaquant.training.objects import MAIN

LEAST_BYTES = 1 << 22
"""Ranks share the writing if each has at least so many bytes of the state to write. Each part costs a file and a
header."""


def share_writing(
    tensors: Mapping[str, Tensor], labels: Mapping[str, Label], differing: Collection[str], group: Group
) -> Division | None:
    """Return which rank writes which tensors, balanced by bytes; None if rank 0 should write all. Collective.

    Any rank may write parameters, and what optimizers keep of them, if all ranks hold the same values. Rank 0 writes
    all else, also its own values of what differs. All tensors of a parameter in an optimizer's state have the same
    writer, since one is stored in units of another. differing: names of tensors that differ between ranks.
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
    same = {name for name in shared if name not in differing}
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
