"""Training that crashes and goes on from quantized checkpoints, against the same training left alone.

    python benchmarks/failure_recovery.py --data DIR --workload gpt --max-degradation 0.05 --restores 10

A crash throws away model, optimizer and checkpointer some steps after a checkpoint; everything is built anew, restored,
and those steps are done again. The seeds of the trainings left alone tell how much luck is worth.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any

from crashes import SEED, Settings, parse
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results import Table, machine, sentence
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from workloads import WORKLOADS, Uninterrupted

import dynaquant as dq
from dynaquant.search.quality import degradation

FINAL_BAR, EXHAUSTIVE_BAR = 0.01, 3
REFERENCE = {0.05: 22.0, 0.01: 17.5}
"""Weights ratio of the published method on the GPT by max_degradation: ten checkpoints, no restores."""
INTERVAL, PAPER_OVERHEAD = 1800, 0.006
"""Seconds between checkpoints in practice; the paper's overhead as a share of training time."""
METRICS = {"gpt": "validation loss", "resnet": "accuracy"}


@dataclass(frozen=True)
class Saved:
    """One checkpoint.

    restored: whether training went on from it after a crash. weights, state: bytes raw and stored. evaluations:
    configurations scored by the metric. metric: of the weights in training. quality: by the loss that the search goes
    by. progress: share kept of the way since the last restore. searching, blocking, writing: seconds; the first two are
    disjoint and keep training waiting.
    """

    step: int
    restored: bool
    keyframe: bool
    weights: tuple[int, int]
    state: tuple[int, int]
    metric: float
    quality: dict[str, float] | None
    limit: float
    progress: float | None
    search: str
    configuration: dict[str, Any] | None
    evaluations: int
    searching: float
    blocking: float
    writing: float
    notes: list[str]

    @property
    def weights_ratio(self) -> float:
        return self.weights[0] / self.weights[1]

    @property
    def degradation(self) -> float:
        return self.quality["degradation"] if self.quality else 0.0

    @property
    def exhaustive(self) -> bool:
        """Whether the neighbourhood was not enough; more bins and lossless are what follows an exhaustive search."""
        return self.search != "neighbourhood"


@dataclass(frozen=True)
class Result:
    """A training with crashes and those left alone, the first of which has the same seed.

    final: metric at the end, on more data than the checkpoints'. training_seconds: without saving and restoring.
    """

    settings: Settings
    machine: dict[str, str | int]
    higher_is_better: bool
    saved: list[Saved]
    final: float
    training_seconds: float
    restoring_seconds: float
    alone: list[Uninterrupted]

    @property
    def weights_ratio(self) -> float:
        return _ratio(saved.weights for saved in self.saved)

    @property
    def state_ratio(self) -> float:
        return _ratio(saved.state for saved in self.saved)

    @property
    def final_degradation(self) -> float:
        return degradation(self.alone[0].final, self.final, self.higher_is_better)

    @property
    def finals(self) -> list[float]:
        """Of the trainings left alone."""
        return [one.final for one in self.alone]

    @property
    def spread(self) -> float:
        """Of the seeds' final metrics: their range over their mean."""
        return (max(self.finals) - min(self.finals)) / abs(sum(self.finals) / len(self.finals))

    @property
    def within_spread(self) -> bool:
        """Whether the final metric is no worse than that of the worst seed."""
        return self.final >= min(self.finals) if self.higher_is_better else self.final <= max(self.finals)

    @property
    def worst(self) -> float:
        return max(saved.degradation for saved in self.saved)

    @property
    def exhaustive(self) -> int:
        return sum(saved.exhaustive for saved in self.saved)

    @property
    def overhead(self) -> float:
        """Seconds that saving kept training waiting, over those of training."""
        return sum(saved.searching + saved.blocking for saved in self.saved) / self.training_seconds

    def overhead_in_practice(self, exhaustive: bool) -> float:
        """The overhead with a checkpoint every half an hour, with or without the exhaustive searches."""
        waits = [saved.searching + saved.blocking for saved in self.saved if exhaustive or not saved.exhaustive]
        return sum(waits) / max(len(waits), 1) / INTERVAL

    def to_json(self) -> dict[str, Any]:
        summary = {
            "weights_ratio": self.weights_ratio,
            "state_ratio": self.state_ratio,
            "final_degradation": self.final_degradation,
            "seed_spread": self.spread,
            "largest_degradation": self.worst,
            "exhaustive_searches": self.exhaustive,
            "overhead": self.overhead,
            "overhead_in_practice": self.overhead_in_practice(True),
            "overhead_in_practice_without_exhaustive": self.overhead_in_practice(False),
        }
        return {"summary": summary, "verdicts": verdicts(self), **asdict(self)}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Result:
        parts = {
            **{field.name: stored[field.name] for field in fields(cls)},
            "settings": Settings(**stored["settings"]),
            "saved": [Saved(**saved) for saved in stored["saved"]],
            "alone": [Uninterrupted.from_json(one) for one in stored["alone"]],
        }
        return cls(**parts)


def _ratio(sizes: Iterable[tuple[int, int]]) -> float:
    """Raw bytes over stored bytes."""
    listed = list(sizes)
    return sum(raw for raw, _ in listed) / sum(stored for _, stored in listed)


def with_crashes(settings: Settings, data: Path, cache: Path) -> dict[str, Any]:
    """Trains with checkpoints and crashes; the fields of ``Result`` that come of it."""
    points = settings.restore_points
    saves: list[tuple[Future[dq.Record], float, float]] = []
    training = restoring = 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(dir=cache) as folder, Progress(*columns) as progress:
        task = progress.add_task("", total=settings.steps)
        for begin, end in zip([0, *points], [*(p + settings.lost for p in points), settings.steps], strict=True):
            progress.update(task, description=f"training the {settings.workload} from step {begin} to {end}")
            start = perf_counter()
            work = WORKLOADS[settings.workload](data, cache, settings.steps, SEED)
            with dq.Checkpointer(
                folder,
                work.model,
                work.optimizer,
                extras={"scheduler": work.scheduler, "data": work.generator},
                evaluate=work.search_loss,
                max_degradation=settings.max_degradation,
                method="published",
                every=settings.every,
            ) as checkpointer:
                restored = checkpointer.restore() or 0
                assert restored == begin, f"restored step {restored} instead of {begin}: {checkpointer.skipped}"
                if begin:
                    restoring += perf_counter() - start
                for step in range(begin + 1, end + 1):
                    start = perf_counter()
                    work.train_step()
                    training += perf_counter() - start
                    if step % settings.every == 0:
                        start = perf_counter()
                        future = checkpointer.save(step)
                        saves.append((future, perf_counter() - start, work.evaluate(work.model)))
                    progress.update(task, completed=step)
    return {
        "higher_is_better": work.higher_is_better,
        "saved": [saved_of(future.result(), waited, points, metric) for future, waited, metric in saves],
        "final": work.final_quality(work.model),
        "training_seconds": training,
        "restoring_seconds": restoring,
    }


def saved_of(record: dq.Record, waited: float, restored: list[int], metric: float) -> Saved:
    """What is kept of a record. waited: seconds that ``save`` took. restored: steps from which training went on."""
    assert record.search is not None, record.notes
    assert record.limit is not None, record.notes
    weights = record.roles["weight"]
    searching = record.seconds.get("search", 0.0)
    return Saved(
        step=record.step,
        restored=record.step in restored,
        keyframe=record.keyframe,
        weights=(weights.raw, weights.stored),
        state=(record.total.raw, record.total.stored),
        metric=metric,
        quality=record.quality,
        limit=record.limit,
        progress=record.progress,
        search=record.search,
        configuration=None if record.configuration is None else asdict(record.configuration),
        evaluations=record.evaluations,
        searching=searching,
        blocking=waited - searching,
        writing=record.seconds["write"],
        notes=record.notes,
    )


def verdicts(result: Result) -> list[str]:
    settings = result.settings
    later = result.saved[1:]
    near = sum(not saved.exhaustive for saved in later)
    evaluations = sum(saved.evaluations for saved in result.saved)
    end = [
        (
            result.final_degradation <= FINAL_BAR or result.within_spread,
            f"at the end the {METRICS[settings.workload]} is {result.final_degradation:.2%} worse than without crashes "
            f"(negative: better), {FINAL_BAR:.0%} or the worst of {settings.seeds} seed(s) allowed; those are "
            f"{result.spread:.2%} apart",
        ),
    ]
    found = [
        *(end if settings.restores else []),  # without crashes there is nothing to compare
        (
            all(saved.degradation <= settings.max_degradation for saved in result.saved),
            f"the worst checkpoint costs {result.worst:.2%}, {settings.max_degradation:.1%} allowed",
        ),
        (
            result.exhaustive <= EXHAUSTIVE_BAR,
            f"exhaustive searches: {result.exhaustive}, at most {EXHAUSTIVE_BAR} wanted; {evaluations} configurations "
            f"evaluated for {len(result.saved)} checkpoints",
        ),
        (near > 0, f"{near} of the {len(later)} checkpoints after the first found in the neighbourhood"),
    ]
    reference = REFERENCE.get(settings.max_degradation)
    if reference and (settings.workload, settings.steps, settings.every, settings.restores) == ("gpt", 1600, 160, 0):
        ratio = result.weights_ratio
        found.append((ratio >= reference, f"weights {ratio:.1f}× smaller, {reference}× by the published method"))
    return [f"{'passed' if good else 'MISSED'}: {what}" for good, what in found]


def overview(results: list[Result]) -> Table:
    columns = ["run", "weights", "whole state", "at the end", "seeds", "worst checkpoint", "exhaustive"]
    columns += ["overhead", "every 30 min", "without exhaustive"]
    rows = [
        [
            f"{r.settings.workload}, ε = {r.settings.max_degradation:g}, {r.settings.restores} restores, "
            f"every {r.settings.every}",
            *(f"{ratio:.1f}×" for ratio in (r.weights_ratio, r.state_ratio)),
            f"{r.final_degradation:+.2%}" if r.settings.restores else "–",
            f"{r.spread:.2%}" if r.settings.seeds > 1 else "–",
            f"{r.worst:.2%}",
            f"{r.exhaustive} of {len(r.saved)}",
            f"{r.overhead:.1%}",
            *(f"{r.overhead_in_practice(exhaustive):.2%}" for exhaustive in (True, False)),
        ]
        for r in results
    ]
    return Table("All runs", columns, rows)


def by_step(result: Result) -> Table:
    columns = ["step", "restored", "weights", "state", "worse by", "kept", "search", "bins", "pruned", "protected"]
    columns += ["evaluations", "search s", "blocked s", "write s"]
    first_restore = min((saved.step for saved in result.saved if saved.restored), default=result.settings.steps)
    rows = [
        [
            f"{saved.step}{' (keyframe)' if saved.keyframe else ''}",
            "yes" if saved.restored else "",
            f"{saved.weights_ratio:.1f}×",
            f"{_ratio([saved.state]):.2f}×",
            f"{saved.degradation:+.2%}",
            f"{saved.progress:.0%}" if saved.progress is not None and saved.step > first_restore else "",
            saved.search,
            *_knobs(saved.configuration),
            str(saved.evaluations),
            *(f"{seconds:.1f}" for seconds in (saved.searching, saved.blocking, saved.writing)),
        ]
        for saved in result.saved
    ]
    return Table(f"The checkpoints of {result.settings.name}", columns, rows)


def _knobs(configuration: dict[str, Any] | None) -> list[str]:
    """Bins, pruned and protected in short; nothing for weights that are stored exactly."""
    if configuration is None:
        return ["", "", ""]
    return [
        f"{configuration['bins']}/{configuration['embedding_bins']}",
        f"{configuration['pruned']:.0%} {configuration['pruning_metric'][0]}",
        f"{configuration['protected']:.2%} {configuration['protection_metric'][0]}",
    ]


def plot(result: Result, file: Path) -> None:
    """Compression, quality and degradation over the steps; restores are vertical lines."""
    figure = Figure(figsize=(10, 10), layout="constrained")
    ratios, quality, degradations = figure.subplots(3, 1, sharex=True)
    _plot_ratios(ratios, result)
    _plot_quality(quality, result)
    _plot_degradations(degradations, result)
    for axes in (ratios, quality, degradations):
        for i, point in enumerate(saved.step for saved in result.saved if saved.restored):
            axes.axvline(point, color="tab:red", alpha=0.35, linewidth=1, label=None if i else "restored")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    degradations.set_xlabel("training step")
    figure.savefig(file, dpi=130)


def _plot_ratios(axes: Axes, result: Result) -> None:
    settings = result.settings
    steps = [saved.step for saved in result.saved]
    axes.plot(steps, [saved.weights_ratio for saved in result.saved], "o-", markersize=4, label="weights")
    axes.plot(steps, [_ratio([saved.state]) for saved in result.saved], "--", color="tab:gray", label="whole state")
    axes.axhline(result.weights_ratio, color="tab:blue", linestyle=":", label="weights, all checkpoints")
    title = f"{settings.workload}, ε = {settings.max_degradation:g}, {settings.restores} restores"
    axes.set(title=title, ylabel="times smaller", ylim=(0, None))


def _plot_quality(axes: Axes, result: Result) -> None:
    steps = [saved.step for saved in result.saved]
    seeds = [[one.qualities[step] for one in result.alone] for step in steps]
    lowest, highest = [min(values) for values in seeds], [max(values) for values in seeds]
    axes.fill_between(
        steps, lowest, highest, color="tab:gray", alpha=0.3, label=f"{len(result.alone)} seeds left alone"
    )
    axes.plot(steps, [values[0] for values in seeds], color="tab:gray", label="left alone")
    axes.plot(steps, [saved.metric for saved in result.saved], "o-", markersize=4, label="with crashes")
    axes.set(ylabel=METRICS[result.settings.workload])


def _plot_degradations(axes: Axes, result: Result) -> None:
    steps = [saved.step for saved in result.saved]
    axes.step(steps, [100 * saved.limit for saved in result.saved], "k--", where="mid", label="allowed")
    axes.plot(steps, [100 * saved.degradation for saved in result.saved], "o-", markersize=4, label="of the checkpoint")
    axes.set(ylabel="validation loss, % worse")


def page(results: list[Result]) -> str:
    """The page that shows all runs."""
    parts = [
        "# Recovery from failures",
        'A training saves quantized checkpoints (`method="published"`) and crashes again and again; each time it is '
        "built anew and goes on from the newest. The same training left alone, with several seeds, is what it is "
        "compared with. ε is `max_degradation`: how much worse the metric of one checkpoint may be.",
        "The GPT has 3.2 M weights and is trained with AdamW on Shakespeare; the ResNet has 0.7 M and is trained with "
        "SGD on 20,000 images of CIFAR-10. `DIR` holds `shakespeare.txt` and `cifar10.zip` (`train/<class>/*.jpg`, "
        "`test/<class>/*.jpg`).",
        "Configurations are searched for by the loss on held-out data; an accuracy on as many images would tell too "
        "little. Trainings are compared by the loss of the GPT and the accuracy of the ResNet, at the end on 50 "
        "batches and 4,000 images; the pictures' 6 and 1,000 are noisier. Saving leaves no trace, so a run without "
        "restores is the training left alone.",
        overview(results).in_markdown(),
        "*Weights* and *whole state* are raw bytes over stored bytes of all checkpoints together. *At the end* is how "
        f"much worse the final metric is than that of the same seed left alone (negative: better), *seeds* how far "
        f"apart those of the seeds are, over their mean. *Overhead* is the time that saving keeps training waiting, "
        f"over that of training; *every 30 min* is what it would be with so much training between two checkpoints, "
        f"*without exhaustive* what it would be but for exhaustive searches. The paper has {PAPER_OVERHEAD:.1%}.",
    ]
    for result in results:
        settings = result.settings
        step_seconds = result.training_seconds / (settings.steps + settings.restores * settings.lost)
        parts += [
            f"## {settings.workload}, ε = {settings.max_degradation:g}, {settings.restores} restores",
            f"```\n{settings.command('failure_recovery.py')}\n```",
            f"{sentence(result.machine)} PyTorch had {settings.threads} thread(s).",
            f"{settings.steps} steps of {step_seconds:.2f} s, a checkpoint every {settings.every}"
            + (f", each crash {settings.lost} steps after one." if settings.restores else "."),
            "\n".join(f"- {verdict}" for verdict in verdicts(result)),
            f"![ratio, quality and degradation over the steps](failure_recovery-{settings.name}.png)",
            by_step(result).in_markdown(),
        ]
    parts.append(
        "*kept*: share of the way since the last restore. *bins*: of embeddings after the slash. *pruned*, *protected*:"
        " share and metric (m: magnitude, s: sensitivity, b: both). *blocked*: by anything but the search."
    )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    settings, arguments = parse(__doc__)
    alone = settings.alone(arguments.data, arguments.cache)
    described = machine("numpy", "torch")
    crashed = with_crashes(settings, arguments.data, arguments.cache)
    result = Result(settings=settings, machine=described, alone=alone, **crashed)
    console = Console()
    console.width = max(console.width, 150)
    console.print(by_step(result).on_screen())
    console.print(overview([result]).on_screen())
    for verdict in verdicts(result):
        console.print(verdict)

    file = arguments.out / f"failure_recovery-{settings.name}.json"
    file.write_text(json.dumps(result.to_json(), indent=1) + "\n")
    plot(result, file.with_suffix(".png"))
    known = sorted(arguments.out.glob("failure_recovery-*.json"))
    results = [Result.from_json(json.loads(file.read_text())) for file in known]
    (arguments.out / "failure_recovery.md").write_text(page(results))


if __name__ == "__main__":
    main()
