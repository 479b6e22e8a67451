"""What earlier searches found: the configurations that the next one starts from, by how much was allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dynaquant.quantize.grid import SCALES_PER_OCTAVE, GridConfiguration
from dynaquant.quantize.knobs import Knobs, knobs_from_json, knobs_to_json
from dynaquant.quantize.partition import Configuration

_SMALLEST = 1e-9
"""Limits below it are taken for it, so that they have a logarithm."""


class History:
    """The last best configuration for every limit, as powers of two.

    Limits change from one checkpoint to the next: the user changes ε, and a noisy metric leaves less of it. What was
    found for a limit is no place to start from for another one.
    """

    def __init__(self) -> None:
        self._found: dict[int, Knobs] = {}

    def nearest(self, limit: float) -> Configuration | None:
        """What was found last for the limit, or for the nearest one; None when none was ever as loose as this one."""
        key = _key(limit)
        found = {known: knobs for known, knobs in self._found.items() if isinstance(knobs, Configuration)}
        if not found or key > max(found):
            return None
        return found[_nearest(found, key)]

    def scale(self, limit: float) -> tuple[int, bool] | None:
        """The scale that was found last for the limit, and whether it was for that limit.

        For another one it is moved by what the limits differ: degradations grow like the square of the scale.
        """
        key = _key(limit)
        found = {known: knobs for known, knobs in self._found.items() if isinstance(knobs, GridConfiguration)}
        if not found:
            return None
        known = _nearest(found, key)
        return found[known].scale + (key - known) * SCALES_PER_OCTAVE // 2, key == known

    def note(self, limit: float, configuration: Knobs) -> None:
        """Takes note of what was found for a limit."""
        self._found[_key(limit)] = configuration

    def to_json(self) -> dict[str, Any]:
        """The history as it stands in a record."""
        return {str(key): knobs_to_json(configuration) for key, configuration in self._found.items()}

    @classmethod
    def from_json(cls, data: Any) -> History:
        """The inverse of ``to_json``; an empty history for anything else."""
        history = cls()
        try:
            if isinstance(data, Mapping):
                history._found = {int(key): knobs_from_json(knobs) for key, knobs in data.items()}
        except (TypeError, ValueError):
            return cls()
        return history


def _nearest(found: Mapping[int, Any], key: int) -> int:
    return min(found, key=lambda known: (abs(known - key), -known))


def _key(limit: float) -> int:
    return round(math.log2(max(limit, _SMALLEST)))
