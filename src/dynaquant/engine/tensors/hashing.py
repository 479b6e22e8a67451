"""Hash the values of tensors with BLAKE3. Large tensors use as many threads as the native core may use."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from dynaquant import _native
from dynaquant.engine.tensors.dtypes import bytes_of, dtype_name

_SHARED_FROM = 1 << 19
"""Smallest number of bytes to hash on several threads. Below it, waking the threads costs more than hashing."""


def tensor_hash(tensor: Tensor) -> str:
    """Return the hash of dtype, shape and values, 64 hexadecimal digits (docs/format.md, "Identity")."""
    return hash_of_pieces(tensor.dtype, tensor.shape, [tensor])


def hash_of_pieces(dtype: torch.dtype, shape: torch.Size, pieces: Iterable[Tensor]) -> str:
    """Return the ``tensor_hash`` of a tensor whose values come in pieces."""
    described = f"{dtype_name(dtype)}{list(shape)}".encode()
    return hash_of(chain([described], (bytes_of(piece).data for piece in pieces)), shape.numel() * dtype.itemsize)


@lru_cache(maxsize=4096)
def hash_of_zeros(dtype: torch.dtype, shape: torch.Size) -> str:
    """Return the ``tensor_hash`` of a tensor of zeros."""
    return tensor_hash(torch.from_numpy(np.zeros(shape, dtype=np.float32)).to(dtype))


def hash_of(parts: Iterable[bytes | memoryview], size: int) -> str:
    """Return the hash of the concatenated parts, 64 hexadecimal digits. size: roughly how many bytes they have."""
    threads = _native.threads()
    if threads > 1 and size >= _SHARED_FROM:
        hasher, free = _shared_hasher(os.getpid(), threads)
        # If the shared hasher is in use, hash on this thread alone.
        if free.acquire(blocking=False):
            try:
                hasher.reset()
                return _digest(hasher, parts)
            finally:
                free.release()
    return _digest(blake3(), parts)


@lru_cache(maxsize=4)
def _shared_hasher(process: int, threads: int) -> tuple[blake3, threading.Lock]:  # noqa: ARG001 - part of the key
    """Return a hasher that owns its threads, which a forked process lacks, and a lock that is free."""
    return blake3(max_threads=threads), threading.Lock()  # blake3.AUTO would start a thread for each processor


def _digest(hasher: blake3, parts: Iterable[bytes | memoryview]) -> str:
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()
