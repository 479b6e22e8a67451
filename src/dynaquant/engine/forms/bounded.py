"""A tensor on a grid whose step follows from a bound on every value's error (role ``bound``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.engine.coding import byte_planes, prediction
from dynaquant.engine.coding.prediction import Integers
from dynaquant.engine.forms.form import Coded, Form, StoredTensor
from dynaquant.engine.forms.scheme import Coder, Scheme
from dynaquant.engine.forms.schemes import Bounded
from dynaquant.engine.forms.stored import values_of
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.dtypes import QUANTIZABLE_DTYPES


@dataclass(frozen=True)
class BoundedTensor(Form):
    """A tensor as multiples of a step, and some exact values.

    dtype: float32, float64, bfloat16 or float16. levels: flat in C order, int64 for float64, else int32. A value is its
    level times the step. positions: of the exact values, ascending, int64. exact: the bytes of these values. bound: the
    largest error; for information.
    """

    dtype: torch.dtype
    shape: torch.Size
    step: float
    bound: float = field(compare=False)
    levels: Integers
    positions: NDArray[np.int64]
    exact: NDArray[np.uint8]

    def pieces(self, size: int, device: torch.device, out: Tensor | None = None) -> Iterator[Tensor]:  # noqa: ARG002 - copied
        if len(self.exact) != len(self.positions) * self.dtype.itemsize:
            raise ValueError("the number of exact values differs from the number of their positions")
        for begin in range(0, self.levels.size, size):
            values = on_grid(self.levels[begin : begin + size], self.step, self.dtype)
            first, last = np.searchsorted(self.positions, [begin, begin + size])
            if first < last:
                exact = torch.from_numpy(self.exact).view(self.dtype)[first:last]
                values[torch.from_numpy(self.positions[first:last] - begin)] = exact
            yield values.to(device)

    def encode(self, parent: StoredTensor | None, coder: Coder) -> tuple[Scheme, bytes]:  # noqa: ARG002 - it has one
        predicted = _predicted(parent, self.step, self.dtype, self.shape)
        width, axes, by_parent, coded = prediction.encode(self.levels, self.shape, predicted)
        count = len(self.positions)
        gaps = np.diff(self.positions, prepend=-1) - 1
        positions = byte_planes.encode(gaps.astype("<u8").view(np.uint8), 8) if count else b""
        exact = byte_planes.encode(self.exact, self.dtype.itemsize) if count else b""
        scheme = Bounded(self.step, self.bound, width, axes, count, len(positions), len(exact), by_parent)
        return scheme, positions + exact + coded

    def cut(self, box: Box) -> BoundedTensor:
        levels = self.levels.reshape(tuple(self.shape))[box.slices]
        numbers = np.full(self.levels.size, -1, dtype=np.int64)
        numbers[self.positions] = np.arange(len(self.positions))
        own = numbers.reshape(tuple(self.shape))[box.slices].reshape(-1)
        positions = np.flatnonzero(own >= 0)
        exact = self.exact.reshape(-1, self.dtype.itemsize)[own[positions]].reshape(-1)
        flat: NDArray[Any] = np.ascontiguousarray(levels).reshape(-1)
        return replace(self, shape=torch.Size(box.sizes), levels=flat, positions=positions, exact=exact)

    @classmethod
    def join(
        cls, dtype: torch.dtype, shape: torch.Size, parts: Sequence[tuple[Box, BoundedTensor]]
    ) -> BoundedTensor | None:
        _, first = parts[0]
        if any((stored.step, stored.bound) != (first.step, first.bound) for _, stored in parts):
            return None
        levels = np.zeros(tuple(shape), dtype=first.levels.dtype)
        is_exact = np.zeros(tuple(shape), dtype=bool)
        exact = np.zeros((*shape, dtype.itemsize), dtype=np.uint8)
        for box, stored in parts:
            levels[box.slices] = stored.levels.reshape(box.sizes)
            own = np.zeros(stored.levels.size, dtype=bool)
            own[stored.positions] = True
            is_exact[box.slices] = own.reshape(box.sizes)
            exact[box.slices][own.reshape(box.sizes)] = stored.exact.reshape(-1, dtype.itemsize)
        positions = np.flatnonzero(is_exact)
        return replace(
            first, shape=shape, levels=levels.reshape(-1), positions=positions, exact=exact[is_exact].reshape(-1)
        )

    def describe(self) -> str:
        return (
            f"every finite value is within {self.bound:.6g} of the original: grid step {self.step:.6g}, "
            f"{len(self.positions):,} values stored exactly"
        )

    def facts(self) -> dict[str, Any]:
        return {"bound": self.bound, "step": self.step}


def decode(scheme: Bounded, coded: Coded) -> BoundedTensor:
    """Return the tensor of a stream. Raises ValueError if it is damaged or the parent does not fit."""
    dtype, shape, stream = coded.dtype, coded.shape, coded.stream
    predicted = _predicted(coded.parent, scheme.step, dtype, shape) if scheme.needs_parent else None
    if scheme.needs_parent and predicted is None:
        raise ValueError("the parent has no values of this shape to predict from")
    middle, end = scheme.positions_size, scheme.positions_size + scheme.exact_size
    positions = _decode_positions(stream[:middle], scheme.exact, shape.numel())
    size = dtype.itemsize * scheme.exact
    exact = byte_planes.decode(stream[middle:end], size, dtype.itemsize) if size else np.empty(0, dtype=np.uint8)
    levels = prediction.decode(stream[end:], shape, level_dtype(dtype), scheme.width, scheme.axes)
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
    if not isinstance(parent, Tensor | BoundedTensor) or parent.shape != shape:
        return None
    if parent.dtype not in QUANTIZABLE_DTYPES:
        return None
    return filled(nearest_levels(values_of(parent).reshape(-1), step, dtype)).astype(level_dtype(dtype))


def level_dtype(dtype: torch.dtype) -> type[np.int32] | type[np.int64]:
    """Return the dtype of the levels of a tensor of this dtype."""
    return np.int64 if dtype == torch.float64 else np.int32


def on_grid(levels: Integers | NDArray[np.float64], step: float, dtype: torch.dtype) -> Tensor:
    """Return level times step, rounded to a dtype. Of a dtype with less bits than float32, it is rounded twice.

    Numbers beyond the range of the dtype become infinite.
    """
    with np.errstate(over="ignore"):
        values = torch.from_numpy(np.multiply(levels, step, dtype=np.float64))
    return values if dtype == torch.float64 else values.to(torch.float32).to(dtype)


def nearest_levels(values: Tensor, step: float, dtype: torch.dtype) -> NDArray[np.float64]:
    """Return the nearest level of each value, as float64. NaN where the level would be too large, or is not defined.

    values: float, flat, on the host. dtype: of the tensor whose levels these are.
    """
    largest = 2**52 if dtype == torch.float64 else 2**31 - 1
    with np.errstate(all="ignore"):
        levels: NDArray[np.float64] = np.rint(values.detach().to(torch.float64).numpy() / step)
        levels[~(np.abs(levels) <= largest)] = np.nan
    return levels


def filled(levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Replace every NaN by the last level before it, by 0 if there is none. Changes the array in place."""
    missing = np.isnan(levels)
    if missing.any():
        last = np.where(missing, -1, np.arange(levels.size))
        np.maximum.accumulate(last, out=last)
        levels[:] = np.where(last >= 0, levels[last], 0.0)
    return levels
