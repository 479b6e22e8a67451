"""Predicts the size of a configuration before any weight is quantized, from the entropy of its levels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dynaquant.engine.quantize.kmeans import bins_table, codebook
from dynaquant.engine.quantize.kmeans_weights import KMeansWeights
from dynaquant.engine.quantize.knobs import Configuration
from dynaquant.engine.quantize.partition import Thresholds, thresholds
from dynaquant.engine.tensors.codebook import PROTECTED, PRUNED
from dynaquant.engine.tensors.log_histogram import MAGNITUDES


class SizeModel:
    """Predicts how many bytes the weights of a checkpoint take, from their histograms.

    A tensor takes the entropy of its levels, and two bytes for every outlier. To save time, this uses the codebook
    of all values, and prunes and protects by magnitude, whatever the pruning metric. This predicts a keyframe. A delta
    takes less, by a factor that does not matter when configurations are compared.
    """

    def __init__(self, weights: KMeansWeights) -> None:
        self._weights = weights
        self._totals = weights.by_layer_type(weights.histograms)
        self._thresholds: dict[tuple[str, float, float], Thresholds] = {}
        self._bins: dict[tuple[str, int], NDArray[np.uint8]] = {}
        self._predicted: dict[Configuration, float] = {}

    def predict(self, configuration: Configuration) -> float:
        """Return the bytes of the coded weights."""
        if configuration not in self._predicted:
            self._predicted[configuration] = sum(self._bytes(name, configuration) for name in self._weights.histograms)
        return self._predicted[configuration]

    def _bytes(self, name: str, configuration: Configuration) -> float:
        histogram, kind = self._weights.histograms[name], self._weights.layer_types[name]
        key = kind, configuration.pruned, configuration.protected
        if key not in self._thresholds:
            self._thresholds[key] = thresholds(self._totals[kind], *key[1:])
        limits = self._thresholds[key]
        magnitudes = histogram.buckets % MAGNITUDES
        levels = self._bins_of_buckets(
            name, configuration.embedding_bins if kind == "embedding" else configuration.bins
        ).copy()
        levels[magnitudes < max(limits.prune_below, 1)] = PRUNED
        levels[magnitudes >= limits.protect_from] = PROTECTED
        counts = np.bincount(levels, weights=histogram.counts, minlength=2)
        share = counts[counts > 0] / counts.sum()
        bits = -counts.sum() * (share * np.log2(share)).sum()
        return float(bits / 8 + 2 * counts[PROTECTED])

    def _bins_of_buckets(self, name: str, bins: int) -> NDArray[np.uint8]:
        """Return the level of every bucket that occurs in a tensor."""
        if (name, bins) not in self._bins:
            histogram, dtype = self._weights.histograms[name], self._weights.weights[name].dtype
            self._bins[name, bins] = bins_table(codebook(histogram, bins, dtype), dtype)[histogram.buckets]
        return self._bins[name, bins]
