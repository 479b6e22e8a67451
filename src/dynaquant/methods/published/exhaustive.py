"""Guided exhaustive search (method 1.4): finds the smallest candidate of the whole cube that is good enough.

Degradation falls along every axis. So a candidate that fails rules out all that are more conservative on no axis, and
one that is good enough rules out all that are not smaller. The search begins on the main diagonal, with the most
aggressive point that is good enough. Then it always scores the candidate that rules out most of the others, whether it
fails or not. (The paper recurses into the diagonals of the remaining sub-cubes, which scores about twice as many.) The
result was always scored and is good enough. So if degradation does not quite fall along every axis, the result may be
larger, but not worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from dynaquant.engine.quantize.knobs import Metric
from dynaquant.methods.published.space import Candidate, Point, Score, Size


def guided_exhaustive(
    shape: Point, metrics: Sequence[Metric], size: Size, score: Score, limit: float, per_round: int = 1
) -> Candidate | None:
    """Return the smallest candidate whose degradation is at most ``limit``; None if there is none.

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
