"""Moments of an optimizer in a few bits, as coarse as the next update allows (method 2.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from dynaquant.codebook import LOWEST_RUNG, RUNGS_PER_OCTAVE, LogGrid
from dynaquant.quantize.grid import quantize
from dynaquant.quantized import FIRST_BIN, MAX_BINS, Quantized, QuantizedTensor, RankOne, Scaled, dequantize

FACTOR_PACE = 1
"""Rungs between the values of a rank-one tensor's rows and columns."""
SECOND_PACES = (8, 4, 2)
"""Rungs between the values of a second moment, coarsest first: 2, 1 and 1/2 octaves."""
FIRST_RUNGS = tuple(range(12, -25, -2))
"""Steps of a first moment in its unit, coarsest first: from 8 to 1/64 in half octaves."""
EPSILON = 1e-8
"""What optimizers add to the root of the second moment, so that the update of a weight without gradients is none."""


def log_quantize(tensor: Tensor, pace: int) -> QuantizedTensor | None:
    """A tensor of values from zero on, each at the nearest power of ``2^(pace/4)``; None where they span too many."""
    values = tensor.detach().to("cpu", torch.float32).numpy().reshape(-1)
    positive = values > 0
    with np.errstate(divide="ignore"):
        exponents = np.rint(np.log2(values, where=positive, out=np.zeros_like(values)) * (RUNGS_PER_OCTAVE / pace))
    exponents = np.maximum(exponents, math.ceil(LOWEST_RUNG / pace)).astype(np.int64)
    first = int(exponents[positive].min()) if positive.any() else 0
    bins = int(exponents[positive].max()) - first + 1 if positive.any() else 0
    if bins > MAX_BINS:
        return None
    levels = np.where(positive, exponents - first + FIRST_BIN, 0).astype(np.uint8)
    return QuantizedTensor(tensor.dtype, tensor.shape, levels, LogGrid(pace, first, bins), np.zeros(0, np.uint16))


def rank_one(tensor: Tensor) -> RankOne | None:
    """A second moment as row mean × column mean / mean; None where it has fewer than two dimensions or is zero."""
    if tensor.ndim < 2:
        return None
    matrix = tensor.detach().to("cpu", torch.float64).reshape(tensor.shape[0], -1)
    root = matrix.mean().sqrt()
    if not root > 0:
        return None
    rows = log_quantize((matrix.mean(1) / root).to(torch.float32), FACTOR_PACE)
    columns = log_quantize((matrix.mean(0) / root).to(torch.float32), FACTOR_PACE)
    if rows is None or columns is None:
        return None
    return RankOne(tensor.dtype, tensor.shape, rows, columns)


def update(first: Tensor, second: Tensor) -> Tensor:
    """The direction of the next update, ``m / (sqrt(v) + ε)``."""
    return first / (second.sqrt() + EPSILON)


def relative_error(exact: Tensor, stored: Tensor) -> float:
    """``‖stored - exact‖ / ‖exact‖``; 0 where both are zero, infinite where only the exact one is or for no number."""
    distance, norm = float(torch.linalg.vector_norm(stored - exact)), float(torch.linalg.vector_norm(exact))
    if not math.isfinite(distance):
        return math.inf
    return distance / norm if norm else (0.0 if distance == 0 else math.inf)


def second_moment(second: Tensor, tolerance: float) -> QuantizedTensor | RankOne | None:
    """The cheapest form whose effect on an update of ``1 / sqrt(v)`` stays in tolerance; None: store it exactly.

    The effect is the root mean square of ``sqrt(v / v̂) - 1`` over the elements that are not zero.
    """
    values = second.detach().to("cpu", torch.float32)
    moved = values > 0

    def effect(stored: Quantized) -> float:
        decoded = dequantize(stored).to(torch.float32)
        if not bool((decoded[moved] > 0).all()) or bool(
            (decoded[~moved] != 0).any() and not isinstance(stored, RankOne)
        ):
            return math.inf
        ratio = (values[moved] / decoded[moved]).sqrt() - 1
        return float(ratio.square().mean().sqrt()) if ratio.numel() else 0.0

    def forms() -> Iterator[QuantizedTensor | RankOne | None]:
        yield rank_one(second)
        for pace in SECOND_PACES:
            yield log_quantize(second, pace)

    return next((form for form in forms() if form is not None and effect(form) <= tolerance), None)


def first_moment(
    first: Tensor, second: Tensor, stored_second: QuantizedTensor | RankOne, second_name: str, tolerance: float
) -> Scaled | None:
    """The coarsest first moment with which the next update stays in tolerance; None: store it exactly.

    second: as it is; stored_second: as it is stored, which is what the first moment is stored in units of.
    """
    exact = first.detach().to("cpu", torch.float32)
    root = dequantize(stored_second).to(torch.float32).sqrt()
    if bool((exact[root == 0] != 0).any()):
        return None
    units = torch.where(root > 0, exact / root, torch.zeros(()))
    wanted = update(exact, second.detach().to("cpu", torch.float32))

    def stored(rung: int) -> Scaled:
        return Scaled(_as(quantize(units, rung), first.dtype), stored_second, second_name)

    def effect(scaled: Scaled) -> float:
        return relative_error(wanted, update(dequantize(scaled).to(torch.float32), root.square()))

    return _coarsest(stored, effect, tolerance)


def momentum(first: Tensor, tolerance: float) -> QuantizedTensor | None:
    """The coarsest first moment of an optimizer without second ones; None: store it exactly.

    Its update is the moment itself, so the step goes by its root mean square.
    """
    exact = first.detach().to("cpu", torch.float32)
    size = float(exact.square().mean().sqrt()) if exact.numel() else 0.0
    if not size > 0:
        return None
    unit = round(RUNGS_PER_OCTAVE * math.log2(size))

    def stored(rung: int) -> QuantizedTensor:
        return quantize(first, max(unit + rung, LOWEST_RUNG))

    def effect(quantized: QuantizedTensor) -> float:
        return relative_error(exact, dequantize(quantized).to(torch.float32))

    return _coarsest(stored, effect, tolerance)


T = TypeVar("T")


def _coarsest(stored: Callable[[int], T], effect: Callable[[T], float], tolerance: float) -> T | None:
    return next((form for rung in FIRST_RUNGS if effect(form := stored(rung)) <= tolerance), None)


def _as(quantized: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    return QuantizedTensor(dtype, quantized.shape, quantized.levels, quantized.codebook, quantized.protected)
