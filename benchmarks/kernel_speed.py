"""Compare histogram, level assignment, quantiles and clustering with other libraries.

    python benchmarks/kernel_speed.py [--values 50000000] [--quick]

All methods of a task take turns, and the shortest time of each counts. Everything runs twice: in a process on one core,
and in one on all cores. Every library sizes its thread pool by that.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import faiss
import kmeans1d
import numpy as np
import torch
from cores import by_cores, on_cores, page
from ddsketch import DDSketch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from options import parse, parser
from results import Table, machine, publish, show
from rich.console import Console
from sklearn.cluster import KMeans
from workloads import gpt_snapshots

from dynaquant import _native
from dynaquant.engine.kernels.host import bits_of
from dynaquant.engine.quantize.kmeans import SIGMA, bins_table, codebook, kmeans, sample_weights
from dynaquant.engine.tensors.log_histogram import BUCKETS, LogHistogram, bucket_values

REPEATS, ENOUGH = 7, 2.0
"""Turns of every method. A method that has taken ENOUGH seconds gets no further turn."""
VALUES, QUICK_VALUES = 50_000_000, 1_000_000
CLUSTERS = 16
QUANTILES = (0.1, 0.995)
"""The quantiles at which the default configuration has its thresholds."""
TORCH_QUANTILE_LIMIT = 16_000_000
DDSKETCH_SAMPLE = 200_000
OPTIMUM_SAMPLE = 1_000_000
PEERS = ("numpy", "torch", "scikit-learn", "faiss-cpu", "ddsketch", "kmeans1d")

Values = NDArray[np.float32]


@dataclass(frozen=True)
class Method:
    """One way to do a task. run: does it. values: how many values it goes through."""

    name: str
    values: int
    run: Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """Results of a method. accuracy: how far its answer is from the exact one, in words."""

    task: str
    method: str
    values: int
    seconds: float
    accuracy: str

    @property
    def speed(self) -> float:
        """Gigabytes of float32 per second."""
        return 4e-9 * self.values / self.seconds


def race(methods: list[Method], turns: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the shortest time of every method in seconds, and its answer."""
    seconds: dict[str, list[float]] = {method.name: [] for method in methods}
    answers: dict[str, Any] = {}
    for _ in range(turns):
        for method in methods:
            if sum(seconds[method.name]) < ENOUGH:
                start = perf_counter()
                answers[method.name] = method.run()
                seconds[method.name].append(perf_counter() - start)
    return {name: min(times) for name, times in seconds.items()}, answers


def histogram(x: Values, turns: int) -> list[Row]:
    tensor = torch.from_numpy(x)
    methods = [
        Method("dynaquant", x.size, lambda: LogHistogram.of(tensor)),
        Method("NumPy bincount", x.size, lambda: np.bincount(x.view(np.uint16)[1::2], minlength=BUCKETS)),
        Method(
            "PyTorch bincount",
            x.size,
            lambda: torch.bincount((tensor.view(torch.int32) >> 16) & 0xFFFF, minlength=BUCKETS),
        ),
    ]
    seconds, answers = race(methods, turns)
    sketch = answers.pop("dynaquant")
    dense = np.zeros(BUCKETS, dtype=np.int64)
    dense[sketch.buckets] = sketch.counts
    for name, answer in answers.items():
        assert np.array_equal(dense, answer), f"{name} counts something else"
    return [Row("log histogram", m.name, m.values, seconds[m.name], "exact counts") for m in methods]


def assignment(x: Values, turns: int) -> list[Row]:
    tensor = torch.from_numpy(x)
    bits = bits_of(tensor)
    centres = codebook(LogHistogram.of(tensor), CLUSTERS)
    table = bins_table(centres)
    boundaries = ((centres[1:] + centres[:-1]) / 2).astype(np.float32)
    torch_table, torch_boundaries = torch.from_numpy(table), torch.from_numpy(boundaries)
    silent = np.full(BUCKETS, _native.UNDECIDED, dtype=np.uint8)

    def assign(sensitivity: NDArray[np.uint32]) -> NDArray[np.uint8]:
        levels = np.empty(x.size, dtype=np.uint8)
        _native.assign_levels(bits, table, sensitivity, silent, levels)
        return levels

    methods = [
        Method("dynaquant", x.size, lambda: assign(np.zeros(0, dtype=np.uint32))),
        # Any array of this size will do: the sensitivities do not change the work.
        Method("dynaquant with sensitivity", x.size, lambda: assign(bits)),  # type: ignore[arg-type]
        Method("NumPy take (table)", x.size, lambda: table.take(x.view(np.uint16)[1::2])),
        Method("NumPy searchsorted", x.size, lambda: np.searchsorted(boundaries, x)),
        Method(
            "PyTorch index_select (table)",
            x.size,
            lambda: torch.index_select(torch_table, 0, (tensor.view(torch.int32) >> 16) & 0xFFFF),
        ),
        Method("PyTorch bucketize", x.size, lambda: torch.bucketize(tensor, torch_boundaries, out_int32=True)),
    ]
    seconds, answers = race(methods, turns)
    exact = answers["NumPy searchsorted"] + int(table.min())
    answers["NumPy searchsorted"] = exact
    answers["PyTorch bucketize"] = answers["PyTorch bucketize"].numpy() + int(table.min())

    def accuracy(answer: Any) -> str:
        return f"{np.mean(np.asarray(answer) != exact):.2%} in the next bin"

    return [Row("level assignment", m.name, m.values, seconds[m.name], accuracy(answers[m.name])) for m in methods]


def quantiles(x: Values, turns: int) -> list[Row]:
    tensor = torch.from_numpy(x)
    magnitudes = np.abs(x)
    torch_magnitudes = torch.from_numpy(magnitudes)
    first = torch_magnitudes[:TORCH_QUANTILE_LIMIT]
    sample = magnitudes[:DDSKETCH_SAMPLE]

    def dynaquant() -> list[float]:
        sketch = LogHistogram.of(tensor)
        return [sketch.quantile(q) for q in QUANTILES]

    def ddsketch() -> list[float]:
        sketch = DDSketch(relative_accuracy=1 / 256)
        for value in sample.tolist():
            sketch.add(value)
        return [float(sketch.get_quantile_value(q) or 0.0) for q in QUANTILES]

    methods = [
        Method("dynaquant", x.size, dynaquant),
        Method("NumPy quantile", x.size, lambda: np.quantile(magnitudes, QUANTILES)),
        Method("PyTorch quantile", len(first), lambda: torch.quantile(first, torch.tensor(QUANTILES))),
        Method(
            "PyTorch kthvalue",
            x.size,
            lambda: [float(torch_magnitudes.kthvalue(int(q * (x.size - 1)) + 1).values) for q in QUANTILES],
        ),
        Method("ddsketch", len(sample), ddsketch),
    ]
    seconds, answers = race(methods, turns)
    rows = []
    for m in methods:
        exact = np.quantile(magnitudes[: m.values], QUANTILES)
        error = np.max(np.abs(np.asarray(answers[m.name]) - exact) / exact)
        rows.append(Row("two quantiles", m.name, m.values, seconds[m.name], f"{error:.2%} off"))
    return rows


def mean_squared_error(x: Values, centres: NDArray[Any]) -> float:
    ordered = np.sort(centres.astype(np.float64), axis=None)
    boundaries = ((ordered[1:] + ordered[:-1]) / 2).astype(np.float32)
    parts = [part - ordered[np.searchsorted(boundaries, part)] for part in np.array_split(x, x.size // 1_000_000 + 1)]
    return sum(float(np.sum(part**2)) for part in parts) / x.size


def clustering(x: Values, turns: int) -> list[Row]:
    tensor = torch.from_numpy(x)
    column = x.reshape(-1, 1)

    def dynaquant(sigma: float) -> NDArray[np.float64]:
        sketch = LogHistogram.of(tensor)
        middles = bucket_values()[sketch.buckets].astype(np.float64)
        order = np.argsort(middles, kind="stable")
        return kmeans(middles[order], sample_weights(middles[order], sketch.counts[order], sigma), CLUSTERS)

    def with_faiss(points: int) -> NDArray[np.float32]:
        clusters = faiss.Kmeans(1, CLUSTERS, seed=0, max_points_per_centroid=points // CLUSTERS + 1)
        clusters.cp.init_method = faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS
        clusters.train(column)
        return np.asarray(clusters.centroids)

    methods = [
        Method("dynaquant, σ = 1", x.size, lambda: dynaquant(1.0)),
        Method(f"dynaquant, σ = {SIGMA} (default)", x.size, lambda: dynaquant(SIGMA)),
        Method("sklearn KMeans", x.size, lambda: KMeans(CLUSTERS, n_init=1, random_state=0).fit(column)),
        Method("faiss Kmeans", x.size, lambda: with_faiss(x.size)),
        Method("faiss Kmeans, sampling", x.size, lambda: with_faiss(256 * CLUSTERS)),
    ]
    seconds, answers = race(methods, turns)
    answers["sklearn KMeans"] = answers["sklearn KMeans"].cluster_centers_
    sample = np.random.default_rng(0).choice(x, min(OPTIMUM_SAMPLE, x.size), replace=False)
    optimum = mean_squared_error(x, np.array(kmeans1d.cluster(sample, CLUSTERS).centroids))
    return [
        Row(
            f"{CLUSTERS} clusters",
            m.name,
            m.values,
            seconds[m.name],
            f"{mean_squared_error(x, answers[m.name]) / optimum:.3f} × optimum",
        )
        for m in methods
    ]


def synthetic(size: int, piece: int = 100_000) -> Values:
    """Return a heavy-tailed mix: pieces of Laplace values, each with its own scale from 0.005 to 0.1, like layers."""
    random = np.random.default_rng(0)
    pieces = [
        np.exp(random.uniform(np.log(0.005), np.log(0.1))) * random.laplace(size=min(piece, size - begin))
        for begin in range(0, size, piece)
    ]
    return np.concatenate(pieces).astype(np.float32)


def trained(snapshot: Path) -> Values:
    """Return the weights of two or more dimensions in a snapshot of another benchmark, tied ones once."""
    model = torch.load(snapshot, weights_only=True)["model"]
    distinct = {tensor.data_ptr(): tensor for tensor in model.values() if tensor.ndim >= 2}
    weights: Values = torch.cat([tensor.flatten() for tensor in distinct.values()]).numpy()
    return weights


def measure(source: Path | int, turns: int) -> list[Row]:
    x = synthetic(source) if isinstance(source, int) else trained(source)
    cores = len(os.sched_getaffinity(0))
    rows = []
    with Console(stderr=True).status("") as status:
        for task in (histogram, assignment, quantiles, clustering):
            status.update(f"{task.__name__} of {x.size:,} values on {cores} core{'s' * (cores > 1)}")
            rows += task(x, turns)
    return rows


def ratios(rows: list[Row]) -> list[float]:
    """Return for each row how many times faster dynaquant does its task, per value."""
    fastest: dict[str, float] = {}
    for row in rows:
        fastest.setdefault(row.task, row.speed)
    return [fastest[row.task] / row.speed for row in rows]


def times(ratio: float) -> str:
    return f"{ratio:,.0f}×" if ratio >= 100 else f"{ratio:.2g}×"


def table(title: str, one: list[Row], every: list[Row], cores: int) -> Table:
    rows: list[list[str]] = []
    for a, b, ratio_a, ratio_b in zip(one, every, ratios(one), ratios(every), strict=True):
        task = "" if rows and a.task == one[len(rows) - 1].task else a.task
        speeds = [f"{a.speed:.2g}", times(ratio_a), f"{b.speed:.2g}", times(ratio_b)]
        rows.append([task, a.method, *speeds, a.accuracy])
    return Table(title, ["task", "method", "1 core, GB/s", "ratio", f"{cores} cores, GB/s", "ratio", "accuracy"], rows)


def plot(title: str, rows: list[Row], file: Path) -> None:
    """Draw the speed of every method, with one bar chart for each task."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    tasks = list(dict.fromkeys(row.task for row in rows))
    speeds = [row.speed for row in rows]
    limits = 10 ** math.floor(math.log10(min(speeds))), 2 * max(speeds)
    for task, axes in zip(tasks, figure.subplots(2, 2, sharex=True).flat, strict=True):
        some = [row for row in rows if row.task == task]
        colors = ["C0" if row.method.startswith("dynaquant") else "C7" for row in some]
        axes.barh([row.method for row in some], [row.speed for row in some], color=colors)
        axes.set(title=task, xscale="log", xlim=limits, xlabel="GB/s of float32")
        axes.invert_yaxis()
        axes.grid(alpha=0.3, axis="x")
    figure.suptitle(f"{title}, 1 core")
    figure.savefig(file, dpi=130)


def verdict(what: str, value: float, bar: float, unit: str) -> str:
    return f"{'passed' if value >= bar else 'MISSED'}: {what} {value:,.4g}{unit}, at least {bar:g}{unit} wanted"


def verdicts(rows: list[Row]) -> list[str]:
    """Return whether the bars were reached, on one core with synthetic values."""
    speed = {(row.task, row.method): row.speed for row in rows}
    ratio = {(row.task, row.method): r for row, r in zip(rows, ratios(rows), strict=True)}

    quantile = min(r for (task, method), r in ratio.items() if task == "two quantiles" and method != "dynaquant")
    clusters = min(ratio[f"{CLUSTERS} clusters", peer] for peer in ("sklearn KMeans", "faiss Kmeans"))
    return [
        verdict("log histogram", speed["log histogram", "dynaquant"], 2, " GB/s per core"),
        verdict("level assignment", speed["level assignment", "dynaquant"], 2, " GB/s per core"),
        verdict("quantiles against the fastest peer", quantile, 4, "×"),
        verdict("clustering of every value against the fastest peer", clusters, 65, "×"),
    ]


NOTES = f"""\
- Speeds are GB/s of float32 input, the best of up to {REPEATS} turns. *ratio* is how many times faster dynaquant is on
  the same number of cores. Two methods get fewer values, and are compared by speed: `torch.quantile` refuses more
  than about 16 M, and `ddsketch` inserts values one by one in Python, so it gets {DDSKETCH_SAMPLE:,}.
- *log histogram*: counts of the 65,536 values of the top 16 bits; all methods count the same.
- *level assignment*: the nearest of {CLUSTERS} centres. dynaquant and the methods marked *table* decide by bucket;
  their accuracy is the share of values that land in the next bin because the boundary runs through their bucket.
  NumPy and PyTorch first write an index for every value, which is slow if the indices do not fit into the cache.
- *two quantiles*: {QUANTILES[0]:g} and {QUANTILES[1]:g} of the magnitudes. dynaquant starts from the signed values and
  counts its histogram first. The others get the magnitudes. NumPy's and PyTorch's answers are exact.
- *{CLUSTERS} clusters*: the centres only, from the raw values, seeded by k-means++. dynaquant's time is the histogram
  and k-means on its buckets. Accuracy is the mean squared error over that of an exact 1-D k-means (`kmeans1d`) of
  {OPTIMUM_SAMPLE:,} of the values. *sampling* is the default of faiss: it looks at
  {256 * CLUSTERS:,} values. σ = 1 weighs buckets by frequency alone, as the others do; the default σ = {SIGMA} does the
  same work and gives up mean squared error for resolution away from zero, as the paper proposes.
- The weights of a GPT are measured if `benchmarks/delta_ablation.py --data DIR` has been run before.
- The paper's figures (3–4× over CuPy's quantiles, 65× over cuML's k-means) were measured on a GPU, these on a CPU.
"""


def main() -> None:
    made = parser(__doc__, data=None)
    made.add_argument("--values", type=int, help=f"synthetic values: {VALUES:,}; quick: {QUICK_VALUES:,}")
    arguments = parse(made)
    values = arguments.values or (QUICK_VALUES if arguments.quick else VALUES)
    turns = 1 if arguments.quick else REPEATS

    cores = os.sched_getaffinity(0)
    sources: dict[str, Path | int] = {f"{values:,} synthetic values": values}
    if not arguments.quick and (snapshots := gpt_snapshots(arguments.cache)):
        sources["The weights of a trained GPT"] = snapshots[-1]
    described = machine(*PEERS)
    results = {
        name: (on_cores({min(cores)}, measure, source, turns), on_cores(cores, measure, source, turns))
        for name, source in sources.items()
    }
    tables = [table(name, *rows, len(cores)) for name, rows in results.items()]
    bars = verdicts(next(iter(results.values()))[0])

    show(*tables, *bars, width=130)
    title, (one, _) = next(iter(results.items()))
    written = page(
        "Kernels", "kernels", "kernel_speed.py", "speed by method, for each task", described, tables, bars, NOTES
    )
    numbers = {"machine": described, "bars": bars, "results": by_cores(results)}
    publish(arguments.out, "kernels", numbers, lambda file: plot(title, one, file), written)


if __name__ == "__main__":
    main()
