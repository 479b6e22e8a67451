"""A save that fails anywhere leaves everything as if it had never been called, also for the saves that follow."""

import contextlib
import random
import shutil
import signal

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interrupts import interrupted, points
from movement import Movement
from searches import training_of
from torch import nn
from torch.nn import functional as F
from training import train

import dynaquant as dq
from dynaquant.store.run import Run

BATCHES = [torch.randint(40, (16,), generator=torch.Generator().manual_seed(i)) for i in range(20)]


@pytest.fixture(autouse=True)
def interrupts():
    """Ctrl-C raises KeyboardInterrupt, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def cross_entropy(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch), batch)


class Failing:
    """A metric that can make the save fail after its search: it calls ``save``, which is refused, and goes on."""

    def __init__(self, metric) -> None:
        self.metric, self.ckpt, self.fails = metric, None, False

    def __call__(self, model: nn.Module) -> float:
        if self.fails:
            with contextlib.suppress(RuntimeError):
                self.ckpt.save(1)
        return self.metric(model)


class FailingOn(dq.LossOn):
    """``Failing`` for a metric on batches."""

    def __init__(self) -> None:
        self.failing = Failing(lambda _: 0.0)
        super().__init__(BATCHES, self.loss)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.failing(model)
        return cross_entropy(model, batch)


def fail(ckpt: dq.Checkpointer, failing: Failing, step: int) -> None:
    failing.ckpt, failing.fails = ckpt, True
    with pytest.raises(RuntimeError, match="from inside it"):
        ckpt.save(step)
    failing.fails = False


def stored(folder) -> list[tuple]:
    """What each checkpoint holds, how it was searched for, and what the next search starts from."""
    run = Run(folder)
    headers = [run.file(step).header for step in sorted(run.steps())]
    for header in headers:
        for trial in header.record["search"]["trials"]:
            del trial["seconds"]
    return [(header.identity, header.record["search"], header.record["notes"]) for header in headers]


def test_a_failed_save_does_not_end_the_protection_of_what_was_learned_since_a_restore(tmp_path):
    progress = []
    for fails in (False, True):
        model, optimizer = training_of()
        evaluate = Failing(Movement(model, 10.0))
        with dq.Checkpointer(tmp_path / f"{fails}", model, optimizer, evaluate=evaluate) as ckpt:
            train(model, optimizer, 30)
            evaluate.metric.remember()
            ckpt.save(30).result()
            ckpt.restore()
            for step, more in ((31, 1), (90, 59)):
                train(model, optimizer, more)
                evaluate.metric.remember()
                if fails and step == 90:
                    fail(ckpt, evaluate, step)
                progress.append(ckpt.save(step).result().progress)
    assert progress[:2] == progress[2:]
    assert None not in progress  # the protection ends with the save that has kept enough, for those after it


def test_a_failed_save_does_not_forget_that_nothing_was_good_enough(tmp_path):
    found = []
    for fails in (False, True):
        model, optimizer = training_of()
        evaluate = Failing(Movement(model, 1e12))
        with dq.Checkpointer(tmp_path / f"{fails}", model, optimizer, evaluate=evaluate) as ckpt:
            train(model, optimizer, 5)
            evaluate.metric.remember()
            assert ckpt.save(5).result().search == "lossless"
            train(model, optimizer, 5)
            evaluate.metric.remember()
            if fails:
                evaluate.metric.strictness = 0.1
                fail(ckpt, evaluate, 10)
                evaluate.metric.strictness = 1e12
            found.append(len(ckpt.save(10).result().trials))
    assert found == [1, 1]  # only the finest grid


def test_a_failed_save_does_not_change_the_order_of_batches(tmp_path):
    for fails in (False, True):
        model, optimizer = training_of()
        evaluate = FailingOn()
        with dq.Checkpointer(tmp_path / f"{fails}", model, optimizer, evaluate=evaluate) as ckpt:
            for step in (5, 10, 15, 20):
                train(model, optimizer, 5)
                if fails:
                    fail(ckpt, evaluate.failing, step)
                ckpt.save(step).result()
    assert stored(tmp_path / "False") == stored(tmp_path / "True")


def train_and_save(folder, failures: dict[int, float], kind: str) -> list[tuple]:
    """Train with eight saves, restoring after the fourth. failures: at which share of a save it is interrupted first.

    Returns what the checkpoints hold.
    """
    random.seed(0)  # checkpoints hold the states of the generators, which Hypothesis sets
    numpy.random.seed(0)
    model, optimizer = training_of()
    evaluate = dq.LossOn(BATCHES, cross_entropy) if kind == "batches" else Movement(model, 0.5)
    options = {"every": 3, "quality": dq.Quality(max_degradation=0.01) if kind == "batches" else "balanced"}
    with dq.Checkpointer(folder, model, optimizer, evaluate=evaluate, **options) as ckpt:
        for number in range(1, 9):
            step = 3 * number
            train(model, optimizer, 3)
            if isinstance(evaluate, Movement):
                evaluate.remember()
                evaluate.strictness = 1e12 if number in (2, 3, 6) else 0.5
            if number in failures:
                assert ckpt.due(step)
                interrupted(lambda: ckpt.save(step), int(failures[number] * POINTS[kind]))  # noqa: B023
            if ckpt.due(step):  # it was not interrupted after the hand-over
                ckpt.save(step)
            if number == 4:
                ckpt.restore()
    found = stored(folder)
    shutil.rmtree(folder)
    return found


POINTS: dict[str, int] = {}
EXPECTED: dict[str, list[tuple]] = {}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["batches", "whole"])
def test_a_save_that_fails_anywhere_leaves_the_saves_that_follow_as_they_were(tmp_path_factory, kind):
    model, optimizer = training_of()
    evaluate = dq.LossOn(BATCHES, cross_entropy) if kind == "batches" else Movement(model, 0.5)
    with dq.Checkpointer(tmp_path_factory.mktemp("counted"), model, optimizer, evaluate=evaluate) as ckpt:
        POINTS[kind] = points(lambda: ckpt.save(1))
    EXPECTED[kind] = train_and_save(tmp_path_factory.mktemp("undisturbed"), {}, kind)
    assert len(EXPECTED[kind]) == 8

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.dictionaries(st.integers(1, 8), st.floats(0, 1.2), min_size=1, max_size=4))
    def as_if_never_called(failures: dict[int, float]) -> None:
        assert train_and_save(tmp_path_factory.mktemp("disturbed"), failures, kind) == EXPECTED[kind]

    as_if_never_called()
