"""The presets of ``quality``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

QualityName = Literal["lossless", "high", "balanced", "small"]
"""How much quality a checkpoint may lose: nothing, 0.1 %, 1 % or 5 % of the metric."""


@dataclass(frozen=True)
class Preset:
    """How much quality a checkpoint may lose.

    max_degradation: of the metric, relative. first_tolerance: the relative error ``‖Δu‖/‖u‖`` of a tensor's next
    update that stored first moments may cause; 1 is the error without first moments. second_tolerance: the relative
    error (root mean square) of ``1/sqrt(v)`` that stored second moments may cause (``quantize/moments.py``).
    """

    max_degradation: float
    first_tolerance: float
    second_tolerance: float


BALANCED = Preset(0.01, 1.0, 0.3)
PRESETS: dict[QualityName, Preset | None] = {
    "lossless": None,
    "high": Preset(0.001, 0.5, 0.1),
    "balanced": BALANCED,
    "small": Preset(0.05, 1.0, 0.5),
}
"""By name of ``quality``. None: every tensor is stored exactly."""
