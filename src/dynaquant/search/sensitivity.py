"""Measures how sensitive a metric is to each tensor, for models without recorded gradients."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from dynaquant.engine.forms.form import dequantize
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.quantize.grid_weights import GridWeights
from dynaquant.engine.quantize.knobs import GridConfiguration
from dynaquant.search.failures import attempt

PROBE_DISTORTION = 0.02
"""Share of a tensor's squares that is lost when it is quantized alone: about that of 4 bits a value."""
MOST_GROUPS = 32
"""Maximum number of evaluations in one measurement."""
SMALL = 1e-3
"""Tensors with a smaller share of all values are quantized together."""
LEAST_SENSITIVITY = 0.01
"""Lower bound, relative to the median: a tensor whose quantization happens to improve the metric still counts."""


def groups_of(sizes: Mapping[str, int]) -> list[list[str]]:
    """Return which tensors are quantized together. sizes: numbers of values by name, in the order of the model.

    Large tensors are alone. If there are too many, neighbours whose names differ only by numbers are together. All
    small tensors are one group.
    """
    total = sum(sizes.values())
    kinds: dict[tuple[bool, str], list[str]] = {}
    for name, size in sizes.items():
        kinds.setdefault((size < SMALL * total, re.sub(r"\d+", "#", name)), []).append(name)
    small = [name for (is_small, _), names in kinds.items() if is_small for name in names]
    large = [names for (is_small, _), names in kinds.items() if not is_small]
    per_group = 1
    while sum(math.ceil(len(names) / per_group) for names in large) >= MOST_GROUPS and per_group < len(sizes):
        per_group += 1
    groups = [names[i : i + per_group] for names in large for i in range(0, len(names), per_group)]
    return groups + ([small] if small else [])


def measure_sensitivity(
    weights: GridWeights,
    degradation: Callable[[Mapping[str, QuantizedTensor]], float],
    report_progress: Callable[[str], None],
) -> dict[str, float]:
    """Return ``F`` of every weight, up to a common factor: the degradation per squared error of its values.

    weights: with grid steps by the size of each tensor (no ``F`` known). degradation: of the model with some weights
    quantized and the others unchanged. If it raises, the sensitivity of that group is unknown, unless the exception is
    not about the weights (``failures.ends_save``); then it is raised. report_progress: gets a line for each group.

    A group counts like the median if its sensitivity is unknown, or if the metric does not depend on it.
    """
    configuration = GridConfiguration(weights.scale_exponent_for(PROBE_DISTORTION))
    quantized = weights.quantize(configuration)
    groups = groups_of({name: weights.weights[name].numel() for name in quantized})
    sensitivities: list[float | None] = []
    for i, names in enumerate(groups):
        report_progress(f"measuring the metric's sensitivity to each tensor: {i + 1} of {len(groups)}")
        sensitivities.append(_sensitivity(weights, {name: quantized[name] for name in names}, degradation))
    return _mean_squares(weights, groups, sensitivities)


def _sensitivity(
    weights: GridWeights,
    quantized: Mapping[str, QuantizedTensor],
    degradation: Callable[[Mapping[str, QuantizedTensor]], float],
) -> float | None:
    """Return the degradation per relative squared error of a group; None if it is unknown or zero."""
    worse, _ = attempt(lambda: degradation(quantized))
    if worse is None:
        return None
    relative_error = 0.0
    for name, stored in quantized.items():
        error = dequantize(stored).to(torch.float32) - weights.weights[name].to(torch.float32)
        relative_error += float(torch.linalg.vector_norm(error)) ** 2 / _mean_square(weights, name)
    return worse / relative_error if worse != 0 and math.isfinite(worse) and relative_error > 0 else None


def _mean_squares(
    weights: GridWeights, groups: Sequence[Sequence[str]], sensitivities: Sequence[float | None]
) -> dict[str, float]:
    positive = [value for value in sensitivities if value is not None and value > 0]
    if not positive:
        return {}
    median = statistics.median(positive)
    return {
        name: max(median if value is None else value, LEAST_SENSITIVITY * median) / _mean_square(weights, name)
        for names, value in zip(groups, sensitivities, strict=True)
        for name in names
    }


def _mean_square(weights: GridWeights, name: str) -> float:
    return weights.squares[name] / weights.weights[name].numel()
