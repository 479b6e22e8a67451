"""What a search needs of the weights that a method has prepared."""

from __future__ import annotations

from typing import Protocol

from dynaquant.engine.quantize.knobs import Knobs
from dynaquant.search.decision import Found, Search
from dynaquant.search.judge import DistortionJudge
from dynaquant.search.search_memory import SearchMemory
from dynaquant.search.trials import Quantizer, Trials


class PreparedWeights(Protocol):
    """The weights of one checkpoint, and how their method searches for a configuration."""

    @property
    def quantizer(self) -> Quantizer:
        """The weights, ready for every configuration."""

    @property
    def estimate(self) -> DistortionJudge:
        """The judge that stands in for a metric."""

    @property
    def last_resort(self) -> Search:
        """How the best of configurations that all lose too much counts as found."""

    def find(self, trials: Trials, memory: SearchMemory) -> Found:
        """Return the most compact configuration that is good enough. Collective."""

    def last(self, memory: SearchMemory, limit: float) -> tuple[Search, Knobs]:
        """Return the last configuration, and how it counts as found if no weight has changed since."""

    def after(self, memory: SearchMemory, limit: float, found: Knobs, trials: Trials) -> SearchMemory:
        """Return what the next search starts from. found: the configuration that is good enough for the limit."""
