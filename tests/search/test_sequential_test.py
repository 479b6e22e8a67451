"""The sequential test: it errs as rarely as it says, needs few batches, and decides at the last one at the latest."""

import math
import random
import statistics

import pytest

from dynaquant.search.sequential_test import looks, order_of, t_quantile, verdict

ERROR_RATE = 0.05
ERROR_RATE_OF_MORE = 0.3
FIRST_LOOK = 3


def differences(batches: int, mean: float, spread: float, draw: random.Random) -> list[float]:
    """Return normally distributed differences whose mean over all batches is exactly the given one."""
    drawn = [draw.gauss(0, spread) for _ in range(batches)]
    center = statistics.fmean(drawn)
    return [mean + each - center for each in drawn]


def first_verdict(population: list[float], lower: float, upper: float, rate: float) -> tuple[str, int]:
    """Return the first verdict, and after how many batches it came."""
    for count in looks(len(population)):
        found = verdict(population[:count], len(population), lower, upper, rate)
        if found != "undecided":
            return found, count
    return "undecided", len(population)


@pytest.mark.parametrize("batches", [4, 5, 20, 100, 1000])
def test_looks_begin_early_grow_and_end_with_all_batches(batches):
    found = looks(batches)
    assert found[0] == FIRST_LOOK
    assert found[-1] == batches
    assert found == sorted(set(found))
    assert len(found) <= 2 + math.log(batches) / math.log(1.4)


def test_the_order_is_random_complete_and_the_same_for_all_candidates_of_a_save():
    assert sorted(order_of(20, 1)) == list(range(20))
    assert order_of(20, 1) == order_of(20, 1) != order_of(20, 2)


@pytest.mark.parametrize("freedom", [2, 3, 5, 8, 30, 200])
def test_the_quantiles_are_those_of_students_t(freedom):
    """Tables: the 90 and the 95 % quantile."""
    table = {2: (1.886, 2.920), 3: (1.638, 2.353), 5: (1.476, 2.015), 8: (1.397, 1.860), 30: (1.310, 1.697)}
    expected = table.get(freedom, (1.286, 1.653))
    assert [t_quantile(p, freedom) for p in (0.9, 0.95)] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("rate", [ERROR_RATE, ERROR_RATE_OF_MORE])
@pytest.mark.parametrize("batches", [6, 20, 100])
@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_a_single_look_errs_as_often_as_it_says(batches, rate, spread):
    draw = random.Random(0)
    runs = 4000
    for count in {FIRST_LOOK, batches // 2}:
        wrong = sum(
            verdict(differences(batches, 1.0, spread, draw)[:count], batches, -math.inf, 1.0, rate) == "above"
            for _ in range(runs)
        )
        assert wrong / runs == pytest.approx(rate, abs=0.025)


@pytest.mark.parametrize(("mean", "most"), [(0.999, 0.3), (0.8, 0.12), (0.5, 0.04)])
def test_over_all_looks_few_candidates_that_are_good_enough_are_given_up(mean, most):
    """20 batches whose differences vary as much as the limit."""
    draw = random.Random(1)
    found = [first_verdict(differences(20, mean, 1.0, draw), -math.inf, 1.0, ERROR_RATE) for _ in range(3000)]
    assert sum(verdict == "above" for verdict, _ in found) / len(found) <= most


@pytest.mark.parametrize(("mean", "most"), [(1.5, 0.5), (2.0, 0.28), (4.0, 0.16)])
def test_candidates_far_beyond_the_limit_are_given_up_after_few_batches(mean, most):
    draw = random.Random(2)
    found = [first_verdict(differences(20, mean, 1.0, draw), -math.inf, 1.0, ERROR_RATE) for _ in range(2000)]
    assert statistics.fmean(count for _, count in found) / 20 <= most
    assert sum(verdict == "above" for verdict, _ in found) / len(found) > 0.95


def test_a_candidate_far_below_the_limit_is_recognised_after_few_batches():
    draw = random.Random(3)
    found = [first_verdict(differences(20, 0.05, 0.3, draw), 0.5, 1.0, ERROR_RATE) for _ in range(500)]
    assert statistics.fmean(count for _, count in found) <= 5
    assert {verdict for verdict, _ in found} == {"below"}


@pytest.mark.parametrize(("mean", "expected"), [(1.01, "above"), (0.49, "below"), (0.75, "undecided")])
def test_on_all_batches_the_mean_alone_decides(mean, expected):
    draw = random.Random(4)
    for _ in range(200):
        assert verdict(differences(8, mean, 5.0, draw), 8, 0.5, 1.0) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_difference_that_is_not_finite_decides(bad):
    assert verdict([0.0, bad, 0.0], 20, -1.0, 1.0) == "above"
