"""Levels <-> bytes given the parent's levels: rearranged deltas, run length, Huffman (method 1.5)."""

from __future__ import annotations

from typing import Literal

import numpy as np

from dynaquant import _native
from dynaquant.tensors.stored import Levels

Arrangement = Literal["alone", "delta", "rearranged"]
"""How levels are coded: without the parent; as deltas in their own order; as deltas grouped by source level."""

_TRY_ALL_BELOW = 65_536
_BLOCK = 65_536
_NOTHING = np.zeros(0, dtype=np.uint8)


def _arguments(arrangement: Arrangement, count: int, parent: Levels | None) -> tuple[np.ndarray, int, int]:
    """The native coder's parent levels, modulus and number of groups."""
    if arrangement == "alone":
        return _NOTHING, count, 1
    if parent is None:
        raise ValueError("these levels were coded against a parent, and there is none")
    return parent.values, max(count, parent.count), parent.count if arrangement == "rearranged" else 1


def encode(levels: Levels, parent: Levels | None) -> tuple[Arrangement, bytes]:
    """The coded levels in the arrangement that takes the fewest bytes.

    parent: levels of the same tensor in the parent, as many as ``levels``, or None. The tables of a small tensor can
    outweigh what rearrangement saves, so there all arrangements are tried.
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
    """The coded levels in one arrangement; ``run_length=False`` leaves Huffman coding alone (for ablations)."""
    return _native.encode_levels(levels.values, *_arguments(arrangement, levels.count, parent), run_length)


def decode(stream: bytes, size: int, count: int, arrangement: Arrangement, parent: Levels | None) -> Levels:
    """The ``size`` levels that ``encode`` made ``stream`` of, with the same parent. ``count`` levels can occur.

    Raises ValueError when the stream is not that.
    """
    if size > _BLOCK * (len(stream) // 4):  # every block has a length of four bytes: not a byte for what is not there
        raise ValueError("the coded levels end too early")
    values = np.empty(size, dtype=np.uint8)
    _native.decode_levels(stream, *_arguments(arrangement, count, parent), values)
    if size and int(values.max()) >= count:
        raise ValueError("a level lies outside the codebook")
    return Levels(values, count)
