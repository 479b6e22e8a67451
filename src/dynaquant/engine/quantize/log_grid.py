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
Extremes = tuple[float, float, float]
"""The lowest and the highest value of a tensor, NaN if any value is; and the smallest one that is at least
``SMALLEST``, infinity if there is none."""
NO_EXTREMES = math.inf, 0.0, math.inf
"""Those of a tensor without values."""


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
    _, highest, smallest = extremes
    with np.errstate(over="ignore"):  # of float64, which may be beyond float32
        largest = float(np.float32(highest))
    found = _native.log_bins(smallest, largest, positions(), pace, threshold.value, threshold.turns, negligible)
    if found is None:
        return None
    first, bins = found
    codebook, kernel = LogGrid(pace, first, bins), kernels.for_device(tensor.device)
    position, rest = divmod(threshold.value, threshold.turns)
    low, high = (_level_table(tensor.dtype, pace, up_from, first) for up_from in (position + (rest > 0), position))
    if not rest or not tensor.numel():
        levels = kernel.table_levels(tensor, low)
    else:
        chunks = _chunks_of_rows(shard, threshold.turns)
        levels = kernel.levels_in_turns(tensor, low, high, _goes_up(pace, threshold, first), chunks)
    return QuantizedTensor(tensor.dtype, tensor.shape, kernels.to_host(levels)(), codebook, NO_OUTLIERS)


def threshold_for(values: NDArray[np.float32], pace: int, shard: Shard, negligible: float) -> Reduction[Threshold]:
    """Return the threshold at which updates by the rounded values are as long as before on average.

    values: the rank's part of a sample of a second moment. negligible: smaller values do not count. A moment that is
    rounded to the nearest power, restored and rounded again before it has moved by half a pace, would stay where it is
    for good.
    """

    def by_turn(position: int) -> RootSums:
        chunks = _chunks_of_sample(shard, GRID_TURNS)
        return _native.sums_by_turn(values, chunks, positions(), pace, GRID_TURNS, position, negligible)

    by_position = _native.sums_by_position(values, positions(), pace, negligible)
    return (yield from balanced(by_position, by_turn, pace, GRID_TURNS))


RootSums = tuple[list[float], int]
"""The sum of ``sqrt(v / v rounded down)`` of each class of values, and how many values there are in all."""


def balanced(by_position: RootSums, by_turn: Callable[[int], RootSums], pace: int, turns: int) -> Reduction[Threshold]:
    """Return the threshold at which updates by the rounded values are as long as before on average.

    by_position: of the rank's part of a sample. by_turn: returns the sums of the values at a position.
    """
    *sums, count = (yield from total(*by_position)).tolist()
    threshold, split, rest = _native.balance(np.array(sums), count, pace)
    if split is None:
        return Threshold(threshold * turns, turns)
    *sums, _ = (yield from total(*by_turn(split))).tolist()
    return Threshold(threshold * turns + _native.first_turn(np.array(sums), rest, pace), turns)


def changes_on_log_grid(
    values: NDArray[np.float32],
    pace: int,
    dtype: torch.dtype,
    threshold: Threshold,
    shard: Shard,
    negligible: float,
) -> tuple[bool, float, int]:
    """Return ``_native.root_changes`` of what ``quantize_to_log_grid`` would store of a tensor of ``dtype``.

    values: the rank's part of a sample.
    """
    chunks, powers = _chunks_of_sample(shard, threshold.turns), _rung_values(dtype)
    value, turns = threshold.value, threshold.turns
    return _native.changes_by_rounding(values, chunks, positions(), pace, value, turns, powers, negligible)


@lru_cache(maxsize=16)
def _chunks_of_sample(shard: Shard, turns: int) -> NDArray[np.uint8]:
    """Return the chunk of each value of a sample that the rank holds."""
    rows: NDArray[np.int64] = held(shard).numpy() // max(math.prod(shard.local_shape[1:]), 1)
    return _chunks_of_rows(shard, turns)[rows]


def _chunks_of_rows(shard: Shard, turns: int) -> NDArray[np.uint8]:
    """Return the chunk of each row that the rank holds: a tensor has as many chunks of rows as turns, at most."""
    if not shard.shape:
        return np.zeros(1, dtype=np.uint8)
    return (shard.indices(0) * turns // max(shard.shape[0], 1)).astype(np.uint8)


@cache
def _rung_values(dtype: torch.dtype) -> NDArray[np.float32]:
    """Return the value of each rung in a dtype, as float32."""
    values = np.array([rung_value(rung) for rung in range(LOWEST_RUNG, HIGHEST_RUNG + 1)], dtype=np.float32)
    return saturating_cast(torch.from_numpy(values), dtype).to(torch.float32).numpy()


@lru_cache(maxsize=64)
def _level_table(dtype: torch.dtype, pace: int, up_from: int, first: int) -> NDArray[np.uint8]:
    """Return the level of each bucket of a dtype. up_from: the position from which on values go up."""
    exponents = _exponents(positions(), pace, up_from)
    table = np.clip(exponents - first + FIRST_BIN, FIRST_BIN, 255).astype(np.uint8)
    table[[0, MAGNITUDES]] = PRUNED
    return table_for(dtype, table)


def _goes_up(pace: int, threshold: Threshold, first: int) -> NDArray[np.bool_]:
    """Return whether values at the threshold's position go up, by chunk and by the level below: bool[turns, 256]."""
    moved, rest = divmod(threshold.value, threshold.turns * POSITIONS_PER_RUNG * pace)
    below = np.arange(256, dtype=np.int32) - FIRST_BIN + first + moved
    return _turn(below, threshold.turns, np.arange(threshold.turns)[:, None]) >= rest % threshold.turns


@cache
def positions() -> NDArray[np.int16]:
    """Return where each bucket lies on the ladder of rungs, in sixteenths of a rung; valid for buckets above zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rungs = np.log2(bucket_values().astype(np.float64)) * RUNGS_PER_OCTAVE
    nearest = np.rint(np.clip(np.nan_to_num(rungs), LOWEST_RUNG - 32, HIGHEST_RUNG + 32) * POSITIONS_PER_RUNG)
    result: NDArray[np.int16] = nearest.astype(np.int16)
    return result


def _exponents(at: NDArray[np.int16], pace: int, up_from: int) -> NDArray[np.int32]:
    """Return the exponent e of the power ``2^(pace·e/4)`` that each position is rounded to."""
    rounded = np.floor_divide(at.astype(np.int32) - up_from, POSITIONS_PER_RUNG * pace) + 1
    found: NDArray[np.int32] = np.clip(rounded, math.ceil(LOWEST_RUNG / pace), HIGHEST_RUNG // pace)
    return found


def _turn(down: NDArray[np.int32], turns: int, chunks: NDArray[Any]) -> NDArray[np.int32]:
    """Return the turn of values above these powers. One that has gone up or down gets another turn."""
    return (chunks - (turns * 5 // 8 | 1) * down) & (turns - 1)
