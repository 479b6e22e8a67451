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
NO_OUTLIERS = np.zeros(0, np.uint16)
"""On a logarithmic grid, no value is stored as an outlier."""
Extremes = tuple[float, float]
"""The smallest value of a tensor that is at least ``SMALLEST``, infinity if there is none; and the largest value."""


def quantize_to_log_grid(tensor: Tensor, pace: int, extremes: Extremes | None = None) -> QuantizedTensor | None:
    """Return the tensor with every value rounded to a power of ``2^(pace/4)``; None if this takes too many levels.

    tensor: non-negative. The level depends on a value's bucket (``log_histogram``), so a value within 0.4 % of
    the middle between two powers may go to either. extremes: of the tensor of which this one is a part, if it is one.
    They decide which powers have levels.
    """
    smallest, largest = extremes_of(tensor) if extremes is None else extremes
    found = _native.log_bins(smallest, largest, exponents(pace))
    if found is None:
        return None
    first, bins = found
    table = table_for(tensor.dtype, _level_table(pace, first))
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


def round_to_log_grid(values: NDArray[np.float32], pace: int, dtype: torch.dtype) -> NDArray[np.float32]:
    """Return the values that ``quantize_to_log_grid`` would store for a tensor of ``dtype``, as float32."""
    return rounded(pace, dtype)[_buckets(values)]


@lru_cache(maxsize=16)
def rounded(pace: int, dtype: torch.dtype) -> NDArray[np.float32]:
    """Return what the values of each bucket are rounded to."""
    occurring, index = np.unique(exponents(pace), return_inverse=True)
    powers = np.array([rung_value(int(exponent) * pace) for exponent in occurring], dtype=np.float32)[index]
    powers[0] = 0
    found: NDArray[np.float32] = saturating_cast(torch.from_numpy(powers), dtype).to(torch.float32).numpy()
    return found


@lru_cache(maxsize=256)
def _level_table(pace: int, first: int) -> NDArray[np.uint8]:
    """Return the level of each bucket."""
    table = np.clip(exponents(pace) - first + FIRST_BIN, 0, 255).astype(np.uint8)
    table[[0, MAGNITUDES]] = PRUNED
    return table


def _buckets(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return values.view(np.uint32) >> np.uint32(16)


@cache
def exponents(pace: int) -> NDArray[np.int16]:
    """Return the exponent e of the power ``2^(pace·e/4)`` nearest to each bucket; valid for buckets above zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rungs = np.log2(bucket_values().astype(np.float64)) * RUNGS_PER_OCTAVE
    nearest = np.clip(np.rint(np.nan_to_num(rungs) / pace), math.ceil(LOWEST_RUNG / pace), HIGHEST_RUNG // pace)
    result: NDArray[np.int16] = nearest.astype(np.int16)
    return result
