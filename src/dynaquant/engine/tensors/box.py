"""A box: a region of a tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

MOST_CUT = 8
"""In so many dimensions a tensor may be divided."""


@dataclass(frozen=True, order=True)
class Box:
    """A region of a tensor: for each dimension where it begins, and how long it is. Both have the tensor's rank."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the box in an array of the tensor's shape."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offsets, self.sizes, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """Return the box that lies in both; None if it would have no elements."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Box(begins, sizes) if all(size > 0 for size in sizes) else None

    def relative_to(self, other: Box) -> Box:
        """Return this box with offsets that count from the beginning of another one."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.sizes)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the box lies in a tensor of this shape."""
        return len(shape) == len(self.offsets) == len(self.sizes) and all(
            begin >= 0 and size >= 0 and begin + size <= length
            for begin, size, length in zip(self.offsets, self.sizes, shape, strict=True)
        )


def tile(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether the boxes, which lie in a tensor of this shape, cover it, each element once.

    The corners of a box, with a minus sign for each dimension in which they are at its end, are the derivative of its
    indicator function. So the indicators of the boxes add up to that of the tensor if their corners do.
    """
    cut = [d for d, size in enumerate(shape) if any(box.sizes[d] != size for box in boxes if box.elements)]
    if math.prod(shape) == 0 or len(cut) > MOST_CUT:
        return math.prod(shape) == 0
    corners: Counter[tuple[int, ...]] = Counter()
    corners.subtract(dict(_corners(Box.whole(shape), cut)))
    for box in boxes:
        if box.elements:
            for corner, sign in _corners(box, cut):
                corners[corner] += sign
    return bool(boxes) and not any(corners.values())


def _corners(box: Box, dimensions: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the corners of a box in some dimensions, each with its sign."""
    for ends in product((0, 1), repeat=len(dimensions)):
        corner = tuple(box.offsets[d] + end * box.sizes[d] for d, end in zip(dimensions, ends, strict=True))
        yield corner, -1 if sum(ends) % 2 else 1
