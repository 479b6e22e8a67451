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
from dynaquant.quantize.moment_sample import sample, sample_stored
from dynaquant.tensors.codebook import HIGHEST_STEP_RUNG, LOWEST_RUNG, RUNGS_PER_OCTAVE, Grid
from dynaquant.tensors.dequantize import dequantize, pieces
from dynaquant.tensors.shard import Shard
from dynaquant.tensors.stored import QuantizedTensor, RankOne, ScaledMoment
from dynaquant.training.reduction import Reduction, total

FIRST_RUNGS = tuple(range(12, -25, -1))
"""Grid steps to try for a first moment, coarsest first: rungs from 8 to 1/64 of the moment's unit."""
LARGEST_SHIFT = 2 * RUNGS_PER_OCTAVE
"""Levels are decoded with a step that differs by at most two octaves."""
EPSILON = 1e-8
"""The ε that optimizers add to the root of the second moment. So the update of a weight without gradients is zero."""


def quantize_first_moment(
    first: Tensor,
    stored_second: QuantizedTensor | RankOne,
    second_name: str,
    tolerance: float,
    shard: Shard | None = None,
    together: int = 1,
) -> Reduction[ScaledMoment | None]:
    """Return the coarsest first moment that changes the next update by at most ``tolerance``; None: store it exactly.

    An infinite tolerance drops it: all values become zero. stored_second: the second moment as stored, under the name
    ``second_name``. The first moment is stored in units of its root. The change is the relative error of the update
    with this second moment, on a sample. It may be larger than 1: zeros have the error 1, but no length. shard: what
    ``first`` is of the whole tensor, None if it is all of it; ``stored_second`` is of the same elements. together: how
    many grids one reduction judges.
    """
    if tolerance == math.inf:
        return ScaledMoment(first.dtype, _all_zero(torch.float32, first.shape), stored_second, second_name)
    if (yield from total(_is_divided_by_zero(first, stored_second)))[0]:
        return None
    shard = shard or Shard.whole(first.shape)
    exact = sample(first, shard)
    root = kernels.for_device(kernels.HOST).square_root(sample_stored(stored_second, shard))

    def restored_update(quantized: QuantizedTensor) -> Tensor:
        return update(dequantize(quantized) * root, root.square())

    wanted = update(exact, root.square())
    steps = yield from _coarsest(_in_units(exact, root), 0, wanted, restored_update, tolerance, together)
    if steps is None:
        return None
    # The units of all elements were not kept while other ranks were waited for: with those of a window, they are many.
    return ScaledMoment(first.dtype, _on_grid(_all_in_units(first, stored_second), *steps), stored_second, second_name)


def quantize_momentum(
    first: Tensor, tolerance: float, shard: Shard | None = None, together: int = 1
) -> Reduction[QuantizedTensor | None]:
    """Return the coarsest first moment for an optimizer without second moments; None: store it exactly.

    An infinite tolerance drops it: all values become zero. The update is the moment itself. So the grid step is
    relative to the moment's root mean square, and the change is the relative error of the moment, on a sample. shard,
    together: as for ``quantize_first_moment``.
    """
    if tolerance == math.inf:
        return _all_zero(first.dtype, first.shape)
    sampled = sample(first, shard or Shard.whole(first.shape))
    squares, count = (yield from total(_squared_norm(sampled), sampled.numel())).tolist()
    root_mean_square = math.sqrt(squares) / math.sqrt(max(count, 1))
    if not root_mean_square > 0:
        return None
    unit = round(RUNGS_PER_OCTAVE * math.log2(root_mean_square))
    steps = yield from _coarsest(sampled, unit, sampled, dequantize, tolerance, together)
    return None if steps is None else _on_grid(first, *steps)


def _is_divided_by_zero(first: Tensor, stored_second: QuantizedTensor | RankOne) -> bool:
    """Whether the second moment is zero somewhere where the first is not."""
    flat, begin = first.detach().reshape(-1), 0
    for second in pieces(stored_second, first.device):
        is_zero, part = second == 0, flat[begin : begin + len(second)]
        if bool(is_zero.any()) and bool(part[is_zero].to(torch.float32).any()):
            return True
        begin += len(second)
    return False


def _in_units(first: Tensor, root: Tensor) -> Tensor:
    """Return a first moment in units of the root of its second moment. root: zero only where the first moment is."""
    return (first / root).masked_fill_(root == 0, 0)


def _all_in_units(first: Tensor, stored_second: QuantizedTensor | RankOne) -> Tensor:
    """Return a whole first moment in units of the root of its stored second moment, float32.

    Works piece by piece: second moments, roots and units of a large tensor would be three times its memory.
    """
    flat, begin = first.detach().reshape(-1), 0
    units = kernels.empty(flat.shape, torch.float32, first.device)
    for second in pieces(stored_second, first.device):
        part = slice(begin, begin + len(second))
        root = kernels.for_device(first.device).square_root(second.to(torch.float32))
        units[part] = _in_units(flat[part].to(torch.float32), root)
        begin += len(second)
    return units.view(first.shape)


def update(first: Tensor, second: Tensor) -> Tensor:
    """Return the direction of the next update, ``m / (sqrt(v) + ε)``."""
    return first / (second.sqrt() + EPSILON)


def _coarsest(
    sampled: Tensor,
    unit: int,
    exact: Tensor,
    restored: Callable[[QuantizedTensor], Tensor],
    tolerance: float,
    together: int,
) -> Reduction[tuple[int, int] | None]:
    """Return the rungs that make and decode levels, those of the coarsest grid within the tolerance, or None.

    unit: the rung that ``FIRST_RUNGS`` counts from. exact: the update. restored: the update with a quantized sample.
    All of them are the rank's part. together: how many grids one reduction judges; the result does not depend on it.
    """
    square, norm = _product(exact, exact), _squared_norm(exact)
    for begin in range(0, len(FIRST_RUNGS), together):
        rungs = [_clamped(unit + coarse) for coarse in FIRST_RUNGS[begin : begin + together]]
        quantized = [quantize(sampled, rung) for rung in rungs]
        own = [_product(exact, restored(each)) for each in quantized]
        whole_square, *products = (yield from total(square, own)).tolist()
        shifts = [_shift(product / whole_square if whole_square else 1.0) for product in products]
        tried = [
            (rung, _clamped(rung + shift), each)
            for rung, shift, each in zip(rungs, shifts, quantized, strict=True)
            if shift is not None
        ]
        if not tried:
            continue
        distances = [_squared_norm(restored(_with_step(each, decoded)) - exact) for _, decoded, each in tried]
        whole_norm, *distances = (yield from total(norm, distances)).tolist()
        for (rung, decoded, _), distance in zip(tried, distances, strict=True):
            if _relative_error(distance, whole_norm) <= tolerance:
                return rung, decoded
    return None


def _clamped(rung: int) -> int:
    return min(max(rung, LOWEST_RUNG), HIGHEST_STEP_RUNG)


def _shift(kept: float) -> int | None:
    """Return how many rungs larger the step must be to restore the moment's length. None if that is too many.

    kept: the restored length along the moment's own direction, relative to the moment's.
    """
    shift = round(RUNGS_PER_OCTAVE * -math.log2(kept)) if 0 < kept < math.inf else LARGEST_SHIFT + 1
    return shift if abs(shift) <= LARGEST_SHIFT else None


def _relative_error(squared_distance: float, squared_norm: float) -> float:
    """Return the distance by the norm.

    Returns 0 if both are zero, infinity if only the norm is zero or if the distance is not finite.
    """
    if not math.isfinite(squared_distance):
        return math.inf
    if not squared_norm:
        return math.inf if squared_distance else 0.0
    return math.sqrt(squared_distance) / math.sqrt(squared_norm)


def _product(a: Tensor, b: Tensor) -> float:
    """Return the inner product."""
    return float((a.to(torch.float64) * b.to(torch.float64)).sum())


def _squared_norm(tensor: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
    return norm * norm  # its root is the norm, bit for bit


def _on_grid(tensor: Tensor, rung: int, decoded: int) -> QuantizedTensor:
    """Return levels of the step ``rung``, decoded with the step ``decoded``. Outliers are as they were."""
    return _with_step(quantize(tensor, rung), decoded)


def _with_step(quantized: QuantizedTensor, rung: int) -> QuantizedTensor:
    return replace(quantized, codebook=Grid(rung, quantized.codebook.bins))


def _all_zero(dtype: torch.dtype, shape: torch.Size) -> QuantizedTensor:
    """Return a tensor of zeros."""
    levels = np.zeros(shape.numel(), dtype=np.uint8)
    return QuantizedTensor(dtype, shape, levels, Grid(0, 0), np.zeros(0, dtype=np.uint16))
