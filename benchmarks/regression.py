"""Compare sizes and speeds with those of the last release: short chains of checkpoints, with three presets.

    python benchmarks/regression.py           # exits with 1 if anything is larger by more than 3 %
    python benchmarks/regression.py --keep    # writes regression.json: at a release, or after a change that was meant

It needs no data, one core and less than a minute. ``regression.json`` holds the figures of the last release. Sizes are
compression ratios of the demo's trainings; they hardly depend on the machine. Times are those of saving and restoring
a synthetic state, as multiples of what PyTorch takes for the same state in the same run. Other programs disturb them,
so a slower one is only a warning.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from cores import on_cores
from results import Table, machine, sentence, show
from save import synced
from synthetic import adam_state, advance
from torch import Tensor

import dynaquant as dq
from dynaquant.demo.workloads import Workload, convnet, transformer
from dynaquant.options import QualityName
from dynaquant.saving.record import Size

KEPT = Path(__file__).with_suffix(".json")
UNRELEASED = "the commit that wrote this file, as nothing has been released yet"
PRESETS: tuple[QualityName, ...] = ("balanced", "high", "lossless")
TRAININGS = {"transformer": (60, 20), "convnet": (160, 40)}
"""Steps of each training, and steps between two checkpoints."""
SEED = 0
VALUES = 6_000_000
"""Weights and moments of the state that is timed: 24 MB."""
TURNS, READS = 4, 3
"""How often saves are timed, and restores after each save. The fastest one counts."""
LARGER, SLOWER = 1.03, 2.0
"""How many times as large and as slow as in the last release is still good."""


@dataclass(frozen=True)
class Figures:
    """What was measured, by name.

    ratios: raw bytes over stored bytes of a whole chain. times: of a save or restore, over PyTorch's.
    """

    ratios: dict[str, float]
    times: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """A figure of the last release and the one of now. worse: how many times as large or as slow it is now."""

    name: str
    before: float
    now: float
    worse: float


def training(name: str, steps: int) -> Workload:
    """Return a training that is nearly the same on every machine: its data are scikit-learn's digits."""
    return transformer(steps, SEED, _pixels()) if name == "transformer" else convnet(steps, SEED)


def _pixels() -> Tensor:
    from sklearn.datasets import load_digits  # noqa: PLC0415  (slow to import, and only the measuring process needs it)

    return torch.from_numpy(load_digits().images).to(torch.uint8).flatten()


def ratios_of(name: str, steps: int, every: int) -> dict[str, float]:
    """Train once, save every checkpoint with all presets, and return the ratios of each preset's chain.

    The transformer has a metric. The convnet's accuracy resolves too little: which scale is good enough would depend on
    the machine. So there an estimate decides.
    """
    work = training(name, steps)
    sizes: defaultdict[str, Size] = defaultdict(Size)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        runs = {
            preset: stack.enter_context(
                dq.Checkpointer(
                    folder / preset,
                    work.model,
                    work.optimizer,
                    extras={"scheduler": work.scheduler, "data": work.generator},
                    evaluate=work.evaluate if name == "transformer" else None,
                    quality=preset,
                    every=every,
                )
            )
            for preset in PRESETS
        }
        for step in range(1, steps + 1):
            work.model.train()
            work.loss(work.model, *work.next_batch()).backward()  # type: ignore[no-untyped-call]
            work.optimizer.step()
            work.optimizer.zero_grad()
            work.scheduler.step()
            for preset, run in runs.items():
                if not run.due(step):
                    continue
                record = committed(run, step)
                sizes[f"{name}, {preset}, whole state"] += record.total
                sizes[f"{name}, {preset}, weights"] += record.roles["weight"]
    return {what: size.ratio for what, size in sizes.items()}


def committed(run: dq.Checkpointer, step: int) -> dq.Record:
    """Save, and return the record once the checkpoint is on the disk, read back and compared."""
    return run.save(step).result()


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = perf_counter()
    work()
    return perf_counter() - start


def times(values: int, turns: int) -> dict[str, float]:
    """Return the times of saving a delta and of restoring it, as multiples of PyTorch's.

    PyTorch's are ``torch.save`` with an fsync and ``torch.load``. values: of the state, float32.
    """
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(turns):
        generator = torch.Generator().manual_seed(SEED)
        model, optimizer = adam_state(values, generator)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            runs = {
                preset: stack.enter_context(dq.Checkpointer(folder / preset, model, optimizer, quality=preset))
                for preset in PRESETS
            }
            for run in runs.values():
                committed(run, 1)
            advance(optimizer, generator)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            file = folder / "state.pt"
            seconds["save"].append(seconds_of(partial(synced(partial(torch.save, state)), file)))
            for preset, run in runs.items():
                seconds[f"{preset}, save"].append(seconds_of(partial(committed, run, 2)))
            for _ in range(READS):
                seconds["restore"].append(seconds_of(partial(torch.load, file, weights_only=True)))
                for preset, run in runs.items():
                    seconds[f"{preset}, restore"].append(seconds_of(partial(run.restore, 2)))
    best = {what: min(every_turn) for what, every_turn in seconds.items()}
    return {f"{p}, {what}": best[f"{p}, {what}"] / best[what] for p in PRESETS for what in ("save", "restore")}


def measure() -> Figures:
    """Measure everything, with one thread."""
    torch.set_num_threads(1)
    ratios = {what: ratio for name in TRAININGS for what, ratio in ratios_of(name, *TRAININGS[name]).items()}
    return Figures(ratios, times(VALUES, TURNS))


def rounded(figures: Figures) -> dict[str, dict[str, float]]:
    """Return the figures as they are kept."""
    return {kind: {name: round(figure, 4) for name, figure in each.items()} for kind, each in asdict(figures).items()}


def compare(before: Mapping[str, float], now: Mapping[str, float], higher_is_better: bool) -> list[Comparison]:
    """Return a comparison for each figure. Raises ValueError if the two have other figures: run it with --keep then."""
    if before.keys() != now.keys():
        others = ", ".join(sorted(before.keys() ^ now.keys()))
        raise ValueError(f"{KEPT.name} holds other figures than are measured ({others}); write it again with --keep")
    pairs = [(name, before[name], now[name]) for name in now]
    return [Comparison(name, old, new, old / new if higher_is_better else new / old) for name, old, new in pairs]


def table(title: str, compared: list[Comparison], limit: float, verdict: str) -> Table:
    """Return the table. verdict: what to say of a figure beyond the limit."""
    rows = [
        [one.name, f"{one.before:.2f}×", f"{one.now:.2f}×", f"{one.worse:.3f}", verdict if one.worse > limit else ""]
        for one in compared
    ]
    return Table(title, ["", "last release", "now", "times as much", ""], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--keep",
        nargs="?",
        const=UNRELEASED,
        metavar="OF",
        help="write the figures; OF says of what, e.g. 'release 1.0'",
    )
    arguments = parser.parse_args()
    now = on_cores({min(os.sched_getaffinity(0))}, measure)
    if arguments.keep:
        kept = {"of": arguments.keep, "machine": machine("numpy", "torch", "scikit-learn"), **rounded(now)}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    stored = json.loads(KEPT.read_text())
    sizes = compare(stored["ratios"], now.ratios, higher_is_better=True)
    speeds = compare(stored["times"], now.times, higher_is_better=False)
    show(
        f"The figures of the last release are those of {stored['of']}. {sentence(stored['machine'])}",
        table("Compression ratios", sizes, LARGER, "LARGER"),
        table("Times, as multiples of torch.save + fsync and of torch.load", speeds, SLOWER, "slower"),
        width=100,
    )
    if slower := [one.name for one in speeds if one.worse > SLOWER]:
        print(f"WARNING: slower than in the last release, if nothing else was running: {'; '.join(slower)}")
    if larger := [one.name for one in sizes if one.worse > LARGER]:
        print(f"larger than in the last release by more than {LARGER - 1:.0%}: {'; '.join(larger)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
