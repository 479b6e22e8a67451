"""The published configurations (method 1.4), and the two searches of the paper.

Configurations are points of a cube with four ordered axes, each with a pruning metric. A search goes through the whole
cube, or through the neighbourhood of the last result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

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


def guided_exhaustive(
    shape: Point, metrics: Sequence[Metric], size: Size, score: Score, limit: float, per_round: int = 1
) -> Candidate | None:
    """Return the smallest candidate of the cube whose degradation is at most ``limit``; None if there is none.

    Degradation falls along every axis. So a candidate that fails rules out all that are more conservative on no axis,
    and one that is good enough rules out all that are not smaller. The search begins on the main diagonal, with the
    most aggressive point that is good enough. Then it always scores the candidate that rules out most of the others,
    whether it fails or not. (The paper recurses into the diagonals of the remaining sub-cubes, which scores about twice
    as many.) The result was always scored and is good enough. So if degradation does not quite fall along every axis,
    the result may be larger, but not worse.

    shape: lengths of the axes. metrics: pruning metrics, searched one after the other; with the later ones, only
    candidates smaller than the best so far. per_round: how many candidates are scored at once.
    """
    best: Candidate | None = None
    best_size = np.inf
    points = np.array(list(product(*map(range, shape))))
    for metric in metrics:
        candidates = [Candidate(metric, tuple(map(int, point))) for point in points]
        sizes = np.array([size(candidate) for candidate in candidates])
        is_open = sizes < best_size
        diagonal = _diagonal(points, shape)
        while is_open.any():
            on_diagonal = diagonal & is_open
            among = on_diagonal if on_diagonal.any() else is_open
            chosen = _most_decisive(points, sizes, among, is_open, per_round)
            scores = score([candidates[i] for i in chosen])
            for i, degradation in zip(chosen, scores, strict=True):
                is_open[i] = False
                if not degradation <= limit:  # NaN is not good enough
                    is_open &= ~_at_most(points, points[i])
                elif sizes[i] < best_size:
                    best, best_size = candidates[i], sizes[i]
            is_open &= sizes < best_size
    return best


def _diagonal(points: NDArray[np.int64], shape: Point) -> NDArray[np.bool_]:
    """Return which points lie on the line from corner to corner. It has as many points as the longest axis."""
    last = max(max(shape) - 1, 1)
    line = {tuple(round(i * (n - 1) / last) for n in shape) for i in range(last + 1)}
    return np.array([tuple(point) in line for point in points])


def _most_decisive(
    points: NDArray[np.int64],
    sizes: NDArray[np.float64],
    among: NDArray[np.bool_],
    is_open: NDArray[np.bool_],
    count: int,
) -> list[int]:
    """Return at most ``count`` of the points ``among``, each the one that rules out most of the open candidates."""
    chosen: list[int] = []
    left = is_open.copy()
    while len(chosen) < count and (among & left).any():
        indices = np.flatnonzero(left)
        eligible = np.flatnonzero(among & left)
        ruled_out_if_bad = [_at_most(points[indices], points[i]).sum() for i in eligible]
        ruled_out_if_good = [(sizes[indices] >= sizes[i]).sum() for i in eligible]
        i = int(eligible[np.argmax(np.minimum(ruled_out_if_bad, ruled_out_if_good))])
        chosen.append(i)
        left &= ~_at_most(points, points[i])
        left[i] = False
    return chosen


def _at_most(points: NDArray[np.int64], point: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which points are more conservative than ``point`` on no axis."""
    below: NDArray[np.bool_] = np.all(points <= point, axis=1)
    return below


def delta_neighbourhood(
    last: Candidate,
    shape: Point,
    metrics: Sequence[Metric],
    size: Size,
    score: Score,
    limit: float,
    reach: int = 1,
    switch_margin: float = 0.0,
    per_round: int = 1,
) -> Candidate | None:
    """Return the smallest candidate near ``last`` whose degradation is at most ``limit``; None if there is none.

    shape: lengths of the axes. metrics: pruning metrics. reach: how far to search on every axis. per_round: how
    many candidates are scored at once.

    ``last`` is scored with every pruning metric first. Another metric takes over if its degradation is lower by more
    than ``switch_margin``. Then the search scores points up to ``reach`` more conservative on every axis, smallest
    first, until one is good enough. Models grow more sensitive as they train, so nothing more aggressive than ``last``
    is tried. A candidate that failed rules out all that are more conservative on no axis.
    """
    ranges = [range(at, min(at + reach, length - 1) + 1) for at, length in zip(last.point, shape, strict=True)]

    def near(metric: Metric) -> list[Candidate]:
        return sorted((Candidate(metric, point) for point in product(*ranges) if point != last.point), key=size)

    scores: dict[Candidate, float] = {}

    def score_new(candidates: Sequence[Candidate]) -> None:
        if new := [candidate for candidate in candidates if candidate not in scores]:
            scores.update(zip(new, score(new), strict=True))

    same_point = [last, *(Candidate(metric, last.point) for metric in metrics if metric != last.metric)]
    rounds = -(-len(same_point) // per_round)
    filled = [*same_point, *near(last.metric)][: rounds * per_round]  # neighbours fill the last round
    for i in range(0, len(filled), per_round):
        score_new(filled[i : i + per_round])
    best = last
    for other in same_point[1:]:
        clearly_better = scores[other] < scores[best] - switch_margin
        if clearly_better or (scores[other] <= limit and not scores[best] <= limit):
            best = other
    if scores[best] <= limit:
        return best

    left = near(best.metric)
    while left:
        if left[0] not in scores:
            score_new(left[:per_round])
        candidate = left.pop(0)
        if scores[candidate] <= limit:
            return candidate
        left = [other for other in left if not at_most(other.point, candidate.point)]
    return None
