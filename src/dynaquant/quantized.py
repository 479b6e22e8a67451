"""The quantized tensor: the small value in which quantizers and coders meet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import _native

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
    centres: NDArray[np.float32]
    protected: NDArray[np.uint16]

    @property
    def parent_levels(self) -> Levels:
        """What the next checkpoint's delta is coded against."""
        return Levels(self.levels, FIRST_BIN + len(self.centres))


def dequantize(quantized: QuantizedTensor) -> Tensor:
    """The values, as a new CPU tensor of the original shape and dtype. This is what a restore returns, bit for bit.

    Raises ValueError when the levels do not fit the codebook or the protected values.
    """
    dtype = torch.float32 if quantized.dtype == torch.float64 else quantized.dtype
    table = torch.zeros(FIRST_BIN + len(quantized.centres), dtype=dtype)
    table[FIRST_BIN:] = torch.from_numpy(quantized.centres)
    values = torch.empty(quantized.shape, dtype=dtype)
    bits = torch.uint32 if dtype == torch.float32 else torch.uint16
    _native.values_of_levels(
        quantized.levels, table.view(bits).numpy(), quantized.protected, values.view(-1).view(bits).numpy()
    )
    return values.to(quantized.dtype)
