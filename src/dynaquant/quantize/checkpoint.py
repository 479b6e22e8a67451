"""All tensors of one checkpoint, quantized with thresholds that each layer type shares (method 1.2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dynaquant.quantize.kmeans import quantize
from dynaquant.quantize.partition import Configuration, Thresholds, thresholds
from dynaquant.quantized import QuantizedTensor
from dynaquant.roles import Label
from dynaquant.sketch import LogHistogram


def quantize_weights(
    weights: Mapping[str, Tensor],
    labels: Mapping[str, Label],
    gradients: Mapping[str, Tensor],
    configuration: Configuration,
) -> tuple[dict[str, QuantizedTensor], list[str]]:
    """Quantizes the weights of a checkpoint; a pure function of its arguments.

    weights: tensors of dtypes in ``sketch.SKETCHED``, by name. gradients: float32, for as many of the weights as have
    one; sensitivity has no say about the others.

    Returns the quantized tensors, and a note for every tensor that cannot be quantized because it has infinities or
    NaNs. Those tensors, empty ones and constant ones are missing from the result: they are to be stored exactly.
    """
    notes = []
    histograms: dict[str, LogHistogram] = {}
    for name, tensor in weights.items():
        histogram = LogHistogram.of(tensor)
        if histogram.nonfinite:
            notes.append(f"{name}: {histogram.nonfinite} infinite or NaN values, stored exactly")
        elif len(histogram.buckets) > 1:
            histograms[name] = histogram

    sensitive = [name for name in histograms if configuration.uses_sensitivity and name in gradients]
    magnitude_pruned, sensitivity_pruned, magnitude_protected, sensitivity_protected = _fractions(
        configuration, bool(sensitive)
    )
    by_magnitude = _thresholds(
        ((labels[name].layer_type, histogram) for name, histogram in histograms.items()),
        magnitude_pruned,
        magnitude_protected,
    )
    # Sensitivities are computed twice, here and below, rather than held for all tensors at once.
    by_sensitivity = _thresholds(
        (
            (labels[name].layer_type, LogHistogram.of(_sensitivity(weights[name], gradients[name])))
            for name in sensitive
        ),
        sensitivity_pruned,
        sensitivity_protected,
    )
    quantized = {}
    for name, histogram in histograms.items():
        kind = labels[name].layer_type
        sensitivity = (
            (_sensitivity(weights[name], gradients[name]), by_sensitivity[kind]) if name in sensitive else None
        )
        bins = configuration.embedding_bins if kind == "embedding" else configuration.bins
        quantized[name] = quantize(weights[name], histogram, bins, by_magnitude[kind], sensitivity)
    return quantized, notes


def _fractions(configuration: Configuration, gradients: bool) -> tuple[float, float, float, float]:
    """Pruned by magnitude and by sensitivity, protected by magnitude and by sensitivity.

    Where there are no gradients, magnitude stands in for sensitivity.
    """
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
    """``|gradient · weight|``, the first-order Taylor term of the loss (method 1.1), float32 on the host."""
    return (weight.detach().to("cpu", torch.float32) * gradient).abs()


def _thresholds(
    histograms: Iterable[tuple[str, LogHistogram]], pruned: float, protected: float
) -> dict[str, Thresholds]:
    """The thresholds of each layer type, from the layer types and histograms of its tensors."""
    totals: dict[str, LogHistogram] = {}
    for layer_type, histogram in histograms:
        totals[layer_type] = totals.get(layer_type, LogHistogram.empty()) + histogram
    return {layer_type: thresholds(total, pruned, protected) for layer_type, total in totals.items()}
