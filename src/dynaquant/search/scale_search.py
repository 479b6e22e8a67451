"""Searches for the scale exponent of the grid quantizer (method 2.1) with few evaluations.

A scale exponent counts sixteenths of an octave of the scale. Degradation grows roughly as the square of the scale, so a
few scores predict where the limit is reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from dynaquant.quantize.grid import SCALES_PER_OCTAVE

Score = Callable[[Sequence[int], float], Sequence[float]]
"""Returns the degradations for the exponents of one round. NaN if one cannot be judged; it is never good enough. Those
above the limit, or below the second argument, may be estimates."""
Finish = Callable[[int], float]
"""Returns the degradation for an exponent that was scored, and no estimate."""

TARGET = 0.8
"""Share of the limit that a predicted exponent aims at. A higher aim would fail more often, and cost evaluations."""
ENOUGH = 0.67
"""A search ends when its result uses this share of the limit, unless it started from an exponent that was good."""
ENOUGH_FROM_GOOD = 0.5
"""The same for a search that started from an exponent that was good."""
LEAST_GAIN = SCALES_PER_OCTAVE // 2
"""A start that is good enough is left only for a predicted exponent this much larger: changed grid steps cost bits."""
LEAST_CHANGE = SCALES_PER_OCTAVE // 4
"""After a start that was good has failed, the search ends if it could gain less than this."""
ESTIMATED_BELOW = 0.5
"""An exponent whose degradation is clearly below this share of the limit need not be evaluated on all batches: a search
goes on to larger ones."""
RESOLUTION = SCALES_PER_OCTAVE // 8
"""A search ends if the best exponent and a failed one are no further apart."""
STRIDE_BEYOND = SCALES_PER_OCTAVE // 2
"""Distance of the exponents that are scored beyond a failed one. Ranges of good exponents are about as long, as
measured on the ResNet of the benchmarks."""
MOST_BEYOND = 8
"""The largest number of these exponents: four octaves."""
LONGEST_MOVE = 2 * SCALES_PER_OCTAVE
MOST_ROUNDS = 12
SECOND_ORDER_POWER = 2.0
"""In the second-order model of the loss, degradation grows with this power of the scale."""
STEEPEST_POWER = 8.0
"""Upper bound of a power estimated from two scores. A steeper rise is a cliff, which says nothing about
smaller exponents."""


@dataclass(frozen=True)
class _Scored:
    """The exponents that were scored, with their degradations. All are from ``lowest`` to ``highest``."""

    score: Score
    lowest: int
    highest: int
    limit: float
    per_round: int
    degradations: dict[int, float] = field(default_factory=dict)

    def add(self, exponents: Iterable[int]) -> None:
        """Score the first new ones of these exponents, as many as fit into one round."""
        inside = (k for k in dict.fromkeys(exponents) if self.lowest <= k <= self.highest)
        new = list(islice((k for k in inside if k not in self.degradations), self.per_round))
        if new:
            low = ESTIMATED_BELOW * self.limit if max(new) < self.highest else -math.inf
            self.degradations.update(zip(new, self.score(new, low), strict=True))

    @property
    def good(self) -> list[int]:
        """The scored exponents that are good enough."""
        return [k for k, degradation in self.degradations.items() if degradation <= self.limit]

    @property
    def failed(self) -> list[int]:
        """The scored exponents that are not good enough."""
        return [k for k, degradation in self.degradations.items() if not degradation <= self.limit]

    def near(self, exponent: int) -> int | None:
        """Return the largest scored exponent within half a stride of this one."""
        return max((k for k in self.degradations if abs(k - exponent) < STRIDE_BEYOND // 2), default=None)


def scale_search(
    start: int,
    lowest: int,
    highest: int,
    score: Score,
    limit: float,
    start_was_good: bool,
    per_round: int = 1,
    finish: Finish | None = None,
) -> int | None:
    """Return the largest scored exponent whose degradation is at most ``limit``; None if there is none.

    start: is scored first. start_was_good: whether it was good enough at the last checkpoint. Then a
    predicted exponent must be larger by ``LEAST_GAIN``. per_round: how many exponents are scored at once. finish: makes
    sure that the result is no estimate; None if there are none.

    The search first finds the largest exponent below all failed ones. But degradation need not grow with the scale: for
    the ResNet of the benchmarks it goes up and down by many times the limit. So if an exponent has failed, larger ones
    are scored too, half an octave apart, until two in a row fail and the second is no better than the first. If
    ``start_was_good``, this happens only if ``start`` has failed, and is larger than the exponent found by half an
    octave or more.
    """
    scored = _Scored(score, lowest, highest, limit, per_round)
    at = min(max(start, lowest), highest)
    while True:
        found = _below_failures(scored, at, start_was_good)
        # A smooth degradation has failures near the result, too. Looking beyond these would gain nothing.
        failed = [k for k in scored.failed if k <= start or not start_was_good]
        if found is not None and max(failed, default=lowest) - found >= (STRIDE_BEYOND if start_was_good else 1):
            _look_beyond(scored, found)
        best = max(scored.good, default=None)
        if best is None or finish is None:
            return best
        scored.degradations[best] = finish(best)
        if scored.degradations[best] <= limit:
            return best
        at = best  # its estimate was too low


def _below_failures(scored: _Scored, start: int, start_was_good: bool) -> int | None:
    """Return the largest exponent found that is good enough and smaller than all failed ones."""
    at = start
    good: int | None = None
    lowest, highest, limit = scored.lowest, scored.highest, scored.limit
    for rounds in range(MOST_ROUNDS):
        scored.add([at, *(at + sign * i * RESOLUTION for i in range(1, scored.per_round) for sign in (-1, 1))])
        bad = min(scored.failed, default=None)
        good = max((k for k in scored.good if bad is None or k < bad), default=None)
        if good is None:
            assert bad is not None
            if bad <= lowest:
                return None
            # Where degradation is constant, moves must grow longer to reach its end.
            at = max(bad - max(-_predicted_move(scored, bad, None), RESOLUTION << rounds), lowest)
            continue
        move = min(_predicted_move(scored, good, bad), highest - good)
        if start_was_good:
            move = min(move, STRIDE_BEYOND)
        if bad is not None and scored.degradations[good] < (ENOUGH_FROM_GOOD if start_was_good else ENOUGH) * limit:
            move = max(move, (bad - good) // 2)  # there is a cliff in between: scores beyond it mislead the prediction
        least = RESOLUTION if not start_was_good else LEAST_GAIN if good == start else LEAST_CHANGE
        if move < least or (bad is not None and bad - good <= RESOLUTION):
            return good
        at = good + move if bad is not None else min(good + (move << rounds), highest)
    return good


def _look_beyond(scored: _Scored, found: int) -> None:
    """Score exponents larger than ``found``, half an octave apart, until two in a row fail without improvement."""
    ahead = range(found + STRIDE_BEYOND, scored.highest + 1, STRIDE_BEYOND)[:MOST_BEYOND]
    last_failed: float | None = None  # degradation of the exponent before, if it was not good enough
    for i, at in enumerate(ahead):
        if scored.near(at) is None:
            scored.add(k for k in ahead[i:] if scored.near(k) is None)
        near = scored.near(at)
        assert near is not None
        degradation = scored.degradations[near]
        if degradation <= scored.limit:
            last_failed = None
        elif last_failed is None or degradation < last_failed:
            last_failed = degradation
        else:
            return


def _predicted_move(scored: _Scored, at: int, bad: int | None) -> int:
    """Return the predicted distance from a scored exponent to the target, at most half way to ``bad`` if beyond it.

    Assumes that degradation is a power of the scale: estimated from ``at`` and ``bad``, or the square if there is no
    ``bad``.
    """
    degradation, target = scored.degradations[at], TARGET * scored.limit
    if not (math.isfinite(degradation) and degradation > 0 and target > 0):
        move = LONGEST_MOVE if degradation <= scored.limit else -LONGEST_MOVE
    else:
        power = SECOND_ORDER_POWER / SCALES_PER_OCTAVE
        if bad is not None and math.isfinite(scored.degradations[bad]):
            estimated = math.log2(scored.degradations[bad] / degradation) / (bad - at)
            power = min(estimated, STEEPEST_POWER / SCALES_PER_OCTAVE)
        move = math.floor(math.log2(target / degradation) / power)
        move = min(max(move, -LONGEST_MOVE), LONGEST_MOVE)
    return move if bad is None or at + move < bad else (bad - at) // 2
