"""Chooses a published configuration: searches the published space (method 1.4), then configurations with more bins."""

from __future__ import annotations

from collections.abc import Sequence

from dynaquant.engine.quantize.kmeans_weights import KMeansWeights
from dynaquant.engine.quantize.knobs import Configuration, Knobs, in_short
from dynaquant.methods.published.size import SizeModel
from dynaquant.methods.published.space import Candidate, Space, delta_neighbourhood, guided_exhaustive
from dynaquant.search.decision import NOTHING_GOOD_ENOUGH, Found, Search
from dynaquant.search.scores import Trial
from dynaquant.search.trials import Trials

SWITCH_MARGIN = 0.1
"""Another pruning metric takes over if it is better by this share of the limit."""

LEAST_KEPT = 0.95
"""Share of the displacement since a restore that a checkpoint must keep. Less than on a grid, where stochastic rounding
keeps all of it on average: clusters would need far more bins."""


def clusters_keep_enough(trial: Trial) -> bool:
    """Return whether a configuration keeps enough of the displacement since a restore, if there was one."""
    return trial.keeps(LEAST_KEPT)


def search_published(
    weights: KMeansWeights, sizes: SizeModel, trials: Trials, last: Configuration | None, gave_up: bool
) -> Found:
    """Find the smallest configuration that is good enough and keeps enough of the displacement since a restore.

    last: the configuration that was found before for this limit or a near one (``History.last_configuration``).
    gave_up: whether the last search found nothing good enough. Collective.
    """
    space = Space(
        embeddings="embedding" in weights.layer_types.values(),
        metrics=("magnitude", "sensitivity") if weights.sensitivities else ("magnitude",),
    )
    search, found = _good_enough(space, sizes, trials, last, gave_up)
    if found is None:
        return NOTHING_GOOD_ENOUGH
    good_enough = space.configuration(found)
    if clusters_keep_enough(trials.trial(good_enough)):
        return Found(search, good_enough, good_enough)
    chosen = _keeping_enough(space, sizes, trials, found)
    by_quality, kept = (f"{trials.trial(each).progress:.0%}" for each in (good_enough, chosen))
    since = "of what weights have moved since the restore"
    if chosen == good_enough:
        note = f"{in_short(chosen)}: keeps only {kept} {since}; nothing else that is good enough keeps more"
    else:
        note = f"{in_short(chosen)}: keeps {kept} {since}; {in_short(good_enough)} would keep only {by_quality}"
    return Found(search, good_enough, chosen, (note,))


def _good_enough(
    space: Space, sizes: SizeModel, trials: Trials, last: Configuration | None, gave_up: bool
) -> tuple[Search, Candidate | None]:
    """Find the smallest candidate that is good enough; None if there is none.

    Searches the neighbourhood of ``last``, then the whole published space, then candidates with more bins.
    """

    def size(candidate: Candidate) -> float:
        return sizes.predict(space.configuration(candidate))

    def score(candidates: Sequence[Candidate]) -> list[float]:
        return trials.score([space.configuration(candidate) for candidate in candidates])

    limit, per_round = trials.limit, trials.per_round
    # If the last search found nothing, score the candidate with most bins. Search again only if it is good enough.
    if gave_up and not trials.is_good_enough(space.configuration(space.more_bins[-1])):
        return "lossless", None
    too_few_bins = 0  # how many candidates with more bins the neighbourhood search has ruled out
    if last is not None:
        start = space.candidate(last)
        switch_margin = SWITCH_MARGIN * max(limit, 0)
        found = delta_neighbourhood(
            start, space.wide_shape, space.metrics, size, score, limit, switch_margin=switch_margin, per_round=per_round
        )
        if found is not None:
            return "neighbourhood", found
        too_few_bins = max(start.point[0] - space.shape[0] + 1, 0)
    if too_few_bins == 0:
        found = guided_exhaustive(space.shape, space.metrics, size, score, limit, per_round)
        if found is not None:
            return "exhaustive", found
    left = space.more_bins[too_few_bins:]
    for i in range(0, len(left), per_round):
        candidates = left[i : i + per_round]
        for candidate, degradation in zip(candidates, score(candidates), strict=True):
            if degradation <= limit:
                return "more bins", candidate
    return "lossless", None


def _keeping_enough(space: Space, sizes: SizeModel, trials: Trials, found: Candidate) -> Knobs:
    """Return the smallest configuration with more bins or less pruning that also keeps enough of the displacement.

    If none does, returns the one that keeps most. Either way the next search starts from ``found``: the displacement
    grows with training, until ``found`` keeps enough of it.
    """

    def finer(moves: Candidate) -> Configuration:
        return space.configuration(space.finer(found, *moves.point))

    best = guided_exhaustive(
        space.finer_shape(found),
        [found.metric],
        lambda moves: sizes.predict(finer(moves)),
        lambda moves: trials.score([finer(each) for each in moves], LEAST_KEPT),
        trials.limit,
        trials.per_round,
    )
    return trials.keeping_most() if best is None else finer(best)
