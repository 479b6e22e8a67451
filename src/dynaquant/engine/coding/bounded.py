"""Levels of tensors with a bound, to bytes and back (docs/format.md, "Bounded tensors").

A level is predicted by the parent's value on the grid, by its neighbours, or by both. The neighbours' prediction is
Lorenzo's: differences along the last axes. What the prediction leaves is coded as exact values are.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dynaquant.engine.coding import byte_planes, lossless
from dynaquant.engine.coding.schemes import Bounded
from dynaquant.engine.tensors.bounded import BoundedTensor, Integers, filled, level_dtype, nearest_levels
from dynaquant.engine.tensors.dequantize import values_of
from dynaquant.engine.tensors.dtypes import QUANTIZABLE_DTYPES
from dynaquant.engine.tensors.stored import StoredTensor

MOST_AXES = 3
_SAMPLE = {1: (1, 1, 4096), 2: (1, 32, 128), 3: (4, 16, 32)}
"""Size of the parts of a tensor that decide on its prediction, by its number of axes."""


def encode(stored: BoundedTensor, parent: StoredTensor | None) -> tuple[Bounded, bytes]:
    """Return the scheme and the stream. parent: the parent's tensor of the same name, if it has one."""
    predicted = _predicted(parent, stored.step, stored.dtype, stored.shape)
    levels = stored.levels.reshape(_three_axes(stored.shape))
    by_parent, axes = _best_prediction(levels, None if predicted is None else predicted.reshape(levels.shape))
    if by_parent:
        assert predicted is not None
        levels = levels - predicted.reshape(levels.shape)
    folded = _folded(_differences(levels, axes)).reshape(-1)
    width = next(n for n in (1, 2, 4, 8) if int(folded.max(initial=0)) < 1 << 8 * n)
    coded = lossless.encode(folded.astype(f"<u{width}").view(np.uint8), width, None)
    gaps = np.diff(stored.positions, prepend=-1) - 1
    positions = byte_planes.encode(gaps.astype("<u8").view(np.uint8), 8) if len(gaps) else b""
    exact = byte_planes.encode(stored.exact, stored.dtype.itemsize) if len(gaps) else b""
    scheme = Bounded(stored.step, stored.bound, width, axes, len(gaps), len(positions), len(exact), by_parent)
    return scheme, positions + exact + coded


def decode(
    scheme: Bounded, dtype: torch.dtype, shape: torch.Size, stream: bytes, parent: StoredTensor | None
) -> BoundedTensor:
    """Return the tensor of a stream. Raises ValueError if it is damaged or the parent does not fit."""
    predicted = _predicted(parent, scheme.step, dtype, shape) if scheme.needs_parent else None
    if scheme.needs_parent and predicted is None:
        raise ValueError("the parent has no values of this shape to predict from")
    middle, end = scheme.positions_size, scheme.positions_size + scheme.exact_size
    positions = _decode_positions(stream[:middle], scheme.exact, shape.numel())
    size = dtype.itemsize * scheme.exact
    exact = byte_planes.decode(stream[middle:end], size, dtype.itemsize) if size else np.empty(0, dtype=np.uint8)
    data = lossless.decode(stream[end:], shape.numel() * scheme.width, scheme.width, None)
    folded = data.view(f"<u{scheme.width}").astype(_unsigned(level_dtype(dtype)))
    levels = _sums(_unfolded(folded).reshape(_three_axes(shape)), scheme.axes).reshape(-1)
    if predicted is not None:
        levels += predicted
    return BoundedTensor(dtype, shape, scheme.step, scheme.bound, levels, positions, exact)


def _decode_positions(stream: bytes, count: int, elements: int) -> NDArray[np.int64]:
    if not count:
        return np.empty(0, dtype=np.int64)
    gaps = byte_planes.decode(stream, 8 * count, 8).view("<u8")
    if int(gaps.max()) < elements:
        positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
        if int(positions[-1]) < elements:
            return positions
    raise ValueError("an exact value lies outside the tensor")


def _predicted(parent: StoredTensor | None, step: float, dtype: torch.dtype, shape: torch.Size) -> Integers | None:
    """Return the levels that the parent's values would have, flat; None if the parent does not fit."""
    if not isinstance(parent, torch.Tensor | BoundedTensor) or parent.shape != shape:
        return None
    if parent.dtype not in QUANTIZABLE_DTYPES:
        return None
    return filled(nearest_levels(values_of(parent).reshape(-1), step, dtype)).astype(level_dtype(dtype))


def _three_axes(shape: torch.Size) -> tuple[int, int, int]:
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
    """Return whether the parent predicts and along how many axes differences are taken: what a sample says.

    predicted: by the parent, or None.
    """
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
