"""Delta-neighbourhood search (method 1.4): from the last best candidate to the next, with few scored."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from dynaquant.quantize.partition import Metric
from dynaquant.search.space import Candidate, Point, Score, Size, at_most


def delta_neighbourhood(
    last: Candidate,
    shape: Point,
    metrics: Sequence[Metric],
    size: Size,
    score: Score,
    limit: float,
    reach: int = 1,
    clearly: float = 0.0,
    width: int = 1,
) -> Candidate | None:
    """The smallest candidate near ``last`` whose degradation is at most ``limit``; None when there is none.

    The last best is scored with every pruning metric first; another metric takes over when its degradation is lower by
    more than ``clearly``. Then come the points at most ``reach`` steps more conservative on every axis, smallest first,
    until one is good enough: models grow denser and more sensitive as they train, so nothing more aggressive than the
    last best is tried. What is nowhere more conservative than a candidate that failed is passed over.

    shape: lengths of the axes. width: how many candidates are scored in one round.
    """
    ranges = [range(at, min(at + reach, length - 1) + 1) for at, length in zip(last.point, shape, strict=True)]

    def near(metric: Metric) -> list[Candidate]:
        return sorted((Candidate(metric, point) for point in product(*ranges) if point != last.point), key=size)

    scores: dict[Candidate, float] = {}

    def score_new(candidates: Sequence[Candidate]) -> None:
        if new := [candidate for candidate in candidates if candidate not in scores]:
            scores.update(zip(new, score(new), strict=True))

    head = [last, *(Candidate(metric, last.point) for metric in metrics if metric != last.metric)]
    rounds = -(-len(head) // width)
    for chunk in _chunks([*head, *near(last.metric)][: rounds * width], width):  # the rest fills the last round
        score_new(chunk)
    best = last
    for other in head[1:]:
        clearly_better = scores[other] < scores[best] - clearly
        if clearly_better or (scores[other] <= limit and not scores[best] <= limit):
            best = other
    if scores[best] <= limit:
        return best

    open_ = near(best.metric)
    while open_:
        if open_[0] not in scores:
            score_new(open_[:width])
        candidate = open_.pop(0)
        if scores[candidate] <= limit:
            return candidate
        open_ = [other for other in open_ if not at_most(other.point, candidate.point)]
    return None


def _chunks(candidates: Sequence[Candidate], width: int) -> list[Sequence[Candidate]]:
    return [candidates[i : i + width] for i in range(0, len(candidates), width)]
