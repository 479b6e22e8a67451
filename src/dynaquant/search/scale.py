"""Search for the scale of the grid quantizer (method 2.1): the degradation grows like its square, so few are scored."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dynaquant.quantize.grid import SCALES_PER_OCTAVE

Score = Callable[[Sequence[int]], Sequence[float]]
"""The degradations of the scales of one round; NaN for one that cannot be judged, which is never good enough."""

AIM = 0.8
"""Share of the limit that a predicted scale is aimed at: an evaluation that fails is lost."""
ENOUGH = 0.67
"""Share of the limit that a new search wants to use before it ends."""
WORTH_IT = SCALES_PER_OCTAVE // 4
"""Steps that a larger scale must promise before a settled one is left: tensors that change their step cost bits."""
CLOSE = SCALES_PER_OCTAVE // 8
"""A search ends when a scale that is good enough is so near to one that is not."""
LARGEST_STEP = 2 * SCALES_PER_OCTAVE
ROUNDS = 12
POWER = 2.0
"""Of the scale, by which degradation grows in the second-order model of the loss."""
STEEPEST = 8.0
"""The power between two scores counts as at most so much: beyond it lies a cliff, which says nothing of its foot."""


def scale_search(
    start: int, lowest: int, highest: int, score: Score, limit: float, settled: bool, width: int = 1
) -> int | None:
    """The largest scale found whose degradation is at most ``limit``; None when there is none from ``lowest`` on.

    start: what is scored first. settled: whether it was good enough for the checkpoint before; then a larger one has to
    promise more. width: how many are scored in a round.
    """
    scores: dict[int, float] = {}
    good: int | None = None
    at = min(max(start, lowest), highest)
    for before in range(ROUNDS):
        near = [at, *(at + sign * i * CLOSE for i in range(1, width) for sign in (-1, 1))]
        new = [k for k in dict.fromkeys(near) if lowest <= k <= highest and k not in scores][:width]
        scores.update(zip(new, score(new), strict=True))
        bad = min((k for k, found in scores.items() if not found <= limit), default=None)
        good = max((k for k, found in scores.items() if found <= limit and (bad is None or k < bad)), default=None)
        if good is None:
            assert bad is not None
            if bad <= lowest:
                return None
            # On a plateau only larger and larger steps get anywhere.
            at = max(bad - max(-_promised(scores, bad, None, limit), CLOSE << before), lowest)
            continue
        promised = min(_promised(scores, good, bad, limit), highest - good)
        if bad is not None and not settled and scores[good] < ENOUGH * limit:
            promised = max(promised, (bad - good) // 2)  # a cliff lies between: the scores beyond it mislead
        if promised < (WORTH_IT if settled else CLOSE) or (bad is not None and bad - good <= CLOSE):
            return good
        at = good + promised if bad is not None else min(good + (promised << before), highest)
    return good


def _promised(scores: dict[int, float], at: int, bad: int | None, limit: float) -> int:
    """How many steps from a scale that was scored the aim is thought to lie, and before ``bad``.

    Degradation is taken for a power of the scale: as between the two, where both are known, else the second.
    """
    found, aim = scores[at], AIM * limit
    if not (math.isfinite(found) and found > 0 and aim > 0):
        steps = LARGEST_STEP if found <= limit else -LARGEST_STEP
    else:
        power = POWER / SCALES_PER_OCTAVE
        if bad is not None and math.isfinite(scores[bad]):
            power = min(math.log2(scores[bad] / found) / (bad - at), STEEPEST / SCALES_PER_OCTAVE)
        steps = math.floor(math.log2(aim / found) / power)
        steps = min(max(steps, -LARGEST_STEP), LARGEST_STEP)
    return steps if bad is None or at + steps < bad else (bad - at) // 2
