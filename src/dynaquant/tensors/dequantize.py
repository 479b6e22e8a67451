"""The values of stored tensors, on any device, bit for bit the same everywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import kernels
from dynaquant.tensors.codebook import Codebook
from dynaquant.tensors.stored import (
    FIRST_BIN,
    PROTECTED,
    PRUNED,
    External,
    Quantized,
    QuantizedTensor,
    RankOne,
    Rounded,
    Scaled,
    StoredTensor,
)


def values_of(stored: StoredTensor) -> Tensor:
    """The values a restore returns, bit for bit. Raises CheckpointError for external ones that cannot be had."""
    if isinstance(stored, External):
        return stored.values()
    return stored if isinstance(stored, Tensor) else dequantize(stored)


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
