"""How much a metric differs between two evaluations of the same weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

MARGIN = 2.0
"""A degradation must stay below the limit by this many standard deviations of the noise."""
FIRST = 5
"""Evaluations at the first save. Why five: docs/architecture.md, "A noisy metric"."""
AGAIN = 10
"""A metric without noise is evaluated twice at one in this many saves, to find out whether that is still so."""
REMEMBERED = 8


class Noise:
    """The noise of a metric, relative to its value, from all evaluations of the weights in training.

    The first save evaluates them five times. Twice is not enough: an accuracy moves in steps of one example, so two
    evaluations often agree by chance. A metric that repeats itself is evaluated twice at every tenth save from then on.
    A noisy one is evaluated twice at every save. Saves that evaluate once say nothing.
    """

    def __init__(self) -> None:
        # Of each of the last saves that evaluated more than once: squared deviations from the mean, degrees of freedom.
        self._looks: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)
        self._unseen = 0  # saves since then

    @property
    def evaluations(self) -> int:
        """How often the next save evaluates the weights in training."""
        if not self._looks:
            return FIRST
        return 2 if self.margin > 0 or self._unseen >= AGAIN - 1 else 1

    @property
    def margin(self) -> float:
        """How far noise can make a measured degradation too low. 0 for a metric that repeats itself.

        Two standard deviations of the difference of two evaluations.
        """
        freedom = sum(freedom for _, freedom in self._looks)
        return MARGIN * math.sqrt(2 * sum(squares for squares, _ in self._looks) / freedom) if freedom else 0.0

    def look_again(self) -> None:
        """Makes the next save evaluate at least twice."""
        self._unseen = AGAIN

    def learn(self, scores: Sequence[Sequence[float]]) -> bool:
        """Adds one save's scores of the weights in training, by rank. The noisiest rank counts.

        Returns False, and adds nothing, if the relative noise is undefined: a score is not finite, or the mean is 0.
        """
        squares = [_squares(own) for own in scores]
        if not all(map(math.isfinite, squares)):
            return False
        if (freedom := len(scores[0]) - 1) > 0:
            self._looks.append((max(squares), freedom))
            self._unseen = 0
        else:
            self._unseen += 1
        return True


def mean(scores: Sequence[float]) -> float:
    """Returns the mean. The mean of equal scores is that score, bit for bit."""
    return scores[0] if len(set(scores)) == 1 else math.fsum(score / len(scores) for score in scores)


def _squares(scores: Sequence[float]) -> float:
    """Returns the sum of squared deviations, relative to the mean; NaN or infinite if that is undefined."""
    if not all(map(math.isfinite, scores)):
        return math.nan
    if len(set(scores)) == 1:
        return 0.0
    center = mean(scores)
    relative = [(score - center) / abs(center) if center else math.inf for score in scores]
    return sum(deviation * deviation for deviation in relative)
