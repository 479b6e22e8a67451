"""Measure what 0, 5, 10 and 20 restores cost at the end of a training.

python benchmarks/restores.py --data DIR [--workload resnet] [--max-degradation 0.01]
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from checkpointers import DEFAULT, METHODS, PUBLISHED
from crashes import Training, of_size, parser, spread, times, trainings
from matplotlib.figure import Figure
from options import parse
from results import Table, machine, plain_ticks, publish, sentence, show
from workloads import Uninterrupted

COUNTS = (0, 5, 10, 20)
PAPER = "1.1 % of accuracy after 20 restores of ResNet-152, 0.5 % after 10, at ε = 0.05"


def table(found: list[Training], alone: list[Uninterrupted]) -> Table:
    columns = ["method", "restores", "at the end", "weights", "whole state", "worst checkpoint", "evaluations"]
    rows = [
        [
            one.method,
            str(one.settings.restores),
            f"{one.worse_than(alone):+.2%}",
            times(one.weights),
            times(one.state),
            f"{one.worst:.2%}",
            f"{one.evaluations:.1f}",
        ]
        for one in found
    ]
    rows.append(["seeds apart", "", f"{spread(alone):.2%}", "", "", "", ""])
    settings = found[0].settings
    return Table(f"{settings.workload}, ε = {settings.max_degradation:g}", columns, rows)


def plot(found: list[Training], alone: list[Uninterrupted], path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    apart = 100 * spread(alone)
    left.axhspan(-apart, apart, color="gray", alpha=0.15, label="seeds apart")
    for method in dict.fromkeys(one.method for one in found):
        ours = [one for one in found if one.method == method]
        counts = [one.settings.restores for one in ours]
        left.plot(counts, [100 * one.worse_than(alone) for one in ours], "o-", label=method)
        right.plot(counts, [one.state for one in ours], "o-", label=method)
    left.axhline(0, color="black", linewidth=0.8)
    left.set(xlabel="restores", ylabel="worse at the end, %")
    right.set(xlabel="restores", ylabel="whole state, times smaller", yscale="log")
    plain_ticks(right.yaxis)
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def in_words(found: list[Training], alone: list[Uninterrupted]) -> str:
    """Return the results in words."""
    most = max(one.settings.restores for one in found)
    by = {(one.method, one.settings.restores): one for one in found}
    ends = "; ".join(
        f"{method} {by[method, most].worse_than(alone):+.2%}" for method in METHODS if (method, most) in by
    )
    ours, none = by[DEFAULT, most], by[DEFAULT, 0]
    outside = [f"{one.method} with {one.settings.restores}" for one in found if one.worse_than(alone) > spread(alone)]
    return (
        f"The paper: {PAPER}. Here, after {most} restores: {ends} (negative is better). Seeds are {spread(alone):.2%} "
        f"apart; worse by more than that: {', '.join(outside) or 'none'}. With so many restores, a training of "
        f"{ours.settings.steps} steps has hardly more than the steps between two checkpoints before it is restored "
        f"again, and dynaquant's default forgets the momentum at each restore. Its whole states are "
        f"{times(none.state)} smaller without restores, {times(ours.state)} with {most}. Saving does not change a "
        f"training, so without restores it ends bit for bit like the training without checkpoints."
    )


def page(found: list[Training], alone: list[Uninterrupted], described: dict[str, str | int]) -> str:
    settings = found[0].settings
    return f"""\
# Restores

```
make benchmark-setup
.venv/bin/python benchmarks/restores.py --data DIR --workload {settings.workload} \\
  --max-degradation {settings.max_degradation:g}
```

`DIR` holds `shakespeare.txt` and `cifar10.zip`. {sentence(described)} Trainings of {settings.steps} steps with a
checkpoint every {settings.every}, as in [failure recovery](failure_recovery.md), where the words are explained.

![degradation and ratio by the number of restores](restores.png)

{table(found, alone).in_markdown()}

## What agrees with the paper, and what does not

{in_words(found, alone)}
"""


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--workload", choices=["gpt", "resnet"], default="resnet")
    made.add_argument("--max-degradation", type=float, default=0.01)
    arguments = parse(made)
    counts = (0, 1) if arguments.quick else COUNTS
    jobs = [
        (method, of_size(arguments.workload, arguments.max_degradation, count, arguments.quick))
        for method in (PUBLISHED, DEFAULT)
        for count in counts
    ]
    found = trainings(jobs, arguments.data, arguments.cache, arguments.workers)
    alone = jobs[0][1].alone(arguments.data, arguments.cache)
    show(table(found, alone), width=100)
    described = machine("torch")
    numbers = {"machine": described, "trainings": [asdict(one) for one in found], "alone": [asdict(a) for a in alone]}
    publish(arguments.out, "restores", numbers, lambda file: plot(found, alone, file), page(found, alone, described))


if __name__ == "__main__":
    main()
