"""Delta-neighbourhood search (method 1.4): from the last best candidate to the next, with few evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from dynaquant.engine.quantize.knobs import Metric
from dynaquant.methods.published.space import Candidate, Point, Score, Size, at_most


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
