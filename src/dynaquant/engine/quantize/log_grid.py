"""Quantize non-negative values on a logarithmic grid: every value becomes a power of ``2^(pace/4)`` (method 2.3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import _native
from dynaquant.engine import kernels
from dynaquant.engine.forms.levels import NO_OUTLIERS, QuantizedTensor
from dynaquant.engine.quantize.moment_sample import held
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
from dynaquant.engine.tensors.shard import Shard

SMALLEST = 2.0**-133
"""The smallest value outside the bucket of zero."""
POSITIONS_PER_RUNG = 16
"""Values are rounded by their positions between two powers, in sixteenths of a rung."""
GRID_TURNS = 64
"""Turns of the values of a tensor. Rows in a chunk have the same turn."""
Extremes = tuple[float, float]
"""The smallest value of a tensor that is at least ``SMALLEST``, infinity if there is none; and the largest value."""


@dataclass(frozen=True)
class Threshold:
    """When a value goes up to the next power (method 2.3): if its class is at least ``value``.

    Between two powers lie 16 positions for each rung, and each has as many classes as there are turns. Turns are
    equally frequent in a tensor, so values that move alike need not all go up at once.
    """

    value: int
    turns: int = 1


def quantize_to_log_grid(
    tensor: Tensor,
    pace: int,
    extremes: Extremes,
    threshold: Threshold,
    shard: Shard,
    negligible: float,
) -> QuantizedTensor | None:
    """Return the tensor with every value rounded to a power of ``2^(pace/4)``; None if this takes too many levels.

    tensor: non-negative. The level depends on a value's bucket (``log_histogram``), so a value within 1 % of the
    threshold may go to either power. extremes: of the whole tensor. They decide which powers have levels. shard: what
    the tensor is of the whole one. negligible: smaller values, but for zeros, may be raised as far as this.
    """
    found = _native.log_bins(*extremes, positions(), pace, threshold.value, threshold.turns, negligible)
    if found is None:
        return None
    first, bins = found
    codebook, kernel = LogGrid(pace, first, bins), kernels.for_device(tensor.device)
    position, rest = divmod(threshold.value, threshold.turns)
    low, high = (_level_table(tensor.dtype, pace, up_from, first) for up_from in (position + (rest > 0), position))
    if not rest or not tensor.numel():
        levels = kernel.table_levels(tensor, low)
    else:
        chunks = _chunks_of_rows(shard, threshold.turns).astype(np.uint8)
        levels = kernel.levels_in_turns(tensor, low, high, _goes_up(pace, threshold, first), chunks)
    return QuantizedTensor(tensor.dtype, tensor.shape, kernels.to_host(levels)(), codebook, NO_OUTLIERS)


def extremes_of(tensor: Tensor) -> Extremes:
    """Return the extremes of a non-negative tensor's values as float32."""
    if not tensor.numel():
        return math.inf, 0.0
    kernel = kernels.for_device(tensor.device)
    with np.errstate(over="ignore"):  # of float64, which may be beyond float32
        return kernel.smallest_from(tensor, SMALLEST), float(np.float32(kernel.extremes(tensor)[1]))


def threshold_for(values: NDArray[np.float32], pace: int, shard: Shard, negligible: float) -> Reduction[Threshold]:
    """Return the threshold at which updates by the rounded values are as long as before on average.

    values: the rank's part of a sample of a second moment. negligible: as for ``balanced``. A moment that is rounded to
    the nearest power, restored and rounded again before it has moved by half a pace, would stay where it is for good.
    """
    return (yield from balanced(values, pace, GRID_TURNS, lambda: _rounded_down(values, pace, shard), negligible))


Down = tuple[NDArray[np.float32], NDArray[Any], NDArray[Any]]
"""The values of a sample rounded down to powers, their positions above these, and their turns: whole numbers."""


def balanced(
    values: NDArray[np.float32], pace: int, turns: int, rounded_down: Callable[[], Down], negligible: float
) -> Reduction[Threshold]:
    """Return the threshold at which updates by the rounded values are as long as before on average.

    values: the rank's part of a sample. rounded_down: is called again for each sum, so nothing is held between them.
    negligible: smaller values do not count.
    """

    def sums(split: int | None) -> tuple[list[float], int]:
        down, positions, turn = rounded_down()
        if split is None:
            classes = positions.astype(np.uint16, copy=False)
            return _native.root_sums(values, down, classes, POSITIONS_PER_RUNG * pace, negligible)
        there = positions == split
        return _native.root_sums(values[there], down[there], turn[there].astype(np.uint16), turns, negligible)

    *by_position, count = (yield from total(*sums(None))).tolist()
    threshold, split, rest = _native.balance(np.array(by_position), count, pace)
    if split is None:
        return Threshold(threshold * turns, turns)
    *by_turn, _ = (yield from total(*sums(split))).tolist()
    return Threshold(threshold * turns + _native.first_turn(np.array(by_turn), rest, pace), turns)


def _rounded_down(values: NDArray[np.float32], pace: int, shard: Shard) -> Down:
    at, step = positions()[_buckets(values)], POSITIONS_PER_RUNG * pace
    down = _exponents(at, pace, Threshold(step))
    above = np.clip(at - step * down.astype(np.int32), 0, step - 1)
    turns = _turns(at, pace, GRID_TURNS, _chunks_of_sample(shard, GRID_TURNS))
    return _powers(down, pace, values, torch.float32), above, turns


def round_to_log_grid(
    values: NDArray[np.float32],
    pace: int,
    dtype: torch.dtype,
    threshold: Threshold,
    shard: Shard,
    negligible: float,
) -> NDArray[np.float32]:
    """Return what ``quantize_to_log_grid`` would store of a sample of a tensor of ``dtype``, as float32."""
    exponents = _exponents(positions()[_buckets(values)], pace, threshold, _chunks_of_sample(shard, threshold.turns))
    if (lowest := negligible / 4) >= SMALLEST:
        found = _native.log_bins(lowest, lowest, positions(), pace, threshold.value, threshold.turns, negligible)
        assert found is not None
        exponents = np.maximum(exponents, found[0])
    return _powers(exponents, pace, values, dtype)


def _chunks_of_sample(shard: Shard, turns: int) -> NDArray[np.int32]:
    """Return the chunk of each value of a sample."""
    rows: NDArray[np.int64] = held(shard).numpy() // max(math.prod(shard.local_shape[1:]), 1)
    return _chunks_of_rows(shard, turns)[rows]


def _chunks_of_rows(shard: Shard, turns: int) -> NDArray[np.int32]:
    """Return the chunk of each row that the rank holds: a tensor has as many chunks of rows as turns, at most."""
    if not shard.shape:
        return np.zeros(1, dtype=np.int32)
    return (shard.indices(0) * turns // max(shard.shape[0], 1)).astype(np.int32)


def _powers(
    exponents: NDArray[np.int16], pace: int, values: NDArray[np.float32], dtype: torch.dtype
) -> NDArray[np.float32]:
    """Return the powers with these exponents in a dtype, as float32; zero for values in the bucket of zero."""
    powers = _rung_values()[exponents.astype(np.int32) * pace - LOWEST_RUNG]
    powers[_buckets(values) == 0] = 0
    if dtype == torch.float32:
        return powers
    return saturating_cast(torch.from_numpy(powers), dtype).to(torch.float32).numpy()


@cache
def _rung_values() -> NDArray[np.float32]:
    return np.array([rung_value(rung) for rung in range(LOWEST_RUNG, HIGHEST_RUNG + 1)], dtype=np.float32)


@lru_cache(maxsize=64)
def _level_table(dtype: torch.dtype, pace: int, up_from: int, first: int) -> NDArray[np.uint8]:
    """Return the level of each bucket of a dtype. up_from: the position from which on values go up."""
    exponents = _exponents(positions(), pace, Threshold(up_from))
    table = np.clip(exponents - first + FIRST_BIN, FIRST_BIN, 255).astype(np.uint8)
    table[[0, MAGNITUDES]] = PRUNED
    return table_for(dtype, table)


def _goes_up(pace: int, threshold: Threshold, first: int) -> NDArray[np.bool_]:
    """Return whether values at the threshold's position go up, by chunk and by the level below: bool[turns, 256]."""
    moved, rest = divmod(threshold.value, threshold.turns * POSITIONS_PER_RUNG * pace)
    below = np.arange(256, dtype=np.int32) - FIRST_BIN + first + moved
    return _turn(below, threshold.turns, np.arange(threshold.turns)[:, None]) >= rest % threshold.turns


def _buckets(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return values.view(np.uint32) >> np.uint32(16)


@cache
def positions() -> NDArray[np.int16]:
    """Return where each bucket lies on the ladder of rungs, in sixteenths of a rung; valid for buckets above zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rungs = np.log2(bucket_values().astype(np.float64)) * RUNGS_PER_OCTAVE
    nearest = np.rint(np.clip(np.nan_to_num(rungs), LOWEST_RUNG - 32, HIGHEST_RUNG + 32) * POSITIONS_PER_RUNG)
    result: NDArray[np.int16] = nearest.astype(np.int16)
    return result


def _exponents(
    at: NDArray[np.int16], pace: int, threshold: Threshold, chunks: NDArray[np.int32] | int = 0
) -> NDArray[np.int16]:
    """Return the exponent e of the power ``2^(pace·e/4)`` that each position is rounded to."""
    classes = POSITIONS_PER_RUNG * pace * threshold.turns
    turns = _turns(at, pace, threshold.turns, chunks) if threshold.value % threshold.turns else 0
    rounded = np.floor_divide(at.astype(np.int32) * threshold.turns + turns - threshold.value, classes) + 1
    found: NDArray[np.int16] = np.clip(rounded, math.ceil(LOWEST_RUNG / pace), HIGHEST_RUNG // pace).astype(np.int16)
    return found


def _turns(at: NDArray[np.int16], pace: int, turns: int, chunks: NDArray[np.int32] | int) -> NDArray[np.int32]:
    """Return the turn of values at these positions."""
    return _turn(np.floor_divide(at.astype(np.int32), POSITIONS_PER_RUNG * pace), turns, chunks)


def _turn(down: NDArray[np.int32], turns: int, chunks: NDArray[Any] | int) -> NDArray[np.int32]:
    """Return the turn of values above these powers. One that has gone up or down gets another turn."""
    return (chunks - (turns * 5 // 8 | 1) * down) & (turns - 1)
