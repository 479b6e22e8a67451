"""A tensor on a grid whose step follows from a bound on every value's error (role ``bound``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True)
class BoundedTensor:
    """A tensor as multiples of a step, and some exact values.

    dtype: float32, float64, bfloat16 or float16. levels: flat in C order, int64 for float64, else int32. A value is its
    level times the step. positions: of the exact values, ascending, int64. exact: the bytes of these values. bound: the
    largest error; for information.
    """

    dtype: torch.dtype
    shape: torch.Size
    step: float
    bound: float
    levels: Integers
    positions: NDArray[np.int64]
    exact: NDArray[np.uint8]

    def pieces(self, size: int) -> Iterator[Tensor]:
        """Yield the values in order, in flat pieces of ``size`` values on the host. The last one may be smaller.

        Raises ValueError if the exact values do not fit the levels.
        """
        if len(self.exact) != len(self.positions) * self.dtype.itemsize:
            raise ValueError("the number of exact values differs from the number of their positions")
        for begin in range(0, self.levels.size, size):
            values = on_grid(self.levels[begin : begin + size], self.step, self.dtype)
            first, last = np.searchsorted(self.positions, [begin, begin + size])
            if first < last:
                exact = torch.from_numpy(self.exact).view(self.dtype)[first:last]
                values[torch.from_numpy(self.positions[first:last] - begin)] = exact
            yield values

    def equals(self, other: BoundedTensor) -> bool:
        """Whether both have the same form: step, levels and exact values."""
        return (
            (self.dtype, self.shape, self.step) == (other.dtype, other.shape, other.step)
            and np.array_equal(self.levels, other.levels)
            and np.array_equal(self.positions, other.positions)
            and np.array_equal(self.exact, other.exact)
        )


def level_dtype(dtype: torch.dtype) -> type[np.int32] | type[np.int64]:
    """Return the dtype of the levels of a tensor of this dtype."""
    return np.int64 if dtype == torch.float64 else np.int32


def largest_level(dtype: torch.dtype) -> int:
    """Return the largest level that a value may have. Values further out are stored exactly."""
    return 2**52 if dtype == torch.float64 else 2**31 - 1


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
    with np.errstate(all="ignore"):
        levels: NDArray[np.float64] = np.rint(values.detach().to(torch.float64).numpy() / step)
        levels[~(np.abs(levels) <= largest_level(dtype))] = np.nan
    return levels


def filled(levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Replace every NaN by the last level before it, by 0 if there is none. Changes the array in place."""
    missing = np.isnan(levels)
    if missing.any():
        last = np.where(missing, -1, np.arange(levels.size))
        np.maximum.accumulate(last, out=last)
        levels[:] = np.where(last >= 0, levels[last], 0.0)
    return levels
