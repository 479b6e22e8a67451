"""How much a metric differs between two evaluations of the same weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

MARGIN = 2.0
"""How many standard deviations of the noise a degradation must stay below what is allowed."""
FIRST = 5
"""Evaluations that tell whether a metric repeats itself. Measured, see docs/architecture.md, "A noisy metric"."""
AGAIN = 10
"""A metric that has repeated itself is evaluated twice at one in so many saves, to see whether it still does."""
REMEMBERED = 8


class Noise:
    """The noise of a metric, relative to its value, from all evaluations of the weights in training.

    The first save evaluates them five times. Two are not enough: an accuracy moves in steps of one example, so that two
    evaluations often agree by chance. A metric that repeats itself is evaluated twice at every tenth save from then on.
    A noisy one is evaluated twice at every save. Saves that evaluate once say nothing.
    """

    def __init__(self) -> None:
        # Of the last saves that evaluated more than once: squared deviations from the mean, and degrees of freedom.
        self._looks: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)
        self._unseen = 0  # saves since the last of these

    @property
    def evaluations(self) -> int:
        """How often the next save evaluates the weights in training."""
        if not self._looks:
            return FIRST
        return 2 if self.margin > 0 or self._unseen >= AGAIN - 1 else 1

    @property
    def margin(self) -> float:
        """How much a measured degradation may be too low by. 0 for a metric that repeats itself.

        Two standard deviations of the difference of two evaluations.
        """
        freedom = sum(freedom for _, freedom in self._looks)
        return MARGIN * math.sqrt(2 * sum(squares for squares, _ in self._looks) / freedom) if freedom else 0.0

    def look_again(self) -> None:
        """The next save evaluates at least twice."""
        self._unseen = AGAIN

    def learn(self, scores: Sequence[Sequence[float]]) -> bool:
        """Takes note of one save's scores of the weights in training, by rank. The noisiest rank counts.

        False where relative noise cannot be told: a score is not finite, or the mean is 0. Nothing is noted then.
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
    """The mean; that of equal scores is that score, bit for bit."""
    return scores[0] if len(set(scores)) == 1 else math.fsum(score / len(scores) for score in scores)


def _squares(scores: Sequence[float]) -> float:
    """The sum of the squared deviations from the mean, relative to it; NaN or infinite where that cannot be told."""
    if not all(map(math.isfinite, scores)):
        return math.nan
    if len(set(scores)) == 1:
        return 0.0
    center = mean(scores)
    relative = [(score - center) / abs(center) if center else math.inf for score in scores]
    return sum(deviation * deviation for deviation in relative)
