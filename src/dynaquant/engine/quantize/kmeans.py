"""Quantize one tensor to non-uniform levels: weighted k-means over the buckets of a log histogram (method 1.3)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.forms.levels import QuantizedTensor, protected_values
from dynaquant.engine.quantize.partition import NO_THRESHOLDS, Thresholds, magnitude_table, sensitivity_table
from dynaquant.engine.tensors.codebook import FIRST_BIN, PRUNED, Centres
from dynaquant.engine.tensors.log_histogram import BUCKETS, LogHistogram, bucket_values, table_for

SIGMA = 0.2
"""Share of a bucket's sample weight that comes from its frequency. The rest comes from its magnitude (method 1.3)."""
ROUNDS = 300
"""Maximum number of Lloyd iterations. They stop earlier if no bucket changes its cluster."""

Array = NDArray[np.float64]


def sample_weights(values: Array, frequencies: NDArray[np.int64], sigma: float = SIGMA) -> Array:
    """Return ``σ·freq + (1-σ)·|value|``, both normalised to sum to 1 over the buckets (method 1.3)."""
    magnitudes = np.abs(values)
    by_frequency: Array = frequencies / frequencies.sum()
    return sigma * by_frequency + (1 - sigma) * magnitudes / max(float(magnitudes.sum()), 1e-300)


def seed_centres(values: Array, weights: Array, clusters: int, seed: int) -> Array:
    """Draw initial centres as k-means++ does: with probability ∝ weight × squared distance to the nearest centre."""
    random = np.random.default_rng(seed)
    centres = [float(random.choice(values, p=weights / weights.sum()))]
    distance = (values - centres[0]) ** 2
    while len(centres) < clusters:
        mass = np.cumsum(weights * distance)
        if mass[-1] <= 0:
            break
        # 1 - random() is never 0: a draw of 0 could select a bucket without mass.
        drawn = int(np.searchsorted(mass, (1 - random.random()) * mass[-1], side="left"))
        centres.append(float(values[drawn]))
        distance = np.minimum(distance, (values - centres[-1]) ** 2)
    return np.sort(np.array(centres))


def kmeans(values: Array, weights: Array, clusters: int, seed: int = 0) -> Array:
    """Weighted k-means in one dimension: Lloyd's iterations from k-means++ seeds.

    values: ascending, distinct. weights: positive. Returns at most ``clusters`` centres, ascending, float64; fewer if
    there are fewer values.
    """
    if len(values) <= clusters:
        return values.copy()
    centres = seed_centres(values, weights, clusters, seed)
    mass = np.concatenate(([0.0], np.cumsum(weights)))
    moment = np.concatenate(([0.0], np.cumsum(weights * values)))
    edges = None
    for _ in range(ROUNDS):
        previous = edges
        edges = np.concatenate(([0], np.searchsorted(values, (centres[1:] + centres[:-1]) / 2), [len(values)]))
        if previous is not None and np.array_equal(edges, previous):
            break
        cluster_mass = np.diff(mass[edges])
        occupied = cluster_mass > 0
        centres = centres.copy()
        means = np.diff(moment[edges])[occupied] / cluster_mass[occupied]
        # Differences of cumulative sums lose precision. Clipping keeps a mean inside its cluster.
        first, last = values[edges[:-1][occupied]], values[edges[1:][occupied] - 1]
        centres[occupied] = np.clip(means, first, last)
    return centres


def codebook(histogram: LogHistogram, bins: int, dtype: torch.dtype = torch.float32) -> Array:
    """Return at most ``bins`` centres for the values of a histogram, ascending, float64. dtype: of these values."""
    values = bucket_values(dtype)[histogram.buckets].astype(np.float64)
    order = np.argsort(values, kind="stable")
    values, counts = values[order], histogram.counts[order]
    if len(values) == 0:
        return values
    return kmeans(values, sample_weights(values, counts), bins)


def bins_table(centres: Array, dtype: torch.dtype = torch.float32) -> NDArray[np.uint8]:
    """Return the level of the nearest centre for every bucket, uint8[65536]. dtype: of the values in the buckets."""
    middles = (centres[1:] + centres[:-1]) / 2
    with np.errstate(invalid="ignore"):
        bins = np.searchsorted(middles, np.nan_to_num(bucket_values(dtype).astype(np.float64)))
    return (FIRST_BIN + bins).astype(np.uint8)


def quantize(
    tensor: Tensor,
    histogram: LogHistogram,
    bins: int,
    magnitude: Thresholds = NO_THRESHOLDS,
    sensitivity: tuple[Tensor, Thresholds] | None = None,
) -> QuantizedTensor:
    """Quantize one tensor by k-means: return its levels, codebook and protected values.

    tensor: any shape, in ``QUANTIZABLE_DTYPES``, finite. histogram: ``LogHistogram.of(tensor)``. magnitude: thresholds
    by magnitude. sensitivity: ``|gradient · weight|``, float32, of the tensor's shape and on its device, with its
    thresholds; None to decide by magnitude alone.
    """
    by_sensitivity = None if sensitivity is None else (sensitivity[0], sensitivity_table(sensitivity[1]))

    def assign(bins_of_buckets: NDArray[np.uint8]) -> Tensor:
        table = table_for(tensor.dtype, magnitude_table(magnitude, bins_of_buckets))
        return kernels.for_device(tensor.device).table_levels(tensor, table, by_sensitivity)

    if sensitivity is None:
        # Only whole buckets are pruned or protected, so the histogram of the other values needs no second pass.
        rest = magnitude_table(magnitude, np.full(BUCKETS, FIRST_BIN, dtype=np.uint8))[histogram.buckets] == FIRST_BIN
        kept = LogHistogram(histogram.buckets[rest], histogram.counts[rest])
    else:
        outside = assign(np.full(BUCKETS, FIRST_BIN, dtype=np.uint8)) == FIRST_BIN
        kept = LogHistogram.of(tensor.detach().reshape(-1)[outside])
    centres = codebook(kept, bins, tensor.dtype)
    levels = assign(bins_table(centres, tensor.dtype) if len(centres) else np.full(BUCKETS, PRUNED, dtype=np.uint8))
    protected = protected_values(tensor, levels)
    return QuantizedTensor(
        tensor.dtype, tensor.shape, levels.cpu().numpy(), Centres(centres.astype(np.float32)), protected
    )
