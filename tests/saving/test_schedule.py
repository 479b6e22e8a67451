"""When a checkpoint is due, with a clock that the tests control."""

import itertools
import math
import random

import pytest

from dynaquant.options import Auto
from dynaquant.saving.schedule import Schedule, daly

FIRST = 50
MAX_OVERHEAD = 0.005


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Training:
    """A training with given durations of steps and saves. Remembers the steps of the saves."""

    def __init__(self, every=None, seconds_per_step: float = 0.1, **options) -> None:
        self.clock = Clock()
        self.schedule = Schedule(every or Auto(**options), clock=self.clock)
        self.seconds_per_step = seconds_per_step
        self.step = 0
        self.saved_at: list[int] = []
        self.trained = self.spent = 0.0
        self.share_before_saves: list[float] = []
        """Saving time as a share of training time, just before each save."""

    def train_until_due(self) -> None:
        while True:
            self.step += 1
            self.clock.now += self.seconds_per_step
            self.trained += self.seconds_per_step
            if self.schedule.due(self.step):
                return

    def save(self, cost: float, typical: float | None = None) -> None:
        self.share_before_saves.append(self.spent / self.trained if self.trained else 0.0)
        self.schedule.saving(self.step)
        self.clock.now += cost
        self.spent += cost
        self.schedule.saved(cost if typical is None else typical)
        self.saved_at.append(self.step)

    def run(self, saves: int, cost: float) -> list[int]:
        """Return the steps between the next saves."""
        before = len(self.saved_at)
        for _ in range(saves):
            self.train_until_due()
            self.save(cost)
        return [b - a for a, b in itertools.pairwise([0, *self.saved_at])][before:]


# A number of steps


def test_every_n_steps_means_multiples_of_n():
    training = Training(every=10)
    training.run(4, cost=1e6)
    assert training.saved_at == [10, 20, 30, 40]
    assert training.schedule.interval == 10


def test_after_a_late_save_the_next_multiple_counts():
    schedule = Schedule(10)
    assert [step for step in range(12) if schedule.due(step)] == [10, 11]
    schedule.saving(17)
    schedule.saved(1.0)
    assert [step for step in range(17, 33) if schedule.due(step)] == list(range(20, 33))


def test_a_restored_training_continues_at_the_next_multiple():
    schedule = Schedule(10)
    schedule.begin(25, interval=999)
    assert [step for step in range(25, 33) if schedule.due(step)] == [30, 31, 32]
    assert schedule.interval == 10


def test_due_without_every_is_an_error():
    schedule = Schedule(None)
    assert schedule.interval is None
    with pytest.raises(ValueError, match="every"):
        schedule.due(10)
    schedule.saving(3)
    schedule.saved(1.0)
    assert schedule.interval is None


# Auto: from the cost of a save


def test_the_first_automatic_checkpoint_comes_after_fifty_steps():
    training = Training()
    training.train_until_due()
    assert training.step == training.schedule.interval == FIRST == 50


@pytest.mark.parametrize("max_overhead", [None, 0.002, 0.03, 0.5])
@pytest.mark.parametrize("first_cost", [2.0, 500.0], ids=["as any other", "expensive"])
def test_saves_stay_below_max_overhead(max_overhead, first_cost):
    """Saves take about two seconds. The first may include a search from scratch, which later intervals compensate."""
    training, draw = Training(max_overhead=max_overhead), random.Random(0)
    training.train_until_due()
    training.save(first_cost, typical=2.0)
    for _ in range(60):
        training.train_until_due()
        training.save(draw.uniform(1, 3), typical=2.0)
    allowed = max_overhead or MAX_OVERHEAD
    assert max(training.share_before_saves[30:]) <= 1.01 * allowed
    assert min(training.share_before_saves[30:]) >= 0.8 * allowed  # and not rarer than necessary


def test_saves_that_always_cost_more_than_expected_become_rarer():
    training = Training(max_overhead=0.01)
    for _ in range(200):
        training.train_until_due()
        training.save(cost=3.0, typical=1.0)
    assert max(training.share_before_saves[100:]) <= 1.02 * 0.01


def test_the_cost_of_an_expensive_first_save_is_spread_over_several_intervals():
    training = Training(max_overhead=0.01)
    training.train_until_due()
    training.save(cost=101.0, typical=1.0)
    intervals = training.run(12, cost=1.0)
    assert intervals == sorted(intervals, reverse=True)
    steady = 1.0 / 0.01 / training.seconds_per_step
    assert intervals[0] < 0.4 * 100 * steady  # all at once would take 100 steady intervals
    assert intervals[-1] < 4 * steady


def test_the_interval_follows_the_time_of_a_step_and_of_a_save():
    training = Training(max_overhead=0.01)
    assert training.run(40, cost=1.0)[-1] == pytest.approx(1000, rel=0.02)
    training.seconds_per_step = 0.5
    assert training.run(40, cost=1.0)[-1] == pytest.approx(200, rel=0.02)
    assert training.run(60, cost=4.0)[-1] == pytest.approx(800, rel=0.02)


def test_steps_longer_than_the_interval_are_all_saved():
    training = Training(seconds_per_step=1000.0)
    training.run(1, cost=1.0)
    assert training.run(10, cost=1.0) == [1] * 10


def test_a_save_without_a_step_before_it_does_not_measure_steps():
    training = Training(max_overhead=0.01)
    training.save(cost=1.0)
    assert training.schedule.interval == FIRST
    training.run(1, cost=1.0)
    interval = training.schedule.interval
    training.save(cost=1.0)  # the same step again
    assert training.schedule.interval > interval  # its cost counts, too


def test_after_going_back_to_an_earlier_step_the_interval_starts_there():
    training = Training(max_overhead=0.01)
    training.run(3, cost=1.0)
    training.step = 10
    training.schedule.begin(10, interval=300)
    training.train_until_due()
    assert training.step == 310


def test_a_save_that_fails_does_not_count():
    training = Training(max_overhead=0.01)
    training.run(3, cost=1.0)
    interval = training.schedule.interval
    training.train_until_due()
    training.schedule.saving(training.step)  # no ``saved`` follows
    assert training.schedule.due(training.step + 1)
    assert training.schedule.interval == interval


def test_saved_without_saving_is_an_error():
    with pytest.raises(ValueError, match="no save has begun"):
        Schedule(Auto()).saved(1.0)


def test_a_training_that_begins_at_a_later_step_counts_steps_from_there():
    schedule = Schedule(Auto(), clock=Clock())
    assert [step for step in range(1001, 1100) if schedule.due(step)] == list(range(1050, 1100))


def test_after_a_restore_the_stored_interval_is_used():
    schedule = Schedule(Auto(), clock=Clock())
    schedule.begin(4000, interval=700)
    assert schedule.interval == 700
    assert not schedule.due(4699)
    assert schedule.due(4700)


def test_after_a_restore_without_a_stored_interval_the_first_one_is_used():
    schedule = Schedule(Auto(), clock=Clock())
    schedule.begin(4000, interval=None)
    assert not schedule.due(4000 + FIRST - 1)
    assert schedule.due(4000 + FIRST)


def test_the_time_of_a_restore_does_not_count_as_training():
    training = Training(max_overhead=0.01)
    training.clock.now += 1e6
    training.step = 4000
    training.schedule.begin(training.step, interval=100)
    training.train_until_due()
    training.save(cost=1.0)
    assert training.schedule.interval == pytest.approx(1225, rel=0.01)  # includes the first quarter of the excess


# Auto: from the rate of failures


def seconds_lost(interval: float, cost: float, mean_time_between_failures: float) -> float:
    """Expected seconds lost per second of useful training (Daly 2006, equation 13, with a free restart)."""
    m = mean_time_between_failures
    return m / interval * math.expm1((interval + cost) / m) - 1


@pytest.mark.parametrize("cost", [0.001, 0.1, 1.0, 30.0, 300.0, 2000.0])
def test_dalys_interval_loses_as_little_time_as_the_best_one(cost):
    m = 3600.0
    best = min(seconds_lost(interval, cost, m) for interval in (m * 2 ** (i / 50) for i in range(-1000, 150)))
    assert seconds_lost(daly(cost, m), cost, m) <= 1.002 * best


def test_dalys_interval_is_youngs_while_saves_are_cheap():
    assert daly(1e-6, 1e6) == pytest.approx(math.sqrt(2), rel=1e-5)
    assert daly(1e-4, 1e8) == pytest.approx(math.sqrt(2 * 1e4), rel=1e-5)
    assert daly(0.0, 3600.0) == 0


def test_dalys_interval_is_the_time_between_failures_if_saves_take_longer():
    assert daly(200.0, 100.0) == daly(1e9, 100.0) == 100.0
    assert daly(199.999, 100.0) == pytest.approx(100.0, rel=0.15)


def test_mean_time_between_failures_gives_dalys_interval():
    training = Training(mean_time_between_failures=3600.0)
    assert training.run(5, cost=2.0)[-1] == math.ceil(daly(2.0, 3600.0) / 0.1)


def test_with_max_overhead_and_failures_the_longer_interval_counts():
    rarely, often = 1e6, 10.0
    by_overhead = Training(max_overhead=0.01).run(40, cost=1.0)[-1]
    by_failures = Training(mean_time_between_failures=rarely).run(40, cost=1.0)[-1]
    assert by_failures > by_overhead
    both = Training(max_overhead=0.01, mean_time_between_failures=rarely)
    assert both.run(40, cost=1.0)[-1] == by_failures
    both = Training(max_overhead=0.01, mean_time_between_failures=often)
    assert both.run(40, cost=1.0)[-1] == by_overhead
