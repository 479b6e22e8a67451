"""How much a metric minds each tensor, found by trying, for models that come without a training and its gradients."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from dynaquant.quantize.grid import GridConfiguration
from dynaquant.quantize.grid_weights import GridWeights
from dynaquant.search.failures import attempt
from dynaquant.tensors.dequantize import dequantize
from dynaquant.tensors.stored import QuantizedTensor

PROBE = 0.02
"""The share of a tensor, by squares, that is lost when it is tried: about what a checkpoint of 4 bits a value loses."""
MOST_GROUPS = 32
"""Evaluations that probing takes at most."""
SMALL = 1e-3
"""Tensors of a smaller share of all values are tried together."""
LEAST = 0.01
"""Of the median sensitivity: no tensor counts for less, as one that happens to make the metric better would."""


def groups_of(sizes: Mapping[str, int]) -> list[list[str]]:
    """Which tensors are tried together. sizes: numbers of values by name, in the order of the model.

    Large ones alone, or with their neighbours of the same name but for numbers where there are too many; small ones of
    the same name together.
    """
    total = sum(sizes.values())
    kinds: dict[tuple[bool, str], list[str]] = {}
    for name, size in sizes.items():
        kinds.setdefault((size < SMALL * total, re.sub(r"\d+", "#", name)), []).append(name)
    small = [name for (is_small, _), names in kinds.items() if is_small for name in names]
    large = [names for (is_small, _), names in kinds.items() if not is_small]
    together = 1
    while sum(math.ceil(len(names) / together) for names in large) >= MOST_GROUPS and together < len(sizes):
        together += 1
    groups = [names[i : i + together] for names in large for i in range(0, len(names), together)]
    return groups + ([small] if small else [])


def probe(
    weights: GridWeights,
    degradation: Callable[[Mapping[str, QuantizedTensor]], float],
    tell: Callable[[str], None],
) -> dict[str, float]:
    """F of every weight, up to a common factor: how much worse the metric gets for a squared movement of its values.

    weights: with steps by the size of each tensor (no F known). degradation: of the metric with some weights quantized
    and the others as they are; what it raises counts as not known, unless it
    is no matter of the weights (``failures.ended_by``). tell: is told how far it has come.

    A group that the metric does not depend on, or which cannot be told, counts as the median does.
    """
    configuration = GridConfiguration(weights.scale_exponent_for(PROBE))
    quantized = weights.quantize(configuration)
    groups = groups_of({name: weights.weights[name].numel() for name in quantized})
    found: list[float | None] = []
    for i, names in enumerate(groups):
        tell(f"measuring how much each tensor matters: {i + 1} of {len(groups)}")
        found.append(_sensitivity(weights, {name: quantized[name] for name in names}, degradation))
    return _fisher(weights, groups, found)


def _sensitivity(
    weights: GridWeights,
    quantized: Mapping[str, QuantizedTensor],
    degradation: Callable[[Mapping[str, QuantizedTensor]], float],
) -> float | None:
    """Degradation for a relative squared movement of 1 of every tensor of a group; None where it cannot be told."""
    worse, _ = attempt(lambda: degradation(quantized))
    if worse is None:
        return None
    moved = 0.0
    for name, stored in quantized.items():
        error = dequantize(stored).to(torch.float32) - weights.weights[name].to(torch.float32)
        moved += float(torch.linalg.vector_norm(error)) ** 2 / _mean_square(weights, name)
    return worse / moved if worse != 0 and math.isfinite(worse) and moved > 0 else None


def _fisher(weights: GridWeights, groups: Sequence[Sequence[str]], found: Sequence[float | None]) -> dict[str, float]:
    positive = [value for value in found if value is not None and value > 0]
    if not positive:
        return {}
    median = statistics.median(positive)
    return {
        name: max(median if value is None else value, LEAST * median) / _mean_square(weights, name)
        for names, value in zip(groups, found, strict=True)
        for name in names
    }


def _mean_square(weights: GridWeights, name: str) -> float:
    return weights.squares[name] / weights.weights[name].numel()
