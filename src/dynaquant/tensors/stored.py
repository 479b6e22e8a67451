"""The forms in which a checkpoint stores a tensor. Quantizers make them, coders turn them into bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import _native
from dynaquant.errors import CheckpointError
from dynaquant.tensors.codebook import Codebook
from dynaquant.tensors.dtypes import bytes_of

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


@dataclass(frozen=True, eq=False)
class External:
    """A tensor of which a checkpoint holds only the hash.

    file: the identity of the file of frozen parameters that holds the values; None for an omitted tensor. values: reads
    the values and compares them with the hash; raises CheckpointError if that fails.
    """

    dtype: torch.dtype
    shape: torch.Size
    hash: str
    file: str | None
    values: Callable[[], Tensor]


def omitted(name: str, dtype: torch.dtype, shape: torch.Size, digest: str) -> External:
    """Returns an omitted tensor: one whose values are not stored. digest: their hash."""

    def values() -> Tensor:
        raise CheckpointError(f"{name} was omitted when the checkpoint was saved: only its hash is stored")

    return External(dtype, shape, digest, None, values)


StoredTensor = Quantized | Tensor | External
"""A tensor as a checkpoint holds it: quantized, its exact values, or where these are."""


def same(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors are stored as the same, so that their values are the same bit for bit."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        fits = (a.dtype, a.shape) == (b.dtype, b.shape)
        return fits and np.array_equal(bytes_of(a), bytes_of(b))
    if isinstance(a, External) and isinstance(b, External):
        return (a.dtype, a.shape, a.hash, a.file) == (b.dtype, b.shape, b.hash, b.file)
    if isinstance(a, RankOne) and isinstance(b, RankOne):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and same(a.rows, b.rows) and same(a.columns, b.columns)
    if isinstance(a, Rounded) and isinstance(b, Rounded):
        return (a.dtype, a.of_name) == (b.dtype, b.of_name) and same(a.of, b.of)
    if isinstance(a, Scaled) and isinstance(b, Scaled):
        return (
            (a.dtype, a.second_name) == (b.dtype, b.second_name) and same(a.units, b.units) and same(a.second, b.second)
        )
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)):
        return False
    return (
        (a.dtype, a.shape) == (b.dtype, b.shape)
        and np.array_equal(a.levels, b.levels)
        and np.array_equal(a.centres.view(np.uint32), b.centres.view(np.uint32))
        and np.array_equal(a.protected, b.protected)
    )
