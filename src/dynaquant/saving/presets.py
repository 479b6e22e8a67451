"""What the presets of a ``Quality`` mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynaquant.engine.quantize.step_limits import BALANCED_LIMITS, StepLimits
from dynaquant.options import Quality, QualityName

DROPPED = math.inf
"""The tolerance of first moments that are not stored at all."""


@dataclass(frozen=True)
class Preset:
    """How much quality may be lost.

    max_degradation: of the metric by one checkpoint, relative. training_budget: of the metric at the end of the
    training, by all restores. step_limits: the largest grid steps, so that what has been learned survives where the
    metric does not see it. lost_steps: the share of the steps between two checkpoints that a restore may lose by first
    moments that are not stored exactly, except those of SGD and Muon (``saving/moment_tolerances.py``). muon_tolerance:
    the relative error of a stored momentum of Muon. first_tolerance: if those steps are not known, the relative error
    of a tensor's next update that stored first moments may cause (``engine/quantize/first_moment.py``).
    second_tolerance: the relative error (root mean square) of ``1/sqrt(v)`` that stored second moments may cause
    (``engine/quantize/moments.py``). average_error: the largest error of an average of weights, as a share of its small
    values (``engine/quantize/bounds.py``).
    """

    max_degradation: float
    training_budget: float
    step_limits: StepLimits
    lost_steps: float
    muon_tolerance: float
    first_tolerance: float
    second_tolerance: float
    average_error: float


BALANCED = Preset(0.01, 0.005, BALANCED_LIMITS, 0.0125, 0.15, DROPPED, 0.07, 1 / 64)
PRESETS: dict[QualityName, Preset | None] = {
    "lossless": None,
    "high": Preset(0.001, 0.0005, StepLimits(1 / 32, 1 / 4), 0.005, 0.07, 0.5, 0.03, 1 / 128),
    "balanced": BALANCED,
    "small": Preset(0.05, 0.025, StepLimits(1 / 4, 1.0), 0.2, DROPPED, DROPPED, 0.5, 1 / 16),
}
"""By name of ``quality``. None: every tensor is stored exactly."""


def largest_degradation(quality: Quality) -> float:
    """Return how much worse one checkpoint may make the metric: what was given, or else what the preset means."""
    if quality.max_degradation is not None:
        return quality.max_degradation
    preset = PRESETS[quality.preset]
    return preset.max_degradation if preset is not None else 0.0


def budget_of(quality: Quality) -> float | None:
    """Return what the whole training may lose by restores; None if every checkpoint may use ``max_degradation``."""
    preset = PRESETS[quality.preset]
    if quality.training_budget is not None or preset is None or not quality.has_budget:
        return quality.training_budget
    return preset.training_budget
