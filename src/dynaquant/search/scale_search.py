"""Search for the scale of the grid quantizer (method 2.1): the degradation grows like its square, so few are scored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

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
JUMP = SCALES_PER_OCTAVE // 2
"""Steps between the scales that are scored beyond one that failed: what is good enough comes in stretches about as
long, measured on the ResNet of the benchmarks."""
MOST_JUMPS = 8
"""Beyond what was found: four octaves."""
LARGEST_STEP = 2 * SCALES_PER_OCTAVE
ROUNDS = 12
POWER = 2.0
"""Of the scale, by which degradation grows in the second-order model of the loss."""
STEEPEST = 8.0
"""The power between two scores counts as at most so much: beyond it lies a cliff, which says nothing of its foot."""


@dataclass(frozen=True)
class _Scored:
    """The degradations of scales that were scored, all of them from ``lowest`` to ``highest``."""

    score: Score
    lowest: int
    highest: int
    limit: float
    width: int
    degradations: dict[int, float] = field(default_factory=dict)

    def add(self, scales: Iterable[int]) -> None:
        """Scores the first that are new, as many as a round has room for."""
        inside = (k for k in dict.fromkeys(scales) if self.lowest <= k <= self.highest)
        new = list(islice((k for k in inside if k not in self.degradations), self.width))
        self.degradations.update(zip(new, self.score(new), strict=True))

    @property
    def good(self) -> list[int]:
        """Those that are good enough."""
        return [k for k, degradation in self.degradations.items() if degradation <= self.limit]

    @property
    def failed(self) -> list[int]:
        """Those that are not."""
        return [k for k, degradation in self.degradations.items() if not degradation <= self.limit]

    def near(self, scale: int) -> int | None:
        """The largest that is so near that it stands for a scale."""
        return max((k for k in self.degradations if abs(k - scale) < JUMP // 2), default=None)


def scale_search(
    start: int, lowest: int, highest: int, score: Score, limit: float, settled: bool, width: int = 1
) -> int | None:
    """The largest scale that was scored and whose degradation is at most ``limit``; None when there was none.

    First the largest below all that fail is looked for. But degradation need not grow with the scale: that of the
    ResNet of the benchmarks goes up and down by many times the limit. So where a scale has failed, larger ones than
    what was found are scored as well, half an octave apart, until two in a row fail and the second is no better than
    the first. A settled search does so only where one failed that lies that far beyond what was found: a failure
    nearer by is what a smooth degradation has, too.

    start: what is scored first. settled: whether it was good enough for the checkpoint before; then a larger one has to
    promise more. width: how many are scored in a round.
    """
    scored = _Scored(score, lowest, highest, limit, width)
    found = _below_failures(scored, min(max(start, lowest), highest), settled)
    if found is not None and scored.failed and max(scored.failed) - found >= (JUMP if settled else 1):
        _look_beyond(scored, found)
    return max(scored.good, default=None)


def _below_failures(scored: _Scored, at: int, settled: bool) -> int | None:
    """The largest scale found that is good enough, and below all that are not. at: what is scored first."""
    good: int | None = None
    lowest, highest, limit = scored.lowest, scored.highest, scored.limit
    for before in range(ROUNDS):
        scored.add([at, *(at + sign * i * CLOSE for i in range(1, scored.width) for sign in (-1, 1))])
        bad = min(scored.failed, default=None)
        good = max((k for k in scored.good if bad is None or k < bad), default=None)
        if good is None:
            assert bad is not None
            if bad <= lowest:
                return None
            # On a plateau only larger and larger steps get anywhere.
            at = max(bad - max(-_promised(scored, bad, None), CLOSE << before), lowest)
            continue
        promised = min(_promised(scored, good, bad), highest - good)
        if bad is not None and not settled and scored.degradations[good] < ENOUGH * limit:
            promised = max(promised, (bad - good) // 2)  # a cliff lies between: the scores beyond it mislead
        if promised < (WORTH_IT if settled else CLOSE) or (bad is not None and bad - good <= CLOSE):
            return good
        at = good + promised if bad is not None else min(good + (promised << before), highest)
    return good


def _look_beyond(scored: _Scored, found: int) -> None:
    """Scores scales half an octave apart, from what was found on, until two in a row fail and it gets no better."""
    ahead = range(found + JUMP, scored.highest + 1, JUMP)[:MOST_JUMPS]
    failed: float | None = None  # the degradation of the one before, where that was not good enough
    for i, at in enumerate(ahead):
        if scored.near(at) is None:
            scored.add(k for k in ahead[i:] if scored.near(k) is None)
        near = scored.near(at)
        assert near is not None
        degradation = scored.degradations[near]
        if degradation <= scored.limit:
            failed = None
        elif failed is None or degradation < failed:
            failed = degradation
        else:
            return


def _promised(scored: _Scored, at: int, bad: int | None) -> int:
    """How many steps from a scale that was scored the aim is thought to lie, and before ``bad``.

    Degradation is taken for a power of the scale: as between the two, where both are known, else the second.
    """
    found, aim = scored.degradations[at], AIM * scored.limit
    if not (math.isfinite(found) and found > 0 and aim > 0):
        steps = LARGEST_STEP if found <= scored.limit else -LARGEST_STEP
    else:
        power = POWER / SCALES_PER_OCTAVE
        if bad is not None and math.isfinite(scored.degradations[bad]):
            power = min(math.log2(scored.degradations[bad] / found) / (bad - at), STEEPEST / SCALES_PER_OCTAVE)
        steps = math.floor(math.log2(aim / found) / power)
        steps = min(max(steps, -LARGEST_STEP), LARGEST_STEP)
    return steps if bad is None or at + steps < bad else (bad - at) // 2
