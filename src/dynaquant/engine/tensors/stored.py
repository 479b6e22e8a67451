"""The forms in which a checkpoint stores a tensor. Quantizers make them, coders turn them into bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.engine.tensors.bounded import BoundedTensor
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.codebook import FIRST_BIN, Codebook
from dynaquant.engine.tensors.dtypes import bytes_of
from dynaquant.errors import CheckpointError


@dataclass(frozen=True)
class Levels:
    """The levels of one tensor, uint8, flat in C order. count: how many different levels can occur."""

    values: NDArray[np.uint8]
    count: int


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor as levels and a codebook.

    dtype: float32, float64, bfloat16 or float16. levels: flat in C order. protected: the outliers as 16
    bits each, in C order: float16 for a float16 tensor, bfloat16 otherwise.
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
        """The levels on which the next checkpoint's delta is conditioned."""
        return Levels(self.levels, FIRST_BIN + self.codebook.bins)


@dataclass(frozen=True)
class RankOne:
    """A matrix as the product of one value per row and one value per column (method 2.3, as in Adafactor).

    A tensor of more dimensions counts as the matrix of its first dimension and all others together. rows, columns:
    float32, one-dimensional.
    """

    dtype: torch.dtype
    shape: torch.Size
    rows: QuantizedTensor
    columns: QuantizedTensor


@dataclass(frozen=True)
class ScaledMoment:
    """A first moment in units of the root of the stored second moment (method 2.3).

    units: float32. second: has the same shape and is stored under the name ``second_name``.
    """

    dtype: torch.dtype
    units: QuantizedTensor
    second: QuantizedTensor | RankOne
    second_name: str

    @property
    def shape(self) -> torch.Size:
        """Shape of the values."""
        return self.units.shape


@dataclass(frozen=True)
class RoundedWeight:
    """A half-precision weight whose float32 master weight is stored. Its values are the rounded master weight.

    master: the master weight as stored, under the name ``master_name``.
    """

    dtype: torch.dtype
    master: QuantizedTensor | Tensor
    master_name: str

    @property
    def shape(self) -> torch.Size:
        """Shape of the values."""
        return self.master.shape


@dataclass(frozen=True)
class Patchwork:
    """A tensor of a sharded checkpoint: the boxes that are stored, each with its own form. They cover the tensor.

    ``boxes.cut`` takes boxes out of it, and puts those together that lie in a larger one.
    """

    dtype: torch.dtype
    shape: torch.Size
    boxes: tuple[tuple[Box, StoredTensor], ...]


Quantized = QuantizedTensor | RankOne | ScaledMoment | RoundedWeight | BoundedTensor | Patchwork


@dataclass(frozen=True, eq=False)
class External:
    """A tensor whose values are outside the checkpoint. The checkpoint holds only their hash.

    file: the identity of the file of frozen parameters that holds the values; None for an omitted tensor. values: a
    function that reads the values and compares them with the hash; raises CheckpointError if that fails.
    """

    dtype: torch.dtype
    shape: torch.Size
    hash: str
    file: str | None
    values: Callable[[], Tensor]


def omitted(name: str, dtype: torch.dtype, shape: torch.Size, digest: str) -> External:
    """Return an omitted tensor: one whose values are not stored anywhere. digest: the hash of the values."""

    def values() -> Tensor:
        raise CheckpointError(f"{name} was omitted when the checkpoint was saved: only its hash is stored")

    return External(dtype, shape, digest, None, values)


StoredTensor = Quantized | Tensor | External
"""A tensor as a checkpoint holds it: quantized, its exact values, or a hash of external values."""


def _same_bytes(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> bool:
    """Whether two flat arrays are equal. Compares eight bytes at a time, which takes half as long."""
    whole = a.size // 8 * 8
    if a.size != b.size or (a.ctypes.data | b.ctypes.data) % 8:
        return np.array_equal(a, b)
    return np.array_equal(a[whole:], b[whole:]) and np.array_equal(a[:whole].view("<u8"), b[:whole].view("<u8"))


def stored_equal(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors have the same stored form. Then their values are the same, bit for bit."""
    if a is b:
        return True
    if isinstance(a, External) and isinstance(b, External):
        return (a.dtype, a.shape, a.hash, a.file) == (b.dtype, b.shape, b.hash, b.file)
    if type(a) is not type(b) and not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _same_bytes(bytes_of(a), bytes_of(b))
    if isinstance(a, BoundedTensor) and isinstance(b, BoundedTensor):
        return a.equals(b)
    if isinstance(a, Patchwork) and isinstance(b, Patchwork):
        return [box for box, _ in a.boxes] == [box for box, _ in b.boxes] and all(
            stored_equal(one, other) for (_, one), (_, other) in zip(a.boxes, b.boxes, strict=True)
        )
    if isinstance(a, RankOne) and isinstance(b, RankOne):
        return stored_equal(a.rows, b.rows) and stored_equal(a.columns, b.columns)
    if isinstance(a, RoundedWeight) and isinstance(b, RoundedWeight):
        return a.master_name == b.master_name and stored_equal(a.master, b.master)
    if isinstance(a, ScaledMoment) and isinstance(b, ScaledMoment):
        return a.second_name == b.second_name and stored_equal(a.units, b.units) and stored_equal(a.second, b.second)
    assert isinstance(a, QuantizedTensor)
    assert isinstance(b, QuantizedTensor)
    return (
        np.array_equal(a.levels, b.levels)
        and np.array_equal(a.centres.view(np.uint32), b.centres.view(np.uint32))
        and np.array_equal(a.protected, b.protected)
    )
