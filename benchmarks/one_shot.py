"""How many bins each quantizer needs until a single checkpoint is good enough: no parent, nothing pruned.

    python benchmarks/one_shot.py --data DIR [--cache build/benchmarks] [--quick]

Trains both workloads, or takes their snapshots from the cache. Quantizes each of ten checkpoints by each method with
more and more bins, until its validation loss is within every limit. What was tried stays in the cache; delete
``one_shot-*`` there to try again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from bins_needed import CLUSTERS, GRID, LIMITS, METHODS, Walk, walks
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from options import parse, parser
from results import Table, machine, sentence
from rich.console import Console
from rich.progress import track
from workloads import WORKLOADS, snapshots

from dynaquant.engine.quantize.knobs import Configuration
from dynaquant.engine.tensors.codebook import MAX_BINS

BINS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
QUICK_BINS = (4, 32, 256)
STEPS = {"gpt": 1600, "resnet": 1600}
CHECKPOINTS = 10
QUICK_STEPS = 4
PAPER = {"gpt": ("GPT-2 medium", 16.2, 47.7), "resnet": ("ResNet-50", 14.4, 35.1)}
"""The paper's model of the same kind, and the bins that its method and Check-N-Run+ need there for 1 %."""
PAPERS_LIMIT = 0.01


@dataclass(frozen=True)
class Mean:
    """Mean bins and bits per weight over checkpoints.

    failed: checkpoints for which no number of bins was good enough; the largest number counts for them.
    """

    bins: float
    bits: float | None
    failed: int
    checkpoints: int

    def __str__(self) -> str:
        return f"{'≥ ' if self.failed else ''}{self.bins:.1f}" + (f" ({self.failed} fail)" if self.failed else "")


def mean(found: Sequence[Walk], limit: float) -> Mean:
    """Return the mean over walks of one workload and method."""
    needed = [one.needed(limit) for one in found]
    most = max(BINS)
    bits = [tried.bits for tried in needed if tried is not None and tried.bits is not None]
    return Mean(
        float(np.mean([most if tried is None else tried.bins for tried in needed])),
        float(np.mean(bits)) if bits else None,
        sum(tried is None for tried in needed),
        len(needed),
    )


def means(found: Sequence[Walk]) -> dict[str, dict[str, dict[float, Mean]]]:
    """Return the means by workload, method and limit."""
    return {
        workload: {
            method: {
                limit: mean([one for one in found if (one.workload, one.method) == (workload, method)], limit)
                for limit in LIMITS
            }
            for method in METHODS
        }
        for workload in dict.fromkeys(one.workload for one in found)
    }


def table(workload: str, by_method: dict[str, dict[float, Mean]]) -> Table:
    columns = ["method"]
    for limit in reversed(LIMITS):
        columns += [f"bins for {limit:.1%}", "bits per weight"]
    rows = []
    for method, by_limit in by_method.items():
        row = [method]
        for limit in reversed(LIMITS):
            found = by_limit[limit]
            row += [str(found), "" if found.bits is None else f"{found.bits:.2f}"]
        rows.append(row)
    count = next(iter(next(iter(by_method.values())).values())).checkpoints
    return Table(f"Mean over {count} checkpoints of the {NAMES[workload]}", columns, rows)


NAMES = {"gpt": "GPT", "resnet": "ResNet"}
STYLES = {"Check-N-Run+": "C0", "QD-Compressor+": "C1", "GOBO+": "C2", CLUSTERS: "C3", GRID: "C4"}


def plot(found: dict[str, dict[str, dict[float, Mean]]], file: Path) -> None:
    """Draw bins and bits over the limit, for each workload."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    rows = figure.subplots(2, len(found), squeeze=False)
    for i, (workload, by_method) in enumerate(found.items()):
        _plot_bins(rows[0][i], workload, by_method)
        _plot_bits(rows[1][i], by_method)
    shown = rows[0][0].get_legend_handles_labels()
    figure.legend(*shown, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(file, dpi=130)


def _plot_bins(axes: Axes, workload: str, by_method: dict[str, dict[float, Mean]]) -> None:
    for method, by_limit in by_method.items():
        bins = [by_limit[limit].bins for limit in LIMITS]
        label = f"{method} (2 to the entropy)" if method == GRID else method
        axes.plot([100 * limit for limit in LIMITS], bins, "o-", color=STYLES[method], markersize=4, label=label)
    name, clusters, check_n_run = PAPER[workload]
    for method, paper in ((CLUSTERS, clusters), ("Check-N-Run+", check_n_run)):
        axes.plot([100 * PAPERS_LIMIT], [paper], "*", color=STYLES[method], markersize=12, label=f"{method}, in paper")
    axes.set(title=f"{NAMES[workload]} (stars: the paper's {name})", xscale="log", yscale="log", ylabel="bins, mean")
    axes.set_yticks(BINS[::2], [str(bins) for bins in BINS[::2]], minor=False)
    axes.set_yticks([], minor=True)
    _limits_below(axes)


def _plot_bits(axes: Axes, by_method: dict[str, dict[float, Mean]]) -> None:
    for method, by_limit in by_method.items():
        known = [(100 * limit, by_limit[limit].bits) for limit in LIMITS if by_limit[limit].bits is not None]
        axes.plot(*zip(*known, strict=True), "o-", color=STYLES[method], markersize=4) if known else None
    axes.set(xscale="log", ylabel="bits per weight, all in", ylim=(0, None))
    _limits_below(axes)


def _limits_below(axes: Axes) -> None:
    axes.set_xticks([100 * limit for limit in LIMITS], [f"{limit:.1%}" for limit in LIMITS])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("degradation allowed")
    axes.grid(alpha=0.3)


def against_paper(workload: str, by_method: dict[str, dict[float, Mean]]) -> str:
    """Return the paper's two numbers of bins beside those found, in words."""
    name, clusters, check_n_run = PAPER[workload]
    ours, theirs = by_method[CLUSTERS][PAPERS_LIMIT], by_method["Check-N-Run+"][PAPERS_LIMIT]
    return (
        f"For {PAPERS_LIMIT:.0%} on the {NAMES[workload]}, dynaquant's clusters need {ours} bins and Check-N-Run+ "
        f"{theirs}, {theirs.bins / ours.bins:.1f} times as many; in the paper, on {name}, it is {clusters} and "
        f"{check_n_run}, {check_n_run / clusters:.1f} times as many."
    )


def nearer_than_in_paper(workload: str, by_method: dict[str, dict[float, Mean]]) -> bool:
    """Return whether Check-N-Run+ needs fewer bins, relative to dynaquant, than in the paper."""
    _, clusters, check_n_run = PAPER[workload]
    return (
        by_method["Check-N-Run+"][PAPERS_LIMIT].bins / by_method[CLUSTERS][PAPERS_LIMIT].bins < check_n_run / clusters
    )


def short_rows(by_workload: dict[str, dict[str, dict[float, Mean]]]) -> str:
    """Return why Check-N-Run+ may be closer than in the paper."""
    by_layer = []
    for workload, by_method in by_workload.items():
        ours, theirs = (by_method[method][PAPERS_LIMIT] for method in (CLUSTERS, "QD-Compressor+"))
        by_layer.append(
            f"{theirs} on the {NAMES[workload]}, {theirs.bins / ours.bins:.1f} times as many as the clusters"
        )
    return (
        "Check-N-Run+ is closer here than in the paper because of its ranges. It has one for each row, and the rows of "
        "these small models are short (256 or 1,024 values in the GPT; 27 to 1,152 in the ResNet's convolutions), so "
        "each range fits. QD-Compressor+ is uniform as well, but has one range for a layer. It needs "
        f"{'; '.join(by_layer)}. Ranges cost bits, which numbers of bins do not show: the two floats of a row take a "
        "quarter of a bit per weight if the row has 256 values, and two bits if it has 32. Also, Check-N-Run+ and "
        "GOBO+ pack their levels, as published; QD-Compressor+ and dynaquant use entropy coding."
    )


def fewest(by_workload: dict[str, dict[str, dict[float, Mean]]]) -> str:
    """Return a list of the methods with the fewest bins and the fewest bits, by workload and limit."""
    rows = []
    for workload, by_method in by_workload.items():
        for limit in reversed(LIMITS):
            at = {method: by_limit[limit] for method, by_limit in by_method.items()}
            bins = min((method for method in at if method != GRID), key=lambda method: at[method].bins)
            bits = {m: found.bits for m, found in at.items() if found.bits is not None and not found.failed}
            least = min(bits, key=lambda m: bits[m]) if bits else None
            rows.append(
                f"- {NAMES[workload]}, {limit:.1%}: the fewest bins {bins}, {at[bins]}"
                + (f"; the fewest bits {least}, {bits[least]:.2f}." if least else ".")
            )
    return "\n".join(rows)


def page(found: list[Walk], bins: Sequence[int], described: dict[str, str | int]) -> str:
    by_workload = means(found)
    parts = [
        "# Bins for one checkpoint",
        "```\nmake benchmark-setup\n.venv/bin/python benchmarks/one_shot.py --data DIR\n```",
        f"`DIR` holds `shakespeare.txt` and `cifar10.zip`. {sentence(described)}",
        "How many bins does a quantizer need so that the validation loss of a checkpoint rises by no more than a "
        "limit? Each checkpoint of a training stands alone: there is no delta, nothing is pruned, and training goes on "
        f"from the original. Numbers of bins are tried from few to many ({', '.join(map(str, bins))}; {MAX_BINS} at "
        "most for dynaquant's clusters). The first that is good enough counts. If none is, the largest number counts, "
        "and the mean is marked with ≥.",
        *(table(workload, by_method).in_markdown() for workload, by_method in by_workload.items()),
        "![bins and bits per weight over the degradation that is allowed](one_shot.png)",
        "Check-N-Run+ has separate bins for each row of a matrix, with the range search that its space has for this "
        "number of bins. QD-Compressor+ gives all layers the same number. GOBO+ stores outliers exactly beside its "
        f"bins, and dynaquant's clusters store {Configuration().protected:.1%} of the weights in bfloat16. *Bits per "
        "weight* count everything: ranges, centroids, outliers and the vectors that a method leaves exact. They are "
        "the mean over the checkpoints that were good enough. dynaquant's grid has one scale to choose instead of "
        "bins, and its own search finds it. In place of its bins, the table has two to the power of the entropy of its "
        "levels: this number of equally frequent bins would take as many bits. It quantizes vectors, too.",
        "## What agrees with the paper, and what does not",
        *(against_paper(workload, by_method) for workload, by_method in by_workload.items()),
        *([short_rows(by_workload)] if all(nearer_than_in_paper(*item) for item in by_workload.items()) else []),
        fewest(by_workload),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    arguments = parse(parser(__doc__, data="shakespeare.txt and cifar10.zip"))
    torch.set_num_threads(1)

    bins = QUICK_BINS if arguments.quick else BINS
    found: list[Walk] = []
    for name in ["gpt"] if arguments.quick else WORKLOADS:
        steps = QUICK_STEPS if arguments.quick else STEPS[name]
        every = steps if arguments.quick else steps // CHECKPOINTS
        stored = snapshots(name, arguments.data, arguments.cache, steps, every)
        work = WORKLOADS[name](arguments.data, arguments.cache, steps, 0)
        total = len(stored) * len(METHODS)
        found += track(
            walks(name, stored, work, bins, arguments.cache), description=f"quantizing the {NAMES[name]}", total=total
        )
    described = machine("numpy", "torch")
    console = Console()
    console.width = max(console.width, 130)
    for workload, by_method in means(found).items():
        console.print(table(workload, by_method).on_screen())

    results = {"machine": described, "bins": bins, "walks": [asdict(one) for one in found]}
    (arguments.out / "one_shot.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(means(found), arguments.out / "one_shot.png")
    (arguments.out / "one_shot.md").write_text(page(found, bins, described))


if __name__ == "__main__":
    main()
