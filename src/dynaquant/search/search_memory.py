"""What one search remembers for the next, among it the results of earlier searches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.quantize.knobs import Configuration, GridConfiguration, knobs_from_json, knobs_to_json
from dynaquant.search.noise import Noise
from dynaquant.search.scores import number_from_json, number_to_json
from dynaquant.search.sight import Sight

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


@dataclass(frozen=True)
class SearchMemory:
    """What one search remembers for the next. A search returns a new one; a save that fails drops it.

    history: the results of the last searches. gave_up: whether the last one found nothing good enough. noise: of the
    metric. saves: how many saves the metric has judged. whole: whether it can be evaluated only as a whole, because
    the numbers of its batches do not repeat. sight: what it told of weights at the last save. reference: its score of
    the weights in training that later ones are compared with. resolution: the step of a metric that moves in steps, in
    the metric's units. restored: the quantized weights of the last restore by name, while checkpoints have to keep what
    has changed since.

    A record has all but the last restore, which is the checkpoint itself, and ``whole``, which a restored training
    finds out again.
    """

    history: History = field(default_factory=History)
    gave_up: bool = False
    noise: Noise = field(default_factory=Noise)
    saves: int = 0
    whole: bool = False
    sight: Sight = "sees"
    reference: float | None = None
    resolution: float | None = None
    restored: Mapping[str, QuantizedTensor] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the memory as it is stored in a record."""
        return {
            "history": self.history.to_json(),
            "gave_up": self.gave_up,
            "noise": self.noise.to_json(),
            "saves": self.saves,
            "sight": self.sight,
            "reference": self.reference,
            "resolution": number_to_json(self.resolution),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], restored: Mapping[str, QuantizedTensor]) -> SearchMemory:
        """Return the memory of a restored checkpoint. Invalid content of its record is ignored.

        restored: its quantized weights by name.
        """
        search = record.get("search")
        search = search if isinstance(search, Mapping) else {}
        saves, reference = search.get("saves"), search.get("reference")
        sights: tuple[Sight, ...] = get_args(Sight)
        return cls(
            History.from_json(search.get("history")),
            search.get("gave_up") is True,
            Noise.from_json(search.get("noise")).looking_again(),
            saves if isinstance(saves, int) and saves >= 0 else 0,
            sight=next((sight for sight in sights if sight == search.get("sight")), "sees"),
            reference=reference if isinstance(reference, float) and math.isfinite(reference) else None,
            resolution=_resolution_from_json(search.get("resolution")),
            restored=restored,
        )


def _resolution_from_json(data: Any) -> float | None:
    try:
        value = number_from_json(data)
    except (OverflowError, TypeError, ValueError):
        return None
    return value if value is not None and value > 0 else None
