"""Codebooks: what turns levels back into values. Centres, a grid, or a logarithmic grid.

Steps go by *rungs*, quarters of an octave: rung ``k`` is ``2^(k/4)``, so that a step stays where it is while what it is
chosen by drifts, and is written as a small integer (method 2.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

RUNGS_PER_OCTAVE = 4
LOWEST_RUNG, HIGHEST_RUNG = -126 * RUNGS_PER_OCTAVE, 127 * RUNGS_PER_OCTAVE
"""The rungs that are normal float32 numbers."""
HIGHEST_STEP = HIGHEST_RUNG - 8 * RUNGS_PER_OCTAVE
"""The highest rung for the step of a grid, so that 127 steps are a float32 as well."""
_ROOTS = np.array([1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429], dtype=np.float32)


@cache
def rung_value(rung: int) -> np.float32:
    """``2^(rung/4)`` as a float32, the same on every machine."""
    octave, quarter = divmod(rung, RUNGS_PER_OCTAVE)
    return np.float32(math.ldexp(float(_ROOTS[quarter]), octave))


@dataclass(frozen=True, eq=False)
class Centres:
    """A list of values, float32, one for each bin (method 1.3)."""

    values: NDArray[np.float32]

    @property
    def bins(self) -> int:
        """Number of bins."""
        return len(self.values)


@dataclass(frozen=True)
class Grid:
    """Multiples of a step: bins are +1, -1, +2, -2, … times ``rung_value(rung)``; zero is the level *pruned*."""

    rung: int
    bins: int

    @property
    def values(self) -> NDArray[np.float32]:
        """The value of each bin."""
        numbers = np.arange(self.bins) // 2 + 1
        numbers[1::2] *= -1
        with np.errstate(over="ignore"):  # no quantizer makes a grid so wide, but a file may hold one
            return numbers.astype(np.float32) * rung_value(self.rung)


@dataclass(frozen=True)
class LogGrid:
    """Powers of two for values above zero: bin ``i`` is rung ``(first + i) · pace``."""

    pace: int
    first: int
    bins: int

    @property
    def values(self) -> NDArray[np.float32]:
        """The value of each bin."""
        return np.array([rung_value((self.first + i) * self.pace) for i in range(self.bins)], dtype=np.float32)


Codebook = Centres | Grid | LogGrid
