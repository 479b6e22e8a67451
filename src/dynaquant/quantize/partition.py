"""Decide which weights are pruned, protected or quantized: thresholds from histograms (method 1.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dynaquant import _native
from dynaquant.tensors.log_histogram import MAGNITUDES, LogHistogram
from dynaquant.tensors.stored import MAX_BINS, PROTECTED, PRUNED

Metric = Literal["magnitude", "sensitivity"]


@dataclass(frozen=True)
class Configuration:
    """The configuration of the k-means quantizer for one checkpoint.

    bins: clusters per tensor, 1 to 254. embedding_bins: the same for embedding layers.
    pruned: fraction of the weights of a layer type that become zero, in [0, 1).
    pruning_metric: prune the weights of the lowest magnitude, or of the lowest sensitivity ``|gradient · weight|``.
    protected: fraction of the weights of a layer type that stay in 16 bits, in [0, 1).
    protection_metric: protect the weights of the highest magnitude, or of the highest sensitivity. ``"both"`` gives
    half of the fraction to each.

    Gradients are recorded only if one of the metrics is sensitivity. docs/decisions.md says why the default is 32 bins.

    Raises ValueError if a field is out of range.
    """

    bins: int = 32
    embedding_bins: int = 32
    pruned: float = 0.1
    pruning_metric: Metric = "magnitude"
    protected: float = 0.005
    protection_metric: Metric | Literal["both"] = "both"

    def __post_init__(self) -> None:
        if not (1 <= self.bins <= MAX_BINS and 1 <= self.embedding_bins <= MAX_BINS):
            raise ValueError(f"bins must be 1 to {MAX_BINS}: {self}")
        if not (0 <= self.pruned < 1 and 0 <= self.protected < 1):
            raise ValueError(f"pruned and protected are fractions from 0 to below 1: {self}")
        if self.pruning_metric not in ("magnitude", "sensitivity"):
            raise ValueError(f"pruning_metric must be 'magnitude' or 'sensitivity', not {self.pruning_metric!r}")
        if self.protection_metric not in ("magnitude", "sensitivity", "both"):
            raise ValueError(
                f"protection_metric must be 'magnitude', 'sensitivity' or 'both', not {self.protection_metric!r}"
            )

    @property
    def uses_sensitivity(self) -> bool:
        """Whether the configuration needs gradients."""
        return self.pruning_metric == "sensitivity" or self.protection_metric != "magnitude"


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
