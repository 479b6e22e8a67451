"""Synthetic degradations and sizes of configurations, to test the searches without a model."""

import math
import random
from collections.abc import Iterable, Sequence
from itertools import product

from dynaquant.engine.quantize.knobs import Metric
from dynaquant.methods.published.space import Candidate, Point

SHAPE: Point = (6, 2, 6, 3)
METRICS: tuple[Metric, ...] = ("magnitude", "sensitivity")


class Landscape:
    """Random degradations and sizes. Along every axis, degradation falls and size rises. One metric is better.

    noise: relative standard deviation of each degradation. ``rounds`` keeps what was scored.
    """

    def __init__(self, seed: int, shape: Point = SHAPE, noise: float = 0.0) -> None:
        self._draw = random.Random(seed)
        self.shape, self._noise = shape, noise
        self._losses = [self._axis(n, skew=2)[::-1] for n in shape]
        self._costs = [self._axis(n) for n in shape]
        self._factors = {"magnitude": 1.0, "sensitivity": self._draw.uniform(0.7, 1.4)}
        self.degradations: dict[Candidate, float] = {}
        self._refresh()
        # Some landscapes have hardly any candidate that is good enough, others have many.
        self.limit = self.quantile(self._draw.uniform(0.02, 0.98))
        self.rounds: list[list[Candidate]] = []

    def _axis(self, length: int, skew: int = 1) -> list[float]:
        """Return rising values along an axis with a random weight."""
        weight = self._draw.random()
        return sorted(weight * self._draw.random() ** skew for _ in range(length))

    def _refresh(self) -> None:
        for metric in METRICS:
            for point in product(*map(range, self.shape)):
                loss = sum(losses[i] for losses, i in zip(self._losses, point, strict=True))
                error = 1 + self._noise * self._draw.gauss(0, 1)
                self.degradations[Candidate(metric, point)] = self._factors[metric] * loss * error

    def drift(self) -> None:
        """Change degradations as training does: every axis matters a little more or less, on average more."""
        self._losses = [[loss * math.exp(self._draw.gauss(0.02, 0.04)) for loss in axis] for axis in self._losses]
        self._losses = [sorted(axis, reverse=True) for axis in self._losses]
        self._factors["sensitivity"] *= math.exp(self._draw.gauss(0, 0.05))
        self._refresh()

    def quantile(self, fraction: float) -> float:
        """Return the degradation that this fraction of the candidates stays below."""
        return sorted(self.degradations.values())[int(len(self.degradations) * fraction)]

    def size(self, candidate: Candidate) -> float:
        return sum(costs[i] for costs, i in zip(self._costs, candidate.point, strict=True))

    def score(self, candidates: Sequence[Candidate]) -> list[float]:
        self.rounds.append(list(candidates))
        return [self.degradations[candidate] for candidate in candidates]

    @property
    def scored(self) -> list[Candidate]:
        return [candidate for round_ in self.rounds for candidate in round_]

    def is_good(self, candidate: Candidate) -> bool:
        return self.degradations[candidate] <= self.limit

    def smallest_good(self, among: Iterable[Candidate] | None = None) -> float | None:
        """Return the smallest size of all candidates that are good enough, by brute force."""
        candidates = self.degradations if among is None else among
        return min((self.size(candidate) for candidate in candidates if self.is_good(candidate)), default=None)
