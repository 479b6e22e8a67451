"""Ctrl-C at any point of a save, restore or close: training is unchanged, and the run is released after the write."""

import os
import random
import signal
import threading
from functools import partial

import pytest
from interrupts import interrupted, points
from torch import nn
from training import bits
from watched_training import Training, held, while_it_writes, writers

import dynaquant as dq
from dynaquant.store.run import Run
from dynaquant.store.verifying import damage

# Python ignores exceptions in a generator that is being deleted, and warns.
ANYWHERE = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def interrupts():
    """Ctrl-C raises KeyboardInterrupt, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_evaluate_leaves_training_as_it_was(tmp_path, error):
    training = Training()
    fails = []

    def evaluate(model: nn.Module) -> float:
        result = training.evaluate(model)
        if fails and training.evaluations >= fails[0]:
            raise error
        return result

    with training.checkpointer(tmp_path, evaluate=evaluate) as ckpt:
        training.step()
        before = training.everything()
        for nth in range(1, 4):
            fails[:] = [training.evaluations + nth]
            with pytest.raises(error):
                ckpt.save(1)
            assert training.everything() == before
        fails.clear()
        ckpt.save(1)
    assert Run(tmp_path).steps() == [1]


@ANYWHERE
def test_an_interrupted_save_does_not_change_what_the_next_one_stores(tmp_path):
    """Recorded gradients are not lost, and the result of the interrupted search is dropped."""
    identities = []
    for interrupts in ([], [3, 410, 1500, 2200]):  # not where a generator is deleted: Python ignores exceptions there
        training = Training()
        folder = tmp_path / f"{len(interrupts)}"
        with training.checkpointer(folder, every=3) as ckpt:
            for step in range(1, 10):
                training.step()
                if step % 3 == 0:
                    for point in interrupts:
                        assert interrupted(lambda: ckpt.save(step), point)  # noqa: B023
                        assert ckpt.due(step)
                    ckpt.save(step)
        run = Run(folder)
        identities.append([run.file(step).header.identity for step in run.steps()])
    assert len(identities[0]) == 3
    assert identities[0] == identities[1]


def spread(count: int, total: int) -> list[int]:
    """Return points of an action: all of the first and the last ones, and some between them."""
    edges = [*range(20), *range(total - 60, total)]
    return sorted({*edges, *random.Random(0).sample(range(total), count)})


@ANYWHERE
def test_an_interrupt_anywhere_in_a_save_does_not_change_training(tmp_path):
    training = Training()
    with training.checkpointer(tmp_path, keep=dq.Keep(lossless_copy=True, last=2)) as ckpt:
        training.step()
        ckpt.save(0).result()
        total = points(lambda: ckpt.save(1))
        for point in spread(60, total):
            training.step()
            before = training.everything()
            interrupted(lambda: ckpt.save(1), point)
            assert training.everything() == before
            if point % 4 == 0:
                assert ckpt.save(2).result().step == 2
                assert bits(dq.load(tmp_path)["model"]) == before[0]
        assert writers() == 1
        ckpt.save(3)
    assert not held(tmp_path)
    assert [damage(Run(tmp_path), step) for step in Run(tmp_path).steps()] == [None, None]


@ANYWHERE
def test_the_first_save_and_close_may_be_interrupted_anywhere(tmp_path):
    before = writers()
    training = Training()
    with training.checkpointer(tmp_path / "counted", evaluate=None) as ckpt:
        total = points(lambda: ckpt.save(1))
    for point in [*range(0, 30, 3), *range(total - 40, total)]:
        training = Training()
        ckpt = training.checkpointer(tmp_path, evaluate=None)
        interrupted(partial(ckpt.save, 1), point)
        for n in (point % 20, (point + 7) % 20):
            interrupted(ckpt.close, n)
        ckpt.close()
        assert not held(tmp_path)
        assert writers() == before
        assert not training.optimizer._optimizer_step_pre_hooks


@ANYWHERE
def test_an_interrupt_anywhere_in_the_constructor_releases_the_run(tmp_path):
    training, made = Training(), []

    def make() -> None:
        made.append(training.checkpointer(tmp_path))

    for point in spread(20, points(make)):
        made.clear()
        interrupted(make, point)
        made.clear()
        training.checkpointer(tmp_path).close()


@ANYWHERE
def test_a_restore_can_be_repeated_after_an_interrupt_anywhere(tmp_path):
    training = Training()
    with training.checkpointer(tmp_path, keep=dq.Keep(lossless_copy=True)) as ckpt:
        for step in (1, 2):
            training.step()
            ckpt.save(step)
        state = training.everything()[:2]
        for point in spread(20, points(ckpt.restore)):
            training.step()
            interrupted(ckpt.restore, point)
            assert ckpt.restore() == 2
            assert training.everything()[:2] == state
        training.step()
        assert ckpt.save(3).result().parent == 2


def test_an_interrupted_close_releases_the_run_only_after_the_write(tmp_path):
    ckpt, saving, go_on = while_it_writes(Training(), tmp_path)
    for _ in range(2):
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ckpt.close()
        timer.join()
        assert held(tmp_path)
        assert not saving.done()
    go_on.set()
    ckpt.close()
    assert not held(tmp_path)
    assert saving.result().step == 1
