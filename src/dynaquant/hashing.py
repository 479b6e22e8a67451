"""BLAKE3 hashes, of large data on as many threads as the native core may use."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from blake3 import blake3

from dynaquant import _native

_SHARED_FROM = 1 << 19
"""Bytes that several threads hash together: to wake them costs more than to hash fewer."""


def hash_of(parts: Iterable[bytes | memoryview], size: int) -> str:
    """Return the hash of parts that follow each other, 64 hexadecimal digits. size: their bytes, roughly."""
    threads = _native.threads()
    if threads > 1 and size >= _SHARED_FROM:
        shared = _shared(os.getpid(), threads)
        # While another thread uses these threads, this one works alone, so that no more of them are busy.
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
    """Its threads live as long as it does. (Those of ``blake3.AUTO`` are as many as there are processors.)"""
    free: threading.Lock = field(default_factory=threading.Lock)


@lru_cache(maxsize=4)
def _shared(process: int, threads: int) -> _Shared:  # noqa: ARG001 - a forked process has none of its parent's threads
    return _Shared(blake3(max_threads=threads))


def _digest(hasher: blake3, parts: Iterable[bytes | memoryview]) -> str:
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()
