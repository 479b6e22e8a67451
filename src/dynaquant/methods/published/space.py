"""The published configurations (method 1.4): points of a cube with four ordered axes, each with a pruning metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynaquant.engine.quantize.knobs import Configuration, Metric

BINS = (4, 6, 8, 12, 16, 32)
EMBEDDING_BINS = (16, 32)
PRUNED = (0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
PROTECTED = (0.0005, 0.005, 0.01)
MORE_BINS = (64, 128, 254)
"""Tried if no published configuration is good enough."""
ALL_BINS = BINS + MORE_BINS
ALL_EMBEDDING_BINS = EMBEDDING_BINS + MORE_BINS

Point = tuple[int, ...]
"""An index into each axis: bins, embedding bins, pruned, protected. Along each, quality rises, and so does size, with
rare exceptions."""


@dataclass(frozen=True)
class Candidate:
    """A point of the cube, and the metric that decides which weights are pruned."""

    metric: Metric
    point: Point


Size = Callable[[Candidate], float]
"""Returns the predicted bytes of a candidate. Searches compare candidates by it, before anything is encoded."""
Score = Callable[[Sequence[Candidate]], Sequence[float]]
"""Returns the degradations of the candidates of one round. NaN if one cannot be judged; it is never good enough."""


@dataclass(frozen=True)
class Space:
    """The axes for one model.

    embeddings: whether it has embedding layers. If not, their axis has one value. metrics: the available pruning
    metrics; only magnitude if no gradients were recorded.
    """

    embeddings: bool
    metrics: tuple[Metric, ...]

    @property
    def shape(self) -> Point:
        """Lengths of the axes of the published space."""
        return len(BINS), len(EMBEDDING_BINS) if self.embeddings else 1, len(PRUNED), len(PROTECTED)

    @property
    def wide_shape(self) -> Point:
        """Lengths of the axes with more bins."""
        bins, embedding, *rest = self.shape
        return bins + len(MORE_BINS), embedding + len(MORE_BINS) * self.embeddings, *rest

    @property
    def more_bins(self) -> list[Candidate]:
        """Candidates with more bins than the most conservative published one, most aggressive first."""
        bins, embedding, *rest = self.shape
        top = [n - 1 for n in rest]
        return [
            Candidate("magnitude", (bins + i, (embedding + i) if self.embeddings else 0, *top))
            for i in range(len(MORE_BINS))
        ]

    def finer(self, candidate: Candidate, more_bins: int, less_pruned: int) -> Candidate:
        """Return a candidate further along the axes of bins and of pruning by so many indices, or at their ends.

        Embeddings get at least as many bins as the other weights.
        """
        bins, embedding, pruned, protected = candidate.point
        bins = min(bins + more_bins, len(ALL_BINS) - 1)
        if self.embeddings and more_bins:
            embedding = max(embedding, _first(ALL_EMBEDDING_BINS, lambda count: count >= ALL_BINS[bins]))
        return Candidate(candidate.metric, (bins, embedding, min(pruned + less_pruned, len(PRUNED) - 1), protected))

    def finer_shape(self, candidate: Candidate) -> Point:
        """Return how many values of ``more_bins`` and ``less_pruned``, from 0 on, give different candidates."""
        bins, embedding, pruned, _ = candidate.point
        only_embeddings = self.embeddings and bins == len(ALL_BINS) - 1 and embedding < len(ALL_EMBEDDING_BINS) - 1
        return len(ALL_BINS) - bins + only_embeddings, len(PRUNED) - pruned

    def configuration(self, candidate: Candidate) -> Configuration:
        """Return the configuration of a candidate."""
        bins, embedding, pruned, protected = candidate.point
        # If nothing is pruned, the metric makes no difference. One configuration, so that it is scored once.
        metric: Metric = candidate.metric if PRUNED[pruned] else "magnitude"
        return Configuration(
            bins=ALL_BINS[bins],
            embedding_bins=ALL_EMBEDDING_BINS[embedding] if self.embeddings else EMBEDDING_BINS[-1],
            pruned=PRUNED[pruned],
            pruning_metric=metric,
            protected=PROTECTED[protected],
        )

    def candidate(self, configuration: Configuration) -> Candidate:
        """Return the candidate of a configuration; the more conservative one if it lies between two points."""
        point = (
            _first(ALL_BINS, lambda bins: bins >= configuration.bins),
            _first(ALL_EMBEDDING_BINS, lambda bins: bins >= configuration.embedding_bins) if self.embeddings else 0,
            _first(PRUNED, lambda pruned: pruned <= configuration.pruned),
            _first(PROTECTED, lambda protected: protected >= configuration.protected),
        )
        metric = configuration.pruning_metric
        return Candidate(metric if metric in self.metrics else self.metrics[0], point)


def _first(axis: Sequence[float], wanted: Callable[[float], bool]) -> int:
    """Return the index of the first wanted value, or of the last value if there is none."""
    return next((i for i, value in enumerate(axis) if wanted(value)), len(axis) - 1)


def at_most(a: Point, b: Point) -> bool:
    """Return whether ``a`` is more conservative than ``b`` on no axis."""
    return all(x <= y for x, y in zip(a, b, strict=True))
