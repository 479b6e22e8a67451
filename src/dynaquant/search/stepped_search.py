"""A search by a metric that may turn out to move in coarse steps, such as an accuracy (``resolution``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from dynaquant.cached import cached_property
from dynaquant.engine.quantize.knobs import Knobs
from dynaquant.search.decision import Found
from dynaquant.search.history import History
from dynaquant.search.resolution import is_too_coarse, one_step_more, resolution_of
from dynaquant.search.trials import Trials


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
