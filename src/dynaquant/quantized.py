"""Quantized tensors: the small values in which quantizers and coders meet, and the way back to numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import _native, kernels
from dynaquant.codebook import Codebook

PRUNED = _native.LEVEL_PRUNED
PROTECTED = _native.LEVEL_PROTECTED
FIRST_BIN = 2
"""Level 0 is *pruned*, level 1 *protected*, level ``FIRST_BIN + i`` is bin ``i``.

The extra levels come first so that they stay the same when the number of bins changes.
"""
MAX_BINS = 256 - FIRST_BIN


@dataclass(frozen=True)
class Levels:
    """Levels, uint8, flat in C order, and how many different ones can occur: what a delta is coded against."""

    values: NDArray[np.uint8]
    count: int


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor as levels and a codebook, with the exact values of its protected elements.

    dtype is float32, float64, bfloat16 or float16. ``protected`` holds, in C order, the protected values as 16 bits:
    float16 for a float16 tensor, bfloat16 otherwise.
    """

    dtype: torch.dtype
    shape: torch.Size
    levels: NDArray[np.uint8]
    codebook: Codebook
    protected: NDArray[np.uint16]

    @property
    def centres(self) -> NDArray[np.float32]:
        """The value of each bin."""
        return self.codebook.values

    @property
    def parent_levels(self) -> Levels:
        """What the next checkpoint's delta is coded against."""
        return Levels(self.levels, FIRST_BIN + self.codebook.bins)


@dataclass(frozen=True)
class RankOne:
    """A matrix as the product of a value for each row and one for each column (method 2.3, as in Adafactor).

    A tensor of more dimensions is the matrix of its first one and the others together. rows, columns: float32, one
    dimension.
    """

    dtype: torch.dtype
    shape: torch.Size
    rows: QuantizedTensor
    columns: QuantizedTensor


@dataclass(frozen=True)
class Scaled:
    """A first moment in units of the root of the second moment as it is stored (method 2.3).

    units: float32. second: of the same shape; its name in the checkpoint is ``second_name``.
    """

    dtype: torch.dtype
    units: QuantizedTensor
    second: QuantizedTensor | RankOne
    second_name: str

    @property
    def shape(self) -> torch.Size:
        """Of the values."""
        return self.units.shape


@dataclass(frozen=True)
class Rounded:
    """A half-precision weight whose float32 master copy is stored: it is that, rounded, and takes nothing itself.

    of: the master copy as stored, under the name ``of_name``.
    """

    dtype: torch.dtype
    of: QuantizedTensor | Tensor
    of_name: str

    @property
    def shape(self) -> torch.Size:
        """Of the values."""
        return self.of.shape


Quantized = QuantizedTensor | RankOne | Scaled | Rounded


def dequantize(quantized: Quantized, where: torch.device = kernels.HOST) -> Tensor:
    """The values, as a new tensor of the original shape and dtype on a device. This is what a restore returns, bit for
    bit the same on every device.

    Raises ValueError when the levels do not fit the codebook or the protected values, or parts do not fit each other.
    """
    if where == kernels.HOST and is_zero(quantized):
        return torch.from_numpy(np.zeros(quantized.shape, dtype=np.float32)).to(quantized.dtype)  # memory as it is
    if 0 < quantized.shape.numel() <= kernels.piece(where):
        (values,) = pieces(quantized, where)
        return values.view(quantized.shape)
    values = kernels.empty(quantized.shape, quantized.dtype, where)
    dequantize_into(values, quantized)
    return values


def dequantize_into(values: Tensor, quantized: Quantized) -> None:
    """Fills a contiguous tensor of the right shape and dtype, on any device, with what ``dequantize`` returns."""
    flat, begin = values.view(-1), 0
    for piece in pieces(quantized, values.device):
        flat[begin : begin + piece.numel()] = piece
        begin += piece.numel()


def pieces(quantized: Quantized, where: torch.device = kernels.HOST) -> Iterator[Tensor]:
    """The values one after the other, flat, in pieces that stay in a processor's cache while something is done to them.

    Raises ValueError as ``dequantize`` does.
    """
    columns = max(math.prod(quantized.shape[1:]), 1)  # a piece of a matrix is a number of its rows
    yield from _pieces(quantized, max(kernels.piece(where) // columns, 1) * columns, where)


def _pieces(quantized: Quantized, size: int, where: torch.device) -> Iterator[Tensor]:
    """``pieces`` of a size, the last one smaller."""
    if isinstance(quantized, Rounded):
        master = quantized.of
        parts = _parts(master.to(where), size) if isinstance(master, Tensor) else _pieces(master, size, where)
        for part in parts:
            yield part.to(quantized.dtype)
    elif isinstance(quantized, RankOne):
        yield from _products(quantized, size, where)
    elif isinstance(quantized, Scaled):
        if quantized.second.shape != quantized.shape:
            raise ValueError("its second moment has another shape")
        units_of = _pieces(quantized.units, size, where)
        if is_zero(quantized):
            yield from (units.to(quantized.dtype) for units in units_of)
            return
        for units, second in zip(units_of, _pieces(quantized.second, size, where), strict=True):
            units.mul_(kernels.at(where).square_root(second.to(torch.float32)))
            yield finite(units, quantized.dtype)
    else:
        yield from _values(quantized, size, where)


def _parts(tensor: Tensor, size: int) -> Iterator[Tensor]:
    flat = tensor.reshape(-1)
    return (flat[begin : begin + size] for begin in range(0, len(flat), size))


def _products(quantized: RankOne, size: int, where: torch.device) -> Iterator[Tensor]:
    rows, columns = (dequantize(factor, where) for factor in (quantized.rows, quantized.columns))
    if rows.numel() * columns.numel() != quantized.shape.numel():
        raise ValueError("the rows and columns are those of a tensor of another shape")
    if quantized.shape.numel():
        for some in _parts(rows, max(size // len(columns), 1)):
            yield finite(torch.outer(some, columns).view(-1), quantized.dtype)


def _values(quantized: QuantizedTensor, size: int, where: torch.device) -> Iterator[Tensor]:
    table = _table(quantized.codebook, torch.float32 if quantized.dtype == torch.float64 else quantized.dtype)
    rest = quantized.protected
    for begin in range(0, quantized.levels.size, size):
        levels = quantized.levels[begin : begin + size]
        count = np.count_nonzero(levels == PROTECTED) if len(rest) else 0
        yield kernels.at(where).values(levels, table, rest[:count], where).to(quantized.dtype)
        rest = rest[count:]
    if len(rest):
        raise ValueError("the number of protected values differs from the number of protected levels")


def is_zero(quantized: Quantized) -> bool:
    """Whether nothing is left of it: all values are zero, which no codebook and no second moment can change."""
    if isinstance(quantized, Scaled):
        return quantized.second.shape == quantized.shape and is_zero(quantized.units)
    if not isinstance(quantized, QuantizedTensor) or quantized.codebook.bins or len(quantized.protected):
        return False
    return quantized.levels.size > 0 and int(quantized.levels.max()) == PRUNED


def protected_values(tensor: Tensor, levels: Tensor) -> NDArray[np.uint16]:
    """The 16 bits of the protected elements of a tensor, in C order. levels: flat, on the tensor's device."""
    half = torch.float16 if tensor.dtype == torch.float16 else torch.bfloat16
    values = tensor.detach().to(levels.device).reshape(-1)[levels == PROTECTED]
    largest = torch.finfo(half).max  # the clamp keeps the largest floats from rounding up to infinity
    bits: NDArray[np.uint16] = values.clamp(-largest, largest).to(half).cpu().view(torch.uint16).numpy()
    return bits


def finite(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 values rounded to ``dtype``; what lies beyond its largest number becomes that instead of infinity."""
    if dtype in (torch.float16, torch.bfloat16):
        values = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return values.to(dtype)


@lru_cache(maxsize=256)
def _table(codebook: Codebook, dtype: torch.dtype) -> Tensor:
    """The value of every level."""
    centres = torch.from_numpy(codebook.values)
    return torch.cat((torch.zeros(FIRST_BIN, dtype=dtype, device="cpu"), finite(centres, dtype)))
