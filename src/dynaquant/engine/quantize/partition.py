"""Decide which weights are pruned, protected or quantized: thresholds from histograms (method 1.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynaquant import _native
from dynaquant.engine.tensors.codebook import PROTECTED, PRUNED
from dynaquant.engine.tensors.log_histogram import MAGNITUDES, LogHistogram


@dataclass(frozen=True)
class Thresholds:
    """Magnitude buckets: those below ``prune_below`` are pruned, those from ``protect_from`` on are protected."""

    prune_below: int
    protect_from: int


NO_THRESHOLDS = Thresholds(0, MAGNITUDES)


def thresholds(histogram: LogHistogram, pruned: float, protected: float) -> Thresholds:
    """Return the thresholds that prune and protect at most these fractions of the values.

    The fractions are upper bounds, because a threshold cannot divide a bucket. Exact zeros count as pruned.
    """
    cumulative = np.cumsum(histogram.magnitudes())
    total = int(cumulative[-1])
    below = np.concatenate(([0], cumulative))
    prune_below = int(np.searchsorted(below, pruned * total, side="right")) - 1
    protect_from = int(np.searchsorted(below, total - protected * total, side="left"))
    return Thresholds(min(prune_below, MAGNITUDES), min(max(protect_from, prune_below), MAGNITUDES))


def magnitude_table(limits: Thresholds, bins: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the level of every bucket, uint8[65536]: pruned, protected or from ``bins``. Exact zeros are pruned."""
    table = bins.copy()
    for sign in (0, MAGNITUDES):
        table[sign : sign + max(limits.prune_below, 1)] = PRUNED
        table[sign + limits.protect_from : sign + MAGNITUDES] = PROTECTED
    return table


def sensitivity_table(limits: Thresholds) -> NDArray[np.uint8]:
    """Return pruned, protected or ``UNDECIDED`` for each bucket of ``|gradient · weight|``, uint8[65536]."""
    table = np.full(2 * MAGNITUDES, _native.UNDECIDED, dtype=np.uint8)
    table[: limits.prune_below] = PRUNED
    table[limits.protect_from : MAGNITUDES] = PROTECTED
    return table
