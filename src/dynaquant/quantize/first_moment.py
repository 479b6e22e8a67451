"""Quantize one first moment as coarsely as the next update allows (method 2.3).

A grid of several root mean squares rounds most values to zero. What is left is shorter than the moment, and so would
be all updates after a restore. So levels are decoded with another step than the one that made them: the moment keeps
its length along its own direction, and the tolerance limits only the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dynaquant import kernels
from dynaquant.quantize.grid import quantize
from dynaquant.quantize.moment_sample import sample
from dynaquant.tensors.codebook import HIGHEST_STEP_RUNG, LOWEST_RUNG, RUNGS_PER_OCTAVE, Grid
from dynaquant.tensors.dequantize import dequantize
from dynaquant.tensors.stored import QuantizedTensor, RankOne, ScaledMoment

FIRST_RUNGS = tuple(range(12, -25, -1))
"""Grid steps to try for a first moment, coarsest first: rungs from 8 to 1/64 of the moment's unit."""
LARGEST_SHIFT = 2 * RUNGS_PER_OCTAVE
"""Levels are decoded with a step that differs by at most two octaves."""
EPSILON = 1e-8
"""The ε that optimizers add to the root of the second moment. So the update of a weight without gradients is zero."""


def quantize_first_moment(
    first: Tensor, stored_second: QuantizedTensor | RankOne, second_name: str, tolerance: float
) -> ScaledMoment | None:
    """Return the coarsest first moment that changes the next update by at most ``tolerance``; None: store it exactly.

    An infinite tolerance drops it: all values become zero. stored_second: the second moment as stored, under the name
    ``second_name``. The first moment is stored in units of its root. The change is the relative error of the update
    with this second moment, on a sample. It may be larger than 1: zeros have the error 1, but no length.
    """
    if tolerance == math.inf:
        return ScaledMoment(first.dtype, _all_zero(torch.float32, first.shape), stored_second, second_name)
    exact = first.detach().to(torch.float32)
    root = kernels.for_device(first.device).square_root(dequantize(stored_second, first.device).to(torch.float32))
    if bool(((root == 0) & (exact != 0)).any()):
        return None
    units = (exact / root).masked_fill_(root == 0, 0)
    sampled, sampled_root = sample(units), sample(root)

    def restored_update(quantized: QuantizedTensor) -> Tensor:
        return update(dequantize(quantized) * sampled_root, sampled_root.square())

    steps = _coarsest(sampled, 0, update(sample(exact), sampled_root.square()), restored_update, tolerance)
    return None if steps is None else ScaledMoment(first.dtype, _on_grid(units, *steps), stored_second, second_name)


def quantize_momentum(first: Tensor, tolerance: float) -> QuantizedTensor | None:
    """Return the coarsest first moment for an optimizer without second moments; None: store it exactly.

    An infinite tolerance drops it: all values become zero. The update is the moment itself. So the grid step is
    relative to the moment's root mean square, and the change is the relative error of the moment, on a sample.
    """
    if tolerance == math.inf:
        return _all_zero(first.dtype, first.shape)
    sampled = sample(first)
    root_mean_square = float(torch.linalg.vector_norm(sampled, dtype=torch.float64)) / math.sqrt(
        max(sampled.numel(), 1)
    )
    if not root_mean_square > 0:
        return None
    unit = round(RUNGS_PER_OCTAVE * math.log2(root_mean_square))
    steps = _coarsest(sampled, unit, sampled, dequantize, tolerance)
    return None if steps is None else _on_grid(first, *steps)


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


def _coarsest(
    sampled: Tensor,
    unit: int,
    exact: Tensor,
    restored: Callable[[QuantizedTensor], Tensor],
    tolerance: float,
) -> tuple[int, int] | None:
    """Return the rungs that make and decode levels, those of the coarsest grid within the tolerance, or None.

    unit: the rung that ``FIRST_RUNGS`` counts from. exact: the update. restored: the update with a quantized sample.
    """
    for coarse in FIRST_RUNGS:
        rung = min(max(unit + coarse, LOWEST_RUNG), HIGHEST_STEP_RUNG)
        quantized = quantize(sampled, rung)
        kept = _share_kept(exact, restored(quantized))
        shift = round(RUNGS_PER_OCTAVE * -math.log2(kept)) if kept > 0 else math.inf
        if abs(shift) > LARGEST_SHIFT:
            continue
        decoded = min(max(rung + int(shift), LOWEST_RUNG), HIGHEST_STEP_RUNG)
        if relative_error(exact, restored(_with_step(quantized, decoded))) <= tolerance:
            return rung, decoded
    return None


def _share_kept(exact: Tensor, stored: Tensor) -> float:
    """Return how long ``stored`` is along ``exact``: their inner product by the square of ``exact``; 1 for zeros."""
    numbers, others = exact.to(torch.float64), stored.to(torch.float64)
    square = float((numbers * numbers).sum())
    return float((numbers * others).sum()) / square if square else 1.0


def _on_grid(tensor: Tensor, rung: int, decoded: int) -> QuantizedTensor:
    """Return levels of the step ``rung``, decoded with the step ``decoded``. Outliers are as they were."""
    return _with_step(quantize(tensor, rung), decoded)


def _with_step(quantized: QuantizedTensor, rung: int) -> QuantizedTensor:
    return replace(quantized, codebook=Grid(rung, quantized.codebook.bins))


def _all_zero(dtype: torch.dtype, shape: torch.Size) -> QuantizedTensor:
    """Return a tensor of zeros."""
    levels = np.zeros(shape.numel(), dtype=np.uint8)
    return QuantizedTensor(dtype, shape, levels, Grid(0, 0), np.zeros(0, dtype=np.uint16))
