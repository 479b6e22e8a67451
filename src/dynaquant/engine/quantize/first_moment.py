"""Quantize one first moment as coarsely as the next update allows (method 2.3).

A grid of several root mean squares rounds most values to zero. What is left is shorter than the moment, and so would
be all updates after a restore. So levels are decoded with another step than the one that made them: the moment keeps
its length along its own direction, and the tolerance limits only the noise. In both, the update of a weight counts by
the root of its second moment. That is about as large as its gradient, so it counts by how much it lowers the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import _native
from dynaquant.engine import kernels
from dynaquant.engine.forms.form import pieces
from dynaquant.engine.forms.levels import NO_OUTLIERS, QuantizedTensor, protected_values
from dynaquant.engine.forms.rank_one import RankOne
from dynaquant.engine.forms.units import ScaledMoment, in_units, levels_in_units
from dynaquant.engine.quantize.epsilon import Epsilon
from dynaquant.engine.quantize.grid import quantize
from dynaquant.engine.quantize.moment_sample import sample, sample_stored
from dynaquant.engine.reduction import Reduction, total
from dynaquant.engine.tensors.codebook import (
    FIRST_BIN,
    HIGHEST_STEP_RUNG,
    LOWEST_RUNG,
    MAX_BINS,
    PROTECTED,
    RUNGS_PER_OCTAVE,
    Grid,
    inverse_step,
)
from dynaquant.engine.tensors.shard import Shard

FIRST_RUNGS = tuple(range(12, -25, -1))
"""Grid steps to try for a first moment, coarsest first: rungs from 8 to 1/64 of the moment's unit."""
LARGEST = 1e37
"""A first moment with larger values is stored exactly: restored values, which can be several times as large, would be
infinite."""


def quantize_first_moment(
    first: Tensor,
    stored_second: QuantizedTensor | RankOne,
    second_name: str,
    tolerance: float,
    shard: Shard | None,
    epsilon: Epsilon,
) -> Reduction[ScaledMoment | None]:
    """Return the coarsest first moment that changes the next update by at most ``tolerance``; None: store it exactly.

    An infinite tolerance drops it: all values become zero. first: finite with such a tolerance or a shard; otherwise
    one with other values is stored exactly. stored_second: the second moment as stored, under the name
    ``second_name``. The first moment is stored in units of its root. The change is the relative error of the update u
    with this second moment v, ``sqrt(Σ sqrt(v)·Δu² / Σ sqrt(v)·u²)``, on a sample. It may be larger than 1: zeros have
    the error 1, but no length. shard: what ``first`` is of the whole tensor; ``stored_second`` is of the same elements.
    None: it is all of it, and no other rank takes part in the decision. epsilon: of the optimizer.
    """
    if tolerance == math.inf:
        return ScaledMoment(first.dtype, _all_zero(torch.float32, first.shape), stored_second, second_name)
    if (yield from total(_is_divided_by_zero(first, stored_second, epsilon)))[0]:
        return None
    held = shard or Shard.whole(first.shape)
    exact, second = sample(first, held), sample_stored(stored_second, held)
    if shard is None:
        steps = _native.coarsest_update(exact, second, epsilon.assumed, rungs(0), inverses(0), tolerance)
    else:
        steps = yield from _coarsest(0, _fits_of_update(exact, second, epsilon), tolerance)
    if steps is None or (units := _units_on_grid(first, stored_second, *steps)) is None:
        return None
    return ScaledMoment(first.dtype, units, stored_second, second_name)


def quantize_momentum(first: Tensor, tolerance: float, shard: Shard) -> Reduction[QuantizedTensor | None]:
    """Return the coarsest first moment for an optimizer without second moments; None: store it exactly.

    An infinite tolerance drops it: all values become zero. The update is the moment itself. So the grid step is
    relative to the moment's root mean square, and the change is the relative error of the moment, on a sample. shard:
    what ``first`` is of the whole tensor.
    """
    if tolerance == math.inf:
        return _all_zero(first.dtype, first.shape)
    sampled = sample(first, shard)
    square = float(np.square(sampled.astype(np.float64)).sum())  # not a product: BLAS would wake its threads
    squares, count = (yield from total(square, sampled.size)).tolist()
    root_mean_square = math.sqrt(squares) / math.sqrt(max(count, 1))
    if not root_mean_square > 0:
        return None
    unit = round(RUNGS_PER_OCTAVE * math.log2(root_mean_square))
    steps = yield from _coarsest(unit, _fits_of_values(sampled, square, unit), tolerance)
    return None if steps is None else _on_grid(first, *steps)


def _is_divided_by_zero(first: Tensor, stored_second: QuantizedTensor | RankOne, epsilon: Epsilon) -> bool:
    """Whether the second moment is zero somewhere where the first is not as good as zero, or NaN."""
    if stored_second.is_positive:
        return False
    flat, begin = first.detach().reshape(-1), 0
    for second in pieces(stored_second, first.device):
        is_zero, part = second == 0, flat[begin : begin + len(second)]
        if bool(is_zero.any()) and not bool((part[is_zero].to(torch.float32).abs() <= epsilon.zero).all()):
            return True
        begin += len(second)
    return False


@dataclass(frozen=True)
class _Fits:
    """How well grids fit the rank's part of a sample.

    square: the sum of squares of the update. by_rung: four sums for each of ``FIRST_RUNGS``. m is the multiple of the
    step that a value is rounded to, w what turns a value into its update u: Σ u·w·m, Σ (w·m)²; and Σ u·w·p, Σ (w·p)²
    over the outliers p, whose multiples count as zero. If there is a second moment, each update counts by its root.
    """

    square: float
    by_rung: NDArray[np.float64]


def _fits_of_update(exact: NDArray[np.float32], second: NDArray[np.float32], epsilon: Epsilon) -> _Fits:
    """Return the fits of grids to a first moment in units of the root of its second moment."""
    found = np.empty(4 * len(FIRST_RUNGS))
    square, largest = _native.update_fits(exact, second, epsilon.assumed, inverses(0), found)
    return _Fits(square if largest <= LARGEST else math.nan, found)


def _fits_of_values(values: NDArray[np.float32], square: float, unit: int) -> _Fits:
    """Return the fits of grids to a first moment that is the update itself. unit: see ``rungs``."""
    exact, found = values.astype(np.float64), np.empty(4 * len(FIRST_RUNGS))
    _native.grid_fits(values, exact, np.ones_like(exact), inverses(unit), found)
    judged = not len(values) or float(np.abs(values).max()) <= LARGEST
    return _Fits(square if judged else math.nan, found)


@lru_cache(maxsize=256)
def rungs(unit: int) -> NDArray[np.int32]:
    """Return the rungs to try, counted from the rung ``unit``."""
    clamped = (min(max(unit + coarse, LOWEST_RUNG), HIGHEST_STEP_RUNG) for coarse in FIRST_RUNGS)
    return np.fromiter(clamped, dtype=np.int32)


@lru_cache(maxsize=256)
def inverses(unit: int) -> NDArray[np.float32]:
    """Return one by the step of each of ``rungs``."""
    return np.array([inverse_step(int(rung)) for rung in rungs(unit)], dtype=np.float32)


def _coarsest(unit: int, fits: _Fits, tolerance: float) -> Reduction[tuple[int, int] | None]:
    """Return the rungs that make and decode levels, those of the coarsest grid within the tolerance, or None."""
    square, *sums = yield from total(fits.square, fits.by_rung)
    return _native.coarsest(float(square), np.array(sums), rungs(unit), tolerance)


def _units_on_grid(first: Tensor, second: QuantizedTensor | RankOne, rung: int, decoded: int) -> QuantizedTensor | None:
    """Return ``_on_grid`` of a first moment in units of the root of its second moment; None if it is not finite.

    Units of a large tensor are not kept: only its levels leave the processor's caches.
    """
    if not first.numel():
        return _on_grid(in_units(first, second), rung, decoded)
    levels, wait = levels_in_units(first, second, inverse_step(rung))
    highest = wait()
    if highest >= FIRST_BIN + MAX_BINS:  # an infinite or NaN value is an outlier
        outliers = first.detach().reshape(-1)[(levels == PROTECTED).to(first.device)]
        if not bool(outliers.isfinite().all()):
            return None
    return units_of_levels(levels, highest, first, second, decoded)


def units_of_levels(
    levels: Tensor, highest: int, first: Tensor, second: QuantizedTensor | RankOne, decoded: int
) -> QuantizedTensor:
    """Return the stored units of a first moment from their levels. highest: of the levels; 256 with outliers."""
    outliers = NO_OUTLIERS
    if highest >= FIRST_BIN + MAX_BINS:
        outliers = protected_values(in_units(first, second), levels)
    bins = min(max(highest - FIRST_BIN + 1, 0), MAX_BINS)
    return QuantizedTensor(torch.float32, first.shape, kernels.to_host(levels)(), Grid(decoded, bins), outliers)


def _on_grid(tensor: Tensor, rung: int, decoded: int) -> QuantizedTensor:
    """Return levels of the step ``rung``, decoded with the step ``decoded``. Outliers are as they were."""
    quantized = quantize(tensor, rung)
    return replace(quantized, codebook=Grid(decoded, quantized.codebook.bins))


def _all_zero(dtype: torch.dtype, shape: torch.Size) -> QuantizedTensor:
    levels = np.zeros(shape.numel(), dtype=np.uint8)
    return QuantizedTensor(dtype, shape, levels, Grid(0, 0), NO_OUTLIERS)
