"""The fewest bins that each quantizer needs for a checkpoint: no parent, nothing pruned."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.body import exact
from peers.check_n_run import CHECK_N_RUN
from peers.check_n_run import Settings as Ranges
from peers.gobo import GOBO
from peers.peer import Checkpoint, Encoded, Peer
from peers.qd_compressor import QD_COMPRESSOR
from peers.qd_compressor import Settings as Widths
from torch import Tensor
from workloads import Workload, key_of

from dynaquant.engine.forms.form import dequantize
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.forms.scheme import Coder
from dynaquant.engine.forms.stored import encode
from dynaquant.engine.quantize.grid_weights import grid_weights
from dynaquant.engine.quantize.kmeans_weights import KMeansWeights, kmeans_weights, quantize_weights
from dynaquant.engine.quantize.knobs import Configuration, GridConfiguration
from dynaquant.engine.tensors.codebook import MAX_BINS
from dynaquant.engine.tensors.hashing import tensor_hash
from dynaquant.methods.grid.scale_search import scale_search
from dynaquant.methods.grid.search import LEAST_DISTORTION, MOST_DISTORTION
from dynaquant.search.distortion import mean_squared_gradients
from dynaquant.search.evaluation import degradation
from dynaquant.search.judge import DISTORTION_SCALE
from dynaquant.search.live_model import score
from dynaquant.state.roles import labels

LIMITS = (0.05, 0.01, 0.001)
"""Degradations that are allowed, from loose to strict."""
CLUSTERS, GRID = "dynaquant, published", "dynaquant, grid"

Judge = Callable[[dict[str, Tensor]], float]
"""Returns the degradation of the model with these values as its parameters."""


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint of a training. work: holds its weights. gradients: moving averages, by name with "model."."""

    work: Workload
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, work: Workload, stored: dict[str, Any]) -> Snapshot:
        """Load a snapshot into a workload. stored: as ``workloads.snapshots`` returns it."""
        work.model.load_state_dict(stored["model"])
        work.optimizer.load_state_dict(stored["optimizer"])
        return cls(work, stored["gradients"])

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The model's parameters by name."""
        return {name: parameter.detach() for name, parameter in self.work.model.named_parameters()}

    @cached_property
    def mean_squares(self) -> dict[str, float]:
        """The mean squared gradient of each tensor: from Adam's second moments, or else of the averaged gradients."""
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
    """Quantized weights. values: of parameters by name. size: returns the bytes of all parameters when coded."""

    bins: float
    values: dict[str, Tensor]
    size: Callable[[], int]


Method = Callable[[Snapshot, Judge, Sequence[int]], Iterator[Candidate]]
"""Quantizes a snapshot with each number of bins of the sequence. Methods that decide by quality use the judge."""


def of_peer(
    peer: Peer[Any], settings: Callable[[int], Any], snapshot: Snapshot, _judge: Judge, bins: Sequence[int]
) -> Iterator[Candidate]:
    for count in bins:
        encoded = peer.encode(Checkpoint(snapshot.weights), None, settings(count))
        yield Candidate(count, encoded.known.checkpoint.weights, partial(_packed_size, encoded))


def _packed_size(encoded: Encoded) -> int:
    return len(encoded.pack())


def clusters(snapshot: Snapshot, _judge: Judge, bins: Sequence[int]) -> Iterator[Candidate]:
    """Quantize by dynaquant's published method: k-means on the histogram."""
    for count in (min(count, MAX_BINS) for count in bins):
        configuration = Configuration(bins=count, embedding_bins=count, pruned=0.0)
        yield _candidate(count, snapshot, quantize_weights(snapshot.sketched, configuration), "rearranged")


def grid(snapshot: Snapshot, judge: Judge, _bins: Sequence[int]) -> Iterator[Candidate]:
    """Quantize by dynaquant's default method: for each limit, with the scale that its own search finds."""
    ready = grid_weights(
        {f"model.{name}": tensor for name, tensor in snapshot.weights.items()}, snapshot.mean_squares, {}, 0
    )
    lowest, highest = ready.scale_exponent_for(LEAST_DISTORTION), ready.scale_exponent_for(MOST_DISTORTION)

    @cache
    def worse(scale: int) -> float:
        return judge(_values(ready.quantize(GridConfiguration(scale))))

    def degradations(scales: Sequence[int], _low: float) -> list[float]:
        return [worse(scale) for scale in scales]

    for limit in LIMITS:
        start = ready.scale_exponent_for(limit / DISTORTION_SCALE)
        found = scale_search(start, lowest, highest, degradations, limit)
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
    """Return two to the power of the mean entropy of the levels. So many equally frequent levels take as many bits."""
    bits = values = 0.0
    for tensor in quantized:
        counts = np.bincount(tensor.levels).astype(np.float64)
        counts = counts[counts > 0]
        bits -= float(np.sum(counts * np.log2(counts / counts.sum())))
        values += float(counts.sum())
    return float(2 ** (bits / values)) if values else 0.0


def ranges(bins: int) -> Ranges:
    """Return Check-N-Run's settings of the range search that its space has for this number of bins or fewer."""
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
    """A number of bins that was tried.

    bits: per weight, everything counted, if these are the fewest bins for a limit; otherwise None.
    """

    bins: float
    degradation: float
    bits: float | None


@dataclass(frozen=True)
class Walk:
    """The numbers of bins that one method tried on one checkpoint, from few to many."""

    workload: str
    step: int
    method: str
    tried: list[Tried]

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Walk:
        """Return the inverse of ``asdict``."""
        return cls(**{**stored, "tried": [Tried(**tried) for tried in stored["tried"]]})

    def needed(self, limit: float) -> Tried | None:
        """Return the fewest bins that are good enough for a limit, or None."""
        return next((tried for tried in self.tried if tried.degradation <= limit), None)


def walk(candidates: Iterable[Candidate], judge: Judge, weights: int) -> list[Tried]:
    """Try candidates until one is good enough for every limit. weights: how many the model has."""
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
    """Yield the walk of every method on every snapshot. Takes it from the cache if it was done on the same weights."""
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
