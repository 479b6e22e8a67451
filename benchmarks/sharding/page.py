"""Tables, picture and page of ``sharded.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from matplotlib.figure import Figure
from results import Table, plain_ticks, sentence
from sharding.sweep import BY_MMAP, MAPPED, RANKS, Found, Plan
from sharding.trainings import LAYOUTS, Trained

WITHIN = 0.005
"""How much worse a training may end, relative; or one standard error."""
LARGER, COSTLIER, SAVING, RESTORING = 0.05, 1.3, 0.5, 0.1
"""What four ranks may need beside one: bytes, CPU seconds. Memory beside a rank's share of the state."""
MOST = max(RANKS)
CPU = ("keyframe_cpu", "cpu")
Memory = dict[int, list[dict[str, float]]]


@dataclass(frozen=True)
class Apart:
    """How much worse trainings end than others of the same seeds, relative."""

    ends: list[float]

    @property
    def mean(self) -> float:
        return fmean(self.ends)

    @property
    def error(self) -> float:
        """The standard error of the mean; 0 with one seed."""
        return stdev(self.ends) / sqrt(len(self.ends)) if len(self.ends) > 1 else 0.0

    def __str__(self) -> str:
        return f"{self.mean:+.2%} ± {self.error:.2%}"


def apart(found: Found) -> dict[str, Apart]:
    """Return how far apart trainings end: disturbed ones from those on four ranks, and these from single processes."""
    return {
        "crashed": Apart([one.crashed.final / one.whole.final - 1 for one in found.ends]),
        "crashed, single": Apart([one.crashed.final / one.single.final - 1 for one in found.ends]),
        "layout": Apart([one.whole.final / one.single.final - 1 for one in found.ends]),
    }


def saving(memory: Memory, ranks: int) -> float:
    """Return the largest memory of a rank while it saves, beside its share of the state."""
    return max(max(one["keyframe"], one["delta"]) / one["share"] for one in memory[ranks])


def restoring(memory: Memory, ranks: int, tensors: int = 0) -> float:
    """Return the largest memory of a rank while it restores, less so many tensors, beside its share of the state."""
    return max((one["restore"] - tensors * one["largest"]) / one["share"] for one in memory[ranks])


def costlier(many: Mapping[str, float], one: Mapping[str, float], name: str) -> float:
    """Return how many times the CPU seconds of one rank many ranks take together."""
    return many[name] / one[name]


def same_losses(found: Found) -> int:
    """Return at how many steps the lossless training and the one with PyTorch's checkpoints have the same loss."""
    return sum(ours == theirs for ours, theirs in zip(found.lossless.losses, found.replayed.losses, strict=True))


def goals(found: Found) -> Table:
    """Return what was to be shown, and what was found."""

    def row(what: str, shown: str, reached: bool) -> list[str]:
        return [what, shown, "yes" if reached else "**no**"]

    same, steps = same_losses(found), len(found.lossless.losses)
    final = found.lossless.final == found.replayed.final
    larger = {name: found.sizes[MOST][name] / found.sizes[1][name] - 1 for name in ("keyframe", "delta")}
    end = apart(found)["crashed"]
    balanced, by_mmap = found.memory["balanced"], found.memory[BY_MMAP]
    cpu = {name: costlier(found.sizes[MOST], found.sizes[1], name) for name in CPU}
    cpu_large = {name: costlier(balanced[MOST][0], balanced[1][0], name) for name in CPU}
    return Table(
        "What it must show",
        ["", "found", "reached"],
        [
            row(
                "resume on another number of ranks, lossless: the losses that PyTorch's own checkpoints give",
                f"{same} of {steps} losses bit for bit, the loss at the end {'as well' if final else 'differs'}",
                same == steps and final,
            ),
            row(
                f"whole state, {MOST} ranks against 1: at most {LARGER:.0%} larger",
                f"keyframe {larger['keyframe']:+.1%}, delta {larger['delta']:+.1%}",
                max(larger.values()) <= LARGER,
            ),
            row(
                "end of the training: within 0.5 % or one standard error",
                str(end),
                end.mean <= max(WITHIN, end.error),
            ),
            *(
                row(
                    f"CPU of a save, {MOST} ranks against 1, a state of {size / 1e6:,.0f} MB: at most {COSTLIER}×",
                    f"keyframe {factor['keyframe_cpu']:.2f}×, delta {factor['cpu']:.2f}×",
                    max(factor.values()) <= COSTLIER,
                )
                for size, factor in ((found.sizes[1]["raw"], cpu), (balanced[1][0]["share"], cpu_large))
            ),
            row(
                f"memory of a rank while saving, balanced: at most {SAVING:.0%} of its share",
                f"{saving(balanced, MOST):.0%}; {saving(by_mmap, MOST):.0%} if malloc returns freed blocks",
                saving(balanced, MOST) <= SAVING,
            ),
            row(
                f"memory of a rank while restoring, balanced: at most {RESTORING:.0%} and one tensor",
                f"{restoring(balanced, MOST, 1):.0%} and one tensor; {restoring(by_mmap, MOST, 1):.0%} if malloc "
                "returns freed blocks",
                restoring(balanced, MOST, 1) <= RESTORING,
            ),
        ],
    )


def ends(found: Found) -> Table:
    """Return the losses at the end of all trainings."""
    columns = ["seed", "one process", f"{MOST} ranks", "kills", "after the kills", "worse", "whole state"]
    rows = [
        [
            str(seed),
            f"{one.single.final:.4f}",
            f"{one.whole.final:.4f}",
            str(len(one.crashed.attempts) - 1),
            f"{one.crashed.final:.4f}",
            f"{one.crashed.final / one.whole.final - 1:+.2%}",
            f"{one.crashed.ratio:.1f}×",
        ]
        for seed, one in enumerate(found.ends)
    ]
    rows.append(["mean", "", "", "", "", str(apart(found)["crashed"]), ""])
    one = found.lossless
    rows.append(
        [
            "0, lossless",
            "",
            "",
            str(len(one.attempts) - 1),
            f"{one.final:.4f}",
            _beside(one, found),
            f"{one.ratio:.1f}×",
        ]
    )
    rows.append(
        ["0, PyTorch's checkpoints", "", "", "", f"{found.replayed.final:.4f}", _beside(found.replayed, found), ""]
    )
    return Table("Loss at the end", columns, rows)


def _beside(one: Trained, found: Found) -> str:
    return f"{one.final / found.ends[0].whole.final - 1:+.2%}"


def sizes(found: Found) -> Table:
    """Return sizes and CPU seconds of one state on all numbers of ranks."""
    columns = ["", *(f"{count} rank{'s' * (count > 1)}" for count in RANKS), f"{MOST} against 1"]
    names = {
        "keyframe": "keyframe, kB",
        "delta": "delta, kB",
        "dcp": "dcp.save, kB",
        "dcp_zstd": "dcp.save with zstd, kB",
        "keyframe_cpu": "keyframe, CPU s",
        "cpu": "delta, CPU s",
        "dcp_cpu": "dcp.save, CPU s",
        "dcp_zstd_cpu": "dcp.save with zstd, CPU s",
    }
    rows = []
    for name, shown in names.items():
        cpu = name.endswith("cpu")
        values = [found.sizes[count][name] for count in RANKS]
        cells = [f"{value:.2f}" if cpu else f"{value / 1000:,.0f}" for value in values]
        rows.append([shown, *cells, f"{values[-1] / values[0]:.2f}×" if cpu else f"{values[-1] / values[0] - 1:+.1%}"])
    for name, shown in (("keyframe_cpu", "larger model, keyframe, CPU s"), ("cpu", "larger model, delta, CPU s")):
        values = [found.memory["balanced"][count][0][name] for count in RANKS]
        rows.append([shown, *(f"{value:.2f}" for value in values), f"{values[-1] / values[0]:.2f}×"])
    return Table("One state: size and CPU seconds of all ranks together", columns, rows)


def memory(found: Found) -> Table:
    """Return the memory of the rank that needs most."""
    columns = ["quality, ranks", "share, MB", "saving", "between saves", "restoring", "less one tensor"]
    rows = [
        [
            f"{quality}, {count}",
            f"{max(one['share'] for one in of_ranks[count]) / 1e6:.0f}",
            f"{saving(of_ranks, count):.0%}",
            f"{max(one['kept'] / one['share'] for one in of_ranks[count]):.0%}",
            f"{restoring(of_ranks, count):.0%}",
            f"{restoring(of_ranks, count, 1):.0%}",
        ]
        for quality, of_ranks in found.memory.items()
        for count in RANKS
    ]
    return Table("Memory of a rank above its share of the state, beside that share", columns, rows)


def plot(found: Found, path: Path) -> None:
    """Draw the losses of the first seed, and the sizes."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    one = found.ends[0]
    left.plot(_smoothed(one.whole.losses), color="black", linewidth=2.5, alpha=0.35, label=f"undisturbed, {MOST} ranks")
    smooth, named = _smoothed(one.crashed.losses), set[int]()
    for attempt in one.crashed.counted():
        steps = range(max(attempt.after - 1, 0), attempt.until)
        label = None if attempt.ranks in named else f"killed, on {attempt.ranks} rank{'s' * (attempt.ranks > 1)}"
        named.add(attempt.ranks)
        color = f"C{LAYOUTS.index(attempt.ranks)}"
        left.plot(steps, [smooth[step] for step in steps], color=color, linewidth=1, label=label)
    left.set(xlabel="step", ylabel="training loss, smoothed")
    kinds = {"dcp": "dcp.save", "dcp_zstd": "dcp.save, zstd", "keyframe": "keyframe", "delta": "delta"}
    for i, (kind, label) in enumerate(kinds.items()):
        at = [place + 0.2 * (i - 1.5) for place in range(len(RANKS))]
        values = [found.sizes[count][kind] / 1e6 for count in RANKS]
        bars = right.bar(at, values, 0.2, label=label)
        right.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=7)
    right.set_xticks(range(len(RANKS)), [f"{count} rank{'s' * (count > 1)}" for count in RANKS])
    right.set(yscale="log", ylabel="whole state, MB")
    plain_ticks(right.yaxis)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper right" if axes is left else "center right")
    figure.savefig(path, dpi=130)


def _smoothed(losses: list[float], window: int = 15) -> list[float]:
    return [fmean(losses[max(0, i - window + 1) : i + 1]) for i in range(len(losses))]


def in_words(found: Found) -> str:
    """Return the results in words."""
    distances, four = apart(found), found.sizes[MOST]
    larger, zstd = four["dcp"] / four["delta"], four["dcp_zstd"] / four["delta"]
    return (
        f"After the kills, trainings end {distances['crashed']} worse than the same seeds undisturbed on {MOST} ranks, "
        f"and {distances['crashed, single']} worse than in one process (negative is better). Undisturbed, {MOST} ranks "
        f"end {distances['layout']} worse than one process: they add in another order. On {MOST} ranks, dcp.save "
        f"writes {larger:.0f} times as much as a delta, and {zstd:.0f} times as much with zstd.\n\n"
        "What costs CPU: every rank repeats the work that a tensor takes whatever its size, such as samples and "
        "reductions. So the factor falls with the size of the model. What costs memory: a save holds the levels of the "
        "last checkpoint and its own, a byte for each value, and copies of one tensor. A restore holds the levels of "
        "all tensors until all ranks have checked them, and keeps them: the next checkpoint is coded against them "
        "(*between saves*). With `lossless`, these are the tensors themselves. malloc keeps freed blocks between those "
        "that stay."
    )


def page(found: Found, plan: Plan, described: dict[str, str | int]) -> str:
    """Return the page."""
    sized, large = plan.sized, plan.large
    return f"""\
# Sharded training

```
.venv/bin/python benchmarks/sharded.py --data DIR
```

`DIR` holds `shakespeare.txt`. {sentence(described)}

A GPT trains under FSDP2 and tensor parallel together, with torchrun and Gloo: on 4 ranks (2 × 2), on 2 ranks (1 × 2),
and in one process. All layouts take the same batches.

- **Trainings**: promise's GPT of 0.6 M weights, {plan.training.steps} steps, a checkpoint every {plan.every}, default
  settings. A random rank is killed (SIGKILL) at a random moment {plan.crashes} times. The training resumes on
  {", ".join(map(str, LAYOUTS))} ranks by turns. *Worse* compares with the same seed undisturbed on {MOST} ranks.
- **Lossless**: the same kills with `quality="lossless"`. *PyTorch's checkpoints*: a training that changes between the
  same ranks at the same steps with `dcp.save` and `dcp.load`.
- **Sizes and CPU**: a GPT of width {sized.width} with {sized.layers} layers, after {plan.keep[0]} and {plan.keep[1]}
  steps. Every number of ranks saves the same two states with the same configuration, {plan.repeats + 1} times by turns.
  The smallest part of a matrix of a block on {MOST} ranks has {_smallest(sized):,} values. CPU is user and system time
  of all processes from `save` to its result; of deltas, the median.
- **Memory**: a larger GPT of width {large.width} with {large.layers} layers, which takes steps with random gradients
  only, and saves with a fixed configuration. A search by a metric takes a copy of a rank's parameters more, with Adam a
  third of its share. Peak resident memory above that before the first
  save, or before the restore; what a restore adds to the state itself is not counted. Of all ranks, the one that needs
  most. By default, malloc keeps freed blocks, and they count. `{BY_MMAP}` was measured with
  `{_as_text(MAPPED)}`: malloc returns them.

{goals(found).in_markdown()}

![losses of a training with kills, and sizes](sharded.png)

{ends(found).in_markdown()}

{sizes(found).in_markdown()}

{memory(found).in_markdown()}

## In words

{in_words(found)}
"""


def _as_text(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())


def _smallest(sized: object) -> int:
    width = int(getattr(sized, "width", 0))
    return width * width // MOST
