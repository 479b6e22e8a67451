"""Integers of any size to bytes and back: levels of tensors with a bound (docs/format.md, "Bounded tensors").

A level is predicted by the parent's value on the grid, by its neighbours, or by both. The neighbours' prediction is
Lorenzo's: differences along the last axes. What the prediction leaves is coded as exact values are.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynaquant.engine.coding import lossless

MOST_AXES = 3
_SAMPLE = {1: (1, 1, 4096), 2: (1, 32, 128), 3: (4, 16, 32)}
"""Size of the parts of a tensor that decide on its prediction, by its number of axes."""
Integers = NDArray[np.signedinteger[Any]]


def encode(flat: Integers, shape: tuple[int, ...], predicted: Integers | None) -> tuple[int, int, bool, bytes]:
    """Return the bytes of a coded level, the number of axes, whether the parent predicts, and the coded levels.

    flat: the levels, of a tensor of this shape. predicted: by the parent, if it fits.
    """
    levels = flat.reshape(_three_axes(shape))
    by_parent, axes = _best_prediction(levels, None if predicted is None else predicted.reshape(levels.shape))
    if by_parent:
        assert predicted is not None
        levels = levels - predicted.reshape(levels.shape)
    folded = _folded(_differences(levels, axes)).reshape(-1)
    width = next(n for n in (1, 2, 4, 8) if int(folded.max(initial=0)) < 1 << 8 * n)
    return width, axes, by_parent, lossless.encode(folded.astype(f"<u{width}").view(np.uint8), width, None)


def decode(
    stream: bytes, shape: tuple[int, ...], dtype: type[np.signedinteger[Any]], width: int, axes: int
) -> Integers:
    """Return what ``encode`` has coded, less the parent's prediction, flat and of a dtype.

    width, axes: what ``encode`` returned. Raises ValueError if the stream is damaged.
    """
    data = lossless.decode(stream, math.prod(shape) * width, width, None)
    folded = data.view(f"<u{width}").astype(_unsigned(dtype))
    levels: Integers = _sums(_unfolded(folded).reshape(_three_axes(shape)), axes).reshape(-1)
    return levels


def _three_axes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the shape with ones before it, or with its first dimensions as one."""
    *first, rows, columns = (1, 1, *shape)
    return int(np.prod(first, dtype=np.int64)), rows, columns


def _differences(levels: Any, axes: int) -> Any:
    """Return the differences along the last axes, modulo the integers' range. The first value of a row stays."""
    for axis in range(1, axes + 1):
        before, levels = levels, levels.copy()
        cut = (..., slice(1, None), *(slice(None),) * (axis - 1))
        earlier = (..., slice(None, -1), *(slice(None),) * (axis - 1))
        levels[cut] -= before[earlier]
    return levels


def _sums(differences: Any, axes: int) -> Any:
    for axis in range(1, axes + 1):
        differences = np.cumsum(differences, axis=-axis, dtype=differences.dtype)
    return differences


def _unsigned(dtype: Any) -> Any:
    return np.dtype(f"u{np.dtype(dtype).itemsize}")


def _folded(levels: Any) -> Any:
    """Return 0, -1, 1, -2, … as 0, 1, 2, 3, …."""
    bits = 8 * levels.itemsize
    return ((levels << 1) ^ (levels >> (bits - 1))).view(_unsigned(levels.dtype))


def _unfolded(folded: Any) -> Any:
    levels = (folded >> 1) ^ (0 - (folded & 1))
    return levels.view(np.dtype(f"i{folded.itemsize}"))


def _best_prediction(levels: Any, predicted: Any) -> tuple[bool, int]:
    """Return whether the parent predicts and along how many axes differences are taken: what a sample says."""
    boxes = [(levels[box], None if predicted is None else predicted[box]) for box in _boxes(levels.shape)]
    axes = [0, *(n for n in range(1, MOST_AXES + 1) if levels.shape[-n] > 1)]
    choices = list(itertools.product((False,) if predicted is None else (False, True), axes))

    def bits(choice: tuple[bool, int]) -> float:
        by, n = choice
        left = [_differences(box - other if by else box, n).reshape(-1) for box, other in boxes]
        return _information(_folded(np.concatenate(left)))

    return min(choices, key=bits) if len(choices) > 1 else choices[0]


def _boxes(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Return parts of an array, evenly spread."""
    sizes = _SAMPLE[3 if shape[0] > 1 else 2 if shape[1] > 1 else 1]
    ends = [
        tuple((n - size) * part // 6 for part in (1, 3, 5)) if n > size else (0,)
        for n, size in zip(shape, sizes, strict=True)
    ]
    begins = itertools.product(*ends)
    return [tuple(slice(b, b + size) for b, size in zip(begin, sizes, strict=True)) for begin in begins]


def _information(folded: Any) -> float:
    """Return about how many bits the numbers take: the entropy of their lengths, and the bits below the highest."""
    lengths = np.frexp(folded.astype(np.float64))[1]
    shares = np.bincount(lengths) / max(len(lengths), 1)
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum() + np.maximum(lengths - 1, 0).mean())
