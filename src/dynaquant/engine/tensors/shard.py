"""A shard: what one rank holds of a tensor. Its local tensor is made of boxes, which lie side by side in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product

import numpy as np
import torch
from numpy.typing import NDArray

from dynaquant.cached import cached_property
from dynaquant.engine.tensors.box import Box

Span = tuple[int, int]
"""Indices of one dimension from the first to before the second."""


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a tensor, which itself no rank needs to hold.

    shape: of the whole tensor. spans: for each dimension the indices that the rank holds, in the order of its local
    tensor. In one dimension there may be several spans (a strided shard), or none.
    """

    shape: torch.Size
    spans: tuple[tuple[Span, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Shard:
        """Return the shard of a rank that holds the whole tensor."""
        return cls(torch.Size(shape), tuple(((0, size),) if size else () for size in shape))

    @classmethod
    def nothing(cls, shape: Sequence[int]) -> Shard:
        """Return the shard of a rank that holds no element of a tensor, which must have a dimension."""
        return cls(torch.Size(shape), tuple(() for _ in shape))

    @cached_property
    def local_shape(self) -> torch.Size:
        """The shape of the local tensor."""
        return torch.Size(sum(end - begin for begin, end in spans) for spans in self.spans)

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds the whole tensor."""
        return self.local_shape == self.shape

    @property
    def axes(self) -> tuple[Shard, Shard]:
        """Which rows and which columns of a matrix the rank holds: all dimensions but the first count as columns."""
        return Shard(self.shape[:1], self.spans[:1]), Shard(self.shape[1:], self.spans[1:])

    @cached_property
    def boxes(self) -> tuple[tuple[Box, Box], ...]:
        """The boxes with elements: each as a region of the whole tensor, and as one of the local tensor."""
        placed = []
        for spans in self.spans:
            begins = accumulate((end - begin for begin, end in spans), initial=0)
            placed.append([(begin, at, end - begin) for (begin, end), at in zip(spans, begins, strict=False)])
        found = []
        for each in product(*placed):
            sizes = tuple(size for _, _, size in each)
            found.append((Box(tuple(b for b, _, _ in each), sizes), Box(tuple(at for _, at, _ in each), sizes)))
        return tuple(found)

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Stretches of elements that follow one another in both tensors, in the order of the local one.

        Each has its index in the flat local tensor, its index in the flat whole tensor, and its length.
        """
        if not self.local_shape.numel():
            return ()
        # Dimensions after the last divided one are whole, so a run goes through all of them.
        divided = [d for d, size in enumerate(self.shape) if self.local_shape[d] != size or len(self.spans[d]) > 1]
        last = divided[-1] if divided else -1
        inner = math.prod(self.shape[last + 1 :])
        if not divided:
            return ((0, 0, inner),)
        found: list[tuple[int, int, int]] = []
        at = 0
        for index in product(*(self.indices(dimension).tolist() for dimension in range(last))):
            row = 0
            for i, size in zip(index, self.shape[:last], strict=True):
                row = row * size + i
            for begin, end in self.spans[last]:
                found.append((at, (row * self.shape[last] + begin) * inner, (end - begin) * inner))
                at += found[-1][2]
        return tuple(found)

    def find(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find elements of the flat whole tensor in the flat local one.

        Returns the positions in ``indices`` of those that the rank holds, and their indices in the local tensor.
        """
        if self.is_whole:
            return np.arange(len(indices)), indices
        held = np.ones(len(indices), dtype=bool)
        local = np.zeros(len(indices), dtype=np.int64)
        for dimension, coordinates in enumerate(np.unravel_index(indices, tuple(self.shape))):
            own = _local_indices(self.shape[dimension], self.spans[dimension])[coordinates]
            held &= own >= 0
            local = local * self.local_shape[dimension] + own
        positions = np.flatnonzero(held)
        return positions, local[positions]

    def among_zeros(self, local: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return numbers of the elements that the rank holds, among zeros for those of other ranks.

        local: flat, in the order of the local tensor. The result is as long as the whole tensor.
        """
        if self.is_whole:
            return local
        whole = np.zeros(self.shape.numel())
        for at, first, length in self.runs:
            whole[first : first + length] = local[at : at + length]
        return whole

    def indices(self, dimension: int) -> NDArray[np.int64]:
        """Return the indices of a dimension that the rank holds, in the order of the local tensor."""
        parts = [np.arange(begin, end, dtype=np.int64) for begin, end in self.spans[dimension]]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


@lru_cache(maxsize=64)
def _local_indices(size: int, spans: tuple[Span, ...]) -> NDArray[np.int64]:
    """Return the local index of each index of a dimension; -1 if the rank does not hold it."""
    found = np.full(size, -1, dtype=np.int64)
    at = 0
    for begin, end in spans:
        found[begin:end] = np.arange(at, at + end - begin)
        at += end - begin
    return found


def spans_of(indices: Iterable[int]) -> tuple[Span, ...]:
    """Return the spans of a sequence of indices."""
    spans: list[Span] = []
    for index in indices:
        if spans and spans[-1][1] == index:
            spans[-1] = spans[-1][0], index + 1
        else:
            spans.append((index, index + 1))
    return tuple(spans)
