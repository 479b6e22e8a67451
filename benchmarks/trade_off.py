"""Compare ratio and quality at the end for limits of 0.1 %, 1 % and 5 %, with ten restores: the paper's first figure.

python benchmarks/trade_off.py --data DIR [--workload resnet]
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from checkpointers import DEFAULT, METHODS, PUBLISHED
from crashes import Training, of_size, parser, spread, times, trainings
from matplotlib.figure import Figure
from options import parse
from results import Table, machine, plain_ticks, publish, sentence, show
from workloads import Uninterrupted

LIMITS = (0.001, 0.01, 0.05)
RESTORES = 10


def table(found: list[Training], alone: list[Uninterrupted]) -> Table:
    columns = ["method"]
    for limit in LIMITS:
        columns += [f"ε = {limit:g}: weights", "whole state", "at the end", "worst checkpoint"]
    rows = []
    for method in METHODS:
        row = [method]
        for one in (one for one in found if one.method == method):
            row += [times(one.weights), times(one.state), f"{one.worse_than(alone):+.2%}", f"{one.worst:.2%}"]
        rows.append(row)
    return Table(f"{found[0].settings.workload}, {found[0].settings.restores} restores", columns, rows)


def plot(found: list[Training], alone: list[Uninterrupted], path: Path) -> None:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    apart = 100 * spread(alone)
    for axes, what in zip(figure.subplots(1, 2), ("weights", "state"), strict=True):
        for i, method in enumerate(METHODS):
            ratios = [(one, getattr(one, what)) for one in found if one.method == method]
            drawn = [(100 * one.worse_than(alone), ratio) for one, ratio in ratios if ratio is not None]
            axes.plot(*zip(*drawn, strict=True), "-", color=f"C{i}", alpha=0.5) if drawn else None
            for (worse, ratio), marker in zip(drawn, "^os", strict=False):
                axes.plot(worse, ratio, marker, color=f"C{i}", markersize=7)
            if drawn:
                axes.plot([], [], "-", color=f"C{i}", label=method)
        for limit, marker in zip(LIMITS, "^os", strict=True):
            axes.plot([], [], marker, color="black", label=f"ε = {limit:g}")
        axes.axvspan(-apart, apart, color="gray", alpha=0.15, label="seeds apart")
        axes.axvline(0, color="black", linewidth=0.8)
        title = "weights" if what == "weights" else "whole state"
        axes.set(xlabel="worse at the end, %", ylabel="times smaller", title=title, yscale="log")
        plain_ticks(axes.yaxis)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=130)


def in_words(found: list[Training], alone: list[Uninterrupted]) -> str:
    """Return the results in words."""
    by = {(one.method, one.settings.max_degradation): one for one in found}
    sentences = []
    for limit in LIMITS:
        stored = {m: by[m, limit].weights for m in METHODS if m not in (DEFAULT, PUBLISHED)}
        best = max((m for m in stored if stored[m] is not None), key=lambda m: stored[m] or 0)
        sentences.append(
            f"At ε = {limit:g}, the published method's weights are {times(by[PUBLISHED, limit].weights)} smaller, "
            f"those of {best}, the best peer, {times(stored[best])}, dynaquant's {times(by[DEFAULT, limit].weights)} "
            f"(whole states {times(by[DEFAULT, limit].state)})."
        )
    grow = [
        method for method in METHODS if all(by[method, a].state <= by[method, b].state for a, b in pairwise(LIMITS))
    ]
    outside = [
        f"{method} at ε = {limit:g}"
        for limit in LIMITS
        for method in METHODS
        if abs(by[method, limit].worse_than(alone)) > spread(alone)
    ]
    return f"""{" ".join(sentences)}

As in the paper, a looser limit buys a higher ratio ({len(grow)} of {len(METHODS)} methods: {", ".join(grow)}), and can
cost quality at the end. Farther from the training without crashes than seeds are from each other ({spread(alone):.2%})
are: {", ".join(outside) or "none"}. Smaller differences may be chance, as there is one training of each kind. The limit
is on the validation loss of single checkpoints; the metric at the end is on more data."""


def page(found: list[Training], alone: list[Uninterrupted], described: dict[str, str | int]) -> str:
    settings = found[0].settings
    return f"""\
# Trade-off

```
make benchmark-setup
.venv/bin/python benchmarks/trade_off.py --data DIR --workload {settings.workload}
```

`DIR` holds `shakespeare.txt` and `cifar10.zip`. {sentence(described)} Trainings of {settings.steps} steps with a
checkpoint every {settings.every} and {settings.restores} crashes, as in [failure recovery](failure_recovery.md), where
the words are explained.

![ratio against what was lost at the end](trade_off.png)

{table(found, alone).in_markdown()}

## What agrees with the paper, and what does not

{in_words(found, alone)}
"""


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--workload", choices=["gpt", "resnet"], default="resnet")
    arguments = parse(made)
    settings = [of_size(arguments.workload, limit, RESTORES, arguments.quick) for limit in LIMITS]
    jobs = [(method, one) for one in settings for method in METHODS]
    found = trainings(jobs, arguments.data, arguments.cache, arguments.workers)
    alone = settings[0].alone(arguments.data, arguments.cache)
    show(table(found, alone), width=170)
    described = machine("torch")
    numbers = {"machine": described, "trainings": [asdict(one) for one in found], "alone": [asdict(a) for a in alone]}
    publish(arguments.out, "trade_off", numbers, lambda file: plot(found, alone, file), page(found, alone, described))


if __name__ == "__main__":
    main()
