"""Delta-neighbourhood search gets from the last best configuration to the next, mostly in one or two trials."""

import math
import random
import statistics
from itertools import product

import pytest
from landscapes import METRICS, SHAPE, Landscape

from dynaquant.methods.published.space import Candidate, at_most, delta_neighbourhood, guided_exhaustive

LAST = Candidate("magnitude", (2, 0, 3, 1))
OTHER = Candidate("sensitivity", LAST.point)
EVERY_PER_ROUND = pytest.mark.parametrize("per_round", [1, 2, 4, 8])


def search(landscape: Landscape, last: Candidate = LAST, **options) -> Candidate | None:
    return delta_neighbourhood(
        last, landscape.shape, METRICS, landscape.size, landscape.score, landscape.limit, **options
    )


def neighbours(last: Candidate, shape=SHAPE, reach: int = 1) -> list[Candidate]:
    """Returns the candidates that are up to ``reach`` more conservative on every axis, with the same metric."""
    ranges = [range(at, min(at + reach, length - 1) + 1) for at, length in zip(last.point, shape, strict=True)]
    return [Candidate(last.metric, point) for point in product(*ranges)]


def with_scores(scores: dict[Candidate, float], otherwise: float, limit: float = 1.0) -> Landscape:
    """Returns a landscape with these degradations, and one constant degradation everywhere else."""
    landscape = Landscape(0)
    landscape.degradations = dict.fromkeys(landscape.degradations, otherwise) | scores
    landscape.limit = limit
    return landscape


def random_cases(count: int):
    """Yields random landscapes, each with a random last best candidate."""
    for seed in range(count):
        draw = random.Random(seed)
        yield Landscape(seed), Candidate(draw.choice(METRICS), tuple(draw.randrange(n) for n in SHAPE))


# Metrics


@EVERY_PER_ROUND
@pytest.mark.parametrize(
    ("own", "others", "best"),
    [
        (0.5, 0.3, OTHER),
        (0.5, 0.41, LAST),  # better, but by less than the margin
        (0.5, 0.39, OTHER),
        (0.5, 0.7, LAST),
        (0.5, 1.2, LAST),
        (0.5, math.nan, LAST),
        (1.05, 0.99, OTHER),  # better by less than the margin, but good enough
        (math.nan, 0.9, OTHER),
    ],
)
def test_another_metric_takes_over_if_it_is_better_by_the_margin(per_round, own, others, best):
    landscape = with_scores({LAST: own, OTHER: others}, otherwise=0.0)
    assert search(landscape, switch_margin=0.1, per_round=per_round) == best


@EVERY_PER_ROUND
@pytest.mark.parametrize(("others", "metric"), [(1.5, "sensitivity"), (2.5, "magnitude"), (math.nan, "magnitude")])
def test_if_both_metrics_fail_the_better_one_is_searched(per_round, others, metric):
    landscape = with_scores({LAST: 2.0, OTHER: others}, otherwise=0.5)
    found = search(landscape, switch_margin=0.1, per_round=per_round)
    assert found.metric == metric
    assert landscape.size(found) == min(landscape.size(c) for c in neighbours(LAST) if c.point != LAST.point)


def test_a_metric_that_is_no_longer_available_is_not_tried():
    landscape = with_scores({LAST: 2.0, OTHER: 0.0}, otherwise=0.5)
    found = delta_neighbourhood(LAST, SHAPE, ("magnitude",), landscape.size, landscape.score, 1.0)
    assert found.metric == "magnitude"
    assert OTHER not in landscape.scored


# What is found


@EVERY_PER_ROUND
@pytest.mark.parametrize("reach", [1, 2])
def test_the_search_finds_the_same_smallest_good_neighbour_as_brute_force(per_round, reach):
    for landscape, last in random_cases(60):
        found = search(landscape, last, reach=reach, per_round=per_round)
        scores = {metric: landscape.degradations[Candidate(metric, last.point)] for metric in METRICS}
        best = Candidate(min(METRICS, key=scores.get), last.point)
        optimum = landscape.smallest_good(neighbours(best, reach=reach))
        assert (found and landscape.size(found)) == optimum
        if found is not None:
            assert landscape.is_good(found)


@EVERY_PER_ROUND
def test_no_candidate_more_aggressive_than_the_last_best_is_ever_tried(per_round):
    for landscape, last in random_cases(60):
        search(landscape, last, per_round=per_round)
        near = {Candidate(metric, c.point) for metric in METRICS for c in neighbours(last)}
        assert set(landscape.scored) <= near
        assert all(at_most(last.point, candidate.point) for candidate in landscape.scored)


def test_the_first_good_one_in_order_of_size_ends_the_search():
    by_size = sorted(neighbours(LAST), key=Landscape(0).size)
    for i, good in enumerate(by_size):
        landscape = with_scores({good: 0.5}, otherwise=2.0)
        assert search(landscape) == good
        assert landscape.scored == [LAST, OTHER, *by_size[1 : i + 1]]


def test_candidates_more_conservative_than_a_failed_one_on_no_axis_are_skipped():
    for landscape, last in random_cases(60):
        search(landscape, last)
        tried = [c for c in landscape.scored if c.metric == landscape.scored[-1].metric]
        for i, candidate in enumerate(tried):
            failed = [c for c in tried[:i] if not landscape.is_good(c)]
            assert not any(at_most(candidate.point, earlier.point) for earlier in failed)


@EVERY_PER_ROUND
def test_if_nothing_within_reach_is_good_enough_nothing_is_found(per_round):
    landscape = with_scores({}, otherwise=2.0)
    landscape.degradations |= {c: 0.0 for c in landscape.degradations if not at_most(c.point, (3, 1, 4, 2))}
    assert search(landscape, per_round=per_round) is None
    assert search(landscape, reach=2, per_round=per_round) is not None
    landscape.degradations = dict.fromkeys(landscape.degradations, math.nan)
    assert search(landscape, per_round=per_round) is None


@EVERY_PER_ROUND
def test_at_the_most_conservative_corner_only_other_metrics_are_tried(per_round):
    landscape = with_scores({}, otherwise=2.0)
    corner = Candidate("sensitivity", (5, 1, 5, 2))
    assert search(landscape, corner, per_round=per_round) is None
    assert set(landscape.scored) == {corner, Candidate("magnitude", corner.point)}


# Number of trials


@EVERY_PER_ROUND
def test_a_round_scores_at_most_one_candidate_per_rank_and_no_candidate_is_scored_twice(per_round):
    rounds = []
    for landscape, last in random_cases(40):
        search(landscape, last, per_round=per_round)
        assert max(map(len, landscape.rounds)) <= per_round
        assert len(set(landscape.scored)) == len(landscape.scored)
        rounds.append(len(landscape.rounds))
        # The last best and the other metric, then fifteen neighbours of one metric; some were scored with the other.
        assert len(landscape.rounds) <= 2 + -(-15 // per_round)
    assert statistics.median(rounds) <= {1: 3, 2: 2, 4: 2, 8: 2}[per_round]


@pytest.mark.parametrize("seed", range(12))
def test_a_slow_drift_takes_few_trials_and_few_exhaustive_searches(seed):
    landscape = Landscape(seed)
    landscape.limit = landscape.quantile(0.5)
    best = guided_exhaustive(SHAPE, METRICS, landscape.size, landscape.score, landscape.limit)
    trials, exhaustive_searches = [], 0
    for _ in range(20):
        landscape.drift()
        landscape.rounds.clear()
        found = search(landscape, best, switch_margin=0.1 * landscape.limit)
        if found is None:
            exhaustive_searches += 1
            found = guided_exhaustive(SHAPE, METRICS, landscape.size, landscape.score, landscape.limit)
        assert landscape.is_good(found)
        best = found
        trials.append(len(landscape.scored))
    assert statistics.median(trials) <= 4
    assert exhaustive_searches <= 3
