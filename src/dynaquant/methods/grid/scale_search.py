"""Searches for the scale exponent of the grid quantizer (method 2.1) with few evaluations.

A scale exponent counts sixteenths of an octave of the scale. Degradation grows roughly as the square of the scale, so a
few scores predict where the limit is reached.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from dynaquant.engine.quantize.knobs import SCALES_PER_OCTAVE

Score = Callable[[Sequence[int], float], Sequence[float]]
"""Returns the degradations for the exponents of one round. NaN if one cannot be judged; it is never good enough. Those
above the limit, or below the second argument, may be estimates."""

TARGET = 0.7
"""Share of the limit that a predicted exponent aims at. A higher aim would fail more often, and cost evaluations."""
LEAST_GAIN = 3 * SCALES_PER_OCTAVE // 4
"""After an earlier search, an exponent that is good enough is left only for one that is this much larger: changed grid
steps cost bits, and an exponent that seems better on these batches is often worse on others."""
FIRST_GAIN = SCALES_PER_OCTAVE // 2
"""Without an earlier search, an exponent that is good enough is left only for one that is this much larger. The next
search starts from the result, and may leave it."""
FIRST_ROUNDS = 4
"""After so many rounds without an earlier search, one that is good enough is kept if one failed within two octaves."""
LARGEST_LOSS, LARGEST_GAIN = SCALES_PER_OCTAVE // 2, SCALES_PER_OCTAVE
"""The exponent of the last search is scored first, unless the expected one is smaller or larger by more than this."""
MOST_CHANGED = SCALES_PER_OCTAVE // 2
"""Earlier checkpoints change the exponent that the newest one expects by this much at most: early in a training it
rises fast."""
CLIFF = 8.0
"""A degradation beyond this multiple of the limit is a cliff. How high it is says nothing about smaller exponents."""
LARGEST_LOG2 = 1000.0
"""Of a factor that is finite as a float64."""
ESTIMATED_BELOW = 0.5
"""An exponent whose degradation is clearly below this share of the limit need not be evaluated on all batches: a search
goes on to larger ones."""
ENOUGH = 0.67
"""Between a result and a failure, the middle is scored unless the result uses this share of the limit."""
RESOLUTION = SCALES_PER_OCTAVE // 8
"""A later search ends if the best exponent and a failed one are no further apart."""
LONGEST_MOVE = 2 * SCALES_PER_OCTAVE
"""A prediction is trusted no further than this."""
MOST_ROUNDS = 12
SECOND_ORDER_POWER = 2.0
"""In the second-order model of the loss, degradation grows with this power of the scale."""
_POWER = SECOND_ORDER_POWER / SCALES_PER_OCTAVE
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


def degradation_at_scale_1(degradations: Mapping[int, float], limit: float) -> float | None:
    """Return the degradation at the scale 1, as the second-order model says: the median over exponents.

    degradations: by exponent. An improvement is chance, and as large as a degradation that chance makes, so it counts
    as one. One beyond CLIFF times the limit counts as that multiple. None if none is finite, or nothing is allowed.
    """
    if limit <= 0:
        return None
    known = [
        min(abs(value), CLIFF * limit) * 2.0 ** min(-_POWER * exponent, LARGEST_LOG2)
        for exponent, value in degradations.items()
        if math.isfinite(value)
    ]
    median = statistics.median(known) if known else math.nan
    return median if math.isfinite(median) else None


def expected_exponent(at_scale_1: Sequence[float], limit: float) -> int | None:
    """Return the exponent at which a degradation near the limit is expected.

    at_scale_1: ``degradation_at_scale_1`` of several checkpoints, the newest last. Their mean counts, but the older
    ones change what the newest says by MOST_CHANGED at most. None if the metric does not tell: it was the same with
    quantized weights, at the newest checkpoint and on average, or nothing is allowed.
    """
    if not at_scale_1 or limit <= 0:
        return None
    mean = sum(each / len(at_scale_1) for each in at_scale_1)  # fmean overflows at sums of large ones
    together, newest = _exponent_for(mean, limit), _exponent_for(at_scale_1[-1], limit)
    expected = min(max(together, newest - MOST_CHANGED), newest + MOST_CHANGED) if newest < math.inf else together
    return math.floor(expected) if expected < math.inf else None


def _exponent_for(at_scale_1: float, limit: float) -> float:
    # The quotient could overflow.
    return (math.log2(TARGET) + math.log2(limit) - math.log2(at_scale_1)) / _POWER if at_scale_1 > 0 else math.inf


def first_exponent(last: int, at_scale_1: Sequence[float], limit: float) -> int:
    """Return the exponent to score first. last: found by the last search. at_scale_1: see ``expected_exponent``."""
    expected = expected_exponent(at_scale_1, limit)
    if expected is None or last - LARGEST_LOSS <= expected <= last + LARGEST_GAIN:
        return last
    return min(max(expected, last - LONGEST_MOVE), last + LONGEST_MOVE)


def scale_search(
    start: int,
    lowest: int,
    highest: int,
    score: Score,
    limit: float,
    earlier: Sequence[float] | None = None,
    per_round: int = 1,
) -> int | None:
    """Return an exponent near the largest one whose degradation is at most ``limit``; None if there is none.

    start: is scored first. earlier: ``degradation_at_scale_1`` of the last checkpoints; None if ``start`` was not found
    by an earlier search. With them, ``start`` is left only for exponents that these checkpoints together expect. A
    degradation measured on few data goes up and down with the scale, by luck: a search that takes the largest exponent
    that is good enough here and now finds luck, which the restored training does not have. So does one that takes the
    best of several. per_round: how many exponents are scored at once, without ``earlier``; with it, one.

    The result is smaller than all exponents that have failed. It is scored once more, so that it is no estimate.
    """
    scored = _Scored(score, lowest, highest, limit, per_round if earlier is None else 1)
    at = min(max(start, lowest), highest)
    while (best := _below_failures(scored, at, earlier)) is not None:
        [scored.degradations[best]] = score([best], -math.inf)
        if scored.degradations[best] <= limit:
            return best
        at = best  # its estimate was too low
    return None


def _below_failures(scored: _Scored, start: int, earlier: Sequence[float] | None) -> int | None:
    """Return the largest exponent found that is good enough and smaller than all failed ones."""
    at = start
    good: int | None = None
    for rounds in range(MOST_ROUNDS):
        scored.add([at, *(at + sign * i * RESOLUTION for i in range(1, scored.per_round) for sign in (-1, 1))])
        bad = min(scored.failed, default=None)
        good = max((k for k in scored.good if bad is None or k < bad), default=None)
        if good is None:
            assert bad is not None
            if bad <= scored.lowest:
                return None
            at = _smaller(scored, bad, rounds, earlier)
            continue
        larger = _larger(scored, good, bad, rounds, earlier)
        least, nearest = LEAST_GAIN, RESOLUTION
        if earlier is None:
            least, nearest = FIRST_GAIN, FIRST_GAIN if rounds + 1 < FIRST_ROUNDS else LONGEST_MOVE
        if larger - good < least or (bad is not None and bad - good <= nearest):
            return good
        at = larger
    return good


def _smaller(scored: _Scored, bad: int, rounds: int, earlier: Sequence[float] | None) -> int:
    """Return the exponent to score next if all have failed. bad: the smallest of them."""
    at = bad + _predicted_move(scored, bad, None)
    if earlier is not None and (expected := _expected(scored, earlier)) is not None:
        at = (at + expected) // 2
    # Where degradation is constant, moves must grow longer to reach its end.
    return max(min(at, bad - (RESOLUTION << rounds)), scored.lowest)


def _larger(scored: _Scored, good: int, bad: int | None, rounds: int, earlier: Sequence[float] | None) -> int:
    """Return the exponent to score next. good, bad: the best one, and the smallest that has failed."""
    if earlier is not None:
        expected = _expected(scored, earlier)
        largest = min(SCALES_PER_OCTAVE << rounds, scored.highest - good)
        at = good + (largest if expected is None else min(expected - good, largest))
        return at if bad is None or at < bad else (good + bad) // 2
    move = min(_predicted_move(scored, good, bad), scored.highest - good)
    if bad is None:
        return min(good + (move << rounds), scored.highest)
    if scored.degradations[good] < ENOUGH * scored.limit:
        move = max(move, (bad - good) // 2)  # there is a cliff in between: scores beyond it mislead the prediction
    return good + move


def _expected(scored: _Scored, earlier: Sequence[float]) -> int | None:
    now = degradation_at_scale_1(scored.degradations, scored.limit)
    return expected_exponent([*earlier, *([] if now is None else [now])], scored.limit)


def _predicted_move(scored: _Scored, at: int, bad: int | None) -> int:
    """Return the predicted distance from a scored exponent to the target, at most half way to ``bad`` if beyond it.

    Assumes that degradation is a power of the scale: estimated from ``at`` and ``bad``, or the square if there is no
    ``bad``.
    """
    degradation, target = scored.degradations[at], TARGET * scored.limit
    if not (math.isfinite(degradation) and degradation > 0 and target > 0):
        move = LONGEST_MOVE if degradation <= scored.limit else -LONGEST_MOVE
    else:
        power = _POWER
        if bad is not None and math.isfinite(scored.degradations[bad]):
            estimated = math.log2(scored.degradations[bad] / degradation) / (bad - at)
            power = min(estimated, STEEPEST_POWER / SCALES_PER_OCTAVE)
        move = math.floor(math.log2(target / degradation) / power)
        move = min(max(move, -LONGEST_MOVE), LONGEST_MOVE)
    return move if bad is None or at + move < bad else (bad - at) // 2
