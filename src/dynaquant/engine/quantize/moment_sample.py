"""Draw the same sample of elements from tensors of one size, to judge a quantizer without decoding whole tensors.

The sample is one of the whole tensor. Each rank takes the elements that it holds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from dynaquant.engine.forms.form import dequantize
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.forms.rank_one import RankOne
from dynaquant.engine.tensors.dtypes import saturating_cast
from dynaquant.engine.tensors.shard import Shard

SAMPLE_SIZE = 32_768
_STRIDE = 2_654_435_761
"""A large prime. The indices of a sample are its multiples, so that they do not line up with rows or columns."""


def sample(tensor: Tensor, shard: Shard) -> Tensor:
    """Return what the rank holds of at most ``SAMPLE_SIZE`` elements: float32, flat, on the host.

    tensor: the local one.
    """
    flat = tensor.detach().reshape(-1)
    if shard.shape.numel() > SAMPLE_SIZE:
        flat = flat.index_select(0, _held(shard).to(flat.device))
    return flat.to("cpu", torch.float32)


def sample_stored(stored: QuantizedTensor | RankOne, shard: Shard) -> Tensor:
    """Return ``sample`` of the values of a local tensor without outliers; computes no other values."""
    if isinstance(stored, QuantizedTensor):
        levels = stored.levels[_held(shard).numpy()] if shard.shape.numel() > SAMPLE_SIZE else stored.levels
        return dequantize(replace(stored, shape=torch.Size([len(levels)]), levels=levels)).to(torch.float32)
    rows, columns = _rows_and_columns(shard)
    values = dequantize(stored.rows).index_select(0, rows) * dequantize(stored.columns).index_select(0, columns)
    return saturating_cast(values, stored.dtype).to(torch.float32)


@lru_cache(maxsize=16)
def _indices(size: int) -> Tensor:
    """Return the indices of the sample of a tensor of ``size`` elements."""
    indices = torch.arange(min(size, SAMPLE_SIZE), device="cpu")
    return indices if size <= SAMPLE_SIZE else indices * _STRIDE % size


@lru_cache(maxsize=16)
def _held(shard: Shard) -> Tensor:
    """Return the elements of the sample that the rank holds, as indices of the flat local tensor."""
    size = shard.shape.numel()
    if size <= SAMPLE_SIZE:
        return _indices(shard.local_shape.numel())
    return _indices(size) if shard.is_whole else torch.from_numpy(shard.find(_indices(size).numpy())[1])


@lru_cache(maxsize=16)
def _rows_and_columns(shard: Shard) -> tuple[Tensor, Tensor]:
    """Return the local rows and columns of ``_held``. The columns are all dimensions but the first."""
    held, columns = _held(shard), max(shard.local_shape[1:].numel(), 1)
    return held // columns, held % columns
