"""Quantize all weights of a checkpoint by k-means. The layers of one type share their thresholds (method 1.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.kmeans import quantize
from dynaquant.engine.quantize.knobs import Configuration
from dynaquant.engine.quantize.partition import Thresholds, thresholds
from dynaquant.engine.tensors.log_histogram import LogHistogram


@dataclass(frozen=True)
class KMeansWeights:
    """The weights of a checkpoint, prepared to be quantized in any configuration, by name.

    Tensors that must be stored exactly are left out: empty ones, constant ones, and those with infinities or NaNs.
    ``notes`` has a line for each tensor with infinities or NaNs.

    layer_types: from ``Label.layer_type``. histograms: of the weights. sensitivities: histograms of
    ``|gradient · weight|``, for the weights that have a gradient.
    """

    weights: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    layer_types: Mapping[str, str]
    histograms: Mapping[str, LogHistogram]
    sensitivities: Mapping[str, LogHistogram]
    notes: list[str]

    def by_layer_type(self, histograms: Mapping[str, LogHistogram]) -> dict[str, LogHistogram]:
        """Return one histogram for each layer type: the sum over its tensors."""
        totals: dict[str, LogHistogram] = {}
        for name, histogram in histograms.items():
            kind = self.layer_types[name]
            totals[kind] = totals.get(kind, LogHistogram.empty()) + histogram
        return totals


def kmeans_weights(
    weights: Mapping[str, Tensor], labels: Mapping[str, Label], gradients: Mapping[str, Tensor]
) -> KMeansWeights:
    """Read the weights once, to prepare for quantizing them with one or more configurations.

    weights: of ``QUANTIZABLE_DTYPES``, by name. gradients: float32, for some or all weights. Sensitivity does not
    affect weights without a gradient.
    """
    notes = []
    histograms: dict[str, LogHistogram] = {}
    for name, tensor in weights.items():
        histogram = LogHistogram.of(tensor)
        if histogram.nonfinite:
            notes.append(f"{name}: {histogram.nonfinite} infinite or NaN values, stored exactly")
        elif len(histogram.buckets) > 1:
            histograms[name] = histogram
    return KMeansWeights(
        weights={name: weights[name] for name in histograms},
        gradients={name: gradients[name] for name in histograms if name in gradients},
        layer_types={name: labels[name].layer_type for name in histograms},
        histograms=histograms,
        # Sensitivities are computed here and again on quantizing: holding all of them at once would take much memory.
        sensitivities={
            name: LogHistogram.of(_sensitivity(weights[name], gradients[name]))
            for name in histograms
            if name in gradients
        },
        notes=notes,
    )


def quantize_weights(prepared: KMeansWeights, configuration: Configuration) -> dict[str, QuantizedTensor]:
    """Return the quantized weights, by name; a pure function."""
    use = configuration.uses_sensitivity and bool(prepared.sensitivities)
    magnitude_pruned, sensitivity_pruned, magnitude_protected, sensitivity_protected = _fractions(configuration, use)
    by_magnitude = {
        kind: thresholds(total, magnitude_pruned, magnitude_protected)
        for kind, total in prepared.by_layer_type(prepared.histograms).items()
    }
    by_sensitivity = {
        kind: thresholds(total, sensitivity_pruned, sensitivity_protected)
        for kind, total in prepared.by_layer_type(prepared.sensitivities).items()
    }
    quantized = {}
    for name, histogram in prepared.histograms.items():
        kind, weight = prepared.layer_types[name], prepared.weights[name]
        sensitivity: tuple[Tensor, Thresholds] | None = None
        if use and name in prepared.gradients:
            sensitivity = _sensitivity(weight, prepared.gradients[name]), by_sensitivity[kind]
        bins = configuration.embedding_bins if kind == "embedding" else configuration.bins
        quantized[name] = quantize(weight, histogram, bins, by_magnitude[kind], sensitivity)
    return quantized


def _fractions(configuration: Configuration, gradients: bool) -> tuple[float, float, float, float]:
    """Return the fractions to prune by magnitude and by sensitivity, and to protect by magnitude and by sensitivity."""
    pruned, protected = configuration.pruned, configuration.protected
    prune_by_sensitivity = gradients and configuration.pruning_metric == "sensitivity"
    to_sensitivity = {"magnitude": 0.0, "both": protected / 2, "sensitivity": protected}
    sensitivity_protected = to_sensitivity[configuration.protection_metric] if gradients else 0.0
    return (
        0.0 if prune_by_sensitivity else pruned,
        pruned if prune_by_sensitivity else 0.0,
        protected - sensitivity_protected,
        sensitivity_protected,
    )


def _sensitivity(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return ``|gradient · weight|``, float32, on the weight's device: the first-order Taylor term (method 1.1)."""
    return gradient.to(weight.device, torch.float32, copy=True).mul_(weight.detach().to(torch.float32)).abs_()
