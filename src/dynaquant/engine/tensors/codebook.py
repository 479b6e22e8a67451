"""Codebooks turn levels back into values: a list of centres, a uniform grid or a logarithmic grid.

The step of a grid lies on a ladder: rung ``k`` is ``2^(k/4)``, a quarter of an octave. So a step stays the same while
the quantity that decides it drifts a little, and a file holds it as a small integer (method 2.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from dynaquant import _native

PRUNED = _native.LEVEL_PRUNED
PROTECTED = _native.LEVEL_PROTECTED
FIRST_BIN = 2
"""Level 0 is *pruned* (zero), level 1 is *protected* (an outlier in 16 bits), level ``FIRST_BIN + i`` is bin ``i``.

The two extra levels come first, so that they stay the same if the number of bins changes.
"""
MAX_BINS = 256 - FIRST_BIN

RUNGS_PER_OCTAVE = 4
LOWEST_RUNG, HIGHEST_RUNG = -126 * RUNGS_PER_OCTAVE, 127 * RUNGS_PER_OCTAVE
"""The rungs that are normal float32 numbers."""
HIGHEST_STEP_RUNG = HIGHEST_RUNG - 8 * RUNGS_PER_OCTAVE
"""The highest rung of a grid step: 127 steps are still a finite float32."""
_ROOTS = np.array([1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429], dtype=np.float32)


@cache
def rung_value(rung: int) -> np.float32:
    """Return ``2^(rung/4)`` as a float32, the same on every machine."""
    octave, quarter = divmod(rung, RUNGS_PER_OCTAVE)
    return np.float32(math.ldexp(float(_ROOTS[quarter]), octave))


@cache
def inverse_step(rung: int) -> float:
    """Return one by ``rung_value``, rounded to float32: what values are multiplied with to become grid steps."""
    return float(np.float32(1) / rung_value(rung))


@dataclass(frozen=True, eq=False)
class Centres:
    """A list of values, float32, one for each bin (method 1.3)."""

    values: NDArray[np.float32]

    @property
    def bins(self) -> int:
        """Number of bins."""
        return len(self.values)

    @property
    def names(self) -> list[str]:
        """The name of each bin, for people."""
        return [f"bin {i}" for i in range(self.bins)]


@dataclass(frozen=True)
class Grid:
    """Multiples of a step: the bins are +1, -1, +2, -2, … times ``rung_value(rung)``. Zero is the level *pruned*."""

    rung: int
    bins: int

    @property
    def multiples(self) -> NDArray[np.int64]:
        """The number of steps from zero to each bin."""
        multiples = np.arange(self.bins) // 2 + 1
        multiples[1::2] *= -1
        return multiples

    @property
    def values(self) -> NDArray[np.float32]:
        """The value of each bin."""
        with np.errstate(over="ignore"):  # no quantizer makes so wide a grid, but a damaged file may hold one
            return self.multiples.astype(np.float32) * rung_value(self.rung)

    @property
    def names(self) -> list[str]:
        """The name of each bin, for people."""
        return [f"{multiple:+}" for multiple in self.multiples]


@dataclass(frozen=True)
class LogGrid:
    """Powers of ``2^(pace/4)``, for values above zero: the value of bin ``i`` is at rung ``(first + i) · pace``."""

    pace: int
    first: int
    bins: int

    @property
    def values(self) -> NDArray[np.float32]:
        """The value of each bin."""
        return np.array([rung_value((self.first + i) * self.pace) for i in range(self.bins)], dtype=np.float32)

    @property
    def names(self) -> list[str]:
        """The name of each bin, for people."""
        return [f"2^{(self.first + i) * self.pace / RUNGS_PER_OCTAVE:g}" for i in range(self.bins)]


Codebook = Centres | Grid | LogGrid


def in_common(codebooks: Sequence[Codebook]) -> tuple[Codebook, list[int]] | None:
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
        if len(grids) < len(used) or bins > MAX_BINS:
            return None
        shifts = [
            codebook.first - lowest if isinstance(codebook, LogGrid) and codebook.bins else 0 for codebook in codebooks
        ]
        return LogGrid(first.pace, lowest, bins), shifts
    same = all(isinstance(codebook, Centres) and same_values(codebook, first) for codebook in used)
    return (first, [0] * len(codebooks)) if same else None


def same_levels(a: Codebook, b: Codebook) -> bool:
    """Whether a level means the same in both: on the same grid, or the same of as many clusters."""
    if isinstance(a, Grid):
        return isinstance(b, Grid) and a.rung == b.rung
    if isinstance(a, LogGrid):
        return isinstance(b, LogGrid) and (a.pace, a.first) == (b.pace, b.first)
    return isinstance(b, Centres) and a.bins == b.bins


def same_values(a: Codebook, b: Codebook) -> bool:
    """Whether two codebooks have the same bins, bit for bit: zero and minus zero differ."""
    return np.array_equal(a.values.view(np.uint32), b.values.view(np.uint32))
