"""Moments of an optimizer in a few bits, as coarse as the next update allows (method 2.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import _native
from dynaquant.codebook import HIGHEST_RUNG, HIGHEST_STEP, LOWEST_RUNG, RUNGS_PER_OCTAVE, Grid, LogGrid
from dynaquant.quantize.grid import quantize
from dynaquant.quantized import FIRST_BIN, MAX_BINS, PRUNED, QuantizedTensor, RankOne, Scaled, dequantize
from dynaquant.sketch import BUCKETS, MAGNITUDES, LogHistogram, bits_of, bucket_values, table_for

FACTOR_PACE = 1
"""Rungs between the values of a rank-one tensor's rows and columns."""
SECOND_PACES = (8, 4, 2)
"""Rungs between the values of a second moment, coarsest first: 2, 1 and 1/2 octaves."""
FIRST_RUNGS = tuple(range(12, -25, -2))
"""Steps of a first moment in its unit, coarsest first: from 8 to 1/64 in half octaves."""
SAMPLED = 65_536
"""Elements that the effect of a form is judged by."""
SPREAD = 2_654_435_761
EPSILON = 1e-8
"""What optimizers add to the root of the second moment, so that the update of a weight without gradients is none."""


def log_quantize(tensor: Tensor, pace: int) -> QuantizedTensor | None:
    """A tensor of values from zero on, each at the nearest power of ``2^(pace/4)``; None where they span too many.

    By buckets (``sketch``), so a value within 0.4 % of the middle between two powers may go to either.
    """
    buckets = LogHistogram.of(tensor).buckets
    exponents = _exponents(pace)
    occurring = exponents[buckets[buckets > 0]]
    first = int(occurring.min()) if len(occurring) else 0
    bins = int(occurring.max()) - first + 1 if len(occurring) else 0
    if bins > MAX_BINS:
        return None
    table = np.clip(exponents - first + FIRST_BIN, 0, 255).astype(np.uint8)
    table[[0, MAGNITUDES]] = PRUNED
    levels = np.empty(tensor.numel(), dtype=np.uint8)
    nothing, no_say = np.zeros(0, dtype=np.uint32), np.full(BUCKETS, _native.NO_SAY, dtype=np.uint8)
    _native.assign_levels(bits_of(tensor), table_for(tensor.dtype, table), nothing, no_say, levels)
    return QuantizedTensor(tensor.dtype, tensor.shape, levels, LogGrid(pace, first, bins), np.zeros(0, np.uint16))


@cache
def _exponents(pace: int) -> NDArray[np.int64]:
    """The nearest multiple of ``pace`` rungs for what each bucket stands for, where that is above zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rungs = np.log2(bucket_values().astype(np.float64)) * RUNGS_PER_OCTAVE
    exponents = np.clip(np.rint(np.nan_to_num(rungs) / pace), math.ceil(LOWEST_RUNG / pace), HIGHEST_RUNG // pace)
    result: NDArray[np.int64] = exponents.astype(np.int64)
    return result


def rank_one(tensor: Tensor) -> RankOne | None:
    """A second moment as row mean × column mean / mean; None where it has fewer than two dimensions or is zero."""
    if tensor.ndim < 2:
        return None
    matrix = tensor.detach().to("cpu", torch.float32).reshape(tensor.shape[0], -1)
    row_means, column_means = matrix.mean(1), matrix.mean(0)
    root = row_means.mean().sqrt()
    if not root > 0:
        return None
    rows, columns = log_quantize(row_means / root, FACTOR_PACE), log_quantize(column_means / root, FACTOR_PACE)
    if rows is None or columns is None:
        return None
    return RankOne(tensor.dtype, tensor.shape, rows, columns)


def update(first: Tensor, second: Tensor) -> Tensor:
    """The direction of the next update, ``m / (sqrt(v) + ε)``."""
    return first / (second.sqrt() + EPSILON)


def relative_error(exact: Tensor, stored: Tensor) -> float:
    """``‖stored - exact‖ / ‖exact‖``; 0 where both are zero, infinite where only the exact one is or for no number."""
    distance = float(torch.linalg.vector_norm(stored - exact, dtype=torch.float64))
    norm = float(torch.linalg.vector_norm(exact, dtype=torch.float64))
    if not math.isfinite(distance):
        return math.inf
    return distance / norm if norm else (0.0 if distance == 0 else math.inf)


def _sample(tensor: Tensor) -> Tensor:
    """At most ``SAMPLED`` elements, spread by multiples of a large prime, which no shape agrees with; float32, host."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() > SAMPLED:
        flat = flat[torch.arange(SAMPLED, device=flat.device) * SPREAD % flat.numel()]
    return flat.to("cpu", torch.float32)


def second_moment(second: Tensor, tolerance: float) -> QuantizedTensor | RankOne | None:
    """The cheapest form whose effect on an update of ``1 / sqrt(v)`` stays in tolerance; None: store it exactly.

    The effect is the root mean square of ``sqrt(v / v̂) - 1`` over the elements that are not zero, by a sample.
    """
    values = _sample(second)
    moved = values > 0

    def effect(stored: QuantizedTensor | RankOne) -> float:
        decoded = _sample(dequantize(stored))
        if not bool((decoded[moved] > 0).all()):
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

    second: as it is; stored_second: as it is stored, which is what the first moment is stored in units of. The effect
    is judged by a sample.
    """

    def stored(units: QuantizedTensor) -> Scaled:
        return Scaled(first.dtype, units, stored_second, second_name)

    if tolerance >= 1:
        return stored(_nothing(torch.float32, first.shape))
    exact = first.detach().to("cpu", torch.float32)
    root = dequantize(stored_second).to(torch.float32).sqrt()
    if bool((exact[root == 0] != 0).any()):
        return None
    units = torch.where(root > 0, exact / root, torch.zeros(()))
    sampled, sampled_root = _sample(units), _sample(root)
    wanted = update(_sample(exact), _sample(second))

    def effect(rung: int) -> float:
        return relative_error(wanted, update(dequantize(quantize(sampled, rung)) * sampled_root, sampled_root.square()))

    rung = _coarsest(effect, tolerance)
    return None if rung is None else stored(quantize(units, rung))


def momentum(first: Tensor, tolerance: float) -> QuantizedTensor | None:
    """The coarsest first moment of an optimizer without second ones; None: store it exactly.

    Its update is the moment itself, so the step goes by its root mean square. The effect is judged by a sample.
    """
    if tolerance >= 1:
        return _nothing(first.dtype, first.shape)
    exact = _sample(first)
    size = float(torch.linalg.vector_norm(exact, dtype=torch.float64)) / math.sqrt(max(exact.numel(), 1))
    if not size > 0:
        return None
    unit = round(RUNGS_PER_OCTAVE * math.log2(size))

    def step(rung: int) -> int:
        return min(max(unit + rung, LOWEST_RUNG), HIGHEST_STEP)

    def effect(rung: int) -> float:
        return relative_error(exact, dequantize(quantize(exact, step(rung))))

    rung = _coarsest(effect, tolerance)
    return None if rung is None else quantize(first, step(rung))


def _nothing(dtype: torch.dtype, shape: torch.Size) -> QuantizedTensor:
    """All zero: an update that is off by all of itself is within a tolerance of 1."""
    levels = np.zeros(shape.numel(), dtype=np.uint8)
    return QuantizedTensor(dtype, shape, levels, Grid(0, 0), np.zeros(0, dtype=np.uint16))


def _coarsest(effect: Callable[[int], float], tolerance: float) -> int | None:
    return next((rung for rung in FIRST_RUNGS if effect(rung) <= tolerance), None)
