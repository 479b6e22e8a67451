"""Chooses a configuration of the grid quantizer (method 2.1): searches for its scale exponent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dynaquant.engine.quantize.grid_weights import GridWeights
from dynaquant.engine.quantize.knobs import GridConfiguration, in_short
from dynaquant.methods.grid.scale_search import LONGEST_MOVE, degradation_at_scale_1, first_exponent, scale_search
from dynaquant.search.decision import NOTHING_GOOD_ENOUGH, Found
from dynaquant.search.judge import DISTORTION_SCALE
from dynaquant.search.search_memory import REMEMBERED, History, LastScale
from dynaquant.search.trials import Trials

MOST_DISTORTION = 0.1
"""The coarsest grid loses this share of the weights' squares, weighted by the loss's sensitivity. Coarser ones are not
tried, whatever the metric says: early in a training it may prefer a model with no weights at all."""
LEAST_DISTORTION = 1e-9
"""The finest grid loses this share: about what 16-bit floats lose."""


def history_after(
    history: History, limit: float, found: GridConfiguration, degradations: Mapping[int, float]
) -> History:
    """Return the history after a search for a limit. degradations: of the scale exponents that were scored."""
    # The finest grid is scored after a search that found nothing. Noise is all that such a score tells.
    near = {k: value for k, value in degradations.items() if abs(k - found.scale) <= LONGEST_MOVE}
    now = degradation_at_scale_1(near, limit)
    at_scale_1 = (*(history.scale.at_scale_1 if history.scale else ()), *(() if now is None else (now,)))
    return replace(history, scale=LastScale(found.scale, at_scale_1[-REMEMBERED:]))


def search_grid(weights: GridWeights, trials: Trials, last: LastScale | None, gave_up: bool) -> Found:
    """Find the coarsest grid that is good enough and keeps enough of the displacement since a restore. Collective.

    last: the scale exponent that was found before (``History.scale``).
    gave_up: whether the last search found nothing good enough.

    If rounding to the nearest level keeps too little displacement, the search uses stochastic rounding. That is known
    before anything is evaluated, unless it is true only for the scale that is found. If stochastic rounding finds
    nothing, chooses the configuration that keeps most, of those that were tried and are good enough.
    """
    limit = trials.limit
    finest = weights.scale_exponent_for(LEAST_DISTORTION)
    coarsest = max(min(weights.scale_exponent_for(MOST_DISTORTION), weights.coarsest_scale), finest)
    if isinstance(trials.coarsest, GridConfiguration):
        coarsest = min(max(trials.coarsest.scale, finest), coarsest)
    # If the last search found nothing, score the finest grid. Search again only if it is good enough.
    if gave_up and not trials.is_good_enough(GridConfiguration(finest)):
        return NOTHING_GOOD_ENOUGH

    def search(start: int, earlier: Sequence[float] | None, dithered: bool) -> int | None:
        def score(exponents: Sequence[int], low: float) -> list[float]:
            return trials.score([GridConfiguration(exponent, dithered) for exponent in exponents], low=low)

        return scale_search(start, finest, coarsest, score, limit, earlier, trials.per_round)

    earlier: Sequence[float] | None = None
    if trials.coarsest is not None:
        start = coarsest
    elif last is not None:
        start, earlier = first_exponent(last.exponent, last.at_scale_1, limit), last.at_scale_1
    else:
        start = weights.scale_exponent_for(limit / DISTORTION_SCALE) if limit > 0 else finest
    rounded = GridConfiguration(min(max(start, finest), coarsest))
    if trials.keeps_enough(rounded):
        found = search(start, earlier, False)
        if found is None:
            return NOTHING_GOOD_ENOUGH
        rounded = GridConfiguration(found)
        if trials.keeps_enough(rounded):
            return Found("scale", rounded, rounded)
        start, earlier = found, earlier or ()

    # Stochastic rounding keeps the displacement on average. The metric judges its noise.
    found = search(start, earlier, True)
    if found is not None:
        chosen = GridConfiguration(found, dithered=True)
        note = (
            f"stochastic rounding: rounding to the nearest level would keep only {trials.share_kept(rounded):.0%} of "
            f"what weights have moved since the restore, this keeps {trials.share_kept(chosen):.0%}"
        )
        return Found("scale", chosen, chosen, (note,))
    # If little is allowed, even the finest grid may fail by chance: outliers are rounded to 16 bits.
    if search(start, earlier, False) is None:
        return NOTHING_GOOD_ENOUGH
    most = trials.keeping_most()
    note = (
        f"{in_short(most)}: keeps only {trials.share_kept(most):.0%} of what weights have moved since the restore, the "
        "most of what was good enough; stochastic rounding was not"
    )
    return Found("scale", most, most, (note,))
