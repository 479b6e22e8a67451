"""Levels to bytes and back as published: deltas to the parent's levels, run lengths and Huffman codes (method 1.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dynaquant import _native

Arrangement = Literal["alone", "delta", "rearranged"]
"""How levels are coded: without the parent; as deltas in the order of elements; as deltas grouped by parent level."""
_TRY_ALL_BELOW = 65_536
_BLOCK = 65_536
_NOTHING = np.zeros(0, dtype=np.uint8)


@dataclass(frozen=True)
class Levels:
    """The levels of one tensor, uint8, flat in C order. count: how many different levels can occur."""

    values: NDArray[np.uint8]
    count: int


def _arguments(arrangement: Arrangement, count: int, parent: Levels | None) -> tuple[np.ndarray, int, int]:
    """Return the parent levels, the modulus and the number of groups for the native coder."""
    if arrangement == "alone":
        return _NOTHING, count, 1
    if parent is None:
        raise ValueError("its levels are conditioned on a parent, and there is none")
    return parent.values, max(count, parent.count), parent.count if arrangement == "rearranged" else 1


def encode(levels: Levels, parent: Levels | None) -> tuple[Arrangement, bytes]:
    """Return the arrangement that takes the fewest bytes, and the coded levels.

    parent: the levels of the parent's tensor, as many as ``levels``, or None. Small tensors try all arrangements,
    because the tables can outweigh what rearranging saves.
    """
    if parent is None:
        candidates: tuple[Arrangement, ...] = ("alone",)
    elif levels.values.size < _TRY_ALL_BELOW:
        candidates = ("rearranged", "delta", "alone")
    else:
        candidates = ("rearranged",)
    coded = {a: encode_as(a, levels, parent) for a in candidates}
    best = min(candidates, key=lambda a: len(coded[a]))
    return best, coded[best]


def encode_as(arrangement: Arrangement, levels: Levels, parent: Levels | None, run_length: bool = True) -> bytes:
    """Return the coded levels in one arrangement. run_length: False uses Huffman codes only, for ablations."""
    return _native.encode_levels(levels.values, *_arguments(arrangement, levels.count, parent), run_length)


def decode(stream: bytes, size: int, count: int, arrangement: Arrangement, parent: Levels | None) -> Levels:
    """Return the ``size`` levels of a stream that ``encode`` made with the same parent.

    count: how many different levels can occur. Raises ValueError if the stream is damaged.
    """
    if size > _BLOCK * (len(stream) // 4):  # a block takes at least four bytes, its length; checked first
        raise ValueError("the coded levels end too early")
    values = np.empty(size, dtype=np.uint8)
    _native.decode_levels(stream, *_arguments(arrangement, count, parent), values)
    if size and int(values.max()) >= count:
        raise ValueError("a level lies outside the codebook")
    return Levels(values, count)
