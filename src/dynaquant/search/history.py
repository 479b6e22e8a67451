"""The results of earlier searches; the next search starts from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dynaquant.engine.quantize.knobs import Configuration, GridConfiguration, knobs_from_json, knobs_to_json

REMEMBERED = 4
"""Checkpoints whose degradation at the scale 1 is remembered. More would average more luck away, and follow the
training later."""
_SMALLEST_LIMIT = 1e-9
"""Smaller limits count as this one, so that they have a logarithm."""


@dataclass(frozen=True)
class LastScale:
    """Where the last search for the grid's scale ended.

    exponent: of the scale. at_scale_1: the degradation at the scale 1 of the last checkpoints, see
    ``methods/grid/scale_search.py``.
    """

    exponent: int
    at_scale_1: tuple[float, ...] = ()


@dataclass(frozen=True)
class History:
    """The results of the last searches: the scale of the grid, and a published configuration for each limit.

    Limits are rounded to powers of two. They change from one checkpoint to the next: the user changes ε, the budget
    allows less, and a noisy metric leaves less of it. A published configuration for one limit is no good start for a
    very different one.

    scale: of the last search that found one. configurations: by the exponent of the limit.
    """

    scale: LastScale | None = None
    configurations: Mapping[int, Configuration] = field(default_factory=dict)

    def last_configuration(self, limit: float) -> Configuration | None:
        """Return the last published configuration for the limit, or for the nearest one.

        None if no search had a limit as loose as this one.
        """
        exponent, found = _exponent(limit), self.configurations
        if not found or exponent > max(found):
            return None
        return found[min(found, key=lambda known: (abs(known - exponent), -known))]

    def after_configuration(self, limit: float, configuration: Configuration) -> History:
        """Return the history after a search for a limit has found a k-means configuration."""
        return replace(self, configurations={**self.configurations, _exponent(limit): configuration})

    def to_json(self) -> dict[str, Any]:
        """Return the history as it is stored in a record."""
        found: dict[str, Any] = {str(exponent): knobs_to_json(knobs) for exponent, knobs in self.configurations.items()}
        if self.scale is None:
            return found
        return {**found, "scale": {"exponent": self.scale.exponent, "levels": self.scale.at_scale_1}}

    @classmethod
    def from_json(cls, data: Any) -> History:
        """Reverse ``to_json``. Ignores scales of earlier versions, and returns an empty history for anything else."""
        try:
            scale = _scale_from_json(data["scale"]) if "scale" in data else None
            found = {key: knobs_from_json(knobs) for key, knobs in data.items() if key != "scale"}
            return cls(scale, {int(key): knobs for key, knobs in found.items() if isinstance(knobs, Configuration)})
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            return cls()


def _scale_from_json(data: Mapping[str, Any]) -> LastScale:
    configuration = knobs_from_json({"scale": data["exponent"]})
    assert isinstance(configuration, GridConfiguration)
    at_scale_1 = tuple(map(float, data["levels"]))
    if not all(map(math.isfinite, at_scale_1)):
        raise ValueError("levels must be finite")
    return LastScale(configuration.scale, at_scale_1[-REMEMBERED:])


def _exponent(limit: float) -> int:
    return round(math.log2(max(limit, _SMALLEST_LIMIT)))
