"""How large the values of a tensor are: of all of them, and of the rows and columns whose values are small.

A few huge values must not decide how coarsely the others are stored, and rows of large values not how coarsely those of
small values are (docs/decisions.md, "What must a checkpoint keep that the metric does not see?").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import _native
from dynaquant.engine import kernels
from dynaquant.engine.kernels.host import plain_values
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.engine.tensors.lazy_mapping import LazyMapping
from dynaquant.engine.tensors.shard import Shard

_SAFE = 1e-12, 1e15
"""The squares of float32 values between these neither overflow nor vanish."""

SMALLEST, LARGEST = 2.0**-126, 1e37
"""A tensor whose largest magnitude is outside this range is stored exactly: float32 arithmetic would not preserve it.
(Only float64 has values beyond 1e38.)"""

Axes = tuple[NDArray[np.float64], ...]
"""Sums of squares of the rows and of the columns of a tensor; or the values of a vector."""


@dataclass(frozen=True)
class Magnitude:
    """How large the values of a tensor are.

    mean_square: of all values, but of outliers only a part. small: the root mean square of the smallest rows or
    columns, but for a tenth of them. Of a vector, the standard deviation: a norm's weights lie near one, and what they
    have learned is how they differ. ``native/magnitudes.hpp`` has the shares.
    """

    mean_square: float
    small: float


def magnitudes(
    tensors: Mapping[str, Tensor],
    shards: Shards = WHOLE,
    nonfinite: dict[str, int] | None = None,
    uneven: list[str] | None = None,
) -> dict[str, Magnitude]:
    """Return the magnitude of each tensor that a grid can hold, by name. Collective with shards.

    Left out are empty and constant tensors, those with infinities or NaNs, those of extreme values, and uneven
    matrices: values far apart in size, as with a mask of -10000 among trained values (``native/magnitudes.hpp``).
    tensors: of ``QUANTIZABLE_DTYPES``; looked up again whenever they are needed. nonfinite: gets the number of infinite
    or NaN values of each tensor that has any. uneven: gets the names of uneven matrices.
    """
    plain = {}
    for name, tensor in tensors.items() if not shards.divided else ():
        if (magnitude := _of_plain(tensor)) is not None:
            plain[name] = magnitude
    others = [name for name in tensors if name not in plain]
    found = kernels.all_extremes(LazyMapping(others, tensors.__getitem__))
    extremes, counts = {}, {}
    for name in others:
        extremes[name], counts[name] = _extremes_of(tensors[name], found.get(name))
    extremes, counts = shards.largest(extremes), shards.sums(counts)
    largest = {}
    for name, (highest, minus_lowest) in extremes.items():
        if count := round(counts[name][0]):
            if nonfinite is not None:
                nonfinite[name] = count
        elif -minus_lowest < highest and SMALLEST <= max(highest, minus_lowest) < LARGEST:
            largest[name] = max(highest, minus_lowest)
    own = {name: _axes(tensors[name], shards.of(name, tensors[name]), largest[name]) for name in largest}
    if shards.divided:
        sums = shards.sums({name: np.concatenate(axes).tolist() for name, axes in own.items()})
        own = {n: tuple(np.split(np.array(sums[n]), np.cumsum([len(a) for a in own[n]])[:-1])) for n in own}
    of_axes = {name: Magnitude(*_of_axes(*axes)) for name, axes in own.items()}
    matrices = [name for name, axes in own.items() if len(axes) > 1]
    exponents = shards.sums({n: _exponents(t, shards.size(n, t)) for n in matrices for t in (tensors[n],)})
    for name in matrices:
        if _native.is_uneven(np.array(exponents[name]), *own[name]):
            del of_axes[name]
            if uneven is not None:
                uneven.append(name)
    together = {**plain, **of_axes}
    return {name: together[name] for name in tensors if name in together}


def _of_plain(tensor: Tensor) -> Magnitude | None:
    """Return the magnitude of a float32 tensor on the host, in one call; None for others, and for odd values."""
    if not tensor.numel() or (values := plain_values(tensor)) is None:
        return None
    found = _native.tensor_magnitude(values, tensor.shape[0] if tensor.ndim else 1)
    return None if found is None else Magnitude(*found)


def _extremes_of(tensor: Tensor, extremes: tuple[float, float] | None) -> tuple[list[float], list[float]]:
    """Return the highest value and minus the lowest one; the number of values that are not finite.

    extremes: the lowest and the highest value, NaN if any value is NaN; None without values.
    """
    if extremes is None:
        return [-math.inf, -math.inf], [0.0]
    lowest, highest = extremes
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        return [-math.inf, -math.inf], [float((~tensor.detach().isfinite()).sum())]
    return [highest, -lowest], [0.0]


def _axes(tensor: Tensor, shard: Shard, largest: float) -> Axes:
    """Return what this rank adds to the axes of the whole tensor."""
    height = shard.shape[0] if shard.shape else 1
    width = shard.shape[1:].numel()
    if min(height, width) == 1:
        return (shard.among_zeros(tensor.detach().reshape(-1).double().cpu().numpy()),)
    rows, columns = shard.axes
    if not tensor.numel():
        return np.zeros(height), np.zeros(width)
    row_sums, column_sums = _squares(tensor.detach().reshape(tensor.shape[0], -1), _SAFE[0] < largest < _SAFE[1])
    return rows.among_zeros(row_sums), columns.among_zeros(column_sums)


def _squares(matrix: Tensor, is_safe: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the sums of squares of rows and of columns. Works in pieces, to need little memory."""
    height, width = matrix.shape
    rows, columns = np.zeros(height), np.zeros(width)
    kernel, step = kernels.for_device(matrix.device), max(kernels.piece_size(matrix.device) // width, 1)
    for begin in range(0, height, step):
        part = matrix[begin : begin + step]
        if is_safe:
            own, across = kernel.row_and_column_sums(part.to(torch.float32).square())
        else:
            squares = part.double().square()
            own, across = squares.sum(1).cpu().numpy(), squares.sum(0).cpu().numpy()
        rows[begin : begin + step] = own
        columns += across
    return rows, columns


def _exponents(tensor: Tensor, size: int) -> list[float]:
    """Return how many values of a sample have each exponent of float32. size: elements of the whole tensor."""
    sample = tensor.detach().reshape(-1)[:: _native.uneven_pace(size)].cpu().float().numpy()
    return [float(count) for count in np.bincount(sample.view(np.uint32) >> 23 & 0xFF, minlength=256)]


def _of_axes(*axes: NDArray[np.float64]) -> tuple[float, float]:
    return _native.vector_magnitude(*axes) if len(axes) == 1 else _native.matrix_magnitude(*axes)
