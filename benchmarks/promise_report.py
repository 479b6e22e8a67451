"""Tables, picture and page of ``promise.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from crashes import spread, times
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, StrMethodFormatter
from promise_runs import CENTRE, DISTURBANCE, VARIANTS, Sweep, equivalents
from promise_trainings import TRAININGS, Plan
from results import Table, plain_ticks, sentence
from workloads import Uninterrupted

from dynaquant.search.evaluation import degradation

LABELLED = ("20 restores",)
"""Small dots of the picture that have a label; labels of all would cover each other."""
WITHIN = {CENTRE: 0.005, "high": 0.002}
"""How much worse a training may end, relative, unless chance explains it."""
ERRORS = 2
"""Standard errors of a difference that chance explains."""


@dataclass(frozen=True)
class Row:
    """The runs of a training and a variant.

    ends: how much worse it ends than the same seed undisturbed, by seed. state, weights: how many times smaller
    checkpoints are; weights is None if they are not stored separately. evaluations: the median, with those of the
    weights in training. worst: the largest degradation of a checkpoint. seconds: of one core, for a run, on average.
    """

    training: str
    variant: str
    ends: dict[int, float]
    state: float
    weights: float | None
    evaluations: float
    worst: float
    seconds: float

    @property
    def mean(self) -> float:
        return fmean(self.ends.values())

    @property
    def error(self) -> float:
        """The standard error of the mean; NaN with one seed."""
        return standard_error([*self.ends.values()])

    @property
    def end(self) -> str:
        """Mean and standard error as text."""
        return with_error([*self.ends.values()])

    def above(self, others: Mapping[int, float]) -> list[float]:
        """Return how much worse it ends than others of the same seeds, for each seed that both have."""
        return [end - others[seed] for seed, end in self.ends.items() if seed in others]


def by_chance(differences: Sequence[float]) -> bool:
    """Whether a mean difference is not above zero, but for what chance explains."""
    return len(differences) > 1 and fmean(differences) <= ERRORS * standard_error(differences)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; NaN for one value."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else float("nan")


def with_error(values: Sequence[float]) -> str:
    """Return mean and standard error as text."""
    return f"{fmean(values):+.2%}" + (f" ± {standard_error(values):.2%}" if len(values) > 1 else "")


@dataclass(frozen=True)
class Results:
    """All rows, and the runs of each training without checkpoints.

    controls: how much worse each seed of a training ends than undisturbed if its weights change a little once.
    """

    rows: list[Row]
    alone: dict[str, list[Uninterrupted]]
    controls: dict[str, dict[int, float]]

    def row(self, training: str, variant: str) -> Row | None:
        """Return the row of a training and variant, if it was measured."""
        return next((row for row in self.rows if (row.training, row.variant) == (training, variant)), None)

    def kept(self, row: Row) -> bool:
        """Whether a training ends as undisturbed: within WITHIN, or not above the control but for chance."""
        within = WITHIN.get(row.variant, WITHIN[CENTRE])
        return row.mean <= within or by_chance(row.above(self.controls.get(row.training, {})))


def results(sweep: Sweep) -> Results:
    """Return the results of a sweep, as far as it has run."""
    rows, undisturbed, controls = [], {}, {}
    for training in sweep.trainings:
        alone = sweep.alone(training)
        if alone:
            undisturbed[training] = list(alone.values())
        found = {seed: run.final for seed, run in sweep.controls_of(training).items() if seed in alone}
        if found:
            controls[training] = {seed: degradation(alone[seed].final, final, False) for seed, final in found.items()}
        for variant in sweep.variants:
            runs = [run for run in sweep.runs(training, variant) if run.seed in alone]
            if not runs:
                continue
            weights = [run.weights for run in runs if run.weights is not None]
            rows.append(
                Row(
                    training,
                    variant,
                    {run.seed: run.worse_than(alone[run.seed]) for run in runs},
                    fmean(run.state for run in runs),
                    fmean(weights) if weights else None,
                    equivalents(runs),
                    max(run.worst for run in runs),
                    fmean(run.seconds for run in runs),
                )
            )
    return Results(rows, undisturbed, controls)


def table(found: Results) -> Table:
    columns = ["", "at the end", "kept", "seeds", "whole state", "weights", "evaluations", "worst", "seconds"]
    rows = []
    for training, alone in found.alone.items():
        rows += [
            [
                f"{training}, {row.variant}",
                row.end,
                "yes" if found.kept(row) else "no",
                str(len(row.ends)),
                times(row.state),
                times(row.weights),
                f"{row.evaluations:g}",
                f"{row.worst:.2%}",
                f"{row.seconds:.0f}",
            ]
            for row in found.rows
            if row.training == training
        ]
        if training in found.controls:
            ends = [*found.controls[training].values()]
            rows.append([f"{training}, control", with_error(ends), "", str(len(ends)), *[""] * 5])
        seconds = fmean(one.training_seconds for one in alone)
        apart = f"{spread(alone):.2%}"
        rows.append([f"{training}, undisturbed seeds apart", apart, "", str(len(alone)), *[""] * 4, f"{seconds:.0f}"])
    return Table("End of training against the same seed undisturbed, and size", columns, rows)


def bars(found: Results) -> Table:
    """Return what was to be reached, and what each training reaches."""

    def told(reached: bool, value: str) -> str:
        return f"{value}, {'yes' if reached else '**no**'}"

    def kept(training: str, variant: str) -> str:
        row = found.row(training, variant)
        return told(found.kept(row), row.end) if row else "–"

    def against_published(training: str) -> str:
        row, peer = found.row(training, CENTRE), found.row(training, "published")
        if row is None or peer is None:
            return "–"
        differences = row.above(peer.ends)
        if len(differences) < 2:  # one seed cannot tell chance
            return f"{with_error(differences)}, one seed"
        return told(fmean(differences) <= 0 or by_chance(differences), with_error(differences))

    def state(training: str) -> str:
        row = found.row(training, CENTRE)
        return told(row.state >= 15, times(row.state)) if row else "–"

    def weights(training: str) -> str:
        row, peer = found.row(training, CENTRE), found.row(training, "published")
        if row is None or peer is None or row.weights is None or peer.weights is None:
            return "–"
        return told(row.weights >= 1.3 * peer.weights, times(row.weights / peer.weights))

    def excp(training: str) -> str:
        peer = found.row(training, "ExCP")
        return f"{times(peer.state)}, {peer.end}" if peer else "–"

    def evaluations(training: str, variant: str, wanted: float) -> str:
        row = found.row(training, variant)
        return told(row.evaluations <= wanted, f"{row.evaluations:g}") if row else "–"

    lines: dict[str, Callable[[str], str]] = {
        "default kept": lambda name: kept(name, CENTRE),
        "`high` kept, within 0.2 %": lambda name: kept(name, "high"),
        "default ends no worse than published": against_published,
        "whole state, at least 15×": state,
        "weights, at least 1.3× smaller than published": weights,
        "ExCP: whole state, end": excp,
        "evaluations, at most 3": lambda name: evaluations(name, CENTRE, 3),
        "evaluations without restores, at most 2.5": lambda name: evaluations(name, "0 restores", 2.5),
    }
    rows = [[name, *(line(name) for line in lines.values())] for name in found.alone]
    return Table("What was to be reached", ["", *lines], rows)


def plot(found: Results, path: Path) -> None:
    columns = min(len(found.alone), 4)
    lines = -(-len(found.alone) // columns)
    figure = Figure(figsize=(3.4 * columns, 4 * lines + 1), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    for unused in panels[len(found.alone) :]:
        unused.set_axis_off()
    methods = list(dict.fromkeys(variant.method for variant in VARIANTS.values()))
    states = [row.state for row in found.rows]
    legend: dict[str, Artist] = {}
    for axes, (training, alone) in zip(panels, found.alone.items(), strict=False):
        apart = 100 * spread(alone)
        axes.axhspan(-apart, apart, color="gray", alpha=0.15, label="undisturbed seeds apart")
        axes.axhline(0, color="black", linewidth=0.8)
        for row in (row for row in found.rows if row.training == training):
            method = VARIANTS[row.variant].method
            central = not VARIANTS[row.variant].plan
            axes.errorbar(
                row.state,
                100 * row.mean,
                yerr=100 * row.error if len(row.ends) > 1 else None,
                fmt="o" if central else ".",
                color=f"C{methods.index(method)}",
                label=method if central else None,
                capsize=2,
            )
            if row.variant in LABELLED:
                axes.annotate(
                    row.variant,
                    (row.state, 100 * row.mean),
                    (-4, 3),
                    textcoords="offset points",
                    fontsize=6,
                    ha="right",
                )
        axes.set(title=training, xscale="log", xlabel="whole state, times smaller")
        axes.set_xlim(min(states) / 1.5, 1.5 * max(states))
        axes.set_yscale("symlog", linthresh=1)
        axes.yaxis.set_major_locator(FixedLocator([s * x for x in (0.5, 1, 2, 5, 10, 20, 50) for s in (-1, 1)] + [0]))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        plain_ticks(axes.xaxis)
        axes.tick_params(axis="x", labelrotation=45)
        axes.grid(alpha=0.3)
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    for axes in panels[::columns]:
        axes.set_ylabel("worse at the end, %")
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=9, fontsize=8)
    figure.savefig(path, dpi=130)


def in_words(found: Results) -> str:
    """Return the results in words."""
    centre = [row for row in found.rows if row.variant == CENTRE]
    ends = "; ".join(f"{row.training} {row.end}" for row in centre)
    lost = [row.training for row in centre if not found.kept(row)]
    states = [row.state for row in centre]
    return (
        f"The default ends, against the same seed undisturbed: {ends} (negative is better). Not kept: "
        f"{', '.join(lost) or 'none'}. Its whole states are {times(min(states))} to {times(max(states))} smaller."
    )


def page(found: Results, described: dict[str, str | int], hours: float, missing: int) -> str:
    plan = Plan()
    incomplete = (
        f" {missing} runs of the whole sweep are missing: rows have the seeds that they name." if missing else ""
    )
    kinds = "\n".join(
        f"| {name} | {' | '.join(kind.described)} | {kind.plan.every} of {kind.plan.steps} | {kind.plan.restores} |"
        for name, kind in TRAININGS.items()
    )
    return f"""\
# Promise

```
make benchmark-setup
.venv/bin/python benchmarks/promise.py --data DIR
```

`DIR` holds `shakespeare.txt` and `cifar10.zip`. {sentence(described)} The runs on this page took {hours:.1f}
hours of one core.{incomplete}

A training that is restored should end where it would have ended. {len(TRAININGS)} trainings of different kinds:

| training | model | optimizer | schedule | data | saves every | restores |
|---|---|---|---|---|---|---|
{kinds}

Each restore comes {plan.lost} steps after a save: all objects are built anew, restored, and the lost steps repeated.
Restores are spread evenly over the whole training. The sentences that minilm reads are those of Python's documentation.
The other rows differ from the default in one thing. Every method searches at its limit of degradation on eight
batches; the loss at the end is on other held-out data.

*At the end* is how much worse the loss is than that of the same seed undisturbed, as mean ± standard error over seeds;
lossless checkpoints must give exactly 0. *Control* is a training without checkpoints whose weights were changed once,
after a sixteenth of the steps, by about {DISTURBANCE * 100:.3f} % of each. It shows what chance alone does to the end.
*Kept* means: the mean is at most 0.5 % (`high`: 0.2 %), or not above the control of the same seeds by more than
{ERRORS} standard errors of the difference. *Evaluations* is the median over saves and counts those of the weights in
training. *Worst* is the largest degradation of a checkpoint. Seconds are those of one core.

![end of training against size](promise.png)

{bars(found).in_markdown()}

{table(found).in_markdown()}

## In words

{in_words(found)}
"""
