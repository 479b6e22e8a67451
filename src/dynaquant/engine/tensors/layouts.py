"""The layout of a tensor: the order in which its values lie in memory (docs/format.md, "Layouts")."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Layout = tuple[int, ...]
"""Strides in elements, of memory without gaps that is not in C order, e.g. ``(1, 4)`` for the transpose of a 3 x 4."""


def layout_of(tensor: Tensor) -> Layout | None:
    """Return the layout that PyTorch gives a copy of the tensor; None for C order.

    Such a copy has the tensor's own layout, unless the tensor has gaps or elements that share memory.
    """
    if tensor.is_contiguous():
        return None
    dense = torch.empty_like(tensor, device="meta")
    return None if dense.is_contiguous() else dense.stride()


def has_gaps(tensor: Tensor) -> bool:
    """Whether a tensor's memory has gaps, or elements that share it, so that no copy of it has its layout."""
    return not tensor.is_contiguous() and torch.empty_like(tensor, device="meta").stride() != tensor.stride()


def laid_out(values: Tensor, layout: Sequence[int]) -> Tensor:
    """Return the values in a layout. They are copied only if they have another one.

    Raises ValueError for anything but the strides of such a tensor without gaps. A file may hold anything.
    """
    if not isinstance(layout, list | tuple) or len(layout) != values.ndim:
        raise ValueError(f"a tensor of {list(values.shape)} cannot have the strides {layout!r}")
    between = 1
    for stride, size in sorted(zip(layout, values.shape, strict=True)):
        if type(stride) is not int or not 0 <= stride < 2**62 or (size != 1 and stride != between):
            raise ValueError(f"a tensor of {list(values.shape)} without gaps cannot have the strides {layout!r}")
        between *= size
    if values.stride() == tuple(layout):
        return values
    return torch.empty_strided(values.shape, layout, dtype=values.dtype, device=values.device).copy_(values.detach())
