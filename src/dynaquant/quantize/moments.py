"""Moments of an optimizer in a few bits, as coarse as the next update allows (method 2.3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import kernels
from dynaquant.kernels.host import bits_of
from dynaquant.quantize.grid import quantize
from dynaquant.tensors.codebook import (
    HIGHEST_RUNG,
    HIGHEST_STEP,
    LOWEST_RUNG,
    RUNGS_PER_OCTAVE,
    Grid,
    LogGrid,
    rung_value,
)
from dynaquant.tensors.dequantize import dequantize, finite
from dynaquant.tensors.sketch import MAGNITUDES, bucket_values, table_for
from dynaquant.tensors.stored import FIRST_BIN, MAX_BINS, PRUNED, QuantizedTensor, RankOne, Scaled

FACTOR_PACE = 1
"""Rungs between the values of a rank-one tensor's rows and columns."""
SECOND_PACES = (8, 4, 2)
"""Rungs between the values of a second moment, coarsest first: 2, 1 and 1/2 octaves."""
FIRST_RUNGS = tuple(range(12, -25, -2))
"""Steps of a first moment in its unit, coarsest first: from 8 to 1/64 in half octaves."""
SAMPLED = 65_536
"""Elements that the effect of a form is judged by."""
SPREAD = 2_654_435_761
SMALLEST = 2.0**-133
"""The smallest value that is not in the bucket of zero."""
EPSILON = 1e-8
"""What optimizers add to the root of the second moment, so that the update of a weight without gradients is none."""


def log_quantize(tensor: Tensor, pace: int) -> QuantizedTensor | None:
    """A tensor of values from zero on, each at the nearest power of ``2^(pace/4)``; None where they span too many.

    By buckets (``sketch``), so a value within 0.4 % of the middle between two powers may go to either.
    """
    flat = tensor.detach().reshape(-1).to(torch.float32)
    first, bins = 0, 0
    if flat.numel() and float(flat.max()) >= SMALLEST:
        extremes = torch.stack((torch.where(flat >= SMALLEST, flat, torch.inf).min(), flat.max()))
        low, high = _exponents(pace)[_buckets(extremes.cpu())]
        first, bins = int(low), int(high - low) + 1
    if bins > MAX_BINS:
        return None
    levels = kernels.at(tensor.device).table_levels(tensor, table_for(tensor.dtype, _table(pace, first)))
    nothing = np.zeros(0, np.uint16)
    return QuantizedTensor(tensor.dtype, tensor.shape, kernels.to_host(levels)(), LogGrid(pace, first, bins), nothing)


@lru_cache(maxsize=64)
def _table(pace: int, first: int) -> NDArray[np.uint8]:
    """The level of each bucket."""
    table = np.clip(_exponents(pace) - first + FIRST_BIN, 0, 255).astype(np.uint8)
    table[[0, MAGNITUDES]] = PRUNED
    return table


def _buckets(values: Tensor) -> NDArray[np.uint32]:
    return (bits_of(values) >> np.uint32(16)).astype(np.uint32)


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
    matrix = tensor.detach().reshape(tensor.shape[0], -1)
    row_sums, column_sums = kernels.at(tensor.device).row_and_column_sums(matrix)
    row_means, column_means = row_sums / len(column_sums), column_sums / len(row_sums)
    root = math.sqrt(row_means.mean())
    if not 0 < root < math.inf:
        return None

    def factor(means: NDArray[np.float64]) -> QuantizedTensor | None:
        return log_quantize(torch.from_numpy((means / root).astype(np.float32)), FACTOR_PACE)

    rows, columns = factor(row_means), factor(column_means)
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


@lru_cache(maxsize=16)
def _spread(size: int) -> Tensor:
    """Places of at most ``SAMPLED`` elements, by multiples of a large prime, which no shape agrees with."""
    places = torch.arange(min(size, SAMPLED), device="cpu")
    return places if size <= SAMPLED else places * SPREAD % size


def _sample(tensor: Tensor) -> Tensor:
    """At most ``SAMPLED`` elements; float32, on the host."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() > SAMPLED:
        flat = flat.index_select(0, _spread(flat.numel()).to(flat.device))
    return flat.to("cpu", torch.float32)


@lru_cache(maxsize=16)
def _rows_and_columns(size: int, columns: int) -> tuple[Tensor, Tensor]:
    """``_spread`` in a matrix."""
    places = _spread(size)
    return places // columns, places % columns


def _sample_of(stored: RankOne) -> Tensor:
    """``_sample`` of its values."""
    rows, columns = _rows_and_columns(stored.shape.numel(), stored.columns.shape.numel())
    values = dequantize(stored.rows).index_select(0, rows) * dequantize(stored.columns).index_select(0, columns)
    return finite(values, stored.dtype).to(torch.float32)


def _log_quantized(values: Tensor, pace: int, dtype: torch.dtype) -> Tensor:
    """What ``log_quantize`` makes of single values."""
    buckets = _buckets(values)
    exponents = _exponents(pace)[buckets]
    occurring, place = np.unique(exponents, return_inverse=True)
    powers = np.array([rung_value(int(exponent) * pace) for exponent in occurring], dtype=np.float32)
    decoded = np.where(buckets > 0, powers[place], np.float32(0)) if len(powers) else powers
    return finite(torch.from_numpy(decoded), dtype).to(torch.float32)


def second_moment(second: Tensor, tolerance: float) -> QuantizedTensor | RankOne | None:
    """The cheapest form whose effect on an update of ``1 / sqrt(v)`` stays in tolerance; None: store it exactly.

    The effect is the root mean square of ``sqrt(v / v̂) - 1`` over the elements that are not zero, by a sample.
    """
    sample = _sample(second)
    moved = (sample > 0).nonzero().view(-1)
    values = sample.index_select(0, moved)

    def is_good(decoded: Tensor) -> bool:
        if not bool(((decoded > 0) & (decoded < math.inf)).all()):
            return False
        ratio = (values / decoded).sqrt() - 1
        return not ratio.numel() or float(ratio.square().mean().sqrt()) <= tolerance

    factors = rank_one(second)
    if factors is not None and is_good(_sample_of(factors).index_select(0, moved)):
        return factors
    good = (pace for pace in SECOND_PACES if is_good(_log_quantized(values, pace, second.dtype)))
    return next((stored for pace in good if (stored := log_quantize(second, pace)) is not None), None)


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
    exact, here = first.detach().to(torch.float32), kernels.at(first.device)
    root = here.square_root(dequantize(stored_second, first.device).to(torch.float32))
    if bool(((root == 0) & (exact != 0)).any()):
        return None
    units = (exact / root).masked_fill_(root == 0, 0)
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
