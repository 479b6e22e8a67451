"""Which weights are protected, pruned or quantized (method 1.2): thresholds from histograms, as bucket numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dynaquant import _native
from dynaquant.tensors.sketch import MAGNITUDES, LogHistogram
from dynaquant.tensors.stored import MAX_BINS, PROTECTED, PRUNED

Metric = Literal["magnitude", "sensitivity"]


@dataclass(frozen=True)
class Configuration:
    """The knobs of the quantizer for one checkpoint (method 1.4).

    bins: clusters per tensor, 1 to 254; embedding_bins: the same for embedding layers.
    pruned: fraction of the weights of a layer type that becomes zero, in [0, 1).
    pruning_metric: what makes a weight unimportant: its magnitude or its sensitivity ``|gradient · weight|``.
    protected: fraction of the weights of a layer type that is kept in 16 bits, in [0, 1).
    protection_metric: what makes a weight important. With ``"both"`` half of the fraction goes to the weights of the
    highest magnitude and half to those of the highest sensitivity.

    Gradients are recorded only when one of the metrics asks for sensitivity. Why 32 bins: docs/architecture.md,
    "After a restore". Raises ValueError for values out of range.
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
        """Whether gradients are needed."""
        return self.pruning_metric == "sensitivity" or self.protection_metric != "magnitude"


@dataclass(frozen=True)
class Thresholds:
    """Magnitude buckets: below ``prune_below`` is pruned, from ``protect_from`` on is protected."""

    prune_below: int
    protect_from: int


NO_THRESHOLDS = Thresholds(0, MAGNITUDES)


def thresholds(histogram: LogHistogram, pruned: float, protected: float) -> Thresholds:
    """The thresholds that prune and protect at most these fractions of the values, up to the width of a bucket.

    A bucket goes as a whole, so the fractions are upper bounds. Values that are exactly zero count as pruned.
    """
    cumulative = np.cumsum(histogram.magnitudes())
    total = int(cumulative[-1])
    below = np.concatenate(([0], cumulative))
    prune_below = int(np.searchsorted(below, pruned * total, side="right")) - 1
    protect_from = int(np.searchsorted(below, total - protected * total, side="left"))
    return Thresholds(min(prune_below, MAGNITUDES), min(max(protect_from, prune_below), MAGNITUDES))


def magnitude_table(limits: Thresholds, bins: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Level of every bucket, uint8[65536]: ``bins`` where neither limit holds. Exact zeros are always pruned."""
    table = bins.copy()
    for sign in (0, MAGNITUDES):
        table[sign : sign + max(limits.prune_below, 1)] = PRUNED
        table[sign + limits.protect_from : sign + MAGNITUDES] = PROTECTED
    return table


def sensitivity_table(limits: Thresholds) -> NDArray[np.uint8]:
    """What sensitivity says about a weight in each bucket of ``|gradient · weight|``, uint8[65536]."""
    table = np.full(2 * MAGNITUDES, _native.NO_SAY, dtype=np.uint8)
    table[: limits.prune_below] = PRUNED
    table[limits.protect_from : MAGNITUDES] = PROTECTED
    return table
