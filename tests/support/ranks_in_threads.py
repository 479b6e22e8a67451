"""Ranks as threads of one process. Their numbers are reduced as an all-reduce of ``torch.distributed`` would."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from threading import Barrier, BrokenBarrierError

import numpy as np
import torch

from dynaquant.engine.forms.patchwork import patchwork
from dynaquant.engine.forms.stored import cut, in_one
from dynaquant.engine.reduction import Numbers
from dynaquant.engine.tensors.shard import Shard, spans_of

PATIENCE = 60
"""Seconds that a rank waits for the others. One that reduces more often than they do waits in vain."""


def on_ranks(count, work):
    """Run ``work(rank, reduce)`` on all ranks at once. Return the results by rank, and the number of reductions."""
    barrier, given, reductions = Barrier(count, timeout=PATIENCE), [Numbers()] * count, []

    def run(rank):
        def reduce(numbers):
            given[rank] = numbers
            barrier.wait()
            assert len({(len(own.sums), len(own.highest)) for own in given}) == 1, "ranks reduce different things"
            assert not any(np.isnan(own.highest).any() for own in given), "a maximum may lose a NaN"
            found = Numbers(sum(own.sums for own in given), np.maximum.reduce([own.highest for own in given]))
            barrier.wait()
            reductions.append(rank)
            return found

        try:
            return work(rank, reduce)
        except BaseException:
            barrier.abort()  # the others need not wait
            raise

    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(run, rank) for rank in range(count)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    assert len(reductions) % count == 0
    return [future.result() for future in futures], len(reductions) // count


def divided(shape, ways):
    """Return the shards of all ranks. ways: for each dimension that is divided, the number of parts and of turns.

    With one turn, each part is a span, and the last ones may be empty, as in FSDP2. With more, a part gets a span in
    each turn, as with FSDP2 over tensor parallelism.
    """
    return [
        Shard(torch.Size(shape), tuple(spans))
        for spans in product(*(_spans(size, *ways.get(d, (1, 1))) for d, size in enumerate(shape)))
    ]


def _spans(size, parts, turns):
    length = max(-(-size // (parts * turns)), 1)
    return [spans_of(i for i in range(size) if i // length % parts == part) for part in range(parts)]


def local(tensor, shard):
    """Return what a rank holds of a whole tensor."""
    for d in range(tensor.ndim):
        tensor = tensor.index_select(d, torch.from_numpy(shard.indices(d)))
    return tensor


def together(forms, shards):
    """Return the stored forms of all ranks as one."""
    boxes = [(box, cut(form, inside)) for form, shard in zip(forms, shards, strict=True) for box, inside in shard.boxes]
    return in_one(patchwork(forms[0].dtype, shards[0].shape, boxes))
