"""Scores of configurations, as records keep them: the quality of weights, and what was tried."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynaquant.engine.quantize.knobs import Knobs, knobs_from_json, knobs_to_json


@dataclass(frozen=True)
class MeasuredQuality:
    """The metric of the weights in training (``original``) and of the weights that a restore would return.

    degradation: how much worse the second is, see ``evaluation.degradation``.
    """

    original: float
    restored: float
    degradation: float


@dataclass(frozen=True)
class Trial:
    """One configuration that was tried at a checkpoint.

    predicted: bytes of the coded weights; None if nothing predicts them. degradation: relative; NaN if the metric was
    not finite or failed, None if it was not evaluated because too little displacement is kept. progress: the share of
    the displacement since the last restore that is kept; None if nothing was restored. seconds: to quantize and to
    score. error: what ``evaluate`` raised. share: of the metric's batches that were evaluated. Below 1, a few of them
    told enough, and the degradation is an estimate.
    """

    configuration: Knobs
    predicted: float | None
    degradation: float | None
    progress: float | None
    seconds: float
    error: str | None = None
    share: float = 1.0

    def keeps(self, least_kept: float) -> bool:
        """Return whether at least this share of the displacement is kept, or nothing was restored."""
        return self.progress is None or self.progress >= least_kept

    def to_json(self) -> dict[str, Any]:
        """Return the trial as it is stored in a record."""
        return {
            "configuration": knobs_to_json(self.configuration),
            "predicted": None if self.predicted is None else round(self.predicted),
            "degradation": number_to_json(self.degradation),
            "progress": number_to_json(self.progress),
            "seconds": round(self.seconds, 6),
            "error": self.error,
            "share": round(self.share, 6),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trial:
        """Reverse ``to_json``. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            knobs_from_json(data["configuration"]),
            number_from_json(data["predicted"]),
            number_from_json(data["degradation"]),
            number_from_json(data["progress"]),
            float(data["seconds"]),
            data["error"],
            float(data.get("share", 1.0)),  # records of earlier versions have none
        )


def number_to_json(value: float | None) -> float | str | None:
    """Return the value, or its name as text if JSON does not have it: NaN and the infinities."""
    return value if value is None or math.isfinite(value) else repr(value)


def number_from_json(value: Any) -> float | None:
    """Reverse ``number_to_json``. Raises TypeError or ValueError for anything else."""
    return None if value is None else float(value)
