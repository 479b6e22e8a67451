"""How large a grid step may be, whatever the metric says. Imports no torch: the command line knows the presets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynaquant.engine.quantize.magnitude import Magnitude


@dataclass(frozen=True)
class StepLimits:
    """The largest grid step of a tensor, as a multiple of ``Magnitude.small``, up to rounding to a rung.

    What a training has learned must survive, also where the metric does not feel it yet. A step no larger than the
    values changes them as if it added noise; a much larger one rounds nearly all of them to zero. Training can make up
    for noise of the size by which it moves a tensor. So the limit is the displacement since the training began, but
    between these two.

    unmoved: for a tensor that has hardly moved, because it was learned before, as pretrained weights were. moved: for
    one that has moved far.
    """

    unmoved: float
    moved: float

    def largest_step(self, magnitude: Magnitude, displacement: float | None) -> float:
        """Return the largest grid step of a tensor. displacement: root mean square; None if not known."""
        if displacement is None:
            step = min(4 * self.unmoved, self.moved) * magnitude.small
        else:
            step = min(max(displacement, self.unmoved * magnitude.small), self.moved * magnitude.small)
        return max(step, math.sqrt(magnitude.mean_square) / MOST_LEVELS)


BALANCED_LIMITS = StepLimits(1 / 16, 1 / 2)
LOOSEST_LIMITS = StepLimits(2.5, 2.5)
"""For a configuration that the user gives. Larger steps would leave nothing of a tensor."""
MOST_LEVELS = 100
"""A grid step may always be this fraction of the root mean square: a finer one has no levels for most values."""
