"""The noise of a metric: how much evaluations of the same weights differ, and whether it moves in steps."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

DEVIATIONS = 2.0
"""The noise margin, in standard deviations of the difference of two evaluations."""
FIRST_EVALUATIONS = 2
"""Evaluations at the first save of a metric that seems to have no noise."""
EVALUATIONS_IF_UNSURE = 5
"""Evaluations at the first save if the first two differ, or move in steps, so that they may agree by chance. Why five:
docs/decisions.md, "How often is the original evaluated …"."""
FIRST_BATCHES_AGAIN = 3
"""Batches that the first save evaluates a second time, if the metric can be evaluated on single batches."""
DISTINCT = 0.8
"""If fewer than this share of the batches' numbers are distinct, the metric moves in steps."""
SAVES_BETWEEN_CHECKS = 10
"""A metric without noise is evaluated twice at one in this many saves, in case it has become noisy."""
SAVES_REMEMBERED = 8
"""The noise is estimated from this many saves, the last that evaluated more than once."""
_MOST_PARTS, _MOST_PARTS_OF_FLOAT32 = 100_000, 1000
"""A score that is a whole number of such parts, of at most so many, looks like a count of right answers. A float32 is
near such a fraction by chance too often for more parts: a loss between 0 and 1 is for 3 % of all values."""
_FEW_DIGITS = 5
"""A score with so few decimal digits has been rounded, or is a fraction of a round number."""
_FEW_BITS = 12
"""A score with so few binary digits was computed in 16 bits, or is a count."""


@dataclass(frozen=True)
class Noise:
    """The noise of a metric, relative to its value, from all evaluations of the weights in training.

    The first save evaluates twice. If the two differ, or if the metric moves in steps as an accuracy does, it evaluates
    three more times: two evaluations that move in steps often agree by chance. From then on, a metric without noise is
    evaluated twice at every tenth save, and once at the others. A noisy one is evaluated twice at every save. A record
    keeps what was measured, so the first save after a restore evaluates twice.

    measured: for each save that evaluated more than once, the squared deviations from the mean, and the degrees of
    freedom. saves_since: saves since the last of them.
    """

    measured: tuple[tuple[float, int], ...] = ()
    saves_since: int = 0

    @property
    def is_known(self) -> bool:
        """Whether a save, also before a restore, has evaluated the weights in training more than once."""
        return bool(self.measured)

    @property
    def evaluations(self) -> int:
        """How often the next save evaluates the weights in training, at least."""
        if not self.measured:
            return FIRST_EVALUATIONS
        return 2 if self.margin > 0 or self.saves_since >= SAVES_BETWEEN_CHECKS - 1 else 1

    def evaluations_left(self, scores: Sequence[Sequence[float]]) -> int:
        """Return how often this save has to evaluate again, after ``evaluations``. scores: all so far, by rank."""
        flat = [score for own in scores for score in own]
        if self.measured or len(scores[0]) > FIRST_EVALUATIONS or not all(map(math.isfinite, flat)):
            return 0
        differ = any(len(set(own)) > 1 for own in scores)
        return EVALUATIONS_IF_UNSURE - FIRST_EVALUATIONS if differ or any(map(looks_stepped, flat)) else 0

    @property
    def margin(self) -> float:
        """Noise margin of a measured degradation: two standard deviations. 0 for a metric without noise.

        A candidate's degradation must stay below the limit by this much.
        """
        freedom = sum(freedom for _, freedom in self.measured)
        variance = sum(squares for squares, _ in self.measured) / freedom if freedom else 0.0
        return DEVIATIONS * math.sqrt(2 * variance)  # a difference of two evaluations has twice their variance

    def batches_again(self, losses: Sequence[float], seed: int) -> list[int]:
        """Return the batches to evaluate a second time at the next save; a metric without noise gives the same numbers.

        losses: the number of each batch. If many are equal, the metric moves in steps, and equal numbers say little.
        Then all batches are evaluated again, as often as ``evaluations`` says. seed: chooses the batches.
        """
        times = self.evaluations - 1 if self.measured else EVALUATIONS_IF_UNSURE - 1
        if len(set(losses)) < DISTINCT * len(losses):
            return times * list(range(len(losses)))
        count = 0 if times == 0 else FIRST_BATCHES_AGAIN if times > 1 else 1
        return random.Random(seed).sample(range(len(losses)), min(count, len(losses)))

    def looking_again(self) -> Noise:
        """Return the noise so that the next save evaluates at least twice."""
        return replace(self, saves_since=SAVES_BETWEEN_CHECKS)

    def to_json(self) -> list[list[float]]:
        """Return what was measured, as it is stored in a record."""
        return [[squares, float(freedom)] for squares, freedom in self.measured]

    @classmethod
    def from_json(cls, data: Any) -> Noise:
        """Reverse ``to_json``. Returns an unknown noise for anything else."""
        try:
            measured = tuple((float(squares), int(freedom)) for squares, freedom in data)
        except (OverflowError, TypeError, ValueError):
            return cls()
        valid = all(0 <= squares < math.inf and freedom > 0 for squares, freedom in measured)
        return cls(measured[-SAVES_REMEMBERED:]) if valid else cls()

    def after(self, scores: Sequence[Sequence[float]]) -> Noise | None:
        """Return the noise after one save. scores: of the weights in training, by rank. The noisiest rank counts.

        None if the relative noise is undefined: a score is not finite, or the mean is 0.
        """
        squares = [_squared_deviations(own) for own in scores]
        if not all(map(math.isfinite, squares)):
            return None
        if (freedom := len(scores[0]) - 1) > 0:
            return Noise((*self.measured, (max(squares), freedom))[-SAVES_REMEMBERED:])
        return replace(self, saves_since=self.saves_since + 1)


def mean_of_scores(scores: Sequence[float]) -> float:
    """Return the mean. The mean of equal scores is that score, bit for bit."""
    return scores[0] if len(set(scores)) == 1 else math.fsum(score / len(scores) for score in scores)


def looks_stepped(score: float) -> bool:
    """Return whether the metric of a finite score may move in steps, so that equal scores tell little about its noise.

    A score is a step if it has few digits, or is a fraction ``k / n``, or that in percent. Losses hardly ever look so.
    """
    single = float(np.float32(score)) == score if abs(score) < float(np.finfo(np.float32).max) else False
    rounded = f"{score:.{_FEW_DIGITS}g}"
    if float(rounded) == score or (single and float(np.float32(rounded)) == score):
        return True
    if (np.frexp(score)[0] * 2**_FEW_BITS).is_integer():
        return True
    share = abs(score) if abs(score) <= 1 else abs(score) / 100
    if share > 1:
        return False
    most, precision = (_MOST_PARTS_OF_FLOAT32, 2.0**-24) if single else (_MOST_PARTS, 2.0**-51)
    parts = np.arange(1, most + 1)
    counts = share * parts
    # In float64 also one minus such a fraction, however small: its error is that of 1.
    error = precision * (counts if single else parts)
    return bool((np.abs(counts - np.round(counts)) <= error).any())


def _squared_deviations(scores: Sequence[float]) -> float:
    """Return the sum of squared deviations, relative to the mean; NaN or infinite if that is undefined."""
    if not all(map(math.isfinite, scores)):
        return math.nan
    if len(set(scores)) == 1:
        return 0.0
    center = mean_of_scores(scores)
    relative = [(score - center) / abs(center) if center else math.inf for score in scores]
    return sum(deviation * deviation for deviation in relative)
