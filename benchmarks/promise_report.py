"""Tables, picture and page of ``promise.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from crashes import spread, times
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, StrMethodFormatter
from promise_runs import CENTRE, DISTURBANCE, DISTURBED_AT, VARIANTS, Plan, Sweep, equivalents
from promise_trainings import HELD_OUT
from results import Table, plain_ticks, sentence
from workloads import Uninterrupted

from dynaquant.search.evaluation import degradation

LABELLED = ("20 restores", "interval 160")
"""Small dots of the picture that have a label; labels of all would cover each other."""
FEW = 5
"""Seeds whose range is a limit. A range grows with the number of seeds."""
WITHIN = 0.005
"""How much worse a training may end, relative; or one standard error."""


@dataclass(frozen=True)
class Row:
    """The runs of a training and a variant.

    ends: how much worse each seed ends than the same seed undisturbed, relative. state, weights: how many times smaller
    checkpoints are; weights is None if they are not stored separately. evaluations: the median, with those of the
    weights in training. worst: the largest degradation of a checkpoint. seconds: of one core, for a run, on average.
    """

    training: str
    variant: str
    ends: list[float]
    state: float
    weights: float | None
    evaluations: float
    worst: float
    seconds: float

    @property
    def mean(self) -> float:
        return fmean(self.ends)

    @property
    def error(self) -> float:
        """The standard error of the mean; NaN with one seed."""
        return standard_error(self.ends)

    @property
    def end(self) -> str:
        """Mean and standard error as text."""
        return with_error(self.ends)


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
    controls: dict[str, list[float]]

    def row(self, training: str, variant: str) -> Row | None:
        """Return the row of a training and variant, if it was measured."""
        return next((row for row in self.rows if (row.training, row.variant) == (training, variant)), None)


def results(sweep: Sweep) -> Results:
    """Return the results of a sweep, as far as it has run."""
    rows, undisturbed, controls = [], {}, {}
    for training in sweep.trainings:
        alone = sweep.alone(training)
        if alone:
            undisturbed[training] = list(alone.values())
        found = {seed: run.final for seed, run in sweep.controls_of(training).items() if seed in alone}
        if found:
            controls[training] = [degradation(alone[seed].final, final, False) for seed, final in found.items()]
        for variant in sweep.variants:
            runs = [run for run in sweep.runs(training, variant) if run.seed in alone]
            if not runs:
                continue
            weights = [run.weights for run in runs if run.weights is not None]
            rows.append(
                Row(
                    training,
                    variant,
                    [run.worse_than(alone[run.seed]) for run in runs],
                    fmean(run.state for run in runs),
                    fmean(weights) if weights else None,
                    equivalents(runs),
                    max(run.worst for run in runs),
                    fmean(run.seconds for run in runs),
                )
            )
    return Results(rows, undisturbed, controls)


def table(found: Results) -> Table:
    columns = ["", "at the end", "seeds", "whole state", "weights", "evaluations", "worst checkpoint", "seconds"]
    rows = []
    for training, alone in found.alone.items():
        rows += [
            [
                f"{training}, {row.variant}",
                row.end,
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
            ends = found.controls[training]
            rows.append([f"{training}, control", with_error(ends), str(len(ends)), *[""] * 5])
        seconds = fmean(one.training_seconds for one in alone)
        apart = f"{spread(alone):.2%}"
        rows.append([f"{training}, undisturbed seeds apart", apart, str(len(alone)), "", "", "", "", f"{seconds:.0f}"])
    return Table("End of training against the same seed undisturbed, and size", columns, rows)


def bars(found: Results) -> Table:
    """Return what was to be reached, and what each training reaches."""

    def told(reached: bool, value: str) -> str:
        return f"{value}, {'yes' if reached else '**no**'}"

    def end(training: str) -> str:
        row = found.row(training, CENTRE)
        return told(row.mean <= max(WITHIN, row.error), row.end) if row else "–"

    def state(training: str, variant: str, wanted: float) -> str:
        row = found.row(training, variant)
        return told(row.state >= wanted, times(row.state)) if row else "–"

    def excp(training: str) -> str:
        row, peer = found.row(training, CENTRE), found.row(training, "ExCP")
        return told(row.state >= 2 * peer.state, times(row.state / peer.state)) if row and peer else "–"

    def twenty(training: str) -> str:
        row = found.row(training, "20 restores")
        return told(row.mean <= spread(found.alone[training][:FEW]), row.end) if row else "–"

    def evaluations(training: str, variant: str, wanted: float) -> str:
        row = found.row(training, variant)
        return told(row.evaluations <= wanted, f"{row.evaluations:g}") if row else "–"

    lines: dict[str, Callable[[str], str]] = {
        "end, at most 0.5 % or one standard error worse": end,
        "whole state, at least 60×": lambda name: state(name, CENTRE, 60),
        "whole state at interval 160, at least 120×": lambda name: state(name, "interval 160", 120),
        "ExCP larger, at least 2×": excp,
        f"end after 20 restores, within what {FEW} seeds are apart": twenty,
        "evaluations, at most 3": lambda name: evaluations(name, CENTRE, 3),
        "evaluations without restores, at most 2": lambda name: evaluations(name, "0 restores", 2),
    }
    rows = [[what, *(line(training) for training in found.alone)] for what, line in lines.items()]
    return Table("What was to be reached", ["", *found.alone], rows)


def plot(found: Results, path: Path) -> None:
    figure = Figure(figsize=(15, 5), layout="constrained")
    panels = figure.subplots(1, len(found.alone), squeeze=False, sharey=True)[0]
    methods = list(dict.fromkeys(variant.method for variant in VARIANTS.values()))
    for axes, (training, alone) in zip(panels, found.alone.items(), strict=True):
        apart = 100 * spread(alone)
        axes.axhspan(-apart, apart, color="gray", alpha=0.15, label="undisturbed seeds apart")
        axes.axhline(0, color="black", linewidth=0.8)
        for row in (row for row in found.rows if row.training == training):
            method = VARIANTS[row.variant].method
            central = VARIANTS[row.variant].plan == Plan()
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
        title = f"{training} (held out)" if training in HELD_OUT else training
        axes.set(title=title, xscale="log", xlabel="whole state, times smaller")
        axes.set_yscale("symlog", linthresh=1)
        axes.yaxis.set_major_locator(FixedLocator([s * x for x in (0.5, 1, 2, 5, 10, 20, 50) for s in (-1, 1)] + [0]))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        plain_ticks(axes.xaxis)
        axes.tick_params(axis="x", labelrotation=45)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("worse at the end, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=9, fontsize=8)
    figure.savefig(path, dpi=130)


def in_words(found: Results) -> str:
    """Return the results in words."""
    centre = [row for row in found.rows if row.variant == CENTRE]
    ends = "; ".join(f"{row.training} {row.end}" for row in centre)
    beyond = [row.training for row in centre if row.mean > max(WITHIN, row.error)]
    states = [row.state for row in centre]
    return (
        f"With ten restores the default ends, against the same seed undisturbed: {ends} (negative is better). Worse by "
        f"more than 0.5 % and more than one standard error: {', '.join(beyond) or 'none'}. Its whole states are "
        f"{times(min(states))} to {times(max(states))} smaller."
    )


def page(found: Results, described: dict[str, str | int], hours: float, missing: int) -> str:
    plan = Plan()
    incomplete = (
        f" {missing} runs of the whole sweep are missing: rows have the seeds that they name." if missing else ""
    )
    return f"""\
# Promise

```
make benchmark-setup
.venv/bin/python benchmarks/promise.py --data DIR
```

`DIR` holds `shakespeare.txt` and `cifar10.zip`. {sentence(described)} The runs on this page took {hours:.1f}
hours of one core.{incomplete}

A training that is restored many times should end where it would have ended. Five small trainings of {plan.steps} steps:

| training | model | optimizer | schedule | data |
|---|---|---|---|---|
| gpt | GPT, 0.6 M weights | AdamW | one cycle | Shakespeare |
| resnet | ResNet with BatchNorm, 0.4 M | SGD with momentum | one cycle | CIFAR-10 |
| gru | two GRU layers, 0.4 M | Adam | step decay | Shakespeare |
| vit | vision transformer, 0.3 M | NAdam | linear warm-up, linear decay | CIFAR-10 |
| mixer | MLP-Mixer, 0.2 M | Muon and AdamW | warm-up, constant, decay | CIFAR-10 |

dynaquant is tuned on the first three, not on vit and mixer. At the centre, a training saves every {plan.every} steps
and is restored {plan.restores} times, each {plan.lost} steps after a save: all objects are built anew, restored, and
the lost steps repeated. Restores are spread evenly over the whole training. The other rows differ from the centre in
one thing. Interval 160 has only five checkpoints before the end, so it has five restores. "exact moments" quantizes
only weights.
Every method searches at its limit of degradation on eight batches; the loss at the end is on other held-out data.
*At the end* is how much worse it is than that of the same seed undisturbed, as mean ± standard error over seeds;
lossless checkpoints must give exactly 0. *Control* is a training without checkpoints whose weights were changed once,
after {DISTURBED_AT * plan.steps:.0f} steps, by about {DISTURBANCE * 100:.3f} % of each. It shows what chance alone does
to the end. Where it differs from zero, the undisturbed seeds were lucky or unlucky. *Evaluations* is the median over
saves and counts those of the weights in training.

![end of training against size](promise.png)

{table(found).in_markdown()}

{bars(found).in_markdown()}

## In words

{in_words(found)}
"""
