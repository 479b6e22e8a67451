"""Chooses a configuration of the grid quantizer (method 2.1): searches for its scale exponent."""

from __future__ import annotations

from collections.abc import Sequence

from dynaquant.quantize.grid import GridConfiguration
from dynaquant.quantize.grid_weights import GridWeights
from dynaquant.quantize.knobs import in_short
from dynaquant.search.decision import NOTHING_GOOD_ENOUGH, Found
from dynaquant.search.displacement import keeps_enough
from dynaquant.search.judge import DISTORTION_SCALE
from dynaquant.search.scale_search import scale_search
from dynaquant.search.trials import Trials

MOST_DISTORTION = 0.1
"""The coarsest grid loses this share of the weights' squares, weighted by the loss's sensitivity. Coarser ones are not
tried, whatever the metric says: early in a training it may prefer a model with no weights at all."""
LEAST_DISTORTION = 1e-9
"""The finest grid loses this share: about what 16-bit floats lose."""


def search_grid(weights: GridWeights, trials: Trials, last: tuple[int, bool] | None, gave_up: bool) -> Found:
    """Find the coarsest grid that is good enough and keeps enough of the displacement since a restore. Collective.

    last: the scale exponent that was found before, and whether it was for this limit (``History.last_exponent``).
    gave_up: whether the last search found nothing good enough.

    If rounding to the nearest level keeps too little displacement, a second search uses stochastic rounding. If that
    finds nothing, chooses the configuration that keeps most, of those that were tried and are good enough.
    """
    limit = trials.limit
    finest, coarsest = weights.scale_exponent_for(LEAST_DISTORTION), weights.scale_exponent_for(MOST_DISTORTION)
    # If the last search found nothing, score the finest grid. Search again only if it is good enough.
    if gave_up and not trials.is_good_enough(GridConfiguration(finest)):
        return NOTHING_GOOD_ENOUGH

    def score_nearest(exponents: Sequence[int]) -> list[float]:
        return trials.score([GridConfiguration(exponent) for exponent in exponents])

    def score_stochastic(exponents: Sequence[int]) -> list[float]:
        return trials.score([GridConfiguration(exponent, dithered=True) for exponent in exponents])

    if last is not None:
        start, start_was_good = last
    else:
        start = weights.scale_exponent_for(limit / DISTORTION_SCALE) if limit > 0 else finest
        start_was_good = False
    found = scale_search(start, finest, coarsest, score_nearest, limit, start_was_good, trials.per_round)
    if found is None:
        return NOTHING_GOOD_ENOUGH
    nearest = GridConfiguration(found)
    if keeps_enough(trials.trial(nearest).progress):
        return Found("scale", nearest, nearest)

    # Stochastic rounding keeps the displacement on average. The metric judges its noise.
    found = scale_search(found, finest, coarsest, score_stochastic, limit, True, trials.per_round)
    # If little is allowed, even the finest grid may fail by chance: outliers are rounded to 16 bits.
    chosen = trials.keeping_most() if found is None else GridConfiguration(found, dithered=True)
    rounding = f"with {in_short(chosen)}" if found is None else "with stochastic rounding"
    note = (
        f"rounded to the nearest level, weights keep {trials.trial(nearest).progress:.0%} of their displacement since "
        f"the restore; {rounding}, {trials.trial(chosen).progress:.0%}"
    )
    return Found("scale", nearest, chosen, (note,))
