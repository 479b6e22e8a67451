"""Searches by a metric that may turn out to move in coarse steps, such as an accuracy or a loss in 16 bits.

A metric whose step is larger than what a checkpoint may lose cannot tell where that limit is. A candidate seems to lose
nothing or too much, whichever side of a step the weights in training are on. docs/decisions.md, "What if the metric
moves in coarse steps?".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import NamedTuple

from dynaquant.cached import cached_property
from dynaquant.engine.quantize.knobs import SCALES_PER_OCTAVE, GridConfiguration, Knobs
from dynaquant.search.decision import Found
from dynaquant.search.scores import Trial
from dynaquant.search.search_memory import History
from dynaquant.search.trials import Trials

FURTHER_APART = SCALES_PER_OCTAVE // 2
"""Two grids whose scales differ by so much differ by a factor of two in what they lose. A metric that gives the same
number for both moves in steps. (A loss in float32 hardly ever does: only if the metric does not depend on the tensors
in which they differ.)"""
SAME = 1e-7
"""Relative difference of numbers that count as the same: the mean of the same counts, added up in another order."""


def resolution_of(trials: Sequence[Trial], known: float | None) -> float | None:
    """Return the smallest change of a metric that moves in steps, relative; None if nothing says that it does.

    trials: of one save. known: what earlier saves have said. A smaller change replaces it. Infinite while the metric
    gives the same number for all weights, as an accuracy of 1 does.
    """
    judged = [(t, t.degradation) for t in trials if t.degradation is not None and math.isfinite(t.degradation)]
    whole = [each for each in judged if each[0].share == 1]
    levels = sorted({0.0, *(worse for _, worse in whole)})  # 0: the weights in training
    smallest = min((high - low for low, high in pairwise(levels) if high - low > SAME), default=math.inf)
    exact = [each for each in judged if each[0].share == 1 or abs(each[1]) <= SAME]
    in_steps = any(_coincide(*pair) for pair in combinations(exact, 2))
    if known is None:  # whatever is tried first changes an ordinary metric
        in_steps = in_steps or (bool(judged) and all(abs(worse) <= SAME for _, worse in judged))
        return smallest if in_steps else None
    return math.inf if in_steps and math.isinf(smallest) else min(known, smallest)


def _coincide(one: tuple[Trial, float], other: tuple[Trial, float]) -> bool:
    """Return whether the metric is the same for two grids that lose clearly different amounts."""
    (first, worse), (second, by) = one, other
    grids = first.configuration, second.configuration
    if not isinstance(grids[0], GridConfiguration) or not isinstance(grids[1], GridConfiguration):
        return False
    return abs(worse - by) <= SAME and abs(grids[0].scale - grids[1].scale) >= FURTHER_APART


def is_too_coarse(resolution: float | None, limit: float) -> bool:
    """Return whether a metric cannot tell where a limit is. resolution: see ``resolution_of``."""
    return resolution is not None and 0 <= limit < resolution


def one_step_more(resolution: float | None, limit: float, largest: float) -> float:
    """Return how much worse a metric that is too coarse may be: one step more than a limit, if it has shown a step."""
    step = resolution if resolution is not None and math.isfinite(resolution) else 0.0
    return max(limit, min(limit + step, largest)) if limit > 0 else limit


def note_on(resolution: float | None, limit: float, allowed: float) -> str:
    """Return what follows from a metric that is too coarse, and what to do. allowed: by ``one_step_more``."""
    assert resolution is not None
    moves = f"the metric moves in steps of {_percent(resolution)}"
    if math.isinf(resolution):
        moves = "the metric is the same for all weights tried"
    return (
        f"{moves}, and this checkpoint may lose {_percent(limit)}. So an estimate from how far the weights move says "
        f"how coarse they may be, and the metric may be worse by up to {_percent(allowed)}. A loss in float32, or more "
        "data, tells more"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"


class Estimated(NamedTuple):
    """What the estimate says beside a metric in coarse steps.

    coarsest: configuration to try. history: what the estimate's next search starts from.
    """

    coarsest: Knobs | None
    history: History


@dataclass
class SteppedSearch:
    """The search of one save, once more with other limits if the metric's steps are larger than they seemed.

    search: searches once, on ``trials``. estimate: searches by the estimate; called at most once. limit: what the
    checkpoint may lose by a metric that tells where the limit is. largest: what it may lose with one step more.
    resolution: the metric's step, as far as known (``resolution_of``). All methods are collective.
    """

    trials: Trials
    search: Callable[[], Found]
    estimate: Callable[[], Estimated]
    limit: float
    largest: float
    resolution: float | None

    @property
    def is_coarse(self) -> bool:
        """Whether the metric cannot tell where the limit is, so that it only forbids."""
        return is_too_coarse(self.resolution, self.limit)

    @cached_property
    def estimated(self) -> Estimated:
        """What the estimate says of the same weights."""
        return self.estimate()

    def run(self) -> Found:
        """Search by what is known of the metric's step."""
        if self.is_coarse:
            allowed = one_step_more(self.resolution, self.limit, self.largest)
            self.trials.go_on(allowed, self.estimated.coarsest)
        else:
            self.trials.go_on(self.limit, None)
        return self.search()

    def run_again(self, found: Found) -> Found:
        """Search again until what was tried tells nothing new of a coarse step. found: what ``run`` has found."""
        while (seen := resolution_of(self.trials.done, self.resolution)) != self.resolution:
            was_coarse, self.resolution = self.is_coarse, seen
            if was_coarse or self.is_coarse:
                found = self.run()
        return found
