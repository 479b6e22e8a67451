"""``Bound``, a role with a number: how far stored values may be from the original ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A role for tensors: no stored value is further than this from the value in training.

    Give it in ``roles``, e.g. ``{"model.field": dq.Bound(absolute=1e-6)}``. It needs no metric and no search, and holds
    for every finite value after rounding to the tensor's dtype. Infinities and NaNs are kept bit for bit; a negative
    zero becomes zero. Tensors of other dtypes than float32, float64, bfloat16 and float16 are stored exactly; so are
    tensors that a bound would not make smaller.

    absolute: the largest error. relative: the largest error, relative to the range of the tensor's finite values (the
    largest less the smallest) at each save. Give one of them. 0 stores the tensor exactly.

    Raises ValueError if both or none are given, or if a number is negative or not finite.
    """

    absolute: float | None = None
    relative: float | None = None

    def __post_init__(self) -> None:
        if (self.absolute is None) == (self.relative is None):
            raise ValueError("Bound needs either absolute= or relative=, e.g. Bound(absolute=1e-6)")
        for name, value in (("absolute", self.absolute), ("relative", self.relative)):
            valid = isinstance(value, Real) and not isinstance(value, bool) and 0 <= value < math.inf
            if value is not None and not valid:
                raise ValueError(f"Bound({name}=…) must be a finite number of at least 0, not {value!r}")

    def of_range(self, lowest: float, highest: float) -> float:
        """Return the largest error, a float64. lowest, highest: of the tensor's finite values."""
        if self.absolute is not None:
            return float(self.absolute)
        assert self.relative is not None
        # Slightly less, because the product and the difference are rounded.
        return float(self.relative) * (highest / 2 - lowest / 2) * 2 * (1 - 2.0**-50)
