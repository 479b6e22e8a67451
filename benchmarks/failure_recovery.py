"""Trainings that crash ten times, each method going on from its own checkpoints: the paper's main table.

    python benchmarks/failure_recovery.py --data DIR

Every method stores every checkpoint with the smallest settings that the validation loss allows. The same trainings left
alone tell what the crashes have cost, and their seeds how much luck is worth.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from checkpointers import DEFAULT, METHODS, PUBLISHED
from crashes import Settings, Training, of_size, parser, spread, times, trainings
from matplotlib.figure import Figure
from options import parse
from results import Table, machine, plain_ticks, publish, sentence, show
from workloads import Uninterrupted

INTERVAL = 1800
"""Seconds between checkpoints in practice."""
PAPER = {
    "Check-N-Run+": "5.7× to 7.8×",
    "QD-Compressor+": "11.8× to 22.2×, and one failure",
    PUBLISHED: "26.2× to 39.1×",
}
"""Weights of four models, 10 restores, ε = 0.05."""


@dataclass(frozen=True)
class Workload:
    """One workload's trainings by every method, and those left alone."""

    settings: Settings
    methods: list[Training]
    alone: list[Uninterrupted]


def table(found: list[Workload]) -> Table:
    columns = ["training", "method", "weights", "whole state", "at the end", "worst checkpoint", "beyond ε"]
    columns += ["evaluations", "overhead", "every 30 min"]
    rows = []
    for workload in found:
        settings = workload.settings
        name = f"{settings.workload}, ε = {settings.max_degradation:g}, {settings.restores} restores"
        for one in workload.methods:
            rows.append(
                [
                    name,
                    one.method,
                    times(one.weights),
                    times(one.state),
                    f"{one.worse_than(workload.alone):+.2%}",
                    f"{one.worst:.2%}",
                    f"{one.failed} of {len(one.saved)}",
                    f"{one.evaluations:.1f}",
                    f"{one.blocked * len(one.saved) / one.seconds:.0%}",
                    f"{one.blocked / INTERVAL:.2%}",
                ]
            )
        rows.append([name, "seeds apart", "", "", f"{spread(workload.alone):.2%}", *[""] * 5])
    return Table("Ten restores", columns, rows)


def plot(found: list[Workload], path: Path) -> None:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, workload in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        settings = workload.settings
        for i, one in enumerate(workload.methods):
            worse = 100 * one.worse_than(workload.alone)
            axes.plot(worse, one.state, "s", color=f"C{i}", markersize=8)
            if one.weights is not None:
                axes.plot(worse, one.weights, "o", color=f"C{i}", markersize=8, markerfacecolor="none")
            axes.plot([], [], "s", color=f"C{i}", label=one.method)
        axes.plot([], [], "ks", label="whole state")
        axes.plot([], [], "ko", markerfacecolor="none", label="weights alone")
        apart = 100 * spread(workload.alone)
        axes.axvspan(-apart, apart, color="gray", alpha=0.15, label="seeds apart")
        axes.axvline(0, color="black", linewidth=0.8)
        title = f"{settings.workload}, ε = {settings.max_degradation:g}, {settings.restores} restores"
        axes.set(title=title, xlabel="worse at the end, %", ylabel="times smaller", yscale="log")
        plain_ticks(axes.yaxis)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=130)


def comparison(workload: Workload) -> str:
    """What the figures say about one workload."""
    by = {one.method: one for one in workload.methods}
    ours, published = by[DEFAULT], by[PUBLISHED]
    peers = [one for one in workload.methods if one.method not in (DEFAULT, PUBLISHED)]
    largest = max(peers, key=lambda one: one.state)
    apart = [one for one in peers if one.weights is not None]
    weights = max(apart, key=lambda one: one.weights or 0)
    lost = [one.method for one in workload.methods if one.worse_than(workload.alone) > spread(workload.alone)]
    return (
        f"**{workload.settings.workload}.** The published method stores weights in {times(published.weights)} less, "
        f"{weights.method}, the best of the peers that store weights apart, in {times(weights.weights)}. dynaquant's "
        f"default: {times(ours.weights)}. Of whole states {largest.method} is the best peer with "
        f"{times(largest.state)}, against {times(ours.state)}. At the end "
        + (f"{', '.join(lost)} lost more than seeds are apart." if lost else "none lost more than seeds are apart.")
    )


def page(found: list[Workload], described: dict[str, str | int]) -> str:
    settings = found[0].settings
    smaller = [
        by[PUBLISHED].weights / max(one.weights for one in w.methods[:2] if one.weights)  # type: ignore[operator]
        for w in found
        for by in [{one.method: one for one in w.methods}]
    ]
    return f"""\
# Failure recovery

```
make benchmark-setup
.venv/bin/python benchmarks/failure_recovery.py --data DIR
```

`DIR` holds `shakespeare.txt` and `cifar10.zip`. {sentence(described)}

Every training is of {settings.steps} steps on one core; a crash comes {settings.lost} steps after a checkpoint. Every
method goes on from its own checkpoints.

![ratio against what was lost at the end](failure_recovery.png)

{table(found).in_markdown()}

*weights*: raw over stored bytes of the weights of all checkpoints, where they are stored apart; *whole state*: of
weights, moments and buffers, where moments of methods that store weights only are kept exactly, as byte planes and
zstd. *At the end*: how much worse the metric (GPT: validation loss, ResNet: accuracy, on more data than the search
sees) is than without crashes; negative is better. *Beyond ε*: checkpoints of which nothing in a method's space was good
enough; its finest settings were taken. *Evaluations*: settings scored for each checkpoint. *Overhead*: time in which
training waits for quantizing and searching, of that of training, here, and with a checkpoint every half an hour.
dynaquant's states include the generator of the data's order, which the peers are given for nothing.

## What agrees with the paper, and what does not

{chr(10).join(comparison(one) + chr(10) for one in found)}
The paper has, for ε = 0.05 and models of 60 to 350 million weights: {"; ".join(f"{k} {v}" for k, v in PAPER.items())}.
Per weight, the published method is {" and ".join(f"{ratio:.1f}" for ratio in smaller)} times smaller than the better of
Check-N-Run+ and QD-Compressor+ here. The models are small and far from convergence, ε is {settings.max_degradation:g},
and checkpoints lie close together. The overhead here is that of a checkpoint every few seconds.

Every checkpoint is within ε, and yet a training can end much worse: ten restores add up, and metrics do not see
moments. ExCP's β, its paper's, sets most second moments to zero, so that Adam's steps after a restore are much too
large. (Measured while writing this, with the paper's constants for the GPT at step 800: a ninth of them is left, the
next step is 4.5 times as long as with exact moments, and the loss 4 % higher after five.) And what rounds to the
nearest takes weights back to where the last restore had put them. Both of dynaquant's methods must keep the progress
since a restore ([why](../decisions.md#what-must-a-checkpoint-keep-after-a-restore)); the peers, as published, need not.

ExCP may store its weights in 2 bits here, too, which its paper does not have. (Measured while writing this: with the 4
bits of the paper the ResNet's checkpoints are 31.6 times smaller, and the training ends as well as with 2.)
"""


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--max-degradation", type=float, default=0.01)
    made.add_argument("--restores", type=int, default=10)
    arguments = parse(made)
    workloads = [
        of_size(name, arguments.max_degradation, arguments.restores, arguments.quick) for name in ("resnet", "gpt")
    ]
    jobs = [(method, settings) for settings in workloads for method in METHODS]
    trained = trainings(jobs, arguments.data, arguments.cache, arguments.workers)
    found = [
        Workload(
            settings, [t for t in trained if t.settings == settings], settings.alone(arguments.data, arguments.cache)
        )
        for settings in workloads
    ]
    show(table(found), width=160)
    described = machine("torch")
    numbers = {"machine": described, "workloads": [asdict(one) for one in found]}
    publish(arguments.out, "failure_recovery", numbers, lambda file: plot(found, file), page(found, described))


if __name__ == "__main__":
    main()
