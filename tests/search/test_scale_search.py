"""The search for a grid's scale exponent on synthetic degradations: results and numbers of evaluations."""

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiers import examples

from dynaquant.methods.grid.scale_search import degradation_at_scale_1, expected_exponent, first_exponent, scale_search

CLIFF = 8.0
FIRST_GAIN = 8
LARGEST_GAIN = 16
LARGEST_LOSS = 8
LEAST_GAIN = 12
LONGEST_MOVE = 32
MOST_CHANGED = 8
MOST_ROUNDS = 12
RESOLUTION = 2
SCALES_PER_OCTAVE = 16
SECOND_ORDER_POWER = 2.0
TARGET = 0.7

LIMIT = 0.01
LOWEST, HIGHEST = -150, 62  # a typical range
POWERS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EARLIER = [None, (), (LIMIT,), (LIMIT, LIMIT / 2, 2 * LIMIT)]
"""Levels of earlier checkpoints: no earlier search, none known, one, several. At these, the best is near 0."""
NEAR = LONGEST_MOVE
"""How near to the best a first search comes, at least."""
NEAR_TARGET = TARGET * 2 ** (-SECOND_ORDER_POWER * FIRST_GAIN / SCALES_PER_OCTAVE)
"""Share of the limit from which on a first search may accept an exponent at once (second-order model)."""


class Scored:
    """Scores by a function of the exponent. Keeps the scored exponents of each round."""

    def __init__(self, degradation):
        self.degradation = degradation
        self.rounds = []

    def __call__(self, scales, _low):
        self.rounds.append(list(scales))
        return [self.degradation(scale) for scale in scales]

    @property
    def count(self):
        return sum(map(len, self.rounds))


def power_law(power, best, limit=LIMIT):
    """A degradation that grows with a power of the scale. The exponent ``best`` is just good enough."""
    return lambda scale: limit * 2 ** (power * (scale - best - 0.5) / SCALES_PER_OCTAVE)


def search(degradation, start=0, earlier=None, per_round=1, limit=LIMIT, lowest=LOWEST, highest=HIGHEST):
    """Searches. Asserts the properties of every search. Returns the result and the scored exponents."""
    scored = Scored(degradation)
    found = scale_search(start, lowest, highest, scored, limit, earlier, per_round)
    if found is not None:
        assert scored.rounds.pop() == [found], "the result may be an estimate"
    flat = [scale for scales in scored.rounds for scale in scales]
    assert len(flat) == len(set(flat)), "an exponent was scored twice"
    assert all(1 <= len(scales) <= per_round for scales in scored.rounds)
    assert all(lowest <= scale <= highest for scale in flat)
    assert scored.rounds[0][0] == min(max(start, lowest), highest)
    assert len(scored.rounds) <= MOST_ROUNDS
    failed = min((scale for scale in flat if not degradation(scale) <= limit), default=math.inf)
    assert found == max((scale for scale in flat if scale < failed), default=None)
    return found, scored


@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("per_round", [1, 3])
@pytest.mark.parametrize("power", POWERS)
def test_estimates_may_be_wrong_but_the_result_is_no_estimate(power, per_round, earlier):
    """Far from the limit, scores are estimates: too low or too high by up to a factor of three."""
    draw = random.Random(3)
    for _ in range(100):
        law, finished, known = power_law(power, draw.randint(-90, 50)), [], {}

        def estimate(scale, low, law=law, known=known, finished=finished):
            if scale in known:
                finished.append(scale)
                return law(scale)
            known[scale] = value = law(scale) * 3 ** draw.uniform(-1, 1)
            return law(scale) if low <= value <= LIMIT else value

        def score(scales, low, estimate=estimate):
            return [estimate(scale, low) for scale in scales]

        found = scale_search(0, LOWEST, HIGHEST, score, LIMIT, earlier, per_round)
        assert found is not None
        assert law(found) <= LIMIT
        assert finished[-1] == found
        assert len(finished) <= 4


def best_of(degradation, limit=LIMIT):
    """Tries all exponents, and returns the largest one before the first that is not good enough."""
    best = None
    for scale in range(LOWEST, HIGHEST + 1):
        if not degradation(scale) <= limit:
            break
        best = scale
    return best


def assert_close_to_the_best(found, degradation):
    """Asserts that the result is near the best exponent before a failure, or near the target or its prediction.

    Near means within NEAR. A result beyond a failure may be larger.
    """
    best = best_of(degradation)
    assert (found is None) == (best is None), (found, best)
    if found is None or best is None:
        return
    aimed = best_of(degradation, TARGET * LIMIT)
    near_target = aimed is not None and aimed - found <= NEAR
    assert best - found <= NEAR or near_target or degradation(found) >= NEAR_TARGET * LIMIT, (found, best)


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("per_round", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("start", [LOWEST, -60, 0, HIGHEST, 500])
def test_a_search_ends_close_to_the_best_for_any_power_of_the_scale(power, per_round, start):
    for best in range(LOWEST - 3, HIGHEST + 3, 7):
        degradation = power_law(power, best)
        found, _ = search(degradation, start, per_round=per_round)
        assert_close_to_the_best(found, degradation)


@pytest.mark.parametrize("power", POWERS)
def test_a_search_scores_few_exponents(power):
    counts = [search(power_law(power, best), 0)[1].count for best in range(-100, 60, 3)]
    assert sum(counts) / len(counts) <= 5
    assert max(counts) <= 8


@pytest.mark.parametrize("power", POWERS)
def test_a_first_search_scores_four_exponents_at_most_if_its_start_is_within_two_octaves(power):
    """With two evaluations of the weights in training, that makes six."""
    for best in range(-2 * SCALES_PER_OCTAVE, 2 * SCALES_PER_OCTAVE):
        degradation = power_law(power, best)
        found, scored = search(degradation, 0)
        assert scored.count <= 4
        assert best - found <= NEAR or degradation(found) >= NEAR_TARGET * LIMIT


def test_a_first_search_accepts_a_result_that_uses_more_than_a_third_of_the_limit():
    for share in (0.36, 0.6, 0.99):
        assert search(lambda scale, share=share: share * LIMIT * 4 ** (scale / SCALES_PER_OCTAVE))[1].count == 1


def test_if_the_second_order_model_holds_two_scores_are_enough_unless_the_first_fails():
    for best in range(-28, 28):
        _, scored = search(power_law(SECOND_ORDER_POWER, best), 0)
        assert scored.count <= (2 if best >= 0 else 3)


STAIRS = st.lists(st.tuples(st.integers(LOWEST, HIGHEST), st.floats(1e-9, 0.1)), max_size=8)
STARTS = st.integers(LOWEST - 10, HIGHEST + 10)


def staircase(jumps):
    return lambda scale: 1e-9 + sum(height for at, height in jumps if scale >= at)


@examples(300)
@given(jumps=STAIRS, start=STARTS, per_round=st.integers(1, 4))
@example([(-100, 0.012)], 0, 1)
@example([(-140, 0.0101)], HIGHEST, 1)
@example([(40, 0.02)], LOWEST, 1)
def test_if_a_prefix_is_good_enough_something_is_found(jumps, start, per_round):
    degradation = staircase(jumps)
    found, _ = search(degradation, start, per_round=per_round)
    assert (found is None) == (best_of(degradation) is None)


@examples(300)
@given(jumps=STAIRS, start=STARTS, per_round=st.integers(1, 4))
@example([(0, 0.012)], -10, 1)
@example([(-50, 0.02)], -80, 1)
@example([(-20, 0.004), (0, 1.0)], -20, 1)
def test_a_search_ends_close_to_the_best_on_a_staircase_unless_its_rounds_run_out(jumps, start, per_round):
    degradation = staircase(jumps)
    found, scored = search(degradation, start, per_round=per_round)
    if found is not None and len(scored.rounds) < MOST_ROUNDS:
        assert_close_to_the_best(found, degradation)


@pytest.mark.parametrize("floor", [0.0, 1e-7, 0.5 * LIMIT, 0.9 * LIMIT])
@pytest.mark.parametrize("power", POWERS)
def test_a_constant_degradation_at_fine_scales_does_not_mislead_a_search(floor, power):
    """A metric may not resolve small differences."""
    for best in range(-80, 60, 9):
        law = power_law(power, best)

        def degradation(scale, law=law):
            return max(law(scale), floor)

        found, _ = search(degradation, 0)
        assert_close_to_the_best(found, degradation)


@pytest.mark.parametrize("earlier", [None, ()])
@pytest.mark.parametrize("start", [LOWEST, 0, HIGHEST])
@pytest.mark.parametrize("per_round", [1, 3])
@pytest.mark.parametrize("value", [0.0, -1e-30, 1e-30, -math.inf])
def test_if_everything_is_good_enough_the_largest_is_found(value, earlier, start, per_round):
    found, _ = search(lambda _: value, start, earlier, per_round)
    assert HIGHEST - found < LEAST_GAIN if earlier is not None else HIGHEST - found < NEAR


@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("start", [LOWEST, 0, HIGHEST])
@pytest.mark.parametrize("per_round", [1, 3])
@pytest.mark.parametrize("value", [1.0, 1.01 * LIMIT, math.inf, math.nan])
def test_if_nothing_is_good_enough_nothing_is_found(value, earlier, start, per_round):
    found, scored = search(lambda _: value, start, earlier, per_round)
    assert found is None
    assert len(scored.rounds) <= 12


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.0, 1e4])
@pytest.mark.parametrize("start", [-80, 0, HIGHEST])
def test_a_cliff_is_found_whatever_the_scores_beyond_it(bad, start):
    for best in range(-100, 60, 13):
        law = power_law(2, best)

        def degradation(scale, law=law, best=best):
            return law(scale) if scale <= best else bad

        found, _ = search(degradation, start)
        assert_close_to_the_best(found, degradation)


@pytest.mark.parametrize("limit", [0.0, -0.001])
def test_if_no_degradation_is_allowed_only_lossless_scales_are_found(limit):
    found, _ = search(lambda scale: 0.0 if scale < -20 else 1e-6, 0, limit=limit)
    assert found is None if limit < 0 else found < -20
    found, _ = search(lambda scale: -0.01 if scale < -20 else 1e-6, 0, limit=limit)
    assert found < -20


@pytest.mark.parametrize("per_round", [1, 4])
def test_if_there_is_only_one_exponent_it_is_found_or_nothing(per_round):
    for limit, wanted in ((1.0, 5), (0.1, None)):
        found, scored = search(lambda _: 0.5, 0, per_round=per_round, limit=limit, lowest=5, highest=5)
        assert found == wanted
        assert scored.count == 1


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("per_round", [1, 4])
def test_with_noise_the_result_is_good_enough_and_near_the_best(power, noise, per_round):
    for seed in range(20):
        draw = random.Random(seed)
        errors = {scale: math.exp(draw.gauss(0, noise)) for scale in range(LOWEST, HIGHEST + 1)}
        best = draw.randint(-60, 50)
        law = power_law(power, best)
        found, _ = search(lambda scale, law=law, errors=errors: law(scale) * errors[scale], 0, per_round=per_round)
        # Noise of three standard deviations, and the target below the limit, can shift the result this far.
        octaves = (3 * noise * math.log2(math.e) - math.log2(NEAR_TARGET)) / power
        assert abs(found - best) <= octaves * SCALES_PER_OCTAVE * 2 + 2 * RESOLUTION


class Checkpoints:
    """Searches at one checkpoint after another, each from where the last ended. Counts the scored exponents."""

    def __init__(self):
        self.last, self.at_scale_1, self.counts = 0, None, []

    def search(self, degradation, limit=LIMIT):
        start = self.last if self.at_scale_1 is None else first_exponent(self.last, self.at_scale_1, limit)
        found, scored = search(degradation, start, self.at_scale_1, limit=limit)
        assert found is not None
        degradations = {scale: degradation(scale) for scales in scored.rounds for scale in scales}
        now = degradation_at_scale_1(degradations, limit)
        self.last, self.at_scale_1 = found, (*(self.at_scale_1 or ()), now)[-4:]
        self.counts.append(scored.count)
        return found


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("pace", [0.5, 1.0, 2.0, LEAST_GAIN - 1])
@pytest.mark.parametrize("trend", [-0.3, 0.0, 0.3])
def test_a_search_scores_about_two_exponents_on_average_while_the_best_drifts(power, pace, trend):
    """It drifts by less than LEAST_GAIN from one checkpoint to the next."""
    draw = random.Random(1)
    best = 0.0
    checkpoints, behind = Checkpoints(), []
    for _ in range(200):
        best += draw.uniform(-pace, pace) + trend * pace / 2
        best = min(max(best, LOWEST + 20), HIGHEST - 20)
        behind.append(best - checkpoints.search(power_law(power, best)))
    assert sum(checkpoints.counts) / len(checkpoints.counts) <= (2.25 if power <= 4 else 2.6)
    assert sum(behind) / len(behind) <= 1.75 * LEAST_GAIN


@pytest.mark.parametrize("power", POWERS)
def test_a_good_start_is_left_only_for_a_much_larger_exponent(power):
    for ahead in range(60):
        found, scored = search(power_law(power, ahead), 0, ())
        if scored.count == 1:
            # By the second-order model, the target is nearer than LEAST_GAIN.
            assert found == 0
            assert power_law(power, ahead)(0) > TARGET * LIMIT * 2 ** (
                -SECOND_ORDER_POWER * LEAST_GAIN / SCALES_PER_OCTAVE
            )
        else:
            assert found >= RESOLUTION or ahead < 2 * LEAST_GAIN


def test_degradations_of_earlier_checkpoints_keep_a_search_from_following_luck():
    """Here and now, the degradation is a fifth of what it was at the last three checkpoints."""
    degradation = TARGET * LIMIT
    assert search(power_law(SECOND_ORDER_POWER, 20), 0, ())[0] >= LEAST_GAIN
    assert search(power_law(SECOND_ORDER_POWER, 20), 0, (degradation, degradation, degradation))[0] == 0


@pytest.mark.parametrize("earlier", [at_scale_1 for at_scale_1 in EARLIER if at_scale_1 is not None])
@pytest.mark.parametrize("start", [-20, -4, 9])
@pytest.mark.parametrize("per_round", [2, 4, 8])
def test_with_several_ranks_a_search_from_an_earlier_result_scores_and_finds_the_same(per_round, start, earlier):
    """The best of several, or a failure beside a good start, may be luck."""
    draw = random.Random(start)
    for best in range(-60, 60, 7):
        errors = {scale: draw.uniform(0.5, 2) for scale in range(LOWEST, HIGHEST + 1)}
        law = power_law(SECOND_ORDER_POWER, best)

        def degradation(scale, law=law, errors=errors):
            return law(scale) * errors[scale]

        alone, one_rank = search(degradation, start, earlier)
        together, ranks = search(degradation, start, earlier, per_round)
        assert (together, ranks.rounds) == (alone, one_rank.rounds)


def test_earlier_degradations_that_differ_change_what_the_newest_one_expects_by_half_an_octave_at_most():
    newest = expected_exponent([LIMIT], LIMIT)
    for older in (-LIMIT, -1e-3 * LIMIT, 0.0, 1e-9, 0.1 * LIMIT, LIMIT, 10 * LIMIT, 1e9):
        assert abs(expected_exponent([older, older, LIMIT], LIMIT) - newest) <= MOST_CHANGED + 1
    assert expected_exponent([LIMIT, LIMIT, -1e-3 * LIMIT], LIMIT) > newest  # the newest says nothing
    assert expected_exponent([LIMIT, LIMIT, -3 * LIMIT], LIMIT) is None


def test_an_improvement_by_chance_says_as_much_as_a_degradation():
    """Where quantized weights happen to be better, no coarser ones are expected to be good enough."""
    for exponent, value in ((-20, 0.3), (0, 1.0), (7, 3.0)):
        better = degradation_at_scale_1({exponent: -value * LIMIT}, LIMIT)
        assert better == degradation_at_scale_1({exponent: value * LIMIT}, LIMIT) > 0
    far_better = degradation_at_scale_1({0: -3 * LIMIT}, LIMIT)
    found, scored = search(lambda _: -3 * LIMIT, 0, [far_better] * 3)
    assert (found, scored.count) == (0, 1)  # before, it went as far as the grids go


def test_degradations_of_earlier_checkpoints_do_not_hold_a_search_back_where_degradation_falls_fast():
    """Early in a training it may become many times smaller from one checkpoint to the next."""
    checkpoints = Checkpoints()
    for best in range(-120, 60, 30):
        found = checkpoints.search(power_law(SECOND_ORDER_POWER, best))
        assert best - found <= 2 * SCALES_PER_OCTAVE
    assert max(checkpoints.counts[1:]) <= 3


@pytest.mark.parametrize("height", [0.5, 1.0, 2.0])
def test_if_degradation_goes_up_and_down_the_result_is_good_on_average_and_not_by_luck(height):
    """What goes up and down differs between checkpoints, and between the metric's data and any other data."""
    draw = random.Random(2)
    checkpoints, elsewhere = Checkpoints(), []
    law = power_law(SECOND_ORDER_POWER, 0)

    def rugged(scale, phase, length):
        return law(scale) * (1 + height * math.sin(math.tau * scale / length + phase))

    for _ in range(400):
        phase, length = draw.uniform(0, math.tau), draw.uniform(18, 30)
        found = checkpoints.search(lambda scale, phase=phase, length=length: rugged(scale, phase, length))
        elsewhere.append(law(found))
    assert sum(checkpoints.counts) / len(checkpoints.counts) <= 2.6
    assert 0.25 * LIMIT <= sum(elsewhere) / len(elsewhere) <= LIMIT


@pytest.mark.parametrize("power", POWERS)
def test_an_exponent_that_was_good_by_chance_does_not_mislead_the_next_search(power):
    """It fails at the next checkpoint, and the result is near the best again."""
    for chance in range(4, 60, 5):
        for best in range(-100, 0, 7):
            found, scored = search(power_law(power, best), best + chance, ())
            assert best - found <= (2 if power <= 4 else 4) * LEAST_GAIN
            assert scored.count <= 8


@pytest.mark.parametrize("factor", [0.01, 0.1, 0.5, 2, 10, 100])
def test_another_limit_costs_few_evaluations(factor):
    """Degradation grows as the square of the scale, so the exponent for another limit is known."""
    checkpoints = Checkpoints()
    law = power_law(SECOND_ORDER_POWER, 0)
    for _ in range(3):
        checkpoints.search(law)
    checkpoints.counts.clear()
    found = checkpoints.search(law, factor * LIMIT)
    best = math.log2(factor) * SCALES_PER_OCTAVE / SECOND_ORDER_POWER
    assert 0 <= best - found <= LEAST_GAIN + SCALES_PER_OCTAVE
    assert checkpoints.counts[0] <= 3


def test_degradations_that_say_nothing_leave_the_start_where_it_is():
    """The metric was no worse with quantized weights, or allows nothing."""
    for at_scale_1, limit in (((), LIMIT), ((-LIMIT, 0.0), LIMIT), ((LIMIT,), 0.0)):
        assert expected_exponent(at_scale_1, limit) is None
        assert first_exponent(-17, at_scale_1, limit) == -17
    assert degradation_at_scale_1({3: math.nan, 4: math.inf}, LIMIT) is None
    assert degradation_at_scale_1({3: LIMIT, 4: -LIMIT}, 0.0) is None
    assert degradation_at_scale_1({3: LIMIT, 4: -LIMIT}, -LIMIT) is None


@given(degradation=st.floats(1e-6, 1e3), last=st.integers(LOWEST, HIGHEST))
def test_the_first_exponent_is_the_last_one_unless_it_is_far_from_what_degradations_say(degradation, last):
    expected = expected_exponent([degradation], LIMIT)
    assert degradation * 2 ** (SECOND_ORDER_POWER * expected / SCALES_PER_OCTAVE) == pytest.approx(
        TARGET * LIMIT, rel=0.1
    )
    near = last - LARGEST_LOSS <= expected <= last + LARGEST_GAIN
    nearest = min(max(expected, last - LONGEST_MOVE), last + LONGEST_MOVE)
    assert first_exponent(last, [degradation], LIMIT) == (last if near else nearest)


@pytest.mark.parametrize("per_round", [2, 4, 8])
def test_several_exponents_per_round_take_no_more_rounds_and_find_as_much(per_round):
    rounds = {1: 0, per_round: 0}
    for power in POWERS:
        for best in range(-90, 60, 7):
            degradation = power_law(power, best)
            for each in rounds:
                found, scored = search(degradation, 0, per_round=each)
                rounds[each] += len(scored.rounds)
                assert_close_to_the_best(found, degradation)
    assert rounds[per_round] <= rounds[1]


@given(
    degradations=st.dictionaries(st.integers(LOWEST, HIGHEST), st.floats(), max_size=5),
    at_scale_1=st.lists(st.floats(5e-324, 1.7e308), max_size=4),
    limit=st.floats(5e-324, 1.7e308),
    last=st.integers(LOWEST, HIGHEST),
)
def test_any_numbers_give_a_degradation_and_an_exponent(degradations, at_scale_1, limit, last):
    degradation = degradation_at_scale_1(degradations, limit)
    assert degradation is None or math.isfinite(degradation)
    expected = expected_exponent(at_scale_1, limit)
    assert expected is None or isinstance(expected, int)
    assert isinstance(first_exponent(last, at_scale_1, limit), int)


@pytest.mark.parametrize("height", [1e3, 1e9])
def test_candidates_that_diverge_do_not_make_later_saves_fine(height):
    only = degradation_at_scale_1({30: LIMIT * height}, LIMIT)
    assert only == degradation_at_scale_1({30: LIMIT * CLIFF}, LIMIT)
    for pace in (0.5, 2, 6):
        draw, checkpoints, best = random.Random(1), Checkpoints(), 0.0
        for _ in range(200):
            best = min(max(best + draw.uniform(-pace, pace), -100), 40)
            smooth = power_law(2, best + 12)
            found = checkpoints.search(lambda k, best=best, smooth=smooth: smooth(k) if k <= best else height)
            assert best - 2 * SCALES_PER_OCTAVE <= found <= best
        assert sum(checkpoints.counts) <= 2 * len(checkpoints.counts)
