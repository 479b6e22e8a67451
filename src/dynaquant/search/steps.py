"""Tells from one score whether its metric moves in steps, as an accuracy does."""

from __future__ import annotations

import numpy as np

MOST_PARTS, MOST_PARTS_OF_FLOAT32 = 100_000, 1000
"""A score that is a whole number of such parts, of at most so many, looks like a count of right answers. A float32 is
near such a fraction by chance too often for more parts: a loss between 0 and 1 is for 3 % of all values."""
FEW_DIGITS = 5
"""A score with so few decimal digits has been rounded, or is a fraction of a round number."""
FEW_BITS = 12
"""A score with so few binary digits was computed in 16 bits, or is a count."""


def looks_stepped(score: float) -> bool:
    """Return whether the metric of a finite score may move in steps, so that equal scores tell little about its noise.

    A score is a step if it has few digits, or is a fraction ``k / n``, or that in percent. Losses hardly ever look so.
    """
    single = float(np.float32(score)) == score if abs(score) < float(np.finfo(np.float32).max) else False
    rounded = f"{score:.{FEW_DIGITS}g}"
    if float(rounded) == score or (single and float(np.float32(rounded)) == score):
        return True
    if (np.frexp(score)[0] * 2**FEW_BITS).is_integer():
        return True
    share = abs(score) if abs(score) <= 1 else abs(score) / 100
    if share > 1:
        return False
    most, precision = (MOST_PARTS_OF_FLOAT32, 2.0**-24) if single else (MOST_PARTS, 2.0**-51)
    parts = np.arange(1, most + 1)
    counts = share * parts
    # In float64 also one minus such a fraction, however small: its error is that of 1.
    error = precision * (counts if single else parts)
    return bool((np.abs(counts - np.round(counts)) <= error).any())
