"""Measure what one candidate of a search costs beside the user's metric: time on one core, and memory.

    python benchmarks/candidate.py

A candidate is a grid step for each tensor. The time counts from there to a model that holds the values which a restore
would return. All methods take turns, and the shortest time of each counts. It is the processor's time: there is one
thread, and other programs on the machine do not count. The limit is a copy of as many bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle
from time import process_time

import options
import torch
from cores import on_cores
from memory import memory_now, peak_memory
from results import Table, machine, publish, sentence, show
from synthetic import transformer
from torch import Tensor, nn

from dynaquant.engine.quantize.grid_weights import GridWeights, grid_weights
from dynaquant.engine.quantize.knobs import GridConfiguration
from dynaquant.search.displacement import Displacement
from dynaquant.search.judge import DistortionJudge, MetricJudge
from dynaquant.search.live_model import LiveModel

VALUES = 124_000_000
TURNS = 15
WANTED = 0.25
"""Seconds that a candidate of VALUES weights may take on one core."""
DISTORTION = 3e-3
"""Σ F·δ² / Σ F·w² of the first candidate. The others are up to an octave coarser, so that all grid steps change."""
STRIDES = (0, 4, 8, 12)


@dataclass(frozen=True)
class Row:
    """Results of one method. seconds: the shortest and the median time. memory: peak above that before, in bytes."""

    method: str
    seconds: float
    median: float
    memory: int


def no_metric(_: nn.Module) -> float:
    return 1.0


def methods(model: nn.Module, weights: GridWeights) -> dict[str, Callable[[], object]]:
    """Return what is measured. The first is the limit, the next two are what a search does."""
    configurations = cycle([weights.scale_exponent_for(DISTORTION) + stride for stride in STRIDES])

    def configuration(dithered: bool = False) -> GridConfiguration:
        return GridConfiguration(next(configurations), dithered)

    def metric() -> MetricJudge:
        return MetricJudge(LiveModel(model), no_metric, higher_is_better=False, original=1.0, decided={})

    judge, estimate = metric(), DistortionJudge(weights.weights, {}, "distortion")
    since_restore = Displacement(weights.weights, weights.quantize(configuration()))
    source = [tensor.clone() for tensor in weights.weights.values()]
    target = [tensor.clone() for tensor in source]

    def copy() -> None:
        for to, tensor in zip(target, source, strict=True):
            to.copy_(tensor)

    def peer() -> list[Tensor]:
        steps = [float(tensor.abs().max()) / 127 for tensor in source[:1]] * len(source)
        return [torch.fake_quantize_per_tensor_affine(t, s, 0, -127, 127) for t, s in zip(source, steps, strict=True)]

    return {
        "copy of as many bytes": copy,
        "a candidate": lambda: judge(weights.candidate(configuration())),
        "a candidate, stochastic rounding": lambda: judge(weights.candidate(configuration(dithered=True))),
        "a candidate, into new memory": lambda: metric()(weights.candidate(configuration())),
        "a candidate, through levels": lambda: metric()(weights.quantize(configuration())),
        "displacement since a restore": lambda: since_restore.share_kept(weights.candidate(configuration())),
        "distortion, without a metric": lambda: estimate(weights.candidate(configuration())),
        "levels of the chosen one": lambda: weights.quantize(configuration()),
        "PyTorch fake_quantize": peer,
    }


def measure(values: int, turns: int) -> list[Row]:
    torch.set_num_threads(1)
    model = transformer(values, torch.Generator().manual_seed(0))
    matrices = {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.ndim >= 2}
    work = methods(model, grid_weights(matrices, {}, {}, seed=0))
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(turns):
        for name, run in work.items():
            start = process_time()
            run()
            seconds[name].append(process_time() - start)
    return [Row(name, min(s), sorted(s)[len(s) // 2], memory_of(work[name])) for name, s in seconds.items()]


def memory_of(run: Callable[[], object]) -> int:
    resident = memory_now()
    run()
    return peak_memory() - resident


def table(rows: list[Row], values: int) -> Table:
    limit = rows[0].seconds
    cells = [
        [
            row.method,
            f"{row.seconds:.3f}",
            f"{row.median:.3f}",
            f"{row.seconds / limit:.1f}×",
            f"{row.memory / 1e6:,.0f}",
        ]
        for row in rows
    ]
    columns = ["method", "seconds, best", "seconds, median", "of the copy", "memory, MB"]
    return Table(f"{values:,} float32 weights, {4e-6 * values:,.0f} MB, one core", columns, cells)


def verdict(rows: list[Row], values: int) -> str:
    wanted = WANTED * values / VALUES
    worst = max(row.seconds for row in rows[1:3])
    return f"{'passed' if worst <= wanted else 'MISSED'}: a candidate takes {worst:.3f} s, at most {wanted:g} s wanted"


NOTES = """\
- *A candidate*: from prepared weights and grid steps to the model that the metric sees, in one pass over the weights,
  without levels. After a restore, *stochastic rounding* and the *displacement* come in addition. Without a metric, the
  *distortion* is computed instead. Levels are made once, for the candidate that is chosen.
- *Through levels* is how candidates were made before: levels of all weights, then their values.
- *Memory* is the peak above what was resident before. The memory of a candidate stays allocated for the next one, so a
  later candidate adds nothing; *into new memory* shows what the first one takes.
- *PyTorch fake_quantize* rounds to a grid of 8 bits, too, with neither outliers nor stochastic rounding.
"""


def main() -> None:
    arguments = options.parse(options.parser(__doc__, data=None))
    values, turns = (VALUES // 1000, 2) if arguments.quick else (VALUES, TURNS)
    rows = on_cores({min(os.sched_getaffinity(0))}, measure, values, turns)
    shown, bar, described = table(rows, values), verdict(rows, values), machine("numpy", "torch")
    show(shown, bar, width=100)
    numbers = {"machine": described, "bar": bar, "rows": [asdict(row) for row in rows]}
    parts = [
        "# One candidate",
        "```\n.venv/bin/python benchmarks/candidate.py\n```",
        sentence(described),
        shown.in_markdown(),
        f"- {bar}",
        "## How to read it",
        NOTES.rstrip(),
    ]
    publish(arguments.out, "candidate", numbers, None, "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
