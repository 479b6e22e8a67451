"""Quantized tensors: the small values in which quantizers and coders meet, and the way back to numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import _native
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


def dequantize(quantized: Quantized) -> Tensor:
    """The values, as a new CPU tensor of the original shape and dtype. This is what a restore returns, bit for bit.

    Raises ValueError when the levels do not fit the codebook or the protected values, or parts do not fit each other.
    """
    if isinstance(quantized, Rounded):
        master = quantized.of if isinstance(quantized.of, Tensor) else _values_of(quantized.of)
        return master.to(quantized.dtype)
    if isinstance(quantized, RankOne):
        rows, columns = dequantize(quantized.rows), dequantize(quantized.columns)
        if rows.numel() * columns.numel() != quantized.shape.numel():
            raise ValueError("the rows and columns are those of a tensor of another shape")
        return _finite(torch.outer(rows, columns).reshape(quantized.shape), quantized.dtype)
    if isinstance(quantized, Scaled):
        second = dequantize(quantized.second)
        if second.shape != quantized.shape:
            raise ValueError("its second moment has another shape")
        # NumPy's root is correctly rounded everywhere; PyTorch's is not, and values must not depend on the machine.
        root = torch.from_numpy(np.asarray(np.sqrt(second.to(torch.float32).numpy())))
        return _finite(dequantize(quantized.units).mul_(root), quantized.dtype)
    return _values_of(quantized)


def _finite(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 values rounded to ``dtype``; what lies beyond its largest number becomes that instead of infinity."""
    if dtype in (torch.float16, torch.bfloat16):
        values = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return values.to(dtype)


def _values_of(quantized: QuantizedTensor) -> Tensor:
    dtype = torch.float32 if quantized.dtype == torch.float64 else quantized.dtype
    centres = torch.from_numpy(quantized.centres)
    table = torch.zeros(FIRST_BIN + len(centres), dtype=dtype)
    table[FIRST_BIN:] = _finite(centres, dtype)
    values = torch.empty(quantized.shape, dtype=dtype)
    bits = torch.uint32 if dtype == torch.float32 else torch.uint16
    _native.values_of_levels(
        quantized.levels, table.view(bits).numpy(), quantized.protected, values.view(-1).view(bits).numpy()
    )
    return values.to(quantized.dtype)
