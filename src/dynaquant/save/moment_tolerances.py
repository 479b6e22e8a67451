"""How coarse a first moment may be: it follows from the steps of training that a restore would lose by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dynaquant.save.presets import Preset
from dynaquant.training.first_moments import memories_of

ROUNDING = 1 + 1e-9
FINEST = 0.5
"""The finest tolerance. It keeps three quarters of a moment's square; a finer one takes several times the bits."""


def first_tolerances(
    objects: Mapping[str, Any], preset: Preset, interval: int | None, corrected: bool
) -> dict[str, float]:
    """Return the tolerance of first moments by name, as far as β is known: ``‖Δu‖/‖u‖`` of an update.

    A first moment with the decay β remembers ``1 / (1 - β)`` steps. A restore without it loses some of these steps. If
    they are at most ``preset.lost_steps`` of the steps between two checkpoints, the moment is dropped: its tolerance is
    1. Otherwise it is kept. With a tolerance t, a restore loses the part t² of the steps that it remembers.

    Muon orthogonalizes its moment, so that updates have their full length without it. It is always dropped.

    interval: the steps between two checkpoints, if known. corrected: whether restores correct moments of zero.
    """
    tolerances = {}
    for name, memory in memories_of(objects, corrected).items():
        allowed = preset.lost_steps * (interval or 0)
        if memory.lost <= allowed * ROUNDING:
            tolerances[name] = 1.0
        elif interval is not None:
            tolerances[name] = min(max(math.sqrt(allowed / memory.steps), FINEST), 1.0)
    return tolerances
