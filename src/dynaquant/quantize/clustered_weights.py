"""All tensors of one checkpoint, quantized with thresholds that each layer type shares (method 1.2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaquant.quantize.kmeans import quantize
from dynaquant.quantize.partition import Configuration, Thresholds, thresholds
from dynaquant.state.roles import Label
from dynaquant.tensors.sketch import LogHistogram
from dynaquant.tensors.stored import QuantizedTensor


@dataclass(frozen=True)
class SketchedWeights:
    """The weights of a checkpoint with what every configuration needs to know of them, each by name.

    Missing from all of it are tensors that are to be stored exactly: those with infinities or NaNs, for each of which
    there is a note, empty and constant ones. ``sensitivities`` are histograms of ``|gradient · weight|``, for the
    weights that have a gradient; ``layer_types`` are ``Label.layer_type``.
    """

    weights: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    layer_types: Mapping[str, str]
    histograms: Mapping[str, LogHistogram]
    sensitivities: Mapping[str, LogHistogram]
    notes: list[str]

    def by_layer_type(self, histograms: Mapping[str, LogHistogram]) -> dict[str, LogHistogram]:
        """The histograms of all tensors of each layer type together."""
        return _totals((self.layer_types[name], histogram) for name, histogram in histograms.items())


def sketch_weights(
    weights: Mapping[str, Tensor], labels: Mapping[str, Label], gradients: Mapping[str, Tensor]
) -> SketchedWeights:
    """Goes through the weights once, ahead of quantizing them with one or many configurations.

    weights: tensors of dtypes in ``sketch.SKETCHED``, by name. gradients: float32, for as many of the weights as have
    one; sensitivity has no say about the others.
    """
    notes = []
    histograms: dict[str, LogHistogram] = {}
    for name, tensor in weights.items():
        histogram = LogHistogram.of(tensor)
        if histogram.nonfinite:
            notes.append(f"{name}: {histogram.nonfinite} infinite or NaN values, stored exactly")
        elif len(histogram.buckets) > 1:
            histograms[name] = histogram
    return SketchedWeights(
        weights={name: weights[name] for name in histograms},
        gradients={name: gradients[name] for name in histograms if name in gradients},
        layer_types={name: labels[name].layer_type for name in histograms},
        histograms=histograms,
        # Sensitivities are computed here and again on quantizing, rather than held for all tensors at once.
        sensitivities={
            name: LogHistogram.of(_sensitivity(weights[name], gradients[name]))
            for name in histograms
            if name in gradients
        },
        notes=notes,
    )


def quantize_weights(sketched: SketchedWeights, configuration: Configuration) -> dict[str, QuantizedTensor]:
    """Quantizes the weights of a checkpoint, by name; a pure function of its arguments."""
    use = configuration.uses_sensitivity and bool(sketched.sensitivities)
    magnitude_pruned, sensitivity_pruned, magnitude_protected, sensitivity_protected = _fractions(configuration, use)
    by_magnitude = {
        kind: thresholds(total, magnitude_pruned, magnitude_protected)
        for kind, total in sketched.by_layer_type(sketched.histograms).items()
    }
    by_sensitivity = {
        kind: thresholds(total, sensitivity_pruned, sensitivity_protected)
        for kind, total in sketched.by_layer_type(sketched.sensitivities).items()
    }
    quantized = {}
    for name, histogram in sketched.histograms.items():
        kind, weight = sketched.layer_types[name], sketched.weights[name]
        sensitivity: tuple[Tensor, Thresholds] | None = None
        if use and name in sketched.gradients:
            sensitivity = _sensitivity(weight, sketched.gradients[name]), by_sensitivity[kind]
        bins = configuration.embedding_bins if kind == "embedding" else configuration.bins
        quantized[name] = quantize(weight, histogram, bins, by_magnitude[kind], sensitivity)
    return quantized


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
    """``|gradient · weight|``, the first-order Taylor term of the loss (method 1.1), float32, where the weight is."""
    return gradient.to(weight.device, torch.float32, copy=True).mul_(weight.detach().to(torch.float32)).abs_()


def _totals(histograms: Iterable[tuple[str, LogHistogram]]) -> dict[str, LogHistogram]:
    totals: dict[str, LogHistogram] = {}
    for layer_type, histogram in histograms:
        totals[layer_type] = totals.get(layer_type, LogHistogram.empty()) + histogram
    return totals
