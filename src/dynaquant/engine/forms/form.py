"""What every stored form of a tensor can do, and the computation of its values.

Values are the same on every device, bit for bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.forms.scheme import Coder, Scheme
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.codebook import Codebook, same_values
from dynaquant.engine.tensors.dtypes import bytes_of
from dynaquant.engine.tensors.hashing import hash_of_pieces, hash_of_zeros


class Form(ABC):
    """A tensor as a checkpoint stores it. A form is a frozen dataclass; quantizers make it, ``encode`` codes it."""

    external: ClassVar[bool] = False
    """Whether the checkpoint holds only the hash of the values."""

    if TYPE_CHECKING:

        @property
        def dtype(self) -> torch.dtype:
            """The dtype of the values."""

        @property
        def shape(self) -> torch.Size:
            """The shape of the values."""

    @property
    def is_zero(self) -> bool:
        """Whether it is plain that all values are zero, without computing one. False if that is not plain."""
        return False

    @property
    def other(self) -> tuple[str, StoredTensor] | None:
        """The name of the tensor that is decoded before this one, and the tensor; None if there is none."""
        return None

    def with_other(self, name: str, stored: StoredTensor) -> Self:  # noqa: ARG002 - only for forms that have another
        """Return the same form, decoded from the same other tensor by another name."""
        return self

    @abstractmethod
    def pieces(self, size: int, device: torch.device, out: Tensor | None = None) -> Iterator[Tensor]:
        """Yield the values in order, as flat pieces of ``size`` values on a device. The last one may be smaller.

        out: where pieces may be made, instead of memory of their own: flat and contiguous, as long as the tensor, of
        its dtype, on the device.

        Raises ValueError if the parts of the form do not fit together.
        """

    def values(self) -> Tensor:
        """Return the values that a restore returns, on the host. Raises ValueError as ``pieces`` does."""
        return dequantize(self)

    def values_at(self, indices: Tensor) -> Tensor:
        """Return some of the values, in the form's dtype. indices: of flat elements, on the host."""
        return self.values().reshape(-1)[indices]

    def digest(self) -> str:
        """Return the ``tensor_hash`` of the values. Hashes them piece by piece, without memory for all."""
        if self.is_zero:
            return hash_of_zeros(self.dtype, self.shape)
        return hash_of_pieces(self.dtype, self.shape, pieces(self))

    def values_with_digest(self) -> tuple[Tensor, str]:
        """Return ``values`` and ``digest``. Computes each value once."""
        if self.is_zero:
            return self.values(), self.digest()
        values = kernels.empty(self.shape, self.dtype)
        return values, hash_of_pieces(self.dtype, self.shape, _filled(values, self))

    @abstractmethod
    def encode(self, parent: StoredTensor | None, coder: Coder) -> tuple[Scheme, bytes]:
        """Return the scheme and the stream. parent: the parent's tensor of the same name, if it has one."""

    def equals(self, other: StoredTensor) -> bool:
        """Whether another tensor has the same stored form. Then its values are the same, bit for bit.

        Compares all fields but those that are for information, which have ``compare=False``.
        """
        names = [field.name for field in fields(cast(Any, self)) if field.compare]
        return type(other) is type(self) and all(_same(getattr(self, name), getattr(other, name)) for name in names)

    def can_refer_to(self, parent: StoredTensor | None, again: bool) -> bool:
        """Whether this tensor can be stored as a reference to the parent's, which has the same values.

        again: it is re-coded. Other files may depend on its levels, so the parent's must be the same.
        """
        return not again or (parent is not None and self.equals(parent))

    def cut(self, box: Box) -> StoredTensor:
        """Return what the form holds of a box that lies in the tensor and is not all of it."""
        return self.values()[box.slices].contiguous()

    @classmethod  # noqa: B027 - a form need not be joined
    def join(cls, dtype: torch.dtype, shape: torch.Size, parts: Sequence[tuple[Box, Any]]) -> StoredTensor | None:
        """Return boxes of this form as one tensor of it; None if they do not fit together."""

    def in_one(self) -> StoredTensor:
        """Return the tensor in one. Only so can it be the parent of a tensor in one file."""
        return self

    def has_values(self) -> bool:
        """Whether there is anything but pruned values, as far as levels say."""
        return self.shape.numel() > 0

    @abstractmethod
    def describe(self) -> str:
        """Return a sentence that says what the values are made of."""

    def facts(self) -> dict[str, Any]:
        """Return what ``show`` says of the form in JSON."""
        return {}

    def level_counts(self) -> list[LevelCount] | None:
        """Return how often each level occurs; None for a form without levels of its own."""
        return None

    def migrated(self, other: StoredTensor) -> float | None:  # noqa: ARG002 - only levels can be compared
        """Return the share of the values that are on another level; None if levels cannot be compared."""
        return None


StoredTensor = Form | Tensor
"""A tensor as a checkpoint holds it: in a form, or its exact values."""


@dataclass(frozen=True)
class LevelCount:
    """A level of a quantized tensor and how often it occurs. value: None for outliers, because each has its own."""

    level: str
    value: float | None
    count: int


@dataclass(frozen=True)
class Coded:
    """A stream, and what is known of its tensor.

    parent: as given to ``encode``; needed only if ``scheme.needs_parent``. other: the stored tensor that the scheme
    depends on. overwrite: whether levels may be decoded into the memory of the parent's levels, which nobody needs any
    more, as between the links of a chain. The parent is useless then, also if decoding fails.
    """

    dtype: torch.dtype
    shape: torch.Size
    stream: bytes
    parent: StoredTensor | None = None
    other: StoredTensor | None = None
    overwrite: bool = False


Decode = Callable[[Any, Coded], StoredTensor]
"""Returns the tensor of a stream. Raises ValueError if it is damaged, or if parent or other do not fit."""


def stored_equal(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors have the same stored form. Then their values are the same, bit for bit."""
    if isinstance(a, Form):
        return a is b or a.equals(b)
    same = isinstance(b, Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape)
    return a is b or (same and _same_bytes(bytes_of(a), bytes_of(cast(Tensor, b))))


def _same(a: Any, b: Any) -> bool:
    """Whether two fields of stored forms are the same, bit for bit."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, StoredTensor):
        return stored_equal(a, b)
    if isinstance(a, Codebook):
        return same_values(a, b)
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)


def _same_bytes(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> bool:
    """Whether two flat arrays are equal. Compares eight bytes at a time, which takes half as long."""
    whole = a.size // 8 * 8
    if a.size != b.size or (a.ctypes.data | b.ctypes.data) % 8:
        return np.array_equal(a, b)
    return np.array_equal(a[whole:], b[whole:]) and np.array_equal(a[:whole].view("<u8"), b[:whole].view("<u8"))


def dequantize(form: Form, device: torch.device = kernels.HOST) -> Tensor:
    """Return the values as a new tensor of the original shape and dtype on a device.

    Raises ValueError if the levels do not fit the codebook or the protected values, or if the parts of a tensor differ
    in shape.
    """
    if device == kernels.HOST and form.is_zero:
        # NumPy's zeros take no memory until they are written.
        return torch.from_numpy(np.zeros(form.shape, dtype=np.float32)).to(form.dtype)
    if 0 < form.shape.numel() <= kernels.piece_size(device):
        (values,) = pieces(form, device)
        return values.view(form.shape)
    values = kernels.empty(form.shape, form.dtype, device)
    dequantize_into(values, form)
    return values


def dequantize_into(values: Tensor, form: Form) -> None:
    """Fill a contiguous tensor of the right shape and dtype, on any device, with what ``dequantize`` returns."""
    for _ in _filled(values, form):
        pass


def _filled(values: Tensor, form: Form) -> Iterator[Tensor]:
    """Yield the pieces of a tensor as they are filled, for ``dequantize_into``."""
    flat, begin = values.view(-1), 0
    for piece in form.pieces(piece_length(form.shape, values.device), values.device, flat):
        part = flat[begin : begin + piece.numel()]
        if piece.data_ptr() != part.data_ptr():
            part.copy_(piece)
        yield part
        begin += piece.numel()


def pieces(form: Form, device: torch.device = kernels.HOST) -> Iterator[Tensor]:
    """Yield the values in order, as flat pieces. A piece stays in the processor's cache while the caller works on it.

    Raises ValueError as ``dequantize`` does.
    """
    return form.pieces(piece_length(form.shape, device), device)


def piece_length(shape: torch.Size, device: torch.device) -> int:
    """Return the number of values of each of the ``pieces`` but the last."""
    columns = max(math.prod(shape[1:]), 1)  # a piece of a matrix is a whole number of rows
    return max(kernels.piece_size(device) // columns, 1) * columns


def in_pieces(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """Yield the values of a tensor as flat pieces."""
    flat = tensor.reshape(-1)
    return (flat[begin : begin + size] for begin in range(0, len(flat), size))
