"""Exact values <-> bytes, given the parent's values: differences, byte planes, rANS (docs/format.md, "Exact values").

Consecutive checkpoints are alike: the difference of two floats, taken as integers, has a short high end. Where a tensor
has nothing to do with its parent (a momentum that forgets within a few steps), its own values are coded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dynaquant import _native

_MAX_EXPANSION = 131_072
"""Every block of at most 65,536 elements, of at most 8 bytes each, takes at least the 4 bytes of its size."""


def _element(itemsize: int) -> int:
    """Larger elements are taken apart: a complex number into its two parts."""
    return next(n for n in (8, 4, 2, 1) if itemsize % n == 0)


def _context(parent: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    return np.empty(0, dtype=np.uint8) if parent is None else parent


def encode(data: NDArray[np.uint8], itemsize: int, parent: NDArray[np.uint8] | None) -> bytes:
    """The stream of a tensor's exact values.

    ``data``: the elements' bytes, flat, a whole number of elements of ``itemsize`` bytes. ``parent``: as many bytes of
    the same tensor in the parent, if there is one. Raises ValueError when they do not fit each other.
    """
    return _native.encode_exact(data, _context(parent), _element(itemsize))


def needs_parent(stream: bytes) -> bool:
    """Whether the parent's values are needed to decode what ``encode`` wrote."""
    return stream[:1] == b"\x01"


def decode(stream: bytes, size: int, itemsize: int, parent: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    """The ``size`` bytes that ``encode`` was given. ``parent``: as then; None will do if ``needs_parent`` says no.

    Raises ValueError when the stream is not one of so many bytes, or when the parent does not fit. Nothing is allocated
    on the stream's word, and no more than 131,072 times its size.
    """
    if size > _MAX_EXPANSION * len(stream):
        raise ValueError("the exact values end too early")
    data = np.empty(size, dtype=np.uint8)
    _native.decode_exact(stream, _context(parent), _element(itemsize), data)
    return data
