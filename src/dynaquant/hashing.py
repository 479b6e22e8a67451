"""BLAKE3 hashes. Large data is hashed on as many threads as the native core may use."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from blake3 import blake3

from dynaquant import _native

_SHARED_FROM = 1 << 19
"""Bytes from which on several threads hash together. For fewer, waking the threads costs more than hashing."""


def hash_of(parts: Iterable[bytes | memoryview], size: int) -> str:
    """Returns the hash of the concatenated parts, 64 hexadecimal digits. size: their bytes, roughly."""
    threads = _native.threads()
    if threads > 1 and size >= _SHARED_FROM:
        shared = _shared(os.getpid(), threads)
        # If the shared hasher is in use, hash on this thread alone.
        if shared.free.acquire(blocking=False):
            try:
                shared.hasher.reset()
                return _digest(shared.hasher, parts)
            finally:
                shared.free.release()
    return _digest(blake3(), parts)


@dataclass(frozen=True)
class _Shared:
    hasher: blake3
    """Its threads live as long as it does. (``blake3.AUTO`` would start one for each processor.)"""
    free: threading.Lock = field(default_factory=threading.Lock)


@lru_cache(maxsize=4)
def _shared(process: int, threads: int) -> _Shared:  # noqa: ARG001 - a forked process has none of its parent's threads
    return _Shared(blake3(max_threads=threads))


def _digest(hasher: blake3, parts: Iterable[bytes | memoryview]) -> str:
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()
