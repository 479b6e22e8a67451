"""Each workload trained once without crashes and once with many, and the tables that compare the two."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dynaquant.demo.crashes import Outcome, arguments_for, run_training
from dynaquant.saving.record import Record, Size, record_of
from dynaquant.store.run import SUFFIX, Run


@dataclass(frozen=True)
class DemoPlan:
    """How much the demo does. steps: of each training. every: steps between checkpoints. crashes: of each workload."""

    steps: dict[str, int]
    every: dict[str, int]
    crashes: int


FULL = DemoPlan({"transformer": 800, "convnet": 800}, {"transformer": 50, "convnet": 50}, crashes=10)
SHORT = DemoPlan({"transformer": 500, "convnet": 500}, {"transformer": 50, "convnet": 50}, crashes=6)
QUICK = DemoPlan({"transformer": 40, "convnet": 120}, {"transformer": 10, "convnet": 20}, crashes=2)

TOLD_EVERY = 10.0
"""Seconds between two lines about the progress, if there is no terminal."""
AT_ONCE = 2
"""Trainings that run at the same time, each with an equal share of the processors."""


@dataclass(frozen=True)
class Result:
    """One workload: its training without crashes and checkpoints, its training with both, and the checkpoints."""

    name: str
    metric: str
    steps: int
    undisturbed: Outcome
    crashed: Outcome
    records: list[Record]

    @property
    def roles(self) -> dict[str, Size]:
        """Sizes by role, summed over all checkpoints."""
        total: dict[str, Size] = {}
        for record in self.records:
            for role, size in record.roles.items():
                total[role] = total.get(role, Size()) + size
        return total

    @property
    def total(self) -> Size:
        """Bytes of the tensors and bytes of the files, summed over all checkpoints."""
        return sum((record.total for record in self.records), Size())

    @property
    def saving_share(self) -> float:
        """Time spent in ``save``, relative to the rest of the time in the training loop."""
        return self.crashed.saving / (self.crashed.seconds - self.crashed.saving)

    def to_json(self) -> dict[str, Any]:
        """Return everything that the table shows as plain JSON values."""
        sizes = {**self.roles, "total": self.total}
        return {
            "workload": self.name,
            "metric": self.metric,
            "steps": self.steps,
            "checkpoints": len(self.records),
            "sizes": {role: {**asdict(size), "ratio": round(size.ratio, 2)} for role, size in sizes.items()},
            "crashes_at_steps": self.crashed.crashes,
            "crashes_in_save": self.crashed.crashes_in_save,
            "resumed_from_steps": self.crashed.resumed,
            "quality_undisturbed": self.undisturbed.quality,
            "quality_with_crashes": self.crashed.quality,
            "training_seconds": round(self.crashed.seconds - self.crashed.saving, 2),
            "saving_seconds": round(self.crashed.saving, 2),
            "saving_share": round(self.saving_share, 4),
            "records": [record.to_json() for record in self.records],
        }


METRICS = {"transformer": "validation loss", "convnet": "accuracy"}


def run_demo(out: Path, plan: DemoPlan, max_degradation: float | None, seed: int, console: Console) -> list[Result]:
    """Train every workload with and without crashes, two trainings at a time; show the progress on ``console``.

    Leaves the runs in ``out`` and replaces those of an earlier demo.
    """
    with Progress(
        TextColumn("{task.description:48}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        return asyncio.run(_run_all(out, plan, max_degradation, seed, progress))


async def _run_all(
    out: Path, plan: DemoPlan, max_degradation: float | None, seed: int, progress: Progress
) -> list[Result]:
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, processors // AT_ONCE)
    turns = asyncio.Semaphore(min(AT_ONCE, processors))

    async def training(name: str, folder: Path | None) -> Outcome:
        steps, crashes = plan.steps[name], plan.crashes if folder else 0
        what = f"{name}, {crashes} crashes" if folder else f"{name}, undisturbed"
        task = progress.add_task(what, total=steps, start=False)

        def show(step: int, outcome: Outcome) -> None:
            done = f": {len(outcome.crashes)} so far" if outcome.crashes else ""
            progress.update(task, completed=step, description=what + done)

        arguments = arguments_for(name, steps, plan.every[name], max_degradation, seed, folder)
        async with turns:
            progress.start_task(task)
            outcome = await run_training(arguments, steps, crashes, seed, threads, show)
            progress.stop_task(task)
        return outcome

    folders = {name: out / name for name in plan.steps}
    for folder in folders.values():
        for file in folder.glob(f"step-*{SUFFIX}*"):  # of an earlier demo; other files are not the demo's to delete
            file.unlink()
    # The trainings with crashes come first in the queue, because they take longest.
    waiting = [training(name, folder) for name, folder in folders.items()] + [training(name, None) for name in folders]
    telling = asyncio.create_task(_tell(progress))
    try:
        outcomes = await asyncio.gather(*waiting)
    finally:
        telling.cancel()
    pairs = zip(outcomes[: len(folders)], outcomes[len(folders) :], strict=True)
    return [
        Result(name, METRICS[name], plan.steps[name], undisturbed, crashed, _records(folders[name]))
        for name, (crashed, undisturbed) in zip(folders, pairs, strict=True)
    ]


async def _tell(progress: Progress) -> None:
    """Print a line about the progress every ten seconds if there is no terminal for its bars."""
    while not progress.console.is_terminal:
        await asyncio.sleep(TOLD_EVERY)
        running = [task for task in progress.tasks if task.started and not task.finished]
        done = ", ".join(f"{task.description} {task.completed:.0f}/{task.total:.0f}" for task in running)
        progress.console.print(f"training: {done}" if done else "finishing", soft_wrap=True)


def _records(folder: Path) -> list[Record]:
    run = Run(folder)
    return [record_of(run.file(summary.step)) for summary in run.summaries()[0]]


def table_of(result: Result) -> Table:
    """Return a table of the sizes of a workload's checkpoints by role."""
    title = f"{result.name}: {len(result.records)} checkpoints"
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("role", "raw", "stored", "ratio"):
        table.add_column(column, justify="left" if column == "role" else "right")
    for role, size in result.roles.items():
        if _megabytes(size.stored) == _megabytes(0):  # such as counters of steps: their ratio says nothing
            continue
        table.add_row(role, _megabytes(size.raw), _megabytes(size.stored), f"{size.ratio:.1f}×")
    table.add_section()
    table.add_row("total", _megabytes(result.total.raw), _megabytes(result.total.stored), f"{result.total.ratio:.1f}×")
    return table


def summary_of(result: Result) -> str:
    """Say in a few lines what happened to a workload."""
    crashed = result.crashed
    worst = max((r.quality.degradation for r in result.records if r.quality), default=0.0)
    trials = sum(record.evaluations for record in result.records)
    return (
        f"  {len(crashed.crashes)} crashes (SIGKILL), {crashed.crashes_in_save} of them during a save, "
        f"at steps {', '.join(map(str, crashed.crashes))}\n"
        f"  resumed from steps {', '.join(map(str, crashed.resumed))}\n"
        f"  {result.metric} at the end: {crashed.quality:.4f}, undisturbed: {result.undisturbed.quality:.4f} "
        f"({crashed.quality / result.undisturbed.quality - 1:+.2%})\n"
        f"  largest degradation of one checkpoint: {worst:.2%}\n"
        f"  {trials} configurations scored for {len(result.records)} checkpoints\n"
        f"  saving took {crashed.saving:.1f} s, {result.saving_share:.1%} of {crashed.seconds - crashed.saving:.1f} s "
        f"of training, at a checkpoint every {result.records[0].step} steps"
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
