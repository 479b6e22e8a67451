"""The strides of a tensor: the order in which its values lie in memory (docs/format.md, "Strides")."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Strides = tuple[int, ...]
"""In elements, of memory without gaps that is not in C order, e.g. ``(1, 4)`` for the transpose of a 3 x 4."""


def strides_of(tensor: Tensor) -> Strides | None:
    """Return the strides that PyTorch gives a copy of the tensor; None for C order.

    Such a copy has the tensor's own strides, unless the tensor has gaps or elements that share memory.
    """
    if tensor.is_contiguous():
        return None
    dense = torch.empty_like(tensor, device="meta")
    return None if dense.is_contiguous() else dense.stride()


def has_gaps(tensor: Tensor) -> bool:
    """Whether a tensor's memory has gaps, or elements that share it, so that no copy of it has its strides."""
    return not tensor.is_contiguous() and torch.empty_like(tensor, device="meta").stride() != tensor.stride()


def with_strides(values: Tensor, strides: Sequence[int]) -> Tensor:
    """Return the values with these strides. They are copied only if they have others.

    Raises ValueError for anything but the strides of such a tensor without gaps. A file may hold anything.
    """
    if not isinstance(strides, list | tuple) or len(strides) != values.ndim:
        raise ValueError(f"a tensor of {list(values.shape)} cannot have the strides {strides!r}")
    between = 1
    for stride, size in sorted(zip(strides, values.shape, strict=True)):
        if type(stride) is not int or not 0 <= stride < 2**62 or (size != 1 and stride != between):
            raise ValueError(f"a tensor of {list(values.shape)} without gaps cannot have the strides {strides!r}")
        between *= size
    if values.stride() == tuple(strides):
        return values
    return torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device).copy_(values.detach())
