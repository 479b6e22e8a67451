"""The noise of a metric is measured, even if scores move in steps. A metric without noise gets no margin."""

import json
import math
import random
import statistics
from collections.abc import Callable
from functools import cache

import pytest
import torch
from searches import gauss

from dynaquant.methods.grid.scale_search import scale_search
from dynaquant.search.noise import Noise, looks_stepped


class NoiseOfSaves:
    """The noise of one metric, from one save to the next."""

    def __init__(self) -> None:
        self.known = Noise()

    def __getattr__(self, name: str):
        return getattr(self.known, name)

    def learn(self, scores) -> bool:
        after = self.known.after(scores)
        self.known = after or self.known
        return after is not None

    def look_again(self) -> None:
        self.known = self.known.looking_again()


def measured(noise: "NoiseOfSaves", metric: Callable[[], float]) -> list[float]:
    """Evaluates as often as one save does, and adds the scores to the noise. Returns them."""
    scores = [metric() for _ in range(noise.evaluations)]
    scores += [metric() for _ in range(noise.evaluations_left([scores]))]
    assert noise.learn([scores])
    return scores


def accuracy(images: int, sigma: float, draw: random.Random, correct: float = 0.9) -> Callable[[], float]:
    """An accuracy on so many images. sigma: standard deviation of the number of correct ones."""
    return lambda: round(images * correct + sigma * draw.gauss(0, 1)) / images


# A metric without noise


LOSS = float(torch.tensor(7.0).log())  # as a float32
ACCURACIES = [873 / 1000, float(torch.tensor(514 / 597)), 87.3, 9_871 / 10_000, 100 * 1234 / 1437, 0.0, 1.0, -3.0]


@pytest.mark.parametrize(("score", "at_first"), [(LOSS, 2), (-math.e, 2), *((each, 5) for each in ACCURACIES)])
def test_a_metric_without_noise_is_evaluated_twice_at_first_or_five_times_if_it_looks_stepped(score, at_first):
    """Later twice at every tenth save."""
    noise = NoiseOfSaves()
    assert [len(measured(noise, lambda: score)) for _ in range(31)] == [at_first, *3 * [*9 * [1], 2]]
    assert noise.margin == 0


@pytest.mark.parametrize("scores", [[[2.1, 2.1], [2.1, 2.2]], [[2.0, 2.0], [2.0, 2.0]]], ids=["differ", "stepped"])
def test_if_one_rank_needs_five_evaluations_all_of_them_evaluate_five_times(scores):
    assert NoiseOfSaves().evaluations_left(scores) == 3


def test_losses_hardly_ever_look_stepped_and_accuracies_always_do():
    draw = random.Random(0)
    losses = [draw.uniform(0.02, 9) for _ in range(400)]
    singles = [float(torch.tensor(loss)) for loss in losses]
    assert sum(map(looks_stepped, losses)) == 0
    assert sum(map(looks_stepped, singles)) <= 0.02 * len(singles)
    for images in (32, 100, 597, 1000, 10_000):
        counts = [draw.randint(0, images) for _ in range(50)]
        shares = [(torch.arange(images) < count).float().mean().item() for count in counts]
        assert all(map(looks_stepped, [*shares, *(count / images for count in counts)]))
        assert all(looks_stepped(1 - count / images) for count in counts)
    halves = [torch.tensor(loss).bfloat16().item() for loss in losses]
    assert all(map(looks_stepped, halves))


def test_after_a_restore_a_metric_without_noise_is_evaluated_twice():
    noise = NoiseOfSaves()
    for _ in range(3):
        measured(noise, lambda: 2.0)
    noise.look_again()
    assert [len(measured(noise, lambda: 2.0)) for _ in range(3)] == [2, 1, 1]


def test_a_metric_that_becomes_noisy_is_noticed():
    noise, noisy = NoiseOfSaves(), gauss(0.01)
    measured(noise, lambda: 2.0)
    counts = [len(measured(noise, noisy)) for _ in range(14)]
    assert counts == [*9 * [1], *5 * [2]]
    assert noise.margin == pytest.approx(2 * math.sqrt(2) * 0.01, rel=0.7)


# The margin


def test_the_margin_is_two_standard_deviations_of_a_difference():
    noise, metric = NoiseOfSaves(), gauss(0.03)
    squares, freedom = 0.0, 0
    for save in range(5):
        scores = measured(noise, metric)
        assert len(scores) == (2 if save else 5)
        relative = [score / statistics.mean(scores) for score in scores]
        squares += statistics.variance(relative) * (len(scores) - 1)
        freedom += len(scores) - 1
        assert noise.margin == pytest.approx(2 * math.sqrt(2 * squares / freedom))


def test_from_pairs_the_margin_is_twice_the_root_mean_square_of_their_differences():
    noise, metric = NoiseOfSaves(), gauss(0.03)
    measured(noise, metric)
    pairs = [measured(noise, metric) for _ in range(8)]
    differences = [(second - first) / (first / 2 + second / 2) for first, second in pairs]
    assert noise.margin == pytest.approx(2 * math.sqrt(statistics.mean(d * d for d in differences)))


def test_the_margin_follows_the_noise_of_the_last_saves():
    noise, metric = NoiseOfSaves(), gauss(0.1)
    for _ in range(40):
        measured(noise, metric)
    assert noise.margin == pytest.approx(2 * math.sqrt(2) * 0.1, rel=0.5)
    metric = gauss(0.001)
    for _ in range(8):
        measured(noise, metric)
    assert noise.margin == pytest.approx(2 * math.sqrt(2) * 0.001, rel=0.7)


def test_noise_is_relative_to_the_metric():
    small, large = NoiseOfSaves(), NoiseOfSaves()
    measured(small, gauss(0.02, 0.001))
    measured(large, gauss(0.02, -1000.0))
    assert small.margin == pytest.approx(large.margin)


def test_with_several_ranks_the_noisiest_rank_counts():
    one, all_ranks = NoiseOfSaves(), NoiseOfSaves()
    scores = [[2.0] * 5, [2.0, 2.1, 2.0, 2.2, 2.0], [2.0, 2.01, 2.0, 2.0, 2.0]]
    one.learn([scores[1]])
    all_ranks.learn(scores)
    assert one.margin == all_ranks.margin > 0


@pytest.mark.parametrize(
    "scores",
    [[math.nan, 1.0], [1.0, math.nan], [math.inf, math.inf], [1.0, -math.inf], [1.0, -1.0], [1e-300, -1e300, 1e300]],
)
def test_scores_without_a_relative_noise_are_not_remembered(scores):
    noise = NoiseOfSaves()
    for ranks in ([scores], [[1.0] * len(scores), scores]):
        assert not noise.learn(ranks)
        assert not noise.is_known
        assert noise.margin == 0


def test_a_metric_that_is_always_zero_has_no_noise():
    noise = NoiseOfSaves()
    measured(noise, lambda: 0.0)
    assert (noise.margin, noise.evaluations) == (0, 1)


# Scores that move in steps


@pytest.mark.parametrize("sigma", [1.0, 2.0, 4.0])
def test_an_accuracy_with_noise_of_about_one_image_is_seen_as_noisy(sigma):
    draw = random.Random(0)
    none_at_first, none_at_all, runs = 0, 0, 3000
    for _ in range(runs):
        noise, metric = NoiseOfSaves(), accuracy(1000, sigma, draw, correct=draw.uniform(0.8, 0.95))
        margins = []
        for _ in range(12):
            measured(noise, metric)
            margins.append(noise.margin)
        none_at_first += margins[0] == 0
        none_at_all += not any(margins)
    assert none_at_first <= 0.015 * runs  # 1 %, plus the random error of 3,000 runs
    assert none_at_all <= 0.005 * runs


def test_one_image_by_chance_causes_only_a_small_margin():
    """Once, one image of 1,000 is classified differently. That hardly matters if ten are allowed."""
    noise = NoiseOfSaves()
    for _ in range(8):
        measured(noise, lambda: 0.9)
    noise.look_again()
    noise.learn([[0.9, 0.901]])
    assert 0 < noise.margin < 0.002


@pytest.mark.parametrize("sigma", [0.0, 1.0, 2.0])
def test_checkpoints_judged_by_an_accuracy_stay_within_the_limit(sigma):
    """A search prefers candidates that look good by chance. The margin compensates for that."""
    draw, allowed = random.Random(1), 0.01
    beyond, accepted, margins = 0, 0, []
    for _ in range(100):
        noise, last = NoiseOfSaves(), None
        for _ in range(12):
            drift = draw.gauss(0, 0.15)

            def degradation(scale: int, drift=drift) -> float:
                return allowed * 2 ** (2 * (scale / 16 + drift))

            original = statistics.mean(measured(noise, accuracy(1000, sigma, draw)))

            @cache  # a configuration is scored once
            def scored(scale: int, original=original, degradation=degradation) -> float:
                return (original - accuracy(1000, sigma, draw, 0.9 * (1 - degradation(scale)))()) / original

            def score(scales, _low, scored=scored) -> list[float]:
                return [scored(scale) for scale in scales]

            margins.append(noise.margin)
            limit = allowed - noise.margin
            found = scale_search(-8 if last is None else last, -200, 40, score, limit, None if last is None else ())
            if found is not None:
                last = found
                accepted += 1
                beyond += degradation(found) > allowed * (1 + 0.5 / 9)  # 1,000 images cannot resolve half an image
    assert accepted > 1000
    assert beyond < 0.01 * accepted
    assert (max(margins) == 0) == (sigma == 0)


# After a restore


def test_what_was_measured_is_known_after_a_restore():
    noise = NoiseOfSaves()
    measured(noise, gauss(0.01))
    other = Noise.from_json(json.loads(json.dumps(noise.to_json()))).looking_again()
    assert (other.margin, other.evaluations) == (noise.margin, 2)


@pytest.mark.parametrize(
    "data", [None, 3, [[1.0]], [["a", 1.0]], [[-1.0, 4.0]], [[1.0, 0.0]], [[math.nan, 4.0]]], ids=str
)
def test_noise_that_is_not_valid_is_ignored(data):
    noise = Noise.from_json(data)
    assert (noise.margin, noise.is_known) == (0, False)
