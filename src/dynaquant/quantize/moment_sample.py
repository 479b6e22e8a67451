"""Draw the same sample of elements from tensors of one size, to judge a quantizer without decoding whole tensors."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dynaquant.tensors.dequantize import dequantize, saturating_cast
from dynaquant.tensors.stored import RankOne

SAMPLE_SIZE = 65_536
_STRIDE = 2_654_435_761
"""A large prime. The indices of a sample are its multiples, so that they do not line up with rows or columns."""


def sample(tensor: Tensor) -> Tensor:
    """Return at most ``SAMPLE_SIZE`` elements: float32, flat, on the host."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() > SAMPLE_SIZE:
        flat = flat.index_select(0, _indices(flat.numel()).to(flat.device))
    return flat.to("cpu", torch.float32)


def sample_rank_one(stored: RankOne) -> Tensor:
    """Return ``sample`` of the values of a rank-one tensor; computes no other values."""
    rows, columns = _rows_and_columns(stored.shape.numel(), stored.columns.shape.numel())
    values = dequantize(stored.rows).index_select(0, rows) * dequantize(stored.columns).index_select(0, columns)
    return saturating_cast(values, stored.dtype).to(torch.float32)


@lru_cache(maxsize=16)
def _indices(size: int) -> Tensor:
    """Return the indices of the sample of a tensor of ``size`` elements."""
    indices = torch.arange(min(size, SAMPLE_SIZE), device="cpu")
    return indices if size <= SAMPLE_SIZE else indices * _STRIDE % size


@lru_cache(maxsize=16)
def _rows_and_columns(size: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the rows and the columns of ``_indices`` in a matrix of ``columns`` columns."""
    indices = _indices(size)
    return indices // columns, indices % columns
