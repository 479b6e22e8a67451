"""How many bins each quantizer needs until a checkpoint is good enough: one at a time, nothing pruned, no delta.

    python benchmarks/one_shot.py --data DIR [--cache build/benchmarks] [--quick]

Trains both workloads (or takes their snapshots from the cache) and quantizes each of ten checkpoints by each method
with more and more bins, until its validation loss is within every limit. What was tried stays in the cache; delete
``one_shot-*`` there to try again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from options import parse, parser
from peers.body import exact
from peers.check_n_run import CHECK_N_RUN
from peers.check_n_run import Settings as Ranges
from peers.gobo import GOBO
from peers.peer import Checkpoint, Encoded, Peer
from peers.qd_compressor import QD_COMPRESSOR
from peers.qd_compressor import Settings as Widths
from results import Table, machine, sentence
from rich.console import Console
from rich.progress import track
from torch import Tensor
from workloads import WORKLOADS, Workload, key_of, snapshots

from dynaquant.coding.encoder import Coder, encode
from dynaquant.quantize.grid import GridConfiguration
from dynaquant.quantize.grid_weights import grid_weights
from dynaquant.quantize.kmeans_weights import KMeansWeights, kmeans_weights, quantize_weights
from dynaquant.quantize.partition import Configuration
from dynaquant.search.distortion import mean_squared_gradients
from dynaquant.search.grid_method import LEAST_DISTORTION, MOST_DISTORTION
from dynaquant.search.judge import DISTORTION_SCALE
from dynaquant.search.quality import degradation, score
from dynaquant.search.scale_search import scale_search
from dynaquant.state.roles import labels
from dynaquant.tensors.dequantize import dequantize
from dynaquant.tensors.hashing import tensor_hash
from dynaquant.tensors.stored import MAX_BINS, QuantizedTensor

LIMITS = (0.05, 0.01, 0.001)
BINS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
QUICK_BINS = (4, 32, 256)
STEPS = {"gpt": 1600, "resnet": 1600}
CHECKPOINTS = 10
QUICK_STEPS = 4
CLUSTERS, GRID = "dynaquant, published", "dynaquant, grid"
PAPER = {"gpt": ("GPT-2 medium", 16.2, 47.7), "resnet": ("ResNet-50", 14.4, 35.1)}
"""The paper's model of the kind, and the bins that it and Check-N-Run+ need there for 1 %."""
PAPERS_LIMIT = 0.01

Judge = Callable[[dict[str, Tensor]], float]
"""The degradation of the model with these values for its parameters."""


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint of a training. work: with its weights. gradients: their moving averages, by name with "model."."""

    work: Workload
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, work: Workload, stored: dict[str, Any]) -> Snapshot:
        """stored: as ``workloads.snapshots`` returns it."""
        work.model.load_state_dict(stored["model"])
        work.optimizer.load_state_dict(stored["optimizer"])
        return cls(work, stored["gradients"])

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The model's parameters by name."""
        return {name: parameter.detach() for name, parameter in self.work.model.named_parameters()}

    @cached_property
    def fisher(self) -> dict[str, float]:
        """Adam's second moments, or else the squares of the averaged gradients."""
        squares = {name: float(gradient.square().mean()) for name, gradient in self.gradients.items()}
        named = {f"model.{name}": parameter for name, parameter in self.work.model.named_parameters()}
        return mean_squared_gradients(named, [self.work.optimizer], squares)

    @cached_property
    def sketched(self) -> KMeansWeights:
        named = {f"model.{name}": tensor for name, tensor in self.weights.items()}
        label_of = labels(named, {"model": self.work.model})
        weights = {name: tensor for name, tensor in named.items() if label_of[name].role == "weight"}
        return kmeans_weights(weights, label_of, self.gradients)


@dataclass(frozen=True)
class Candidate:
    """Quantized weights. bins: how many. values: of parameters by name. size: bytes of all parameters once coded."""

    bins: float
    values: dict[str, Tensor]
    size: Callable[[], int]


Method = Callable[[Snapshot, Judge, Sequence[int]], Iterator[Candidate]]
"""A snapshot quantized with more and more bins, those of the sequence. The judge is for who decides by quality."""


def of_peer(
    peer: Peer[Any], settings: Callable[[int], Any], snapshot: Snapshot, _judge: Judge, bins: Sequence[int]
) -> Iterator[Candidate]:
    for count in bins:
        encoded = peer.encode(Checkpoint(snapshot.weights), None, settings(count))
        yield Candidate(count, encoded.known.checkpoint.weights, partial(_packed_size, encoded))


def _packed_size(encoded: Encoded) -> int:
    return len(encoded.pack())


def clusters(snapshot: Snapshot, _judge: Judge, bins: Sequence[int]) -> Iterator[Candidate]:
    """dynaquant's published quantizer: k-means on the histogram."""
    for count in (min(count, MAX_BINS) for count in bins):
        configuration = Configuration(bins=count, embedding_bins=count, pruned=0.0)
        yield _candidate(count, snapshot, quantize_weights(snapshot.sketched, configuration), "rearranged")


def grid(snapshot: Snapshot, judge: Judge, _bins: Sequence[int]) -> Iterator[Candidate]:
    """dynaquant's default: for each limit the scale that its own search finds."""
    ready = grid_weights({f"model.{name}": tensor for name, tensor in snapshot.weights.items()}, snapshot.fisher, {}, 0)
    lowest, highest = ready.scale_exponent_for(LEAST_DISTORTION), ready.scale_exponent_for(MOST_DISTORTION)

    @cache
    def worse(scale: int) -> float:
        return judge(_values(ready.quantize(GridConfiguration(scale))))

    def degradations(scales: Sequence[int]) -> list[float]:
        return [worse(scale) for scale in scales]

    for limit in LIMITS:
        start = ready.scale_exponent_for(limit / DISTORTION_SCALE)
        found = scale_search(start, lowest, highest, degradations, limit, start_was_good=False)
        if found is not None:
            quantized = dict(ready.quantize(GridConfiguration(found)))
            yield _candidate(effective_levels(quantized.values()), snapshot, quantized, "conditional")


def _values(quantized: Any) -> dict[str, Tensor]:
    return {name.removeprefix("model."): dequantize(tensor) for name, tensor in quantized.items()}


def _candidate(bins: float, snapshot: Snapshot, quantized: dict[str, QuantizedTensor], coder: Coder) -> Candidate:
    values = _values(quantized)

    def size() -> int:
        rest = {name: tensor for name, tensor in snapshot.weights.items() if name not in values}
        return len(exact(rest)) + sum(len(encode(tensor, None, coder)[1]) for tensor in quantized.values())

    return Candidate(bins, values, size)


def effective_levels(quantized: Iterable[QuantizedTensor]) -> float:
    """Two to the power of the mean entropy of the levels: so many equally frequent ones would take as many bits."""
    bits = values = 0.0
    for tensor in quantized:
        counts = np.bincount(tensor.levels).astype(np.float64)
        counts = counts[counts > 0]
        bits -= float(np.sum(counts * np.log2(counts / counts.sum())))
        values += float(counts.sum())
    return float(2 ** (bits / values)) if values else 0.0


def ranges(bins: int) -> Ranges:
    """Check-N-Run's search of ranges as its space has it for as many bins or fewer."""
    fewer = [settings for settings in CHECK_N_RUN.space if settings.bins <= bins]
    return replace(fewer[-1] if fewer else CHECK_N_RUN.space[0], bins=bins)


METHODS: dict[str, Method] = {
    "Check-N-Run+": partial(of_peer, CHECK_N_RUN, ranges),
    "QD-Compressor+": partial(of_peer, QD_COMPRESSOR, lambda bins: Widths(least=bins, most=bins)),
    "GOBO+": partial(of_peer, GOBO, lambda bins: replace(GOBO.space[-1], bins=bins)),
    CLUSTERS: clusters,
    GRID: grid,
}


@dataclass(frozen=True)
class Tried:
    """One number of bins. bits: per weight, all in, where these are the fewest bins for a limit; None elsewhere."""

    bins: float
    degradation: float
    bits: float | None


@dataclass(frozen=True)
class Walk:
    """What was tried on one checkpoint by one method, from few bins to many."""

    workload: str
    step: int
    method: str
    tried: list[Tried]

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Walk:
        """The inverse of ``asdict``."""
        return cls(**{**stored, "tried": [Tried(**tried) for tried in stored["tried"]]})

    def needed(self, limit: float) -> Tried | None:
        """The fewest bins that are good enough; None where none are."""
        return next((tried for tried in self.tried if tried.degradation <= limit), None)


def walk(candidates: Iterable[Candidate], judge: Judge, weights: int) -> list[Tried]:
    """Tries candidates until one is good enough for every limit. weights: how many there are."""
    tried: list[Tried] = []
    for candidate in candidates:
        worse = judge(candidate.values)
        open_limits = [limit for limit in LIMITS if not any(before.degradation <= limit for before in tried)]
        first = any(worse <= limit for limit in open_limits)
        tried.append(Tried(candidate.bins, worse, 8 * candidate.size() / weights if first else None))
        if worse <= min(LIMITS):
            break
    return tried


def walks(name: str, stored: list[dict[str, Any]], work: Workload, bins: Sequence[int], cache: Path) -> Iterator[Walk]:
    """Every snapshot by every method, taken from the cache where the same was tried on the same weights."""
    for one in stored:
        snapshot = Snapshot.of(work, one)
        original = score(work.model, {}, work.search_loss)
        count = sum(tensor.numel() for tensor in snapshot.weights.values())

        def judge(values: dict[str, Tensor], original: float = original) -> float:
            return degradation(original, score(work.model, values, work.search_loss), higher_is_better=False)

        hashes = [tensor_hash(tensor) for tensor in snapshot.weights.values()]
        for method, candidates in METHODS.items():
            file = cache / f"one_shot-{key_of(hashes, method, bins, LIMITS, torch.__version__)}.json"
            if not file.exists():
                tried = walk(candidates(snapshot, judge, bins), judge, count)
                file.write_text(json.dumps(asdict(Walk(name, one["step"], method, tried))) + "\n")
            yield Walk.from_json(json.loads(file.read_text()))


@dataclass(frozen=True)
class Mean:
    """Over checkpoints, of bins and of bits per weight. failed: how many had not enough bins with the most, for which
    that most counts."""

    bins: float
    bits: float | None
    failed: int
    checkpoints: int

    def __str__(self) -> str:
        return f"{'≥ ' if self.failed else ''}{self.bins:.1f}" + (f" ({self.failed} fail)" if self.failed else "")


def mean(found: Sequence[Walk], limit: float) -> Mean:
    """found: of one workload and method."""
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
    """By workload, method and limit."""
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
    """Bins and bits over the limit, for each workload."""
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
    """The paper's two figures beside those found."""
    name, clusters, check_n_run = PAPER[workload]
    ours, theirs = by_method[CLUSTERS][PAPERS_LIMIT], by_method["Check-N-Run+"][PAPERS_LIMIT]
    return (
        f"For {PAPERS_LIMIT:.0%} on the {NAMES[workload]}, dynaquant's clusters need {ours} bins and Check-N-Run+ "
        f"{theirs}, {theirs.bins / ours.bins:.1f} times as many; in the paper, on {name}, it is {clusters} and "
        f"{check_n_run}, {check_n_run / clusters:.1f} times as many."
    )


def nearer_than_in_paper(workload: str, by_method: dict[str, dict[float, Mean]]) -> bool:
    """Whether Check-N-Run+ needs fewer bins for one of dynaquant's than in the paper."""
    _, clusters, check_n_run = PAPER[workload]
    return (
        by_method["Check-N-Run+"][PAPERS_LIMIT].bins / by_method[CLUSTERS][PAPERS_LIMIT].bins < check_n_run / clusters
    )


def short_rows(by_workload: dict[str, dict[str, dict[float, Mean]]]) -> str:
    """Why Check-N-Run+ may be nearer."""
    by_layer = []
    for workload, by_method in by_workload.items():
        ours, theirs = (by_method[method][PAPERS_LIMIT] for method in (CLUSTERS, "QD-Compressor+"))
        by_layer.append(
            f"{theirs} on the {NAMES[workload]}, {theirs.bins / ours.bins:.1f} times as many as the clusters"
        )
    return (
        "That Check-N-Run+ comes nearer than in the paper goes with its ranges: it has one for each row, and the rows "
        "of these small models are short (256 or 1,024 values in the GPT; 27 to 1,152 in the ResNet's convolutions), "
        "so that each range fits. QD-Compressor+, uniform as well, but with one range for a layer, needs "
        f"{'; '.join(by_layer)}. Ranges cost bits instead, which numbers of bins do not show: a row's two floats are a "
        "quarter of a bit per weight where it has 256 values, two bits where it has 32. Besides, Check-N-Run+ and "
        "GOBO+ pack their levels, as published; QD-Compressor+ and dynaquant code their entropy."
    )


def fewest(by_workload: dict[str, dict[str, dict[float, Mean]]]) -> str:
    """Who needs the fewest bins and the fewest bits, by workload and limit."""
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
        "How many bins does a quantizer need until the validation loss of a checkpoint is at most so much worse? Each "
        "checkpoint of a training stands alone: there is no delta, nothing is pruned, and training goes on from the "
        f"original. Numbers of bins are tried from few to many ({', '.join(map(str, bins))}; {MAX_BINS} at most for "
        "dynaquant's clusters); the first that is good enough counts. Where none is, the most counts, and the mean is "
        "marked with ≥.",
        *(table(workload, by_method).in_markdown() for workload, by_method in by_workload.items()),
        "![bins and bits per weight over the degradation that is allowed](one_shot.png)",
        "Check-N-Run+ has bins for each row of a matrix, with the range search that its space has for as many. "
        "QD-Compressor+ gives all layers as many. GOBO+ keeps outliers exact beside its bins, dynaquant's clusters "
        f"{Configuration().protected:.1%} of the weights in bfloat16. *Bits per weight* are all in: ranges, centroids, "
        "outliers and the vectors that a method leaves exact; they are the mean over the checkpoints that were good "
        "enough. dynaquant's grid has no bins to choose but one scale, which its own search finds; what stands for "
        "bins is two to the power of the entropy of its levels, as so many equally frequent ones would take as many "
        "bits. It quantizes vectors, too.",
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
