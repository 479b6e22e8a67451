"""Guided exhaustive search finds the optimum of brute force with a small part of its trials."""

import math
import random
import statistics

import pytest
from landscapes import METRICS, SHAPE, Landscape

from dynaquant.methods.published.space import Candidate, guided_exhaustive

CUBES = math.prod(SHAPE) * len(METRICS)
MOST_AGGRESSIVE, MOST_CONSERVATIVE = (0, 0, 0, 0), (5, 1, 5, 2)


def search(landscape: Landscape, per_round: int = 1, score=None) -> Candidate | None:
    return guided_exhaustive(
        landscape.shape, METRICS, landscape.size, score or landscape.score, landscape.limit, per_round
    )


def test_the_search_finds_the_optimum_of_brute_force_with_few_trials():
    fractions = []
    for seed in range(100):
        landscape = Landscape(seed)
        best = search(landscape)
        assert landscape.is_good(best)
        assert landscape.size(best) == landscape.smallest_good()
        assert len(set(landscape.scored)) == len(landscape.scored)
        fractions.append(len(landscape.scored) / CUBES)
    assert max(fractions) <= 0.15
    assert statistics.mean(fractions) <= 0.05


def test_with_more_candidates_per_round_the_search_takes_fewer_rounds_and_finds_the_same():
    rounds = {per_round: [] for per_round in (1, 2, 4, 8)}
    for seed in range(20):
        for per_round, counts in rounds.items():
            landscape = Landscape(seed)
            assert landscape.size(search(landscape, per_round)) == landscape.smallest_good()
            assert max(map(len, landscape.rounds)) <= per_round
            assert len(set(landscape.scored)) == len(landscape.scored) <= 0.15 * CUBES
            counts.append(len(landscape.rounds))
    one, two, four, eight = map(statistics.mean, rounds.values())
    assert one > two > four > eight
    assert eight < 0.6 * one


@pytest.mark.parametrize("per_round", [1, 4])
def test_if_degradation_is_not_quite_monotone_the_result_may_be_larger_but_is_good_enough(per_round):
    larger = []
    for seed in range(40):
        landscape = Landscape(seed, noise=0.02)
        best = search(landscape, per_round)
        optimum = landscape.smallest_good()
        if best is None:  # a failure by chance has ruled out the few good candidates
            assert sum(map(landscape.is_good, landscape.degradations)) < 0.05 * CUBES
            continue
        assert landscape.is_good(best)
        assert best in landscape.scored
        larger.append(landscape.size(best) / optimum - 1)
    assert len(larger) >= 36
    assert statistics.mean(larger) < 0.02


@pytest.mark.parametrize("per_round", [1, 8])
def test_if_nothing_is_good_enough_the_diagonal_shows_it(per_round):
    landscape = Landscape(0)
    landscape.limit = landscape.quantile(0) / 2
    assert search(landscape, per_round) is None
    assert {Candidate(metric, MOST_CONSERVATIVE) for metric in METRICS} <= set(landscape.scored)
    assert len(landscape.scored) <= len(METRICS) * max(SHAPE)


@pytest.mark.parametrize("per_round", [1, 8])
def test_if_everything_is_good_enough_the_smallest_is_found(per_round):
    landscape = Landscape(0)
    landscape.limit = math.inf
    assert search(landscape, per_round).point == MOST_AGGRESSIVE
    assert len(landscape.scored) <= max(SHAPE) + len(METRICS)


@pytest.mark.parametrize("per_round", [1, 4])
def test_a_candidate_without_a_score_is_not_good_enough(per_round):
    """Some models diverge if they are quantized too coarsely: from some degradation on, all scores are NaN."""
    for seed in range(10):
        landscape = Landscape(seed)
        landscape.limit = math.inf
        breaks = landscape.quantile(random.Random(seed).random())
        landscape.degradations = {c: d if d < breaks else math.nan for c, d in landscape.degradations.items()}
        assert landscape.size(search(landscape, per_round)) == landscape.smallest_good()
    landscape.degradations = dict.fromkeys(landscape.degradations, math.nan)
    assert search(landscape, per_round) is None


def test_a_score_exactly_at_the_limit_is_good_enough():
    landscape = Landscape(3)
    landscape.limit = landscape.degradations[Candidate("magnitude", (2, 1, 2, 1))]
    assert landscape.size(search(landscape)) <= landscape.size(Candidate("magnitude", (2, 1, 2, 1)))


@pytest.mark.parametrize("shape", [(6, 1, 6, 3), (1, 1, 1, 1), (1, 2, 1, 3), (9, 5, 6, 3)])
@pytest.mark.parametrize("per_round", [1, 4])
def test_axes_may_have_any_length(shape, per_round):
    for seed in range(5):
        landscape = Landscape(seed, shape)
        assert landscape.size(search(landscape, per_round)) == landscape.smallest_good()


def test_with_the_second_metric_only_smaller_candidates_are_scored():
    for seed in range(10):
        landscape = Landscape(seed)
        first = guided_exhaustive(SHAPE, METRICS[:1], landscape.size, landscape.score, landscape.limit)
        search(landscape)
        assert all(landscape.size(c) < landscape.size(first) for c in landscape.scored if c.metric == METRICS[1])


def test_a_search_is_deterministic():
    one, other = Landscape(5), Landscape(5)
    assert search(one, 4) == search(other, 4)
    assert one.rounds == other.rounds
