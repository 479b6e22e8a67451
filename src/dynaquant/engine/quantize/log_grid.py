"""Quantize non-negative values on a logarithmic grid: every value becomes a power of ``2^(pace/4)`` (method 2.3)."""

from __future__ import annotations

import math
from functools import cache, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import _native
from dynaquant.engine import kernels
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.reduction import Reduction, total
from dynaquant.engine.tensors.codebook import (
    FIRST_BIN,
    HIGHEST_RUNG,
    LOWEST_RUNG,
    PRUNED,
    RUNGS_PER_OCTAVE,
    LogGrid,
    rung_value,
)
from dynaquant.engine.tensors.dtypes import saturating_cast
from dynaquant.engine.tensors.log_histogram import MAGNITUDES, bucket_values, table_for

SMALLEST = 2.0**-133
"""The smallest value outside the bucket of zero."""
POSITIONS_PER_RUNG = 16
"""Values are rounded by their positions between two powers, in sixteenths of a rung."""
NO_OUTLIERS = np.zeros(0, np.uint16)
"""On a logarithmic grid, no value is stored as an outlier."""
Extremes = tuple[float, float]
"""The smallest value of a tensor that is at least ``SMALLEST``, infinity if there is none; and the largest value."""


def quantize_to_log_grid(
    tensor: Tensor, pace: int, extremes: Extremes | None = None, threshold: int | None = None
) -> QuantizedTensor | None:
    """Return the tensor with every value rounded to a power of ``2^(pace/4)``; None if this takes too many levels.

    tensor: non-negative. The level depends on a value's bucket (``log_histogram``), so a value within 1 % of
    the middle between two powers may go to either. extremes: of the tensor of which this one is a part, if it is one.
    They decide which powers have levels. threshold: a value goes up if it lies at least so many sixteenths of a rung
    above a power; by default, it goes to the nearest power.
    """
    smallest, largest = extremes_of(tensor) if extremes is None else extremes
    threshold = middle(pace) if threshold is None else threshold
    found = _native.log_bins(smallest, largest, positions(), pace, threshold)
    if found is None:
        return None
    first, bins = found
    table = table_for(tensor.dtype, _level_table(pace, threshold, first))
    levels = kernels.for_device(tensor.device).table_levels(tensor, table)
    codebook = LogGrid(pace, first, bins)
    return QuantizedTensor(tensor.dtype, tensor.shape, kernels.to_host(levels)(), codebook, NO_OUTLIERS)


def extremes_of(tensor: Tensor) -> Extremes:
    """Return the extremes of a non-negative tensor's values as float32."""
    if not tensor.numel():
        return math.inf, 0.0
    kernel = kernels.for_device(tensor.device)
    with np.errstate(over="ignore"):  # of float64, which may be beyond float32
        return kernel.smallest_from(tensor, SMALLEST), float(np.float32(kernel.extremes(tensor)[1]))


def threshold_for(values: NDArray[np.float32], pace: int) -> Reduction[int]:
    """Return the threshold at which updates by the rounded values are as long as before on average.

    values: the rank's part of a sample of a second moment. A moment that is rounded to the nearest power, restored and
    rounded again before it has moved by half a pace, would stay where it is for good.
    """
    buckets, classes = _buckets(values), POSITIONS_PER_RUNG * pace
    exponents = _exponents(positions()[buckets], pace, classes)
    above = positions()[buckets].astype(np.int32) - exponents.astype(np.int32) * classes
    down = _powers(exponents, pace, buckets, torch.float32)
    sums, count = _native.root_sums(values, down, np.clip(above, 0, classes - 1).astype(np.uint8), classes)
    *totals, whole = (yield from total(sums, count)).tolist()
    return _native.balanced_threshold(np.array(totals), whole, pace)


def round_to_log_grid(
    values: NDArray[np.float32], pace: int, dtype: torch.dtype, threshold: int
) -> NDArray[np.float32]:
    """Return the values that ``quantize_to_log_grid`` would store for a tensor of ``dtype``, as float32."""
    buckets = _buckets(values)
    return _powers(_exponents(positions()[buckets], pace, threshold), pace, buckets, dtype)


def _powers(
    exponents: NDArray[np.int16], pace: int, buckets: NDArray[np.uint32], dtype: torch.dtype
) -> NDArray[np.float32]:
    """Return the powers with these exponents in a dtype, as float32; zero for values in the bucket of zero."""
    powers = _rung_values()[exponents.astype(np.int32) * pace - LOWEST_RUNG]
    powers[buckets == 0] = 0
    if dtype == torch.float32:
        return powers
    found: NDArray[np.float32] = saturating_cast(torch.from_numpy(powers), dtype).to(torch.float32).numpy()
    return found


@cache
def _rung_values() -> NDArray[np.float32]:
    return np.array([rung_value(rung) for rung in range(LOWEST_RUNG, HIGHEST_RUNG + 1)], dtype=np.float32)


@lru_cache(maxsize=64)
def _level_table(pace: int, threshold: int, first: int) -> NDArray[np.uint8]:
    """Return the level of each bucket."""
    table = np.clip(_exponents(positions(), pace, threshold) - first + FIRST_BIN, 0, 255).astype(np.uint8)
    table[[0, MAGNITUDES]] = PRUNED
    return table


def _buckets(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return values.view(np.uint32) >> np.uint32(16)


def middle(pace: int) -> int:
    """Return the threshold of rounding to the nearest power."""
    return POSITIONS_PER_RUNG * pace // 2


@cache
def positions() -> NDArray[np.int16]:
    """Return where each bucket lies on the ladder of rungs, in sixteenths of a rung; valid for buckets above zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rungs = np.log2(bucket_values().astype(np.float64)) * RUNGS_PER_OCTAVE
    nearest = np.rint(np.clip(np.nan_to_num(rungs), LOWEST_RUNG - 32, HIGHEST_RUNG + 32) * POSITIONS_PER_RUNG)
    result: NDArray[np.int16] = nearest.astype(np.int16)
    return result


def _exponents(at: NDArray[np.int16], pace: int, threshold: int) -> NDArray[np.int16]:
    """Return the exponent e of the power ``2^(pace·e/4)`` that each position is rounded to."""
    classes = POSITIONS_PER_RUNG * pace
    rounded = np.floor_divide(at.astype(np.int32) + classes - threshold, classes)
    found: NDArray[np.int16] = np.clip(rounded, math.ceil(LOWEST_RUNG / pace), HIGHEST_RUNG // pace).astype(np.int16)
    return found
