"""Boxes are regions of a tensor. A sharded training holds and stores a tensor as boxes, so stored tensors are cut and
joined here. That changes no value: levels are absolute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.tensors.bounded import BoundedTensor
from dynaquant.tensors.codebook import Centres, Codebook, Grid, LogGrid
from dynaquant.tensors.dequantize import values_of
from dynaquant.tensors.stored import (
    FIRST_BIN,
    PROTECTED,
    QuantizedTensor,
    RankOne,
    RoundedWeight,
    ScaledMoment,
    StoredTensor,
)

S = TypeVar("S", bound=StoredTensor)
FEW = 64
"""Up to so many boxes are compared in pairs. Of more, the elements are marked."""


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


Part = tuple[Box, S]
"""A box of a tensor, and what is stored of it."""


def cut(stored: StoredTensor, box: Box) -> StoredTensor:
    """Return what a stored tensor holds of a box. It has the same values there, and the same levels."""
    if box == Box.whole(stored.shape):
        return stored
    shape = torch.Size(box.sizes)
    if isinstance(stored, QuantizedTensor):
        return _cut_levels(stored, box)
    if isinstance(stored, RankOne):
        rows, columns = _factors(box)
        return RankOne(stored.dtype, shape, _cut_levels(stored.rows, rows), _cut_columns(stored, columns))
    if isinstance(stored, ScaledMoment):
        second = cut(stored.second, box)
        assert isinstance(second, QuantizedTensor | RankOne)
        return replace(stored, units=_cut_levels(stored.units, box), second=second)
    if isinstance(stored, RoundedWeight):
        master = cut(stored.master, box)
        assert isinstance(master, QuantizedTensor | Tensor)
        return replace(stored, master=master)
    if isinstance(stored, BoundedTensor):
        return _cut_bounded(stored, box)
    return values_of(stored)[box.slices].contiguous()


def join(dtype: torch.dtype, shape: torch.Size, parts: Sequence[Part[StoredTensor]]) -> StoredTensor:
    """Return a tensor from boxes that cover it. Boxes may overlap if they hold the same there.

    The result has levels if all parts have levels of codebooks that fit together, otherwise values only. Raises
    ValueError if the boxes do not cover the tensor, or if a part has another dtype or shape than its box.
    """
    for box, stored in parts:
        if stored.dtype != dtype or tuple(stored.shape) != box.sizes or not box.fits(shape):
            raise ValueError("a part does not fit its box")
    if not covers(shape, [box for box, _ in parts]):
        raise ValueError("its boxes do not cover it")
    if len(parts) == 1 and parts[0][0] == Box.whole(shape):
        return parts[0][1]
    joined = _joined(dtype, shape, parts)
    if joined is not None:
        return joined
    values = torch.empty(shape, dtype=dtype)
    for box, stored in parts:
        values[box.slices] = values_of(stored)
    return values


def _joined(dtype: torch.dtype, shape: torch.Size, parts: Sequence[Part[StoredTensor]]) -> StoredTensor | None:
    """Return the parts as one tensor of their form; None if their forms do not fit together."""
    if quantized := _all_of(QuantizedTensor, parts):
        return _join_levels(dtype, shape, quantized)
    if factors := _all_of(RankOne, parts):
        return _join_rank_one(dtype, shape, factors)
    if bounded := _all_of(BoundedTensor, parts):
        return _join_bounded(shape, bounded)
    if moments := _all_of(ScaledMoment, parts):
        name = moments[0][1].second_name
        units = _join_levels(torch.float32, shape, [(box, moment.units) for box, moment in moments])
        second = _joined(moments[0][1].second.dtype, shape, [(box, moment.second) for box, moment in moments])
        if units is None or not isinstance(second, QuantizedTensor | RankOne):
            return None
        return ScaledMoment(dtype, units, second, name) if all(m.second_name == name for _, m in moments) else None
    return None


def _all_of(kind: type[S], parts: Sequence[Part[StoredTensor]]) -> list[Part[S]]:
    """Return the parts if all of them are of this kind, otherwise nothing."""
    found = [(box, cast(S, stored)) for box, stored in parts if isinstance(stored, kind)]
    return found if len(found) == len(parts) else []


def covers(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether the boxes cover every element of a tensor."""
    elements = sum(box.elements for box in boxes)
    if elements < math.prod(shape):
        return False
    if elements == math.prod(shape) and len(boxes) <= FEW and not _any_overlap(boxes):
        return True
    marked = np.zeros(tuple(shape), dtype=bool)
    for box in boxes:
        marked[box.slices] = True
    return bool(marked.all())


def _any_overlap(boxes: Sequence[Box]) -> bool:
    return any(a.overlap(b) is not None for a, b in combinations(boxes, 2))


def _cut_levels(stored: QuantizedTensor, box: Box) -> QuantizedTensor:
    levels = stored.levels.reshape(tuple(stored.shape))[box.slices]
    protected = stored.protected
    if len(protected):
        protected = _dense(stored)[box.slices][levels == PROTECTED]
    return replace(
        stored, shape=torch.Size(box.sizes), levels=np.ascontiguousarray(levels).reshape(-1), protected=protected
    )


def _dense(stored: QuantizedTensor) -> NDArray[np.uint16]:
    """Return the outliers in an array of the tensor's shape; zeros elsewhere."""
    found = np.zeros(stored.levels.size, dtype=np.uint16)
    found[stored.levels == PROTECTED] = stored.protected
    return found.reshape(tuple(stored.shape))


def _join_levels(
    dtype: torch.dtype, shape: torch.Size, parts: Sequence[Part[QuantizedTensor]]
) -> QuantizedTensor | None:
    common = _common_codebook([stored.codebook for _, stored in parts])
    if common is None:
        return None
    codebook, shifts = common
    levels = np.zeros(tuple(shape), dtype=np.uint8)
    outliers = np.zeros(tuple(shape), dtype=np.uint16) if any(len(stored.protected) for _, stored in parts) else None
    for (box, stored), shift in zip(parts, shifts, strict=True):
        own = stored.levels.reshape(box.sizes)
        levels[box.slices] = np.where(own >= FIRST_BIN, own + np.uint8(shift), own) if shift else own
        if outliers is not None:
            outliers[box.slices] = _dense(stored)
    protected = np.zeros(0, np.uint16) if outliers is None else outliers[levels == PROTECTED]
    return QuantizedTensor(dtype, shape, levels.reshape(-1), codebook, protected)


def _common_codebook(codebooks: Sequence[Codebook]) -> tuple[Codebook, list[int]] | None:
    """Return a codebook of all levels, and what is to be added to the bins of each. None if there is none."""
    used = [codebook for codebook in codebooks if codebook.bins] or list(codebooks[:1])
    first = used[0]
    bins = max(codebook.bins for codebook in used)
    if isinstance(first, Grid):
        same = all(isinstance(codebook, Grid) and codebook.rung == first.rung for codebook in used)
        return (Grid(first.rung, bins), [0] * len(codebooks)) if same else None
    if isinstance(first, LogGrid):
        grids = [codebook for codebook in used if isinstance(codebook, LogGrid) and codebook.pace == first.pace]
        lowest = min(grid.first for grid in grids)
        bins = max(grid.first + grid.bins for grid in grids) - lowest
        if len(grids) < len(used) or bins > 256 - FIRST_BIN:
            return None
        shifts = [
            codebook.first - lowest if isinstance(codebook, LogGrid) and codebook.bins else 0 for codebook in codebooks
        ]
        return LogGrid(first.pace, lowest, bins), shifts
    same = all(isinstance(codebook, Centres) and np.array_equal(codebook.values, first.values) for codebook in used)
    return (first, [0] * len(codebooks)) if same else None


def _factors(box: Box) -> tuple[Box, Box]:
    """Return the rows of a box, and its columns as a region of all dimensions but the first."""
    return Box(box.offsets[:1], box.sizes[:1]), Box(box.offsets[1:], box.sizes[1:])


def _cut_columns(stored: RankOne, columns: Box) -> QuantizedTensor:
    """Return the columns of a region. They are flat: a matrix has one dimension of columns."""
    found = _cut_levels(replace(stored.columns, shape=stored.shape[1:]), columns)
    return replace(found, shape=torch.Size([columns.elements]))


def _join_rank_one(dtype: torch.dtype, shape: torch.Size, parts: Sequence[Part[RankOne]]) -> RankOne | None:
    boxes = [_factors(box) for box, _ in parts]
    rows = _join_levels(
        torch.float32, shape[:1], [(box, stored.rows) for (box, _), (_, stored) in zip(boxes, parts, strict=True)]
    )
    columns = _join_levels(
        torch.float32, shape[1:], [(box, stored.columns) for (_, box), (_, stored) in zip(boxes, parts, strict=True)]
    )
    if rows is None or columns is None:
        return None
    joined = RankOne(dtype, shape, rows, replace(columns, shape=torch.Size([math.prod(shape[1:])])))
    # Boxes of the same rows could have been quantized apart. Then there are no rows for both.
    fits = all(
        _same_values(_cut_levels(joined.rows, box), stored.rows)
        and _same_values(_cut_columns(joined, other), stored.columns)
        for (box, other), (_, stored) in zip(boxes, parts, strict=True)
    )
    return joined if fits else None


def _same_values(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return torch.equal(values_of(a), values_of(b))


def _cut_bounded(stored: BoundedTensor, box: Box) -> BoundedTensor:
    levels = stored.levels.reshape(tuple(stored.shape))[box.slices]
    itemsize = stored.dtype.itemsize
    numbers = np.full(stored.levels.size, -1, dtype=np.int64)
    numbers[stored.positions] = np.arange(len(stored.positions))
    own = numbers.reshape(tuple(stored.shape))[box.slices].reshape(-1)
    positions = np.flatnonzero(own >= 0)
    exact = stored.exact.reshape(-1, itemsize)[own[positions]].reshape(-1)
    flat: NDArray[Any] = np.ascontiguousarray(levels).reshape(-1)
    return replace(stored, shape=torch.Size(box.sizes), levels=flat, positions=positions, exact=exact)


def _join_bounded(shape: torch.Size, parts: Sequence[Part[BoundedTensor]]) -> BoundedTensor | None:
    first = parts[0][1]
    if any((stored.step, stored.bound) != (first.step, first.bound) for _, stored in parts):
        return None
    levels = np.zeros(tuple(shape), dtype=first.levels.dtype)
    is_exact = np.zeros(tuple(shape), dtype=bool)
    exact = np.zeros((*shape, first.dtype.itemsize), dtype=np.uint8)
    for box, stored in parts:
        levels[box.slices] = stored.levels.reshape(box.sizes)
        own = np.zeros(stored.levels.size, dtype=bool)
        own[stored.positions] = True
        is_exact[box.slices] = own.reshape(box.sizes)
        exact[box.slices][own.reshape(box.sizes)] = stored.exact.reshape(-1, first.dtype.itemsize)
    positions = np.flatnonzero(is_exact)
    return replace(
        first, shape=shape, levels=levels.reshape(-1), positions=positions, exact=exact[is_exact].reshape(-1)
    )
