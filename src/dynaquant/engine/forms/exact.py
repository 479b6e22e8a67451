"""Exact values: any tensor that is not quantized, coded without loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.engine.coding import byte_planes, lossless
from dynaquant.engine.forms.form import Coded, Form, StoredTensor, in_pieces, stored_equal
from dynaquant.engine.forms.scheme import Coder, Scheme
from dynaquant.engine.forms.schemes import BytePlanes, Lossless, Raw
from dynaquant.engine.tensors.dtypes import bytes_of
from dynaquant.engine.tensors.hashing import tensor_hash

_RAW_BELOW = 16
"""Bytes. Smaller tensors, such as step counters, are never smaller coded."""
_TRY_ZSTD_BELOW = 65_536
"""Bytes. Smaller tensors, such as states of random generators and tables of integers, may hold repetitions that only
zstd finds, so zstd is tried too."""


@dataclass(frozen=True, eq=False)
class Exact(Form):
    """The form of a plain tensor. Where a stored tensor is exact it is the tensor itself; this is what can be asked."""

    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def pieces(self, size: int, device: torch.device, out: Tensor | None = None) -> Iterator[Tensor]:  # noqa: ARG002 - copied
        return in_pieces(self.tensor.to(device), size)

    def values(self) -> Tensor:
        return self.tensor

    def digest(self) -> str:
        return tensor_hash(self.tensor)

    def values_with_digest(self) -> tuple[Tensor, str]:
        return self.tensor, self.digest()

    def encode(self, parent: StoredTensor | None, coder: Coder) -> tuple[Scheme, bytes]:  # noqa: ARG002 - no levels
        data, itemsize = bytes_of(self.tensor), self.dtype.itemsize
        if data.size < _RAW_BELOW:
            return Raw(), data.tobytes()
        coded = lossless.encode(data, itemsize, _bytes_of_parent(parent, self.dtype, self.shape))
        best: tuple[Scheme, bytes] = Lossless(lossless.needs_parent(coded)), coded
        if data.size < _TRY_ZSTD_BELOW and len(frames := byte_planes.encode(data, itemsize)) < len(coded):
            best = BytePlanes(), frames
        return best if len(best[1]) < data.size else (Raw(), data.tobytes())

    def equals(self, other: StoredTensor) -> bool:
        return stored_equal(self.tensor, other)

    def describe(self) -> str:
        return "its values are stored exactly; it has no levels"


def _bytes_of_parent(parent: StoredTensor | None, dtype: torch.dtype, shape: torch.Size) -> NDArray[np.uint8] | None:
    """Return the bytes of the parent's values; None if the parent has no exact values of this dtype and shape."""
    if isinstance(parent, Tensor) and (parent.dtype, parent.shape) == (dtype, shape):
        return bytes_of(parent)
    return None


def decode(scheme: Raw | BytePlanes | Lossless, coded: Coded) -> Tensor:
    """Return the tensor of a stream. Raises ValueError if it is damaged, or the parent does not fit."""
    itemsize = coded.dtype.itemsize
    size = coded.shape.numel() * itemsize
    if isinstance(scheme, Lossless):
        data = lossless.decode(coded.stream, size, itemsize, _before(scheme, coded))
    elif isinstance(scheme, BytePlanes):
        data = byte_planes.decode(coded.stream, size, itemsize)
    else:
        data = np.frombuffer(coded.stream, dtype=np.uint8).copy()
    if coded.dtype == torch.bool and data.size and int(data.max()) > 1:
        raise ValueError("a bool is neither 0 nor 1")
    if size == 0:
        return torch.empty(coded.shape, dtype=coded.dtype)  # the strides of an empty array do not allow the view below
    return torch.from_numpy(data).view(coded.dtype).reshape(coded.shape)


def decodes_to(scheme: Lossless, coded: Coded, wanted: Tensor) -> bool:
    """Whether ``decode`` would return a tensor with these bits. Raises ValueError as it does.

    wanted: of the dtype and shape of the stream. Needs no memory for the values, and takes less time than decoding.
    """
    return lossless.decodes_to(coded.stream, bytes_of(wanted), wanted.dtype.itemsize, _before(scheme, coded))


def _before(scheme: Lossless, coded: Coded) -> NDArray[np.uint8] | None:
    """Return the bytes of the parent's values, None if they are not needed. Raises ValueError if they are missing."""
    before = _bytes_of_parent(coded.parent, coded.dtype, coded.shape) if scheme.needs_parent else None
    if scheme.needs_parent and before is None:
        raise ValueError("the parent has no exact values of the same dtype and shape")
    return before
