"""Fills tensors whose elements share memory (``Tensor.expand``). PyTorch itself refuses to fill these."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_expanded(tensor: Tensor) -> bool:
    """Whether all elements of a tensor along some dimension share memory."""
    return bool(_expanded_dimensions(tensor))


def can_hold(tensor: Tensor, values: Tensor) -> bool:
    """Whether a tensor can take values of its shape. Elements that share memory need equal values, bit for bit."""
    if not (dimensions := _expanded_dimensions(tensor)):
        return True
    repeated = _first_along(values, dimensions).expand(values.shape)
    return torch.equal(repeated.contiguous().view(torch.uint8), values.contiguous().view(torch.uint8))


def copy_into(tensor: Tensor, values: Tensor) -> None:
    """Copy values that the tensor can hold into its memory."""
    dimensions = _expanded_dimensions(tensor)
    with torch.no_grad():
        _first_along(tensor, dimensions).copy_(_first_along(values, dimensions))


def _expanded_dimensions(tensor: Tensor) -> list[int]:
    """Return the dimensions along which all elements share memory."""
    return [i for i, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if n > 1 and stride == 0]


def _first_along(tensor: Tensor, dimensions: Sequence[int]) -> Tensor:
    """Return the first slice along each of the dimensions. Dimensions keep a length of 1."""
    for dimension in dimensions:
        tensor = tensor.narrow(dimension, 0, 1)
    return tensor
