"""Restore a short training once with every optimizer, beside an undisturbed training and a control.

    python benchmarks/optimizers.py --data DIR [--only Adam SOAP …] [--seeds 2] [--quick]

The control is the same training without a checkpoint, whose weights are changed once, by 0.001 %, where the other one
is restored. What a training with some optimizer loses by a restore is the difference of the two at the end. What was
measured stays in the cache; delete ``optimizers-*`` there to measure again.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, StrMethodFormatter
from optimizer_trainings import FACTORS, Entry, Training, named, of_pytorch_optimizer, of_torch, quietly
from options import parse, parser
from results import Table, machine, publish, sentence, show
from rich.progress import track
from torch.optim import Optimizer
from workloads import key_of

import dynaquant as dq
from dynaquant.state.roles import SECOND_MOMENTS
from dynaquant.training.moment_uses import why_exact

EXACT = {"optimizer.*": "exact"}
FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
DISTURBANCE = 1e-5
"""Relative standard deviation of the noise in the weights of a control."""
TRAINS = 0.9
"""An optimizer trains if its loss after some steps is below this share of the loss at the beginning."""
WANTED = 0.005
"""How much worse than its control a restored training may end."""
SEEDS = 3


@dataclass(frozen=True)
class Plan:
    """When a training saves, in steps. It is restored from its last checkpoint."""

    steps: int = 500
    every: int = 40
    first: int = 120
    restored: int = 160
    trial: int = 80

    @property
    def saves(self) -> range:
        """The steps of the checkpoints."""
        return range(self.first, self.restored + 1, self.every)


FULL, QUICK = Plan(), Plan(steps=6, every=2, first=2, restored=4, trial=2)


@dataclass(frozen=True)
class Ends:
    """Losses at the end of the trainings of one seed.

    by_key: with moments quantized by their keys, if they are exact otherwise. exact: with exact moments, if they are
    quantized otherwise.
    """

    undisturbed: float
    control: float
    restored: float
    by_key: float | None
    exact: float | None = None

    def beyond(self, loss: float | None) -> float:
        """Return how much worse than the control a training ended, relative to it."""
        return float("nan") if loss is None else loss / self.control - 1


@dataclass(frozen=True)
class Result:
    """What an optimizer showed. exact: why its moments are stored exactly. times: how much smaller its checkpoint is.

    skipped: why it was not measured.
    """

    name: str
    package: str
    skipped: str = ""
    factor: float = 1.0
    exact: str | None = None
    times: float = 0.0
    ends: list[Ends] = field(default_factory=list)

    @property
    def moments(self) -> str:
        """How moments are stored; none if no key in the state is one of theirs."""
        if self.exact is None:
            return "quantized"
        return "exact" if self.beyond_by_key else "none"

    @property
    def beyond(self) -> list[float]:
        return [end.beyond(end.restored) for end in self.ends]

    @property
    def beyond_exact(self) -> list[float]:
        """How far beyond the control a training ends that has lost nothing but precision of its weights."""
        if self.exact is not None:
            return self.beyond
        return [end.beyond(end.exact) for end in self.ends if end.exact is not None]

    @property
    def beyond_by_key(self) -> list[float]:
        return [end.beyond(end.by_key) for end in self.ends if end.by_key is not None]


class Sweep:
    """The trainings of one optimizer."""

    def __init__(self, entry: Entry, data: Path, plan: Plan, factor: float) -> None:
        self._entry, self._data, self._plan, self._factor = entry, data, plan, factor

    def new(self, seed: int) -> Training:
        assert self._entry.new is not None
        return Training(self._data, self._entry.new, self._factor, self._plan.steps, seed)

    def go_on(self, training: Training, begin: int) -> float:
        for _ in range(begin, self._plan.steps):
            training.step()
        return training.loss()

    def control(self, seed: int) -> float:
        training = self.new(seed)
        noise = torch.Generator().manual_seed(seed)
        for _ in range(self._plan.restored):
            training.step()
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.mul_(1 + DISTURBANCE * torch.randn(parameter.shape, generator=noise))
        return self.go_on(training, self._plan.restored)

    def saved(self, seed: int, runs: Mapping[Path, Mapping[str, str]]) -> tuple[float, float]:
        """Train to the end and save on the way, with other roles into each folder, which disturbs nothing.

        Returns the loss, and how many times smaller than the state the last checkpoint of the first folder is.
        """
        training = self.new(seed)
        with ExitStack() as opened:
            into = [opened.enter_context(self._checkpointer(training, run, runs[run])) for run in runs]
            for step in range(1, self._plan.restored + 1):
                training.step()
                if step in self._plan.saves:
                    record, *_ = [checkpointer.save(step).result() for checkpointer in into]
        return self.go_on(training, self._plan.restored), record.total.raw / record.total.stored

    def restored(self, seed: int, folder: Path, roles: Mapping[str, str]) -> float:
        training = self.new(seed)
        with self._checkpointer(training, folder, roles) as checkpointer:
            return self.go_on(training, checkpointer.restore() or 0)

    def _checkpointer(self, training: Training, folder: Path, roles: Mapping[str, str]) -> dq.Checkpointer:
        extras = {f"schedule{i}": schedule for i, schedule in enumerate(training.schedules)}
        optimizers = training.optimizers if len(training.optimizers) > 1 else training.optimizers[0]
        return dq.Checkpointer(
            folder,
            training.model,
            optimizers,
            extras={**extras, "data": training.generator},
            evaluate=training.search_loss(),
            every=self._plan.every,
            roles=roles,
        )

    def ends(self, seed: int, roles: Mapping[str, str]) -> tuple[Ends, float]:
        """Return how the trainings of a seed end, and how many times smaller a checkpoint is.

        roles: as ``other_roles`` returns them.
        """
        with tempfile.TemporaryDirectory() as folder:
            runs: dict[Path, Mapping[str, str]] = {Path(folder, "default"): {}}
            runs |= {Path(folder, "other"): roles} if roles else {}
            undisturbed, times = self.saved(seed, runs)
            restored, *others = [self.restored(seed, run, runs[run]) for run in runs]
            other = others[0] if others else None
        by_key, exact = (None, other) if roles == EXACT else (other, None)
        return Ends(undisturbed, self.control(seed), restored, by_key, exact), times


def other_roles(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Return the roles that moments do not have by default: exact, or those that their keys alone would give them.

    None, if no key is one of a moment.
    """
    if all(why_exact(optimizer) is None for optimizer in optimizers):
        return EXACT
    keys = {
        key
        for optimizer in optimizers
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    first = {f"optimizer.*.{key}": "first_moment" for key in FIRST_MOMENTS if key in keys}
    return first | {f"optimizer.*.{key}": "second_moment" for key in SECOND_MOMENTS if key in keys}


def of_seeds(entry: Entry, data: Path, plan: Plan, seeds: int, cache: Path) -> Result:
    """Return what one optimizer shows with so many seeds."""
    found = [cached(entry, data, plan, seed, cache) for seed in range(seeds)]
    skipped = next((result.skipped for result in found if result.skipped), "")
    times, ends = mean(result.times for result in found), [end for result in found for end in result.ends]
    return replace(found[0], skipped=skipped, times=times, ends=ends)


def cached(entry: Entry, data: Path, plan: Plan, seed: int, cache: Path) -> Result:
    """Return what one optimizer shows with one seed; from the cache if it has been measured there."""
    file = cache / f"optimizers-{key_of(entry.package, entry.name, asdict(plan), seed)}.json"
    if file.exists():
        found = json.loads(file.read_text())
        return Result(**{**found, "ends": [Ends(**end) for end in found["ends"]]})
    result = measure(entry, data, plan, seed)
    file.write_text(json.dumps(asdict(result)))
    return result


def measure(entry: Entry, data: Path, plan: Plan, seed: int) -> Result:
    """Return what one optimizer shows. One that cannot be trained or saved is skipped, with the reason."""
    if entry.new is None:
        return Result(entry.name, entry.package, entry.skipped)
    try:
        factor, exact, roles = _tried(entry, data, plan)
    except Exception as error:
        return Result(entry.name, entry.package, f"{type(error).__name__}: {str(error).splitlines()[0][:90]}")
    if factor is None:
        return Result(entry.name, entry.package, f"does not train here in {plan.trial} steps")
    try:
        ends, times = Sweep(entry, data, plan, factor).ends(seed, roles)
    except dq.DynaquantError as error:
        return Result(entry.name, entry.package, f"cannot be saved: {str(error).splitlines()[0][:140]}")
    if not (isfinite(ends.undisturbed) and isfinite(ends.control)):
        return Result(entry.name, entry.package, "diverges here without any checkpoint")
    return Result(entry.name, entry.package, "", factor, exact, times, [ends])


def _tried(entry: Entry, data: Path, plan: Plan) -> tuple[float | None, str | None, dict[str, str]]:
    """Return the first factor of the learning rate that trains, why moments are exact, and other roles."""
    for factor in FACTORS:
        sweep = Sweep(entry, data, plan, factor)
        training = sweep.new(0)
        before = training.loss()
        for _ in range(plan.trial):
            training.step()
        after = training.loss()
        if after < TRAINS * before or plan is QUICK:
            reasons = (why_exact(optimizer) for optimizer in training.optimizers)
            return factor, next((each for each in reasons if each), None), other_roles(training.optimizers)
    return None, None, {}


def _spread(values: Sequence[float]) -> str:
    """Return mean and standard error in percent."""
    if not values:
        return ""
    if not all(map(isfinite, values)):
        return "diverged"
    error = f" ± {100 * stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{100 * mean(values):+.2f}{error}"


def _label(result: Result) -> str:
    return result.name + (f" (lr × {result.factor:g})" if result.factor != 1 else "")


def table(results: Sequence[Result], package: str) -> Table:
    """Return the table of what was measured in one package."""
    rows = [
        [
            _label(result),
            f"{mean(end.undisturbed for end in result.ends):.3f}",
            _spread([end.undisturbed / end.control - 1 for end in result.ends]),
            _spread(result.beyond),
            _spread(result.beyond_exact),
            result.moments,
            f"{result.times:.1f}×",
            _spread(result.beyond_by_key),
        ]
        for result in results
        if result.package == package and not result.skipped
    ]
    columns = [
        "optimizer",
        "loss, undisturbed",
        "undisturbed − control, %",
        "restored − control, %",
        "with exact moments",
        "moments",
        "smaller",
        "quantized by key − control, %",
    ]
    return Table(f"{package}: {len(rows)} optimizers", columns, rows)


def left_out(results: Sequence[Result]) -> Table:
    rows = [
        [f"{result.package} {result.name}", result.skipped.replace("|", "/")] for result in results if result.skipped
    ]
    return Table(f"Left out: {len(rows)}", ["optimizer", "why"], rows)


def verdict_on_moments(results: Sequence[Result]) -> str:
    """Return whether quantized moments cost too much beyond what the weights cost."""
    both = [result for result in results if result.moments == "quantized" and result.ends]
    if not both:
        return "no optimizer has quantized moments"
    costs = {result.name: mean(result.beyond) - mean(result.beyond_exact) for result in both}
    worst = max(costs, key=lambda name: costs[name])
    return (
        f"{'passed' if costs[worst] <= WANTED else 'MISSED'}: quantized moments cost {costs[worst]:+.2%} more than "
        f"exact ones in the worst of {len(both)} optimizers, {worst}"
    )


def verdict(results: Sequence[Result]) -> str:
    """Return whether no training diverged or ended too far beyond its control."""
    measured = [result for result in results if not result.skipped]
    worst = max(measured, key=lambda result: mean(result.beyond))
    bad = [result.name for result in measured if not mean(result.beyond) <= WANTED]
    what = f"{len(measured)} optimizers; the worst, {worst.name}, ends {mean(worst.beyond):+.2%} beyond its control"
    return f"{'MISSED' if bad else 'passed'}: {what}, at most {WANTED:+.1%} wanted" + (
        f"; beyond that: {', '.join(bad)}" if bad else ""
    )


def plot(results: Sequence[Result], file: Path) -> None:
    """Draw how far beyond their controls restored trainings end, one row for each optimizer."""
    measured = sorted((r for r in results if not r.skipped), key=lambda r: (r.package, r.name.lower()), reverse=True)
    figure = Figure(figsize=(8, 1 + 0.17 * len(measured)), layout="constrained")
    axes = figure.subplots()
    for row, result in enumerate(measured):
        quantized = [_clipped(value) for value in result.beyond_by_key]
        axes.plot(quantized, [row] * len(quantized), "x", color="C3", markersize=4)
        color = "C2" if result.moments == "quantized" else "C0"
        restored = [_clipped(value) for value in result.beyond]
        axes.plot(restored, [row] * len(restored), "o", color=color, markersize=3)
    for label, style in {
        "restored; moments quantized": "C2o",
        "restored; moments exact, or none": "C0o",
        "restored; moments quantized by their keys, as before": "C3x",
    }.items():
        axes.plot([], [], style, markersize=4, label=label)
    axes.axvline(100 * WANTED, color="black", linewidth=0.8, linestyle=":")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(measured)), [result.name for result in measured], fontsize=6)
    axes.set(xscale="symlog", xlabel="restored − control, % of the loss", ylim=(-1, len(measured)))
    axes.xaxis.set_major_locator(FixedLocator([-1, -0.5, 0, 0.5, 1, 2, 5, 10, 100, 1000]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=7, ncols=2)
    figure.savefig(file, dpi=130)


def _clipped(value: float) -> float:
    """Return a difference in percent; what has diverged is drawn at 1000."""
    return min(100 * value, 1000.0) if isfinite(value) else 1000.0


def _seeds_in_words(seeds: int) -> str:
    return "One seed." if seeds == 1 else f"Mean ± standard error of {seeds} seeds."


def page(
    results: Sequence[Result], plan: Plan, seeds: int, only: Sequence[str], described: dict[str, str | int]
) -> str:
    by_key = [result for result in results if result.beyond_by_key]
    harmed = [result for result in by_key if not mean(result.beyond_by_key) <= WANTED]
    parts = [
        "# One restore with every optimizer",
        "```\nmake benchmark-setup\n.venv/bin/python benchmarks/optimizers.py --data DIR\n```",
        *([f"**Not all optimizers are measured yet**, only {len(results)} of them."] if only else []),
        f"`DIR` holds `shakespeare.txt`. {sentence(described)}",
        f"A network of 26,000 weights predicts the next character from sixteen. It trains for {plan.steps} steps, with "
        "the default hyperparameters of each optimizer; the learning rate falls to zero over the second half. Where "
        "the default learning rate does not train the network, it is ten or a hundred times as large (in the table). "
        f"From step {plan.first} on there is a checkpoint every {plan.every} steps, with the default settings and a "
        f"metric. From that of step {plan.restored}, all objects are built anew and restored, and the training goes on "
        "to its end. The *control* has no checkpoint; its weights are changed once by 0.001 %, at the same step. "
        f"Differences are those of the loss on held-out text; negative is better. {_seeds_in_words(seeds)}",
        f"- {verdict(results)}\n- {verdict_on_moments(results)}",
        "![how far beyond their controls restored trainings end](optimizers.png)",
        *(table(results, package).in_markdown() for package in ("torch.optim", "pytorch_optimizer")),
        left_out(results).in_markdown(),
        "## How to read it",
        "- *moments* says what the rule decides ([why](../decisions.md#whose-moments-are-quantized)): *quantized* for "
        "classes that are known or show in a few steps that they use their moments as Adam does, *exact* for all "
        "others. *None*: no tensor has a key of `torch.optim`'s moments, so nothing would be quantized anyway.\n"
        "- *with exact moments*: what the quantized weights alone cost. The difference to the column before is what "
        "quantized moments cost. The training is short, so what the weights have lost has little time to heal.\n"
        "- *smaller*: the whole state against the checkpoint at the restore. The network is so small that what a file "
        "holds besides tensors counts.\n"
        "- *quantized by key*: the same training with roles that quantize the moments by their keys, as dynaquant did "
        f"before it asked for the class. Of {len(by_key)} optimizers, {len(harmed)} end more than {WANTED:.1%} beyond "
        f"their control then: {', '.join(result.name for result in harmed) or 'none'}.",
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    made = parser(__doc__, data="shakespeare.txt")
    made.add_argument("--only", nargs="+", default=[], help="names of optimizers, of which the page tells alone")
    made.add_argument("--seeds", type=int, default=SEEDS)
    arguments = parse(made)
    quietly()
    plan, seeds = (QUICK, 1) if arguments.quick else (FULL, arguments.seeds)
    entries = named([*of_torch(), *of_pytorch_optimizer()], arguments.only)
    if arguments.quick:
        entries = entries[::10]
    results = [
        of_seeds(entry, arguments.data, plan, seeds, arguments.cache)
        for entry in track(entries, description="optimizers")
    ]
    for package in ("torch.optim", "pytorch_optimizer"):
        show(table(results, package), width=150)
    show(left_out(results), verdict(results), verdict_on_moments(results), width=150)
    described = machine("torch", "pytorch-optimizer")
    numbers: dict[str, Any] = {
        "machine": described,
        "plan": asdict(plan),
        "results": [asdict(each) for each in results],
    }
    publish(
        arguments.out,
        "optimizers",
        numbers,
        lambda file: plot(results, file),
        page(results, plan, seeds, arguments.only, described),
    )


if __name__ == "__main__":
    main()
