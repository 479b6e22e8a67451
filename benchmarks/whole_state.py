"""Whole checkpoints, moments included, of a training with crashes: dynaquant, the published method and ExCP.

    python benchmarks/whole_state.py --data DIR --workload gpt --max-degradation 0.01 --restores 10

One training makes the checkpoints, and all three methods store every one of them. After each crash, training goes on
from dynaquant's; the others keep their own chains. The same training left alone, with several seeds, tells what the
crashes have cost.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

from crashes import SEED, Settings, parse
from matplotlib.figure import Figure
from peers import excp
from results import Table, machine, sentence
from rich.console import Console
from rich.progress import track
from torch import Tensor
from workloads import WORKLOADS, Uninterrupted, Workload

import dynaquant as dq
from dynaquant.search.quality import degradation, score

EXCP_STEPS = [excp.Settings(alpha, bits=bits) for bits, alpha in product((2, 4, 8), sorted(excp.SPACE["alpha"])[::-1])]
"""Coarse to fine, with the paper's β throughout: it has no effect on the weights, so that no metric can choose it."""


@dataclass(frozen=True)
class Saved:
    """One checkpoint by one method: raw and stored bytes, of the weights and of all; degradation of the weights.

    weights: None where they are not stored apart.
    """

    step: int
    weights: tuple[int, int] | None
    state: tuple[int, int]
    degradation: float
    evaluations: int
    blocked: float
    how: str


@dataclass(frozen=True)
class Result:
    """saved: by method. final: the metric at the end, on more data; alone: of the trainings left alone."""

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
        saved = {method: [Saved(**one) for one in many] for method, many in stored["saved"].items()}
        alone = [Uninterrupted.from_json(one) for one in stored["alone"]]
        return cls(**{**parts, "settings": Settings(**stored["settings"]), "saved": saved, "alone": alone})


class Excp:
    """ExCP on the checkpoints of a training, with the coarsest settings that are good enough."""

    def __init__(self, work: Workload, limit: float) -> None:
        self._work, self._limit, self._at = work, limit, 0
        self._previous = excp.Checkpoint(self._weights())

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._work.model.named_parameters()}

    def _checkpoint(self) -> excp.Checkpoint:
        work = self._work
        moments: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for name, parameter in work.model.named_parameters():
            state = work.optimizer.state[parameter]
            for found, keys in zip(moments, (("exp_avg", "momentum_buffer"), ("exp_avg_sq",)), strict=True):
                for key in keys:
                    if key in state:
                        found[name] = state[key].clone()
        return excp.Checkpoint(self._weights(), *moments, dict(work.model.named_buffers()))

    def save(self, step: int) -> Saved:
        start = perf_counter()
        checkpoint = self._checkpoint()
        original = score(self._work.model, {}, self._work.search_loss)
        begin = self._at = max(self._at - 1, 0)  # what was too coarse before may do now
        while True:
            data = excp.encode(checkpoint, self._previous, EXCP_STEPS[self._at])
            decoded = excp.decode(data, self._previous)
            worse = degradation(original, score(self._work.model, decoded.weights, self._work.search_loss), False)
            if worse <= self._limit or self._at == len(EXCP_STEPS) - 1:
                break
            self._at += 1
        raw = sum(tensor.nbytes for group in checkpoint.groups().values() for tensor in group.values())
        chosen = EXCP_STEPS[self._at]
        self._previous = decoded
        how = f"α = {chosen.alpha:g}, {chosen.bits} bits"
        seconds = perf_counter() - start
        return Saved(step, None, (raw, len(data)), worse, self._at - begin + 1, seconds, how)


def saved_of(record: dq.Record, blocked: float) -> Saved:
    weights = record.roles["weight"]
    return Saved(
        record.step,
        (weights.raw, weights.stored),
        (record.total.raw, record.total.stored),
        record.quality["degradation"] if record.quality else 0.0,
        record.evaluations,
        blocked,
        str(record.configuration),
    )


def checkpointers(stack: ExitStack, work: Workload, settings: Settings, cache: Path) -> dict[str, dq.Checkpointer]:
    """dynaquant's default and the published method, each with a folder of its own."""

    def made(method: Any) -> dq.Checkpointer:
        return stack.enter_context(
            dq.Checkpointer(
                stack.enter_context(tempfile.TemporaryDirectory(dir=cache)),
                work.model,
                work.optimizer,
                extras={"scheduler": work.scheduler, "data": work.generator},
                evaluate=work.search_loss,
                max_degradation=settings.max_degradation,
                method=method,
                every=settings.every,
            )
        )

    return {"dynaquant": made("grid"), "published": made("published")}


def steps_with_crashes(settings: Settings) -> Iterator[int]:
    """The steps in the order in which they are done; a crash throws back to the last checkpoint."""
    crashes = {point + settings.lost for point in settings.restore_points}
    step = 0
    while step < settings.steps:
        step += 1
        yield step
        if step in crashes:
            crashes.remove(step)
            step -= settings.lost


def run(settings: Settings, data: Path, cache: Path) -> dict[str, Any]:
    """The fields of ``Result`` that come of training."""
    work = WORKLOADS[settings.workload](data, cache, settings.steps, SEED)
    saved: dict[str, list[Saved]] = {"dynaquant": [], "published": [], "ExCP": []}
    training = 0.0
    with ExitStack() as stack:
        methods = checkpointers(stack, work, settings, cache)
        peer = Excp(work, settings.max_degradation)
        before = 0
        total = settings.steps + settings.restores * settings.lost
        for step in track(steps_with_crashes(settings), f"training the {settings.workload} with crashes", total):
            if step <= before:  # an empty memory is what a crash leaves; the restore brings back all of the state
                assert methods["dynaquant"].restore() == step - 1
            before = step
            start = perf_counter()
            work.train_step()
            training += perf_counter() - start
            if step % settings.every == 0 and all(one.step < step for one in saved["dynaquant"]):
                for name, checkpointer in methods.items():
                    start = perf_counter()
                    future = checkpointer.save(step)
                    blocked = perf_counter() - start
                    saved[name].append(saved_of(future.result(), blocked))
                saved["ExCP"].append(peer.save(step))
        final = work.final_quality(work.model)
    return {
        "higher_is_better": work.higher_is_better,
        "saved": saved,
        "final": final,
        "training_seconds": training,
    }


def ratio(sizes: Iterable[tuple[int, int] | None]) -> str:
    """Raw bytes over stored bytes of all together."""
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
    columns = ["step"]
    for method in result.saved:
        columns += [f"{method}: whole", "weights", "worse by"]
    rows = []
    for many in zip(*result.saved.values(), strict=True):
        row = [str(many[0].step)]
        for one in many:
            row += [ratio([one.state]), ratio([one.weights]), f"{one.degradation:.2%}"]
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
        "One training makes the checkpoints, and three methods store every one of them: dynaquant as it is by default, "
        'the published method (`method="published"`, which leaves moments exact), and '
        "[ExCP](../../benchmarks/peers/excp.py). ε is `max_degradation`; every method searches for the smallest that "
        "it can do within it. After a crash training goes on from dynaquant's checkpoint, some steps before. ExCP's "
        "chain then meets weights that have been through another quantizer; runs without restores have none of that.",
        overview(results).in_markdown(),
        "*Whole state* and *weights* are raw bytes over stored bytes of all checkpoints together, files as they are on "
        "disk; dynaquant's hold schedulers and random number generators as well, ExCP's only model and moments. ExCP "
        "stores weights and moments in one archive; its weights alone cannot be told. *At the "
        "end* is how much worse the final metric is than that of the same seed left alone (negative: better), *seeds "
        "apart* how far those of three seeds are.",
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
