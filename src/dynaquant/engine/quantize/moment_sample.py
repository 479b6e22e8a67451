"""Draw the same sample of elements from tensors of one size, to judge a quantizer without decoding whole tensors.

The sample is one of the whole tensor. Each rank takes the elements that it holds.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.engine.forms.form import Form
from dynaquant.engine.tensors.shard import Shard

SAMPLE_SIZE = 32_768
_STRIDE = 2_654_435_761
"""A large prime. The indices of a sample are its multiples, so that they do not line up with rows or columns."""


def sample(tensor: Tensor, shard: Shard) -> NDArray[np.float32]:
    """Return what the rank holds of at most ``SAMPLE_SIZE`` elements, flat.

    tensor: the local one.
    """
    flat = tensor.detach().reshape(-1)
    if shard.shape.numel() > SAMPLE_SIZE:
        flat = flat.index_select(0, _held_on(shard, flat.device))
    return _array(flat)


def sample_stored(stored: Form, shard: Shard) -> NDArray[np.float32]:
    """Return ``sample`` of the values of a local tensor."""
    return _array(stored.values_at(held(shard)))


def _array(values: Tensor) -> NDArray[np.float32]:
    """Return values as native code reads them: a tensor in a memory-mapped file may begin at any byte."""
    return np.require(values.to("cpu", torch.float32).numpy(), requirements=["C", "A"])


@lru_cache(maxsize=16)
def _indices(size: int) -> Tensor:
    """Return the indices of the sample of a tensor of ``size`` elements."""
    indices = torch.arange(min(size, SAMPLE_SIZE), device="cpu")
    return indices if size <= SAMPLE_SIZE else indices * _STRIDE % size


@lru_cache(maxsize=16)
def _held_on(shard: Shard, device: torch.device) -> Tensor:
    """Return ``held`` in the memory of a device. Sending it there takes longer than the sample takes back."""
    return held(shard).to(device)


@lru_cache(maxsize=16)
def held(shard: Shard) -> Tensor:
    """Return the elements of the sample that the rank holds, as indices of the flat local tensor."""
    size = shard.shape.numel()
    if size <= SAMPLE_SIZE:
        return _indices(shard.local_shape.numel())
    return _indices(size) if shard.is_whole else torch.from_numpy(shard.find(_indices(size).numpy())[1])
