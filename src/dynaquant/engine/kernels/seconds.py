"""How second moments are given to a kernel that needs their roots: as values, or as what makes these.

Values of a large tensor would have to be written to memory first, and read again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Outer:
    """The outer product of rows and columns: float32, one-dimensional, on one device."""

    rows: Tensor
    columns: Tensor

    def numel(self) -> int:
        """Return the number of values."""
        return len(self.rows) * len(self.columns)


@dataclass(frozen=True)
class OfLevels:
    """The values that a table has for levels. table: float32, on the host; no level is an outlier."""

    levels: NDArray[np.uint8]
    table: Tensor

    def numel(self) -> int:
        """Return the number of values."""
        return self.levels.size


Seconds = Tensor | Outer | OfLevels
"""Values in C order; a tensor of them is float32 and flat."""
