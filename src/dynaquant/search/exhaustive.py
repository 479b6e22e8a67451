"""Guided exhaustive search (method 1.4): the smallest good candidate of the whole cube, few of which are scored.

Degradation falls along every axis. So a candidate that fails closes the sub-cube of all that is nowhere more
conservative, and one that is good enough closes all that is not smaller. The main diagonal is searched first, for the
most aggressive point that is good enough; then whatever closes most of what is still open, however it turns out. (The
paper recurses into the diagonals of the remaining sub-cubes, which scores about twice as many.) Only what was scored
good is returned, so a landscape that is not quite monotone can cost compression, but not quality.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from dynaquant.quantize.partition import Metric
from dynaquant.search.space import Candidate, Point, Score, Size


def guided_exhaustive(
    shape: Point, metrics: Sequence[Metric], size: Size, score: Score, limit: float, width: int = 1
) -> Candidate | None:
    """The smallest candidate whose degradation is at most ``limit``; None when there is none.

    shape: lengths of the axes. metrics: searched one after the other, the later ones only for what is smaller than the
    best of those before. width: how many candidates are scored in one round.
    """
    best: Candidate | None = None
    bound = np.inf
    points = np.array(list(product(*map(range, shape))))
    for metric in metrics:
        candidates = [Candidate(metric, tuple(map(int, point))) for point in points]
        sizes = np.array([size(candidate) for candidate in candidates])
        is_open = sizes < bound
        diagonal = _diagonal(points, shape)
        while is_open.any():
            on_diagonal = diagonal & is_open
            chosen = _dividing(points, sizes, on_diagonal if on_diagonal.any() else is_open, is_open, width)
            scores = score([candidates[i] for i in chosen])
            for i, degradation in zip(chosen, scores, strict=True):
                is_open[i] = False
                if not degradation <= limit:  # NaN is not good enough
                    is_open &= ~_at_most(points, points[i])
                elif sizes[i] < bound:
                    best, bound = candidates[i], sizes[i]
            is_open &= sizes < bound
    return best


def _diagonal(points: NDArray[np.int64], shape: Point) -> NDArray[np.bool_]:
    """Which points lie on the line from corner to corner, as many as the longest axis has."""
    steps = max(max(shape) - 1, 1)
    line = {tuple(round(i * (n - 1) / steps) for n in shape) for i in range(steps + 1)}
    return np.array([tuple(point) in line for point in points])


def _dividing(
    points: NDArray[np.int64],
    sizes: NDArray[np.float64],
    among: NDArray[np.bool_],
    is_open: NDArray[np.bool_],
    width: int,
) -> list[int]:
    """At most ``width`` of the points ``among``, each the one that closes most of what those before leave open."""
    chosen: list[int] = []
    left = is_open.copy()
    while len(chosen) < width and (among & left).any():
        indices = np.flatnonzero(left)
        eligible = np.flatnonzero(among & left)
        if_bad = [_at_most(points[indices], points[i]).sum() for i in eligible]
        if_good = [(sizes[indices] >= sizes[i]).sum() for i in eligible]
        i = int(eligible[np.argmax(np.minimum(if_bad, if_good))])
        chosen.append(i)
        left &= ~_at_most(points, points[i])
        left[i] = False
    return chosen


def _at_most(points: NDArray[np.int64], point: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which points are nowhere more conservative than ``point``."""
    below: NDArray[np.bool_] = np.all(points <= point, axis=1)
    return below
