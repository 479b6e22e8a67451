"""What the names of ``quality`` stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

QualityName = Literal["lossless", "high", "balanced", "small"]


@dataclass(frozen=True)
class Preset:
    """How much a checkpoint may lose.

    max_degradation: of the metric. first_tolerance: how far the direction of the next update may be off because of the
    first moments, ``‖Δu‖/‖u‖`` of a tensor; 1 is as far as with none. second_tolerance: the same of ``1/sqrt(v)``,
    relative, root mean square (``quantize.moments``).
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
"""None: every tensor is stored exactly."""
