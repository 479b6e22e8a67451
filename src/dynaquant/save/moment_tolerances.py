"""How coarse a first moment may be: it follows from the steps of training that a restore would lose by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dynaquant.save.presets import Preset
from dynaquant.training.first_moments import memories_of

LOST_THOUGH_CORRECTED = 0.2
"""The share of its memory that a training loses with a first moment that a restore corrects. SGD's momentum is not
corrected, and loses no more. Measured: docs/decisions.md, "How much does a restore lose without first moments?"."""
ROUNDING = 1 + 1e-9
FINEST = 0.5
"""The finest tolerance. It keeps three quarters of a moment's square; a finer one takes several times the bits."""


def first_tolerances(
    objects: Mapping[str, Any], preset: Preset, interval: int | None, corrected: bool
) -> dict[str, float]:
    """Return the tolerance of first moments by name, as far as the optimizer is known: ``‖Δu‖/‖u‖`` of an update.

    A first moment with the decay β remembers ``1 / (1 - β)`` steps. A restore without it loses a share of these steps.
    If that is at most ``preset.lost_steps`` of the steps between two checkpoints, the moment is dropped: its tolerance
    is 1. Otherwise it is kept. With a tolerance t, a restore loses the part t² of the steps that it remembers.

    Muon orthogonalizes its moment, so that updates have their full length without it. It is always dropped.

    interval: the steps between two checkpoints, if known. corrected: whether restores correct moments of zero.
    """
    tolerances = {}
    for name, memory in memories_of(objects).items():
        if memory.steps == 0:
            tolerances[name] = 1.0
        elif interval is not None:
            share = LOST_THOUGH_CORRECTED if corrected or not memory.corrected else 1.0
            allowed = preset.lost_steps * interval / memory.steps  # the part of the memory that may be lost
            dropped = share <= allowed * ROUNDING
            tolerances[name] = 1.0 if dropped else min(max(math.sqrt(allowed), FINEST), 1.0)
    return tolerances
