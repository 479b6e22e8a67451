"""The results of earlier searches by limit; the next search starts from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynaquant.quantize.grid import SCALES_PER_OCTAVE, GridConfiguration
from dynaquant.quantize.knobs import Knobs, knobs_from_json, knobs_to_json
from dynaquant.quantize.partition import Configuration

_SMALLEST_LIMIT = 1e-9
"""Smaller limits count as this one, so that they have a logarithm."""


@dataclass(frozen=True)
class LastScale:
    """Where the last search for the grid's scale ended.

    exponent: of the scale. same_limit: whether the limit was the same.
    """

    exponent: int
    same_limit: bool


class History:
    """The last configuration that was found for each limit. Limits are rounded to powers of two.

    Limits change from one checkpoint to the next: the user changes ε, and a noisy metric leaves less of it. The
    result for one limit is no good start for a very different one.
    """

    def __init__(self) -> None:
        self._found: dict[int, Knobs] = {}  # by the exponent of the limit

    def last_configuration(self, limit: float) -> Configuration | None:
        """Return the last k-means configuration for the limit, or for the nearest one.

        None if no search had a limit as loose as this one.
        """
        exponent = _exponent(limit)
        found = {known: knobs for known, knobs in self._found.items() if isinstance(knobs, Configuration)}
        if not found or exponent > max(found):
            return None
        return found[_nearest(found, exponent)]

    def last_scale(self, limit: float) -> LastScale | None:
        """Return the last scale exponent of the grid for the limit; None if there is none.

        For another limit it is adjusted: degradation grows as the square of the scale.
        """
        exponent = _exponent(limit)
        found = {known: knobs for known, knobs in self._found.items() if isinstance(knobs, GridConfiguration)}
        if not found:
            return None
        nearest = _nearest(found, exponent)
        if exponent != nearest:
            return LastScale(found[nearest].scale + (exponent - nearest) * SCALES_PER_OCTAVE // 2, False)
        return LastScale(found[nearest].scale, True)

    def remember(self, limit: float, configuration: Knobs) -> None:
        """Store the result of a search for a limit."""
        self._found[_exponent(limit)] = configuration

    def to_json(self) -> dict[str, Any]:
        """Return the history as it is stored in a record."""
        return {str(exponent): knobs_to_json(configuration) for exponent, configuration in self._found.items()}

    @classmethod
    def from_json(cls, data: Any) -> History:
        """Reverse ``to_json``. Returns an empty history for anything else."""
        history = cls()
        try:
            if isinstance(data, Mapping):
                history._found = {int(exponent): knobs_from_json(knobs) for exponent, knobs in data.items()}
        except (TypeError, ValueError):
            return cls()
        return history


def _nearest(found: Mapping[int, Any], exponent: int) -> int:
    """Return the nearest exponent, the looser of two that are equally near."""
    return min(found, key=lambda known: (abs(known - exponent), -known))


def _exponent(limit: float) -> int:
    return round(math.log2(max(limit, _SMALLEST_LIMIT)))
