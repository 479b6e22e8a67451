"""Cuts boxes out of stored tensors, and puts boxes together. That changes no value: levels are absolute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.engine.tensors.bounded import BoundedTensor
from dynaquant.engine.tensors.box import Box, tile
from dynaquant.engine.tensors.codebook import FIRST_BIN, PROTECTED, Centres, Codebook, Grid, LogGrid
from dynaquant.engine.tensors.dequantize import values_of
from dynaquant.engine.tensors.stored import (
    Patchwork,
    QuantizedTensor,
    RankOne,
    RoundedWeight,
    ScaledMoment,
    StoredTensor,
)

S = TypeVar("S", bound=StoredTensor)


Piece = tuple[Box, S]
"""A box of a tensor, and what is stored of it."""


def cut(stored: StoredTensor, box: Box) -> StoredTensor:
    """Return what a stored tensor holds of a box. It has the same values there and, if they fit together, levels.

    Raises ValueError if the box does not lie in the tensor.
    """
    if not box.fits(stored.shape):
        raise ValueError(f"it has no box {box.offsets}, {box.sizes}")
    if isinstance(stored, Patchwork):
        return _together(stored, box)
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


@overload
def in_one(stored: StoredTensor) -> StoredTensor: ...
@overload
def in_one(stored: None) -> None: ...
def in_one(stored: StoredTensor | None) -> StoredTensor | None:
    """Return a tensor of boxes as one, and any other as it is. Only so can it be the parent of a tensor in one file."""
    return cut(stored, Box.whole(stored.shape)) if isinstance(stored, Patchwork) else stored


def patchwork(dtype: torch.dtype, shape: torch.Size, pieces: Sequence[Piece[StoredTensor]]) -> StoredTensor:
    """Return a tensor of boxes that cover it once. A single box that is the whole tensor stays as it is.

    Raises ValueError if they do not cover it, overlap, or if a piece has another dtype or shape than its box.
    """
    for box, stored in pieces:
        if stored.dtype != dtype or tuple(stored.shape) != box.sizes or not box.fits(shape):
            raise ValueError("a piece does not fit its box")
    if not tile(shape, [box for box, _ in pieces]):
        raise ValueError("its boxes do not cover it once")
    if len(pieces) == 1 and pieces[0][0] == Box.whole(shape):
        return pieces[0][1]
    return Patchwork(dtype, shape, tuple(pieces))


def _together(stored: Patchwork, box: Box) -> StoredTensor:
    """Return a box of a tensor of boxes: with levels if the boxes that overlap it fit together, else with values only.

    Only these boxes count, so the result is the same whether the others were read or not.
    """
    pieces: list[Piece[StoredTensor]] = []
    for other, piece in stored.boxes:
        if other == box:
            return piece
        if (common := other.overlap(box)) is not None:
            pieces.append((common.relative_to(box), cut(piece, common.relative_to(other))))
    shape = torch.Size(box.sizes)
    joined = _joined(stored.dtype, shape, pieces) if pieces else None
    if joined is not None:
        return joined
    values = torch.empty(shape, dtype=stored.dtype)
    for inside, piece in pieces:
        values[inside.slices] = values_of(piece)
    return values


def _joined(dtype: torch.dtype, shape: torch.Size, parts: Sequence[Piece[StoredTensor]]) -> StoredTensor | None:
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


def _all_of(kind: type[S], parts: Sequence[Piece[StoredTensor]]) -> list[Piece[S]]:
    """Return the parts if all of them are of this kind, otherwise nothing."""
    found = [(box, cast(S, stored)) for box, stored in parts if isinstance(stored, kind)]
    return found if len(found) == len(parts) else []


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
    dtype: torch.dtype, shape: torch.Size, parts: Sequence[Piece[QuantizedTensor]]
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
    same = all(
        isinstance(codebook, Centres) and np.array_equal(_bits(codebook.values), _bits(first.values))
        for codebook in used
    )
    return (first, [0] * len(codebooks)) if same else None


def _bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return values.view(np.uint32)  # zero and minus zero differ


def _factors(box: Box) -> tuple[Box, Box]:
    """Return the rows of a box, and its columns as a region of all dimensions but the first."""
    return Box(box.offsets[:1], box.sizes[:1]), Box(box.offsets[1:], box.sizes[1:])


def _cut_columns(stored: RankOne, columns: Box) -> QuantizedTensor:
    """Return the columns of a region. They are flat: a matrix has one dimension of columns."""
    found = _cut_levels(replace(stored.columns, shape=stored.shape[1:]), columns)
    return replace(found, shape=torch.Size([columns.elements]))


def _join_rank_one(dtype: torch.dtype, shape: torch.Size, parts: Sequence[Piece[RankOne]]) -> RankOne | None:
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


def _join_bounded(shape: torch.Size, parts: Sequence[Piece[BoundedTensor]]) -> BoundedTensor | None:
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
