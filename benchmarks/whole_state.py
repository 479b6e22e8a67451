"""Compare whole checkpoints, moments included, of a training with crashes: dynaquant, its published method, and peers.

    python benchmarks/whole_state.py --data DIR --workload gpt --max-degradation 0.01 --restores 10

The peers are ExCP, BitSnap, and PaddleNLP with O1 and O2. One training makes the checkpoints, and every method stores
each of them. After a crash, training resumes from dynaquant's checkpoint; the others keep their own chains. The same
training without crashes, with several seeds, shows what the crashes have cost.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from checkpointers import Checkpoints, Ours, Saved, Theirs
from crashes import SEED, Settings, parse
from matplotlib.figure import Figure
from peers.bitsnap import BITSNAP
from peers.excp import EXCP
from peers.paddlenlp import O1, O2
from peers.peer import Peer
from results import Table, machine, sentence
from rich.console import Console
from rich.progress import track
from workloads import WORKLOADS, Uninterrupted

from dynaquant.options import Quality
from dynaquant.search.evaluation import degradation

PEERS: tuple[Peer[Any], ...] = (EXCP, BITSNAP, O1, O2)


@dataclass(frozen=True)
class Result:
    """Results of a training. saved: by method. final: the metric at the end, on more data. alone: without crashes."""

    settings: Settings
    machine: dict[str, str | int]
    higher_is_better: bool
    saved: dict[str, list[Saved]]
    final: float
    training_seconds: float
    alone: list[Uninterrupted]

    @property
    def final_degradation(self) -> float:
        return degradation(self.alone[0].final, self.final, self.higher_is_better)

    @property
    def spread(self) -> float:
        finals = [one.final for one in self.alone]
        return (max(finals) - min(finals)) / abs(sum(finals) / len(finals))

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Result:
        parts = {field.name: stored[field.name] for field in fields(cls)}
        saved = {method: [Saved.from_json(one) for one in many] for method, many in stored["saved"].items()}
        alone = [Uninterrupted.from_json(one) for one in stored["alone"]]
        return cls(**{**parts, "settings": Settings(**stored["settings"]), "saved": saved, "alone": alone})


def steps_with_crashes(settings: Settings) -> Iterator[int]:
    """Yield the steps in the order in which they are done. A crash goes back to the last checkpoint."""
    crashes = {point + settings.lost for point in settings.restore_points}
    step = 0
    while step < settings.steps:
        step += 1
        yield step
        if step in crashes:
            crashes.remove(step)
            step -= settings.lost


def run(settings: Settings, data: Path, cache: Path) -> dict[str, Any]:
    """Train, and return the fields of ``Result`` that come from training."""
    work = WORKLOADS[settings.workload](data, cache, settings.steps, SEED)
    quality = Quality(max_degradation=settings.max_degradation)
    training = 0.0
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(dir=cache))) for _ in range(2)]
        methods: dict[str, Checkpoints] = {
            "dynaquant": Ours(folders[0], quality=quality, every=settings.every),
            "published": Ours(folders[1], quality=replace(quality, method="published"), every=settings.every),
            **{peer.name: Theirs(peer, settings.max_degradation) for peer in PEERS},
        }
        saved: dict[str, list[Saved]] = {name: [] for name in methods}
        for checkpoints in methods.values():
            stack.callback(checkpoints.close)
            checkpoints.attach(work)
        before = 0
        total = settings.steps + settings.restores * settings.lost
        for step in track(steps_with_crashes(settings), f"training the {settings.workload} with crashes", total):
            if step <= before:  # a crash leaves no memory; the restore brings back the whole state
                assert methods["dynaquant"].attach(work) == step - 1
            before = step
            start = perf_counter()
            work.train_step()
            training += perf_counter() - start
            if step % settings.every == 0 and all(one.step < step for one in saved["dynaquant"]):
                for name, checkpoints in methods.items():
                    saved[name].append(checkpoints.save(step))
        final = work.final_quality(work.model)
    return {
        "higher_is_better": work.higher_is_better,
        "saved": saved,
        "final": final,
        "training_seconds": training,
    }


def ratio(sizes: Iterable[tuple[int, int] | None]) -> str:
    """Return raw bytes over stored bytes of all sizes together, as text."""
    listed = [size for size in sizes if size is not None]
    return f"{sum(raw for raw, _ in listed) / sum(stored for _, stored in listed):.1f}×" if listed else "–"


def overview(results: list[Result]) -> Table:
    columns = [
        "run",
        "method",
        "whole state",
        "weights",
        "worst checkpoint",
        "evaluations",
        "at the end",
        "seeds apart",
    ]
    rows = []
    for result in results:
        settings = result.settings
        for method, saved in result.saved.items():
            ours = method == "dynaquant"
            rows.append(
                [
                    f"{settings.workload}, ε = {settings.max_degradation:g}, {settings.restores} restores",
                    method,
                    ratio(one.state for one in saved),
                    ratio(one.weights for one in saved),
                    f"{max(one.degradation for one in saved):.2%}",
                    f"{sum(one.evaluations for one in saved) / len(saved):.1f}",
                    f"{result.final_degradation:+.2%}" if ours and settings.restores else "–",
                    f"{result.spread:.2%}" if ours and settings.restores else "–",
                ]
            )
    return Table("Whole checkpoints", columns, rows)


def by_step(result: Result) -> Table:
    """Return the table of every checkpoint. Weights have a column where their size is known."""
    columns = ["step"]
    for method, saved in result.saved.items():
        columns += [f"{method}: whole", *(["weights"] if saved[0].weights else []), "worse by"]
    rows = []
    for many in zip(*result.saved.values(), strict=True):
        row = [str(many[0].step)]
        for one in many:
            row += [ratio([one.state]), *([ratio([one.weights])] if one.weights else []), f"{one.degradation:.2%}"]
        rows.append(row)
    return Table(f"{result.settings.name}: every checkpoint", columns, rows)


def plot(result: Result, path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method, saved in result.saved.items():
        steps = [one.step for one in saved]
        left.plot(steps, [one.state[0] / one.state[1] for one in saved], "o-", markersize=4, label=method)
        right.plot(steps, [100 * one.degradation for one in saved], "o-", markersize=4, label=method)
    left.set(yscale="log", xlabel="step", ylabel="whole state, times smaller", title=result.settings.name)
    right.axhline(100 * result.settings.max_degradation, color="black", linestyle="--", label="allowed")
    right.set(xlabel="step", ylabel="loss of the restored weights, % worse")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)


def page(results: list[Result]) -> str:
    parts = [
        "# Whole checkpoints",
        "One training makes the checkpoints, and several methods store each of them: dynaquant with its defaults, the "
        'published method (`Quality(method="published")`, which leaves moments exact), '
        "[ExCP](../../benchmarks/peers/excp.py), [BitSnap](../../benchmarks/peers/bitsnap.py), and "
        "[PaddleNLP](../../benchmarks/peers/paddlenlp.py) with O1 and O2. ε is `max_degradation`. Every method "
        "searches for its smallest checkpoint within ε. After a crash, training resumes from dynaquant's checkpoint, "
        "some steps before. The chains of ExCP and BitSnap then contain weights that went through another quantizer. "
        "Runs without restores do not have this.",
        overview(results).in_markdown(),
        "*Whole state* and *weights* are raw bytes over stored bytes of all checkpoints together, as files on disk. "
        "dynaquant's files also hold schedulers and random number generators, those of the peers only model and "
        "moments. A peer stores weights and moments in one file, so the size of its weights is not known. *Worst "
        "checkpoint* counts weights only. What moments lose shows in a training that resumes from them; here only "
        "dynaquant's does. *At the end* is how much "
        "worse the final metric is than that of the same seed without crashes (negative: better). *Seeds apart* is how "
        "far three seeds are from each other.",
    ]
    for result in results:
        settings = result.settings
        parts += [
            f"## {settings.workload}, ε = {settings.max_degradation:g}, {settings.restores} restores",
            f"```\n{settings.command('whole_state.py')}\n```",
            f"{sentence(result.machine)} PyTorch had {settings.threads} thread(s).",
            f"![ratio and degradation over the steps](whole_state-{settings.name}.png)",
            by_step(result).in_markdown(),
        ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    settings, arguments = parse(__doc__)
    alone = settings.alone(arguments.data, arguments.cache)
    made = run(settings, arguments.data, arguments.cache)
    result = Result(settings=settings, machine=machine("numpy", "torch"), alone=alone, **made)
    console = Console()
    console.width = max(console.width, 150)
    console.print(by_step(result).on_screen())
    console.print(overview([result]).on_screen())
    file = arguments.out / f"whole_state-{settings.name}.json"
    file.write_text(json.dumps(asdict(result), indent=1) + "\n")
    plot(result, file.with_suffix(".png"))
    known = sorted(arguments.out.glob("whole_state-*.json"))
    results = [Result.from_json(json.loads(file.read_text())) for file in known]
    (arguments.out / "whole_state.md").write_text(page(results))


if __name__ == "__main__":
    main()
