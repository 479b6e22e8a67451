"""What one search remembers for the next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.search.history import History
from dynaquant.search.noise import Noise
from dynaquant.search.scores import number_from_json, number_to_json
from dynaquant.search.sight import Sight


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
