"""Train with ten crashes, resuming from each method's own checkpoints: the paper's main table.

    python benchmarks/failure_recovery.py --data DIR

Every method stores every checkpoint with the smallest settings that the validation loss allows. The same trainings
without crashes show what the crashes have cost. Their seeds show how much chance alone changes.
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
NAMES = {"resnet": "ResNet", "gpt": "GPT"}
PAPER = {
    "Check-N-Run+": "5.7× to 7.8×",
    "QD-Compressor+": "11.8× to 22.2×, and one failure",
    PUBLISHED: "26.2× to 39.1×",
}
"""Weights of four models, 10 restores, ε = 0.05."""


@dataclass(frozen=True)
class Workload:
    """The trainings of one workload: with crashes by every method, and without crashes."""

    settings: Settings
    methods: list[Training]
    alone: list[Uninterrupted]


def table(found: list[Workload]) -> Table:
    columns = ["training", "method", "weights", "whole state", "at the end", "worst checkpoint", "beyond ε"]
    columns += ["evaluations", "overhead", "every 30 min"]
    rows = []
    for workload in found:
        settings = workload.settings
        name = f"{NAMES[settings.workload]}, ε = {settings.max_degradation:g}, {settings.restores} restores"
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
    """Return the results of one workload in words."""
    by = {one.method: one for one in workload.methods}
    ours, published = by[DEFAULT], by[PUBLISHED]
    peers = [one for one in workload.methods if one.method not in (DEFAULT, PUBLISHED)]
    largest = max(peers, key=lambda one: one.state)
    apart = [one for one in peers if one.weights is not None]
    weights = max(apart, key=lambda one: one.weights or 0)
    lost = [one.method for one in workload.methods if one.worse_than(workload.alone) > spread(workload.alone)]
    return (
        f"**{NAMES[workload.settings.workload]}.** Weights: the published method makes them {times(published.weights)} "
        f"smaller, {weights.method}, the best peer that stores weights separately, {times(weights.weights)}, and "
        f"dynaquant's default {times(ours.weights)}. Whole states: the best peer, {largest.method}, makes them "
        f"{times(largest.state)} smaller, dynaquant's default {times(ours.state)}. At the end, "
        + (f"{', '.join(lost)}" if lost else "no method")
        + " lost more than seeds are apart."
    )


def page(found: list[Workload], described: dict[str, str | int]) -> str:
    every = [workload.settings for workload in found]
    settings = every[0]
    smaller = [
        by[PUBLISHED].weights / max(one.weights for one in w.methods[:2] if one.weights)  # type: ignore[operator]
        for w in found
        for by in [{one.method: one for one in w.methods}]
    ]
    lengths = "\nand ".join(f"the {NAMES[s.workload]} {s.steps} steps with a checkpoint every {s.every}" for s in every)
    return f"""\
# Failure recovery

```
make benchmark-setup
.venv/bin/python benchmarks/failure_recovery.py --data DIR
```

`DIR` holds `shakespeare.txt` and `cifar10.zip`. {sentence(described)}

Every training runs on one core: {lengths}.
A crash comes {settings.lost} steps after a checkpoint. Every method resumes from its own checkpoints.

![ratio against what was lost at the end](failure_recovery.png)

{table(found).in_markdown()}

- *weights*: raw over stored bytes of the weights of all checkpoints, for methods that store them separately.
- *whole state*: the same of weights, moments and buffers. Methods that store only weights get moments stored exactly,
  as byte planes and zstd. dynaquant's states include the generator of the data's order; peers get it for nothing.
- *at the end*: how much worse the metric is than without crashes; negative is better. It is the validation loss of the
  GPT and the accuracy of the ResNet, on more data than the search sees.
- *beyond ε*: checkpoints for which no settings of the method were good enough. Its finest settings were taken.
- *evaluations*: settings scored for each checkpoint.
- *overhead*: time that training waits for quantizing and searching, relative to training: here, and with a checkpoint
  every half an hour.

## What agrees with the paper, and what does not

{chr(10).join(comparison(one) + chr(10) for one in found)}
The paper has, for ε = 0.05 and models of 60 to 350 million weights: {"; ".join(f"{k} {v}" for k, v in PAPER.items())}.
Here, the published method's ratio is {" and ".join(f"{ratio:.1f}" for ratio in smaller)} times that of the better of
Check-N-Run+ and QD-Compressor+. The models are small and far from convergence, ε is {settings.max_degradation:g}, and
checkpoints lie close together. The overhead here is that of a checkpoint every few seconds.

Every checkpoint is within ε, and yet a training can end much worse: ten restores add up, and metrics do not see
moments.

- ExCP's β, from its paper, sets most second moments to zero. After a restore of the GPT, Adam's steps are much too
  large. The ResNet has momentum only.
- Rounding to the nearest value takes weights back to where the last restore had put them. Both of dynaquant's methods
  must keep the displacement since the restore
  ([why](../decisions.md#what-must-a-checkpoint-keep-after-a-restore)). The peers, as published, need not. dynaquant's
  default also bounds what a checkpoint may change in each tensor, which the published method does not.

Here, ExCP may also store its weights in 2 bits, which its paper does not.
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
