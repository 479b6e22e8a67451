"""Exact values to bytes and back, conditioned on the parent's values (docs/format.md, "Exact values").

The coder takes the bits of a value and of the parent's value as integers, and codes the byte planes of the difference
with rANS. Consecutive checkpoints are similar, so the high bytes of the difference are mostly zero. If a tensor has
little in common with its parent (a momentum changes within a few steps), the coder uses the values themselves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dynaquant import _native

_MAX_EXPANSION = 131_072
"""A block has at most 65,536 elements of at most 8 bytes, and takes at least 4 bytes (its size)."""


def _coded_itemsize(itemsize: int) -> int:
    """Return the element size of the native coder. It divides larger elements: a complex number has two parts."""
    return next(n for n in (8, 4, 2, 1) if itemsize % n == 0)


def _context(parent: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    return np.empty(0, dtype=np.uint8) if parent is None else parent


def encode(data: NDArray[np.uint8], itemsize: int, parent: NDArray[np.uint8] | None) -> bytes:
    """Return the stream of a tensor's exact values.

    data: the bytes of the elements, flat, ``itemsize`` bytes for each. parent: the bytes of the parent's tensor, if it
    has one; as many as ``data``. Raises ValueError if the arguments do not fit each other.
    """
    return _native.encode_lossless(data, _context(parent), _coded_itemsize(itemsize))


def needs_parent(stream: bytes) -> bool:
    """Whether a stream of ``encode`` needs the parent's values for decoding."""
    return stream[:1] == b"\x01"


def decode(stream: bytes, size: int, itemsize: int, parent: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    """Return the ``size`` bytes of a stream of ``encode``. parent: as for ``encode``; None unless ``needs_parent``.

    Raises ValueError if the stream is damaged or has another size, or if the parent does not fit. Allocates at most
    131,072 times the size of the stream.
    """
    if size > _MAX_EXPANSION * len(stream):
        raise ValueError("the exact values end too early")
    data = np.empty(size, dtype=np.uint8)
    _native.decode_lossless(stream, _context(parent), _coded_itemsize(itemsize), data)
    return data


def decodes_to(stream: bytes, data: NDArray[np.uint8], itemsize: int, parent: NDArray[np.uint8] | None) -> bool:
    """Whether ``decode`` would return these bytes. Needs no memory for them. Raises ValueError as ``decode`` does."""
    return _native.decodes_to(stream, _context(parent), _coded_itemsize(itemsize), data)
