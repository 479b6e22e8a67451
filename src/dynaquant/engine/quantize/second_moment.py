"""Quantize one second moment as coarsely as the next update allows (method 2.3)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import _native
from dynaquant.engine import kernels
from dynaquant.engine.forms.levels import NO_OUTLIERS, QuantizedTensor
from dynaquant.engine.forms.rank_one import RankOne, places
from dynaquant.engine.quantize.epsilon import Epsilon
from dynaquant.engine.quantize.log_grid import (
    POSITIONS_PER_RUNG,
    Extremes,
    RootSums,
    balanced,
    changes_on_log_grid,
    positions,
    quantize_to_log_grid,
    threshold_for,
)
from dynaquant.engine.quantize.moment_sample import held, sample, sample_stored
from dynaquant.engine.reduction import Numbers, Reduction, total
from dynaquant.engine.tensors.codebook import LogGrid
from dynaquant.engine.tensors.shard import Shard

FACTOR_PACE = 1
"""Rungs between the values of a rank-one tensor's rows and columns."""
FACTOR_TURNS = 16
"""Turns of rows or columns (``log_grid.Threshold``): a power of two."""
SECOND_PACES = (4, 2, 1)
"""Rungs between the values of a second moment, coarsest first: 1, 1/2 and 1/4 octaves."""
RANK_ONE_SHARE = 0.4
"""The share of the tolerance that the error of rows × columns may be. This form shortens the updates of all values that
are small for their row and column, and these move furthest. Rounding to powers errs either way, and slows training far
less at the same error (docs/decisions.md, "How coarse may a second moment be?")."""
FINEST_RANK_ONE = 0.035
"""The error by rounding rows and columns. A matrix that may have no more is not tried as rows × columns."""


def quantize_second_moment(
    second: Tensor, tolerance: float, shard: Shard, epsilon: Epsilon, extremes: Extremes
) -> Reduction[QuantizedTensor | RankOne | None]:
    """Return the cheapest form that changes ``1 / sqrt(v)`` by at most ``tolerance``; None: store it exactly.

    Rows × columns may only change it by ``RANK_ONE_SHARE`` of that. The change is the root mean square of
    ``sqrt(v / v̂) - 1`` over the elements of a sample that are not zero. v̂ is the stored value of v. shard: what
    ``second`` is of the whole tensor. The form is that of the local tensor. epsilon: of the optimizer. Elements whose v
    and v̂ are negligible beside it count as zero. extremes: of ``second``.
    """
    negligible = epsilon.negligible
    if second.dtype == torch.float64 and (yield from total(_underflows(second, negligible)))[0]:
        return None
    values = sample(second, shard)
    if (allowed := RANK_ONE_SHARE * tolerance) >= FINEST_RANK_ONE:
        factors = yield from quantize_rank_one(second, values, shard, negligible)
        if factors is not None:
            change = _native.root_changes(values, sample_stored(factors, shard), negligible)
            if (yield from _is_good(change, allowed)):
                return factors
    of_all: Extremes | None = None
    for pace in SECOND_PACES:
        threshold = yield from threshold_for(values, pace, shard, negligible)
        change = changes_on_log_grid(values, pace, second.dtype, threshold, shard, negligible)
        if (yield from _is_good(change, tolerance)):
            of_all = of_all or (yield from _whole_extremes(extremes))
            if (stored := quantize_to_log_grid(second, pace, of_all, threshold, shard, negligible)) is not None:
                return stored
    return None


def quantize_rank_one(
    tensor: Tensor, values: NDArray[np.float32], shard: Shard, negligible: float
) -> Reduction[RankOne | None]:
    """Return a second moment as row mean × column mean / mean. Updates by it are as long as before on average.

    Returns None if the tensor has fewer than two dimensions, is all zero, or does not fit the levels. values: a sample
    of the tensor. shard: as for ``quantize_second_moment``. The means are those of the whole tensor. The form has those
    of the local rows and columns. negligible: as for ``quantize_to_log_grid``.
    """
    if tensor.ndim < 2:
        return None
    axes, height = shard.axes, shard.shape[0]
    sums = yield from total(*_row_and_column_sums(tensor, axes))
    if not len(sums) or not shard.shape.numel():
        return None
    levels = np.empty(height, dtype=np.uint8), np.empty(len(sums) - height, dtype=np.uint8)
    longer = 0 if len(levels[0]) >= len(levels[1]) else 1
    classes = np.empty(len(levels[longer]), dtype=np.uint16)
    found = _native.rank_one(sums[:height], sums[height:], positions(), *levels, classes, negligible)
    if found is None:
        return None
    bins = list(found)

    def stored() -> RankOne:
        rows, columns = (_local(factor(b, each), axis) for b, each, axis in zip(bins, levels, axes, strict=True))
        return RankOne(tensor.dtype, tensor.shape, rows, columns)

    def root_sums(position: int | None) -> RootSums:  # made anew for each, so nothing is held in between
        index = places(held(shard), max(math.prod(tensor.shape[1:]), 1))[longer].numpy()
        of_sample, down = _local_levels(classes, axes[longer]).take(index), sample_stored(stored(), shard)
        if position is None:
            return _native.root_sums(values, down, of_sample // FACTOR_TURNS, POSITIONS_PER_RUNG, negligible)
        there = of_sample // FACTOR_TURNS == position
        turns = of_sample[there] & (FACTOR_TURNS - 1)
        return _native.root_sums(values[there], down[there], turns, FACTOR_TURNS, negligible)

    # The longer factor is rounded down so far. As many of its values go up as keep the length of updates.
    threshold = (yield from balanced(root_sums(None), root_sums, FACTOR_PACE, FACTOR_TURNS)).value
    raised = _native.round_up(levels[longer], bins[longer], classes, threshold)
    if raised is None:
        return None
    bins[longer] = raised
    return stored()


def _underflows(second: Tensor, negligible: float) -> bool:
    """Whether a value that is not negligible is zero as float32."""
    return bool(((second > negligible) & (second.to(torch.float32) == 0)).any())


def factor(bins: tuple[int, int], levels: NDArray[np.uint8]) -> QuantizedTensor:
    """Return the rows or columns of a rank-one form. bins: the exponent of the first one, and their number."""
    return QuantizedTensor(torch.float32, torch.Size([len(levels)]), levels, LogGrid(FACTOR_PACE, *bins), NO_OUTLIERS)


def _is_good(change: tuple[bool, float, int], tolerance: float) -> Reduction[bool]:
    """Whether a change is within the tolerance. change: what ``root_changes`` returns of the rank's part."""
    unusable, squares, count = (yield from total(change)).tolist()  # zeros and infinities are unusable
    return not unusable and (not count or math.sqrt(squares / count) <= tolerance)


def _whole_extremes(own: Extremes) -> Reduction[Extremes]:
    """Return the extremes of the whole tensor. own: of what the rank holds."""
    lowest, highest, smallest = own
    found = (yield Numbers(highest=np.array([-lowest, highest, -smallest]))).highest
    return -float(found[0]), float(found[1]), -float(found[2])


def _row_and_column_sums(tensor: Tensor, axes: tuple[Shard, Shard]) -> tuple[NDArray[np.float64], ...]:
    """Return the local sums of rows and of columns, each among those of the whole tensor."""
    if not tensor.numel():
        return tuple(np.zeros(axis.shape.numel()) for axis in axes)
    matrix = tensor.detach().reshape(tensor.shape[0], -1)
    sums = kernels.for_device(tensor.device).row_and_column_sums(matrix)
    return tuple(axis.among_zeros(own) for axis, own in zip(axes, sums, strict=True))


def _local(factor: QuantizedTensor, axis: Shard) -> QuantizedTensor:
    """Return the rows or columns that the rank holds."""
    if axis.is_whole:
        return factor
    levels = _local_levels(factor.levels, axis)
    return replace(factor, shape=torch.Size([len(levels)]), levels=levels)


def _local_levels(levels: NDArray[Any], axis: Shard) -> NDArray[Any]:
    parts = [levels[first : first + length] for _, first, length in axis.runs]
    return np.concatenate(parts) if parts else levels[:0]
