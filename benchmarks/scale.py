"""Measure what grows with the number of ranks: bytes that are gathered, seconds of planning, sizes of headers, files.

    python benchmarks/scale.py

The ranks are a simulation in one process. The tensors have real names and shapes, and no values. PyTorch's fake process
group makes one rank's DTensors; what the other ranks hold is computed by ``held_by``, which ``check`` compares with
DTensors of the fake group. The code of the package runs on that. The time on a network is not measured.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import options
import torch
import torch.distributed as dist
from results import machine, publish, show
from scale_models import LAYOUTS, MODELS, Layout, Tensors, alike, dtensors, held_by, state_of
from scale_report import Row, extrapolated, plot, reductions, report, table
from torch.testing._internal.distributed.fake_pg import FakeStore

from dynaquant.engine.forms.schemes import Reference
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.moments import quantize_moments
from dynaquant.engine.reduction import Numbers
from dynaquant.engine.shards import Shards
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.shard import Shard
from dynaquant.ranks.dtensors import shard_of
from dynaquant.ranks.group import Group
from dynaquant.saving.division import Division, divide
from dynaquant.state.tree import state_dict_tree
from dynaquant.store.container import CheckpointFile, CheckpointWriter, Header, Parent
from dynaquant.store.entry import Entry
from dynaquant.store.layout import PartFile, Plan, box_name, layout_of
from dynaquant.store.writing import WrittenPart, with_parts
from dynaquant.training import rng
from dynaquant.training.packed import joined, packed

RANKS, MEASURED = (1, 8, 64, 256, 1024), ("7B", "70B")
MOMENTS = (("7B", 64), ("7B", 256), ("7B", 1024), ("70B", 256), ("70B", 1024))
"""Numbers of ranks and models, and those for which the moments of one rank are computed."""


@dataclass
class Traffic:
    """What a rank has given to collectives, and has got."""

    collectives: int = 0
    given: int = 0
    got: int = 0
    got_by_rank_0: int = 0


class Simulated(Group):
    """A group of which one rank is there. It counts what the ranks exchange, and answers for the others.

    shards: what every rank holds of the tensors that are divided in different ways.
    """

    def __init__(self, rank: int, size: int, tensors: Tensors, layout: Layout) -> None:
        self.rank, self.size = rank, size
        self.traffic = Traffic()
        self._tensors, self._layout = tensors, layout

    def all_gather(self, value: Any) -> list[Any]:
        values = [value] * self.size
        if isinstance(value, list):  # what a rank holds of tensors that are divided in different ways
            kinds = alike(self._tensors, self._layout)
            values = [[held_by(r, self.size, *kind, self._layout) for kind in kinds] for r in range(self.size)]
            values = [[(shard.spans, mesh) for shard, (_, mesh) in zip(own, value, strict=True)] for own in values]
            assert values[self.rank] == value
        self._count(values, self.size - 1)
        return values

    def from_rank_0(self, value: Any) -> Any:
        self._count([value], 0)
        return value

    def gather_to_rank_0(self, value: Any) -> list[Any]:
        self._count([value], 0)
        self.traffic.got_by_rank_0 += len(pickle.dumps(value)) * (self.size - 1)
        return [value] * self.size

    def reduce(self, numbers: Numbers) -> Numbers:
        """Return the numbers as if all ranks had the same."""
        size = numbers.sums.nbytes + numbers.highest.nbytes
        self.traffic.collectives += bool(len(numbers.sums)) + bool(len(numbers.highest))
        self.traffic.given += size
        self.traffic.got += size
        self.traffic.got_by_rank_0 += size
        return Numbers(numbers.sums * self.size, numbers.highest)

    def _count(self, values: Sequence[Any], others: int) -> None:
        sent = max(len(pickle.dumps(value)) for value in values[:2])
        self.traffic.collectives += 2  # sizes go before pickled values
        self.traffic.given += sent
        self.traffic.got += sent * others if others else sent
        self.traffic.got_by_rank_0 += sent * others


@contextmanager
def fake_ranks(rank: int, ranks: int) -> Iterator[None]:
    """Be one rank of a fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def check(tensors: Tensors, rank: int, ranks: int, layout: Layout) -> dict[str, torch.Tensor]:
    """Return a rank's tensors, after comparing what it holds of them with PyTorch."""
    found = dtensors(tensors, rank, ranks, layout)
    for name, (shape, kind) in tensors.items():
        assert shard_of(found[name]) == held_by(rank, ranks, shape, kind, layout), name
    return found


def planned(tensors: Tensors, rank: int, ranks: int, layout: Layout) -> tuple[float, Traffic, Division, Plan]:
    """Return the seconds that a rank plans, what it communicates, and its plan."""
    with fake_ranks(rank, ranks):
        state = check(tensors, rank, ranks, layout)
        group = Simulated(rank, ranks, tensors, layout)
        for shape, kind in alike(tensors, layout):  # the simulation's own work takes no time later
            for other in range(ranks):
                held_by(other, ranks, shape, kind, layout)
        start = process_time()
        division = divide(state, group)
        assert division is not None
        labels = dict.fromkeys(tensors, Label("weight", ""))
        plan = division.plan(labels, {})
        if (part := division.parts.get(rank)) is not None:
            plan.boxes_of(part)
        return process_time() - start, group.traffic, division, plan


def written_part(plan: Plan, number: int, generator: np.random.Generator) -> WrittenPart:
    """Return a part as if it had been written: hashes are random, and all boxes have a megabyte."""
    boxes = len(plan.boxes_of(number))
    hashes = generator.integers(0, 256, (boxes, 32), dtype=np.uint8)
    file = PartFile(generator.bytes(16).hex(), 10**9)
    return WrittenPart(file, hashes, np.full(boxes, 10**6), np.zeros(boxes, dtype=bool))


def header_of_part(plan: Plan, written: WrittenPart, number: int) -> int:
    """Return the bytes of the header of a part."""
    entries = [
        Entry(box_name(t.name, box), t.label, t.dtype, box.sizes, digest.tobytes().hex(), 0, Reference())
        for (t, box), digest in zip(plan.boxes_of(number), written.hashes, strict=True)
    ]
    return stored(Header(2, 2, Parent(1, "0" * 64), None, tuple(entries), {}))[0]


def stored(header: Header) -> tuple[int, int, float, float]:
    """Write and read a header. Returns its bytes, its bytes before compression, and the seconds of both."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.dqc"
        start = process_time()
        with path.open("wb") as out:
            CheckpointWriter(out).finish(header)
        written = process_time()
        assert CheckpointFile(path).header.identity == header.identity
        read = process_time()
        plain = int.from_bytes(path.read_bytes()[-32:-24], "little")
        return path.stat().st_size, plain, written - start, read - written


def needed_parts(tensors: Tensors, plan: Plan, rank: int, ranks: int, layout: Layout) -> tuple[int, float]:
    """Return how many parts a rank of a restore opens, and the seconds to find its boxes in them."""
    needed: set[int] = set()
    known: dict[tuple[int, Box], list[int]] = {}
    start = process_time()
    for tensor in plan.entries:
        shape, kind = tensors[tensor.name]
        held = held_by(rank, ranks, shape, kind, layout)
        for box in [box for box, _ in held.boxes]:
            if (layout_of(tensor), box) not in known:
                places = plan.layouts[layout_of(tensor)]
                known[layout_of(tensor), box] = [p.part for p in places if p.box == box or p.box.overlap(box)]
            needed.update(known[layout_of(tensor), box])
    return len(needed), process_time() - start


def measure(model: str, layout: Layout, ranks: int) -> Row:
    """Return the figures of one model on so many ranks."""
    tensors = state_of(MODELS[model])
    generator = np.random.default_rng(0)
    states = joined([packed(rng.get_state())] * (ranks - 1))
    if ranks == 1:  # a single process writes one file, and gathers nothing
        entries = tuple(
            Entry(n, Label("weight", ""), "float32", tuple(s), generator.bytes(32).hex(), 0, Reference())
            for n, (s, _) in tensors.items()
        )
        sizes = stored(Header(2, 2, Parent(1, "0" * 64), state_dict_tree(tensors), entries, {}))
        return Row(model, layout.name, 1, 0, 0, 0, 0.0, 0.0, *sizes[:2], 0, *sizes[2:], 0, 1, 1, 0.0)
    last_seconds, traffic, _, _ = planned(tensors, ranks - 1, ranks, layout)
    first_seconds, _, _, plan = planned(tensors, 0, ranks, layout)
    parts = [written_part(plan, number, generator) for number in range(plan.parts)]
    gathered = sum(len(pickle.dumps(part)) for part in parts[1:])
    start = process_time()
    draft = Header(1, 1, None, state_dict_tree([*tensors, "rng.ranks"]), (), {})
    header = with_parts(draft, plan, parts)
    first_seconds += process_time() - start
    size, plain, write, read = stored(header)
    needed, find = needed_parts(tensors, plan, ranks - 1, ranks, layout)
    part = header_of_part(plan, parts[-1], plan.parts - 1)
    found = (traffic.got, gathered, len(states), last_seconds, first_seconds, size, plain, part, write, read)
    return Row(model, layout.name, ranks, *found, len(plan.layouts), plan.parts + 1, needed, find)


def moments_of_a_rank(model: str, ranks: int) -> tuple[int, int, float]:
    """Quantize the moments of rank 0 of FSDP2, with random values, as if the others had the same.

    A second moment has the scales of its rows and columns, as those of trainings do, so that both moments are
    quantized. Returns the reductions, the bytes that the rank gets, and the seconds.
    """
    tensors, layout, generator = state_of(MODELS[model]), LAYOUTS[0], torch.Generator().manual_seed(0)
    group = Simulated(0, ranks, tensors, layout)
    state: dict[str, torch.Tensor] = {}
    held: dict[str, Shard] = {}
    labels: dict[str, Label] = {}
    for name, (shape, kind) in tensors.items():
        if name.endswith("exp_avg"):
            shard = held_by(0, ranks, shape, kind, layout)
            second = torch.full(shard.local_shape, 0.1)
            for dimension, size in enumerate(shard.local_shape):
                scales = 0.5 + torch.rand(size, generator=generator)
                second *= scales.reshape([-1 if d == dimension else 1 for d in range(len(shape))])
            state[name] = torch.randn(shard.local_shape, generator=generator) * second.sqrt()
            state[f"{name}_sq"] = second
            held |= dict.fromkeys((name, f"{name}_sq"), shard)
            labels |= {name: Label("first_moment", ""), f"{name}_sq": Label("second_moment", "")}
    start = process_time()
    found = quantize_moments(state, labels, 0.5, 0.2, shards=Shards(held, reduce=group.reduce))
    assert len(found) > 0.9 * len(state)
    return group.traffic.collectives, group.traffic.got, process_time() - start


def main() -> None:
    arguments = options.parse(options.parser(__doc__, data=None))
    quick = arguments.quick
    models, of_ranks, of_moments = (["7B"], RANKS[:2], MOMENTS[:1]) if quick else (MEASURED, RANKS, MOMENTS)
    rows = []
    for model in models:
        for layout in LAYOUTS:
            for ranks in of_ranks:
                if layout.fits(ranks) and (ranks > 1 or layout is LAYOUTS[0]):
                    rows.append(measure(model, layout, ranks))
                    print(rows[-1], flush=True)
    moments = []
    for model, ranks in of_moments:
        moments.append((model, ranks, *moments_of_a_rank(model, ranks)))
        print(moments[-1], flush=True)
    described = machine("torch", "numpy")
    numbers = {"machine": described, "rows": [asdict(row) for row in rows], "moments": moments}
    publish(arguments.out, "scale", numbers, lambda path: plot(rows, path), report(rows, moments, described))
    show(*(table(rows, model) for model in models), extrapolated(rows, 10_000), reductions(moments), width=200)


if __name__ == "__main__":
    main()
