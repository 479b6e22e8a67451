"""Quantize one first moment as coarsely as the next update allows (method 2.3)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import kernels
from dynaquant.quantize.grid import quantize
from dynaquant.quantize.low_rank import quantize_low_rank
from dynaquant.quantize.moment_sample import sample
from dynaquant.tensors.codebook import HIGHEST_STEP_RUNG, LOWEST_RUNG, RUNGS_PER_OCTAVE, Grid
from dynaquant.tensors.dequantize import dequantize
from dynaquant.tensors.stored import LowRank, QuantizedTensor, RankOne, ScaledMoment

FIRST_RUNGS = tuple(range(12, -25, -2))
"""Grid steps to try for a first moment, coarsest first: rungs from 8 to 1/64 of the moment's unit, in half octaves."""
EPSILON = 1e-8
"""The ε that optimizers add to the root of the second moment. So the update of a weight without gradients is zero."""
LOW_RANK_SHARE = 0.99
"""Share of the tolerance that a matrix of low rank may use. The rest covers the sums of float32 that measure it."""


def quantize_first_moment(
    first: Tensor, stored_second: QuantizedTensor | RankOne, second_name: str, tolerance: float
) -> ScaledMoment | None:
    """Return the smallest first moment that changes the next update by at most ``tolerance``; None: store it exactly.

    It is a matrix of low rank or lies on a grid, whichever is estimated to be smaller. stored_second: the second moment
    as stored, under the name ``second_name``. The first moment is stored in units of its root. The change is the
    relative error of the update with this second moment, on a sample.
    """

    def stored(units: QuantizedTensor | LowRank) -> ScaledMoment:
        return ScaledMoment(first.dtype, units, stored_second, second_name)

    if tolerance >= 1:
        return stored(_all_zero(torch.float32, first.shape))
    exact = first.detach().to(torch.float32)
    root = kernels.for_device(first.device).square_root(dequantize(stored_second, first.device).to(torch.float32))
    if bool(((root == 0) & (exact != 0)).any()):
        return None
    units = (exact / root).masked_fill_(root == 0, 0)
    sampled, sampled_root = sample(units), sample(root)
    exact_update = update(sample(exact), sampled_root.square())

    def error(restored: Tensor) -> float:
        """Return the error of the next update. restored: the sample in units, as it would be restored."""
        return relative_error(exact_update, update(restored * sampled_root, sampled_root.square()))

    rung = _coarsest(lambda rung: error(dequantize(quantize(sampled, rung))), tolerance)
    low_rank = _low_rank(units, torch.float32, tolerance)
    if low_rank is not None and error(sample(dequantize(low_rank))) > tolerance:
        low_rank = None
    if low_rank is not None and (rung is None or _bits(low_rank) < _bits_per_value(sampled, rung) * units.numel()):
        return stored(low_rank)
    return None if rung is None else stored(quantize(units, rung))


def quantize_momentum(first: Tensor, tolerance: float) -> QuantizedTensor | LowRank | None:
    """Return the smallest first moment for an optimizer without second moments; None: store it exactly.

    The update is the moment itself. So the grid step is relative to the moment's root mean square, and the change is
    the relative error of the moment, on a sample.
    """
    if tolerance >= 1:
        return _all_zero(first.dtype, first.shape)
    exact = sample(first)
    root_mean_square = float(torch.linalg.vector_norm(exact, dtype=torch.float64)) / math.sqrt(max(exact.numel(), 1))
    if not root_mean_square > 0:
        return None
    unit = round(RUNGS_PER_OCTAVE * math.log2(root_mean_square))

    def absolute(rung: int) -> int:
        return min(max(unit + rung, LOWEST_RUNG), HIGHEST_STEP_RUNG)

    def error(rung: int) -> float:
        return relative_error(exact, dequantize(quantize(exact, absolute(rung))))

    rung = _coarsest(error, tolerance)
    low_rank = _low_rank(first.detach().to(torch.float32), first.dtype, tolerance)
    if low_rank is not None and (
        rung is None or _bits(low_rank) < _bits_per_value(exact, absolute(rung)) * first.numel()
    ):
        return low_rank
    return None if rung is None else quantize(first, absolute(rung))


def _low_rank(units: Tensor, dtype: torch.dtype, tolerance: float) -> LowRank | None:
    if units.ndim < 2:
        return None
    return quantize_low_rank(units.reshape(units.shape[0], -1), dtype, units.shape, LOW_RANK_SHARE * tolerance)


def _bits(stored: LowRank) -> float:
    """Return the estimated size of a matrix of low rank: the entropy of its levels."""
    return sum(_entropy(factor.levels) * factor.levels.size for factor in (stored.rows, stored.columns))


def _bits_per_value(sampled: Tensor, rung: int) -> float:
    return _entropy(quantize(sampled, rung).levels)


def _entropy(levels: NDArray[np.uint8]) -> float:
    """Return the entropy of levels, in bits per level."""
    counts = np.bincount(levels).astype(np.float64)
    shares = counts[counts > 0] / levels.size
    return float(-(shares * np.log2(shares)).sum())


def update(first: Tensor, second: Tensor) -> Tensor:
    """Return the direction of the next update, ``m / (sqrt(v) + ε)``."""
    return first / (second.sqrt() + EPSILON)


def relative_error(exact: Tensor, stored: Tensor) -> float:
    """Return ``‖stored - exact‖ / ‖exact‖``.

    Returns 0 if both are zero, infinity if only ``exact`` is zero or if the distance is not finite.
    """
    distance = float(torch.linalg.vector_norm(stored - exact, dtype=torch.float64))
    norm = float(torch.linalg.vector_norm(exact, dtype=torch.float64))
    if not math.isfinite(distance):
        return math.inf
    return distance / norm if norm else (0.0 if distance == 0 else math.inf)


def _all_zero(dtype: torch.dtype, shape: torch.Size) -> QuantizedTensor:
    """Return a tensor of zeros. Its relative error is 1, so a tolerance of 1 or more allows it."""
    levels = np.zeros(shape.numel(), dtype=np.uint8)
    return QuantizedTensor(dtype, shape, levels, Grid(0, 0), np.zeros(0, dtype=np.uint16))


def _coarsest(error: Callable[[int], float], tolerance: float) -> int | None:
    return next((rung for rung in FIRST_RUNGS if error(rung) <= tolerance), None)
