"""Compute the values of stored tensors. They are the same on every device, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.tensors.bounded import BoundedTensor
from dynaquant.engine.tensors.codebook import FIRST_BIN, PROTECTED, PRUNED, Codebook
from dynaquant.engine.tensors.stored import (
    External,
    Patchwork,
    Quantized,
    QuantizedTensor,
    RankOne,
    RoundedWeight,
    ScaledMoment,
    StoredTensor,
)


def values_of(stored: StoredTensor) -> Tensor:
    """Return the values that a restore returns. Raises CheckpointError if external values cannot be read."""
    if isinstance(stored, External):
        return stored.values()
    return stored if isinstance(stored, Tensor) else dequantize(stored)


def dequantize(quantized: Quantized, device: torch.device = kernels.HOST) -> Tensor:
    """Return the values as a new tensor of the original shape and dtype on a device.

    Raises ValueError if the levels do not fit the codebook or the protected values, or if the parts of a tensor differ
    in shape.
    """
    if device == kernels.HOST and is_zero(quantized):
        # NumPy's zeros take no memory until they are written.
        return torch.from_numpy(np.zeros(quantized.shape, dtype=np.float32)).to(quantized.dtype)
    if 0 < quantized.shape.numel() <= kernels.piece_size(device):
        (values,) = pieces(quantized, device)
        return values.view(quantized.shape)
    values = kernels.empty(quantized.shape, quantized.dtype, device)
    dequantize_into(values, quantized)
    return values


def dequantize_into(values: Tensor, quantized: Quantized) -> None:
    """Fill a contiguous tensor of the right shape and dtype, on any device, with what ``dequantize`` returns."""
    flat, begin = values.view(-1), 0
    for piece in pieces(quantized, values.device):
        flat[begin : begin + piece.numel()] = piece
        begin += piece.numel()


def pieces(quantized: Quantized, device: torch.device = kernels.HOST) -> Iterator[Tensor]:
    """Yield the values in order, as flat pieces. A piece stays in the processor's cache while the caller works on it.

    Raises ValueError as ``dequantize`` does.
    """
    yield from _pieces(quantized, piece_length(quantized.shape, device), device)


def piece_length(shape: torch.Size, device: torch.device) -> int:
    """Return the number of values of each of the ``pieces`` but the last."""
    columns = max(math.prod(shape[1:]), 1)  # a piece of a matrix is a whole number of rows
    return max(kernels.piece_size(device) // columns, 1) * columns


def _pieces(quantized: Quantized, size: int, device: torch.device) -> Iterator[Tensor]:
    """Yield pieces of ``size`` values. The last one may be smaller."""
    if isinstance(quantized, RoundedWeight):
        master = quantized.master
        parts = _parts(master.to(device), size) if isinstance(master, Tensor) else _pieces(master, size, device)
        for part in parts:
            yield part.to(quantized.dtype)
    elif isinstance(quantized, BoundedTensor):
        for values in quantized.pieces(size):
            yield values.to(device)
    elif isinstance(quantized, RankOne):
        yield from _products(quantized, size, device)
    elif isinstance(quantized, Patchwork):
        yield from _parts(_of_boxes(quantized).to(device), size)
    elif isinstance(quantized, ScaledMoment):
        if quantized.second.shape != quantized.shape:
            raise ValueError("its second moment has another shape")
        all_units = _pieces(quantized.units, size, device)
        if is_zero(quantized):
            yield from (units.to(quantized.dtype) for units in all_units)
            return
        for units, second in zip(all_units, _pieces(quantized.second, size, device), strict=True):
            kernels.for_device(device).multiply_by_roots(units, second.to(torch.float32))
            yield saturating_cast(units, quantized.dtype)
    else:
        yield from _values(quantized, size, device)


def _of_boxes(quantized: Patchwork) -> Tensor:
    values = kernels.empty(quantized.shape, quantized.dtype)
    for box, stored in quantized.boxes:
        values[box.slices] = values_of(stored)
    return values


def _parts(tensor: Tensor, size: int) -> Iterator[Tensor]:
    flat = tensor.reshape(-1)
    return (flat[begin : begin + size] for begin in range(0, len(flat), size))


def _products(quantized: RankOne, size: int, device: torch.device) -> Iterator[Tensor]:
    rows, columns = (dequantize(factor, device) for factor in (quantized.rows, quantized.columns))
    if rows.numel() * columns.numel() != quantized.shape.numel():
        raise ValueError("the rows and columns are those of a tensor of another shape")
    if quantized.shape.numel():
        for some_rows in _parts(rows, max(size // len(columns), 1)):
            yield saturating_cast(kernels.for_device(device).outer(some_rows, columns), quantized.dtype)


def _values(quantized: QuantizedTensor, size: int, device: torch.device) -> Iterator[Tensor]:
    table = _value_table(quantized.codebook, torch.float32 if quantized.dtype == torch.float64 else quantized.dtype)
    protected = quantized.protected
    for begin in range(0, quantized.levels.size, size):
        levels = quantized.levels[begin : begin + size]
        count = np.count_nonzero(levels == PROTECTED) if len(protected) else 0
        values = kernels.for_device(device).values(levels, table, protected[:count], device)
        yield values.to(quantized.dtype)
        protected = protected[count:]
    if len(protected):
        raise ValueError("the number of protected values differs from the number of protected levels")


def is_zero(quantized: Quantized) -> bool:
    """Whether every level is *pruned*, so that all values are zero without looking at codebooks or second moments."""
    if isinstance(quantized, ScaledMoment):
        return quantized.second.shape == quantized.shape and is_zero(quantized.units)
    if not isinstance(quantized, QuantizedTensor) or quantized.codebook.bins or len(quantized.protected):
        return False
    return quantized.levels.size > 0 and int(quantized.levels.max()) == PRUNED


def protected_values(tensor: Tensor, levels: Tensor) -> NDArray[np.uint16]:
    """Return the 16 bits of a tensor's protected elements, in C order. levels: flat, on the tensor's device."""
    half = torch.float16 if tensor.dtype == torch.float16 else torch.bfloat16
    flat = tensor.detach().to(levels.device).reshape(-1)
    if levels.device == kernels.HOST:  # not by PyTorch, whose threads would wait for one another
        values = flat.index_select(0, torch.from_numpy(np.flatnonzero(levels.numpy() == PROTECTED)))
    else:
        values = flat[levels == PROTECTED]
    largest = torch.finfo(half).max  # the clamp keeps the largest floats from rounding up to infinity
    bits: NDArray[np.uint16] = values.clamp(-largest, largest).to(half).cpu().view(torch.uint16).numpy()
    return bits


def saturating_cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values in ``dtype``. Values beyond its range become its largest number, not infinity."""
    if dtype in (torch.float16, torch.bfloat16):
        values = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return values.to(dtype)


@lru_cache(maxsize=256)
def _value_table(codebook: Codebook, dtype: torch.dtype) -> Tensor:
    """Return the value of every level."""
    centres = torch.from_numpy(codebook.values)
    return torch.cat((torch.zeros(FIRST_BIN, dtype=dtype, device="cpu"), saturating_cast(centres, dtype)))
