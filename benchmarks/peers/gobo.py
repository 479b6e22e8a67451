"""GOBO as a peer: exact outliers; all other weights of a layer become indices of a few centroids.

Zadeh et al., "GOBO: Quantizing Attention-Based NLP Models for Low Latency and Energy Efficient Inference", MICRO 2020,
arXiv 2005.03842; as "GOBO+" in the Inshrinkerator paper (arXiv 2306.11800):

- A weight is an outlier if the logarithm of its layer's Gaussian density, with the layer's mean and deviation, is below
  -4. The density is in the units of the weights, not of standard deviations: at BERT's deviation of about 0.04
  that is 3.6 deviations, which leaves the 0.1 % of outliers of the paper; in standard deviations it would be 2.5, above
  one percent. (Reimplementations do so, too: ``GaussianMixture(1).score_samples(weights) < -4``.)
- Outliers stay as they are, with their positions. The rest of a layer becomes indices, of 3 or 4 bits in the paper.
- Centroids start as means of bins of equal population. Each iteration moves weights to the nearest centroid and
  centroids to their means, as k-means does; the centroids with the least sum of absolute errors are kept (L1, where
  k-means goes on for L2). At most 1000 iterations, and soft termination, are from Inshrinkerator. Here that means to
  stop after 10 iterations without a smaller sum, as the sum may rise for a while.

Deviations, all in the peer's favour: positions are gaps; gaps and outliers are compressed without loss; an outlier
takes no index; all sums are exact in float64. Parameters with one dimension are stored exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peers.body import bits_for, described, exact, flat, from_exact, join, matrices, pack, split, unpack
from peers.peer import Checkpoint, Encoded, Known, Peer
from torch import Tensor

OUTLIER = -4.0
"""Logarithm of the density below which a weight is an outlier."""
ITERATIONS = 1000
"""Iterations at most."""
PATIENCE = 10
"""Iterations without a smaller sum of absolute errors before it stops."""

Values = NDArray[np.float32]


@dataclass(frozen=True)
class Settings:
    """bins: centroids of a layer, at most 256."""

    bins: int


SPACE = tuple(Settings(2**bits) for bits in range(2, 9))
"""Numbers of bins that use all values of their bits: others are worse for the same bytes."""


@dataclass(frozen=True)
class Layer:
    """gaps: from the outlier before to each outlier, int32. indices: of all other values, into ``centroids``."""

    gaps: NDArray[np.int32]
    outliers: Values
    indices: NDArray[np.uint8]
    centroids: Values


def encode(checkpoint: Checkpoint, _previous: Known | None, settings: Settings) -> Encoded:
    """Encode a checkpoint without a parent."""
    weights = checkpoint.weights
    layers = {name: quantize(flat(weights[name]), settings.bins) for name in matrices(weights)}
    kept = {name: tensor for name, tensor in weights.items() if name not in layers}
    entries = {name: described(weights[name]) for name in layers}
    decoded = {name: _restored(layer, entries[name]) for name, layer in layers.items()}

    def packed() -> bytes:
        parts = [exact(kept)]
        for layer in layers.values():
            found = {"gaps": layer.gaps, "outliers": layer.outliers, "centroids": layer.centroids}
            parts.append(exact({name: torch.from_numpy(values) for name, values in found.items()}))
            parts.append(pack(layer.indices, bits_for(settings.bins)))
        return join([settings.bins, entries], parts)

    return Encoded(Known(Checkpoint(kept | decoded)), packed)


def decode(data: bytes, _previous: Known | None) -> Known:
    """Decode the weights."""
    (bins, entries), parts = split(data)
    weights = from_exact(parts[0])
    for (name, entry), lists, packed in zip(entries.items(), parts[1::2], parts[2::2], strict=True):
        found = {key: tensor.numpy() for key, tensor in from_exact(lists).items()}
        size = int(np.prod(entry["shape"], dtype=np.int64)) - found["gaps"].size
        weights[name] = _restored(Layer(indices=unpack(packed, bits_for(bins), size), **found), entry)
    return Known(Checkpoint(weights))


def quantize(values: Values, bins: int) -> Layer:
    """Quantize the flat values of a layer."""
    outlying = outliers(values)
    positions = np.flatnonzero(outlying)
    rest = values[~outlying]
    found = centroids(np.sort(rest), bins)
    indices = np.searchsorted(_edges(found), rest).astype(np.uint8)
    return Layer(np.diff(positions, prepend=0).astype(np.int32), values[outlying], indices, found)


def outliers(values: Values) -> NDArray[np.bool_]:
    """Return where the density of the layer's Gaussian is too low."""
    mean, deviation = values.mean(dtype=np.float64), values.std(dtype=np.float64)
    if deviation == 0:
        return np.zeros(values.size, dtype=np.bool_)
    density = -0.5 * ((values - mean) / deviation) ** 2 - np.log(deviation * np.sqrt(2 * np.pi))
    low: NDArray[np.bool_] = density < OUTLIER
    return low


def centroids(ascending: Values, bins: int) -> Values:
    """Return the centroids of sorted values, ascending; fewer than ``bins`` if there are fewer values."""
    if not ascending.size:
        return np.zeros(0, dtype=np.float32)
    sums = np.concatenate(([0.0], np.cumsum(ascending, dtype=np.float64)))
    means = _means(sums, np.linspace(0, ascending.size, min(bins, ascending.size) + 1).astype(np.int64), np.zeros(0))
    best, least, waited = means, np.inf, 0
    for _ in range(ITERATIONS):
        bounds = np.concatenate(([0], np.searchsorted(ascending, _edges(means)), [ascending.size]))
        error = _absolute_error(ascending, sums, bounds, means)
        best, least, waited = (means, error, 0) if error < least else (best, least, waited + 1)
        moved = _means(sums, bounds, means)
        if waited == PATIENCE or np.array_equal(moved, means):
            break
        means = moved
    return best.astype(np.float32)


def _means(sums: NDArray[np.float64], bounds: NDArray[np.int64], empty: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the means between bounds. empty: the results where there is nothing between them."""
    sizes = np.diff(bounds)
    means: NDArray[np.float64] = np.diff(sums[bounds]) / np.maximum(sizes, 1)
    return np.where(sizes > 0, means, empty) if (sizes == 0).any() else means


def _absolute_error(
    ascending: Values, sums: NDArray[np.float64], bounds: NDArray[np.int64], means: NDArray[np.float64]
) -> float:
    """Return the sum of absolute errors: below its centroid, centroid less value; above it, the reverse."""
    middle = np.clip(np.searchsorted(ascending, means), bounds[:-1], bounds[1:])
    below = means * (middle - bounds[:-1]) - (sums[middle] - sums[bounds[:-1]])
    above = sums[bounds[1:]] - sums[middle] - means * (bounds[1:] - middle)
    return float((below + above).sum())


def _edges(found: NDArray[Any]) -> Values:
    """Return the midpoints of neighbours, in the precision of the values, so that a search does not convert them."""
    edges: Values = ((found[1:] + found[:-1]) / 2).astype(np.float32)
    return edges


def _restored(layer: Layer, entry: dict[str, Any]) -> Tensor:
    values = np.empty(layer.gaps.size + layer.indices.size, dtype=np.float32)
    outlying = np.zeros(values.size, dtype=np.bool_)
    outlying[np.cumsum(layer.gaps, dtype=np.int64)] = True
    values[outlying] = layer.outliers
    values[~outlying] = layer.centroids[layer.indices]
    return torch.from_numpy(values).reshape(entry["shape"]).to(getattr(torch, entry["dtype"]))


GOBO = Peer("GOBO+", SPACE, encode, decode)
