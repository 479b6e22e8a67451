"""The demonstration: each workload once without crashes and once with many, and a comparison of the two."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dynaquant.demo.crashes import Story, arguments_for, run_training
from dynaquant.save.record import Record, Size, record_of
from dynaquant.store.listing import SUFFIX
from dynaquant.store.run import Run


@dataclass(frozen=True)
class Scale:
    """How much is done for each workload: training steps, steps between checkpoints."""

    steps: dict[str, int]
    every: dict[str, int]
    crashes: int


FULL = Scale({"transformer": 800, "convnet": 800}, {"transformer": 50, "convnet": 50}, crashes=10)
QUICK = Scale({"transformer": 40, "convnet": 120}, {"transformer": 10, "convnet": 20}, crashes=2)


@dataclass(frozen=True)
class Result:
    """One workload: the training without crashes and without checkpoints, the one with both, and its checkpoints."""

    name: str
    metric: str
    steps: int
    undisturbed: Story
    crashed: Story
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
        """Tensor bytes against file bytes, summed over all checkpoints."""
        return sum((record.total for record in self.records), Size())

    @property
    def saving_share(self) -> float:
        """Time that ``save`` took, as a share of the rest of the training loop's time."""
        return self.crashed.saving / (self.crashed.seconds - self.crashed.saving)

    def to_json(self) -> dict[str, Any]:
        """Everything the table shows, for machines."""
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


def run_demo(out: Path, scale: Scale, max_degradation: float, seed: int, console: Console) -> list[Result]:
    """Trains everything, showing progress on ``console``. Runs are left in ``out``; earlier ones are replaced."""
    with Progress(
        TextColumn("{task.description:48}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        return [_run_workload(name, out, scale, max_degradation, seed, progress) for name in scale.steps]


def _run_workload(name: str, out: Path, scale: Scale, max_degradation: float, seed: int, progress: Progress) -> Result:
    steps, every = scale.steps[name], scale.every[name]
    folder = out / name
    for file in folder.glob(f"step-*{SUFFIX}*"):  # of an earlier demo; anything else is not ours to delete
        file.unlink()

    task = progress.add_task(f"{name}: undisturbed", total=steps)
    undisturbed = run_training(
        arguments_for(name, steps, every, max_degradation, seed, None),
        steps,
        0,
        seed,
        lambda step, _: progress.update(task, completed=step),
    )
    task = progress.add_task(f"{name}: {scale.crashes} crashes to come", total=steps)

    def show(step: int, story: Story) -> None:
        done = len(story.crashes)
        text = f", {done} of {scale.crashes} crashes" + (f", last at {story.crashes[-1]}" if done else "")
        progress.update(task, completed=step, description=f"{name}{text}")

    crashed = run_training(
        arguments_for(name, steps, every, max_degradation, seed, folder), steps, scale.crashes, seed, show
    )
    run = Run(folder)
    records = [record_of(run.file(summary.step)) for summary in run.summaries()[0]]
    return Result(name, METRICS[name], steps, undisturbed, crashed, records)


def table_of(result: Result) -> Table:
    """The sizes of a workload's checkpoints by role."""
    title = f"{result.name}: {len(result.records)} checkpoints"
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("role", "raw", "stored", "ratio"):
        table.add_column(column, justify="left" if column == "role" else "right")
    for role, size in result.roles.items():
        table.add_row(role, _megabytes(size.raw), _megabytes(size.stored), f"{size.ratio:.1f}×")
    table.add_section()
    table.add_row("total", _megabytes(result.total.raw), _megabytes(result.total.stored), f"{result.total.ratio:.1f}×")
    return table


def summary_of(result: Result) -> str:
    """What happened to a workload, in a few lines."""
    crashed = result.crashed
    worst = max((r.quality.degradation for r in result.records if r.quality), default=0.0)
    trials = sum(record.evaluations for record in result.records)
    return (
        f"  {len(crashed.crashes)} crashes (SIGKILL), {crashed.crashes_in_save} of them in a save, "
        f"at steps {', '.join(map(str, crashed.crashes))}\n"
        f"  resumed from steps {', '.join(map(str, crashed.resumed))}\n"
        f"  {result.metric} at the end: {crashed.quality:.4f}, undisturbed: {result.undisturbed.quality:.4f} "
        f"({crashed.quality / result.undisturbed.quality - 1:+.2%})\n"
        f"  worst loss of quality in one checkpoint: {worst:.2%}\n"
        f"  {trials} configurations scored for {len(result.records)} checkpoints\n"
        f"  saving took {crashed.saving:.1f} s, {result.saving_share:.1%} of {crashed.seconds - crashed.saving:.1f} s "
        f"of training, at a checkpoint every {result.records[0].step} steps"
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
