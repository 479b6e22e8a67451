"""Threads, interrupts and forks: nothing hangs, nothing is half done, the run is let go when the last write is done."""

import gc
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import Future
from functools import partial

import pytest
import torch
from interrupts import interrupted, points
from torch import nn
from training import bits

import dynaquant as dq
from dynaquant.store.commit import WritableRun
from dynaquant.store.run import Run
from dynaquant.store.verifying import damage


@pytest.fixture(autouse=True)
def interrupts():
    """Ctrl-C raises KeyboardInterrupt, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Training:
    """A small one with all that a save could disturb: batch norm, dropout, gradients, a generator of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 2))
        self.model[0].bias.requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.order = torch.Generator().manual_seed(1)
        self.asked = 0

    def step(self) -> None:
        self.model.train()
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 6, generator=self.order)).square().mean().backward()
        self.optimizer.step()

    def evaluate(self, model: nn.Module) -> float:
        """Uses the generators and leaves modes and gradients other than they were."""
        self.asked += 1
        torch.set_grad_enabled(True)
        model.eval()
        torch.randn(8, generator=self.order)
        inputs = torch.zeros(8, 6).uniform_() * 0 + 1
        loss = model(inputs.requires_grad_()).square().mean() + 1
        loss.backward()
        return loss.item()

    def checkpointer(self, folder, **options) -> dq.Checkpointer:
        options = {"evaluate": self.evaluate, "extras": {"order": self.order}} | options
        return dq.Checkpointer(folder, self.model, self.optimizer, **options)

    def all_of_it(self):
        """Whatever training depends on; it must be the same before and after a save."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return (
            bits(self.model.state_dict()),
            bits(self.optimizer.state_dict()),
            bits([p.grad for p in self.model.parameters()]),
            [(id(tensor), tensor._version, tensor.requires_grad) for tensor in tensors],
            [module.training for module in self.model.modules()],
            bits(self.order.get_state()),
            bits(torch.get_rng_state()),
            random.getstate(),
            torch.is_grad_enabled(),
        )


def writers() -> int:
    return sum(thread.name == "dynaquant" for thread in threading.enumerate())


# The thread that writes


def test_log_to_may_call_records(tmp_path):
    training, seen = Training(), []
    with training.checkpointer(tmp_path, log_to=lambda _: seen.append([r.step for r in ckpt.records()])) as ckpt:
        for step in (1, 2):
            training.step()
            ckpt.save(step)
    assert seen == [[1], [1, 2]]


@pytest.mark.parametrize("name", ["save", "restore", "close"])
def test_calls_that_must_not_come_from_the_writing_thread_are_refused_there(tmp_path, name, caplog):
    training = Training()
    call = {"save": lambda: ckpt.save(7), "restore": lambda: ckpt.restore(), "close": lambda: ckpt.close()}[name]  # noqa: PLW0108
    with caplog.at_level(logging.WARNING), training.checkpointer(tmp_path, log_to=lambda _: call()) as ckpt:
        ckpt.save(1)
    assert f"{name} was called in the thread that writes" in caplog.text
    assert Run(tmp_path).steps() == [1]


def test_the_writing_thread_survives_callbacks_that_exit(tmp_path):
    with Training().checkpointer(tmp_path) as ckpt:
        ckpt.save(1).add_done_callback(lambda _: sys.exit())
        ckpt.save(2)
        ckpt.wait()
    assert Run(tmp_path).steps() == [1, 2]


def test_a_callback_of_a_save_may_ask_for_its_result(tmp_path):
    training, told = Training(), []
    with training.checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            training.step()
            saved = ckpt.save(step)
            saved.add_done_callback(lambda done: told.append((done.exception(), done.result().step)))
    assert told == [(None, 1), (None, 2)]


def test_log_to_cannot_wait_for_the_save_it_is_called_for(tmp_path, caplog):
    training, saved = Training(), []
    go_on = threading.Event()

    def told(_record):
        go_on.wait(30)
        saved[0].result()

    with training.checkpointer(tmp_path, log_to=told) as ckpt:
        saved.append(ckpt.save(1))
        go_on.set()
        assert saved[0].result().step == 1
    assert "was asked for in the thread that writes" in caplog.text


def test_a_write_cannot_be_cancelled(tmp_path):
    with Training().checkpointer(tmp_path) as ckpt:
        assert not ckpt.save(1).cancel()
    assert Run(tmp_path).steps() == [1]


def held(folder) -> bool:
    """Whether a Checkpointer holds the run."""
    try:
        with WritableRun(folder).locked():
            return False
    except dq.CheckpointError:
        return True


def while_it_writes(training, folder) -> tuple[dq.Checkpointer, Future, threading.Event]:
    """A checkpointer whose first save is being written, until the event is set."""
    writing, go_on = threading.Event(), threading.Event()

    def log_to(_) -> None:
        writing.set()
        go_on.wait()

    ckpt = training.checkpointer(folder, log_to=log_to)
    saving = ckpt.save(1)
    writing.wait()
    return ckpt, saving, go_on


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


def test_a_garbage_collected_checkpointer_releases_the_run_and_ends_its_thread(tmp_path):
    before = writers()
    for step in (1, 2):
        ckpt = Training().checkpointer(tmp_path)
        ckpt.save(step).result()
        del ckpt
        gc.collect()
    assert Run(tmp_path).steps() == [1, 2]
    assert writers() == before


# Processes

SCRIPT = """
import multiprocessing, os, sys, time
import torch
import dynaquant as dq

model = torch.nn.Linear(4, 4)

def slowly(_):
    time.sleep(0.2)

def saving(folder):
    ckpt = dq.Checkpointer(folder, model, log_to=slowly)
    ckpt.save(1).add_done_callback(lambda _: open(os.path.join(folder, "done"), "x"))
    return ckpt

def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def run_script(text: str, cwd) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", SCRIPT + textwrap.dedent(text)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)


def test_the_last_write_is_finished_when_a_process_ends_without_close(tmp_path):
    done = run_script(
        """
        if os.fork() == 0:
            saving("exited")
            sys.exit()
        os.wait()
        if os.fork() == 0:
            ckpt = saving("raised")
            1 / 0
        os.wait()
        process = multiprocessing.get_context("fork").Process(target=saving, args=("multiprocessing",))
        process.start()
        process.join()
        os.mkdir("full")
        ckpt = dq.Checkpointer("full", model)
        os.symlink("/dev/full", "full/step-000000000001.dqc.tmp")
        ckpt.save(1)
        """,
        cwd=tmp_path,
    )
    for name in ("exited", "raised", "multiprocessing"):
        assert Run(tmp_path / name).steps() == [1]
        assert (tmp_path / name / "done").exists()
    assert done.stderr.count("Traceback") == 1
    assert "ZeroDivisionError" in done.stderr
    assert "the last checkpoint could not be written: [Errno 28] No space left on device" in done.stderr


def in_fork(action) -> str:
    """What a forked child says of the action; empty when it hangs or dies."""
    reader, out = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)
            try:
                said = f"returned {action()}"
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            os.write(out, said.encode())
        finally:
            os._exit(0)
    os.close(out)
    with os.fdopen(reader) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.parametrize("busy", [False, True], ids=["at rest", "while writing"])
def test_calls_in_a_forked_child_are_refused_and_nothing_hangs(tmp_path, busy):
    training = Training()
    ckpt, saving, go_on = while_it_writes(training, tmp_path)
    calls = [ckpt.wait, ckpt.records, ckpt.restore, lambda: ckpt.save(2)]
    if busy:
        calls.append(saving.result)
    else:
        go_on.set()
        saving.result()
    for call in calls:
        assert f"RuntimeError: this Checkpointer belongs to process {os.getpid()}" in in_fork(call)
    assert in_fork(ckpt.close) == "returned None"
    assert held(tmp_path)
    go_on.set()
    training.step()
    ckpt.save(2)
    ckpt.close()
    assert Run(tmp_path).steps() == [1, 2]


def test_a_forked_child_ends_as_it_would_without_a_checkpointer(tmp_path):
    done = run_script(
        """
        for pending in (False, True):
            for n, leave in enumerate(["sys.exit(3)", "ckpt.close(); sys.exit(3)", "del ckpt; sys.exit(3)"]):
                with dq.Checkpointer(f"{pending}{n}", model, log_to=slowly) as ckpt:
                    saved = ckpt.save(1)
                    pending or saved.result()
                    if (child := os.fork()) == 0:
                        exec(leave)
                    print(ended(child))
                    ckpt.save(2)
        """,
        cwd=tmp_path,
    )
    assert (done.stdout, done.stderr) == ("3\n" * 6, "")
    assert all(Run(folder).steps() == [1, 2] for folder in tmp_path.iterdir())


def test_a_forked_child_may_have_a_checkpointer_of_its_own(tmp_path):
    with Training().checkpointer(tmp_path / "parent") as ckpt:
        ckpt.save(1)
        process = multiprocessing.get_context("fork").Process(target=save_once, args=(tmp_path / "child",))
        process.start()
        process.join()
    assert Run(tmp_path / "child").steps() == [1]


def save_once(folder) -> None:
    Training().checkpointer(folder).save(1)


# One call at a time


@pytest.mark.parametrize("name", ["save", "restore", "close"])
@pytest.mark.parametrize("caught", [False, True])
def test_a_call_from_inside_evaluate_is_refused_and_nothing_is_saved(tmp_path, name, caught):
    training = Training()
    calls = {"save": lambda: ckpt.save(7), "restore": lambda: ckpt.restore(), "close": lambda: ckpt.close()}  # noqa: PLW0108
    inside = []

    def evaluate(model: nn.Module) -> float:
        if inside:
            try:
                inside[0]()
            except RuntimeError:
                if not caught:
                    raise
        return training.evaluate(model)

    with training.checkpointer(tmp_path, evaluate=evaluate) as ckpt:
        training.step()
        ckpt.save(1)
        before = training.all_of_it()
        inside.append(calls[name])
        with pytest.raises(RuntimeError, match=f"{name} was called while save of the same Checkpointer goes on"):
            ckpt.save(2)
        inside.clear()
        assert training.all_of_it() == before
        assert [record.step for record in ckpt.records()] == [1]
        ckpt.save(3)
    assert Run(tmp_path).steps() == [1, 3]


@pytest.mark.parametrize("name", ["save", "restore", "close"])
def test_a_call_from_another_thread_during_a_save_is_refused_and_changes_nothing(tmp_path, name):
    training, errors = Training(), []
    calls = {"save": lambda: ckpt.save(7), "restore": lambda: ckpt.restore(), "close": lambda: ckpt.close()}  # noqa: PLW0108

    def call() -> None:
        try:
            calls[name]()
        except RuntimeError as error:
            errors.append(str(error))

    def evaluate(model: nn.Module) -> float:
        other = threading.Thread(target=call)
        other.start()
        other.join()
        return training.evaluate(model)

    with training.checkpointer(tmp_path, evaluate=evaluate) as ckpt:
        record = ckpt.save(1).result()
    assert record.configuration is not None
    assert len(errors) == training.asked
    assert set(errors) == {
        f"{name} was called while save of the same Checkpointer goes on, from another thread: "
        "use a Checkpointer from one thread"
    }
    assert Run(tmp_path).steps() == [1]


# Interrupts

# Python ignores what is raised in a generator that is being deleted, and says so.
ANYWHERE = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_evaluate_leaves_training_as_it_was(tmp_path, error):
    training = Training()
    fails = []

    def evaluate(model: nn.Module) -> float:
        result = training.evaluate(model)
        if fails and training.asked >= fails[0]:
            raise error
        return result

    with training.checkpointer(tmp_path, evaluate=evaluate) as ckpt:
        training.step()
        before = training.all_of_it()
        for nth in range(1, 4):
            fails[:] = [training.asked + nth]
            with pytest.raises(error):
                ckpt.save(1)
            assert training.all_of_it() == before
        fails.clear()
        ckpt.save(1)
    assert Run(tmp_path).steps() == [1]


@ANYWHERE
def test_an_interrupted_save_does_not_change_what_the_next_one_stores(tmp_path):
    """Gradients that were recorded are not lost, and what was found does not count."""
    identities = []
    for interrupts in ([], [3, 400, 1500, 2200]):
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
    """Points of an action: each of the first and the last, and some of those between them."""
    edges = [*range(20), *range(total - 60, total)]
    return sorted({*edges, *random.Random(0).sample(range(total), count)})


@ANYWHERE
def test_a_save_that_is_interrupted_anywhere_changes_nothing_in_training(tmp_path):
    training = Training()
    with training.checkpointer(tmp_path, exact="latest", keep_last=2) as ckpt:
        training.step()
        ckpt.save(0).result()
        total = points(lambda: ckpt.save(1))
        for point in spread(60, total):
            training.step()
            before = training.all_of_it()
            interrupted(lambda: ckpt.save(1), point)
            assert training.all_of_it() == before
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
def test_a_constructor_that_is_interrupted_anywhere_releases_the_run(tmp_path):
    training, made = Training(), []

    def make() -> None:
        made.append(training.checkpointer(tmp_path))

    for point in spread(20, points(make)):
        made.clear()
        interrupted(make, point)
        made.clear()
        training.checkpointer(tmp_path).close()


@ANYWHERE
def test_a_restore_that_is_interrupted_anywhere_can_be_repeated(tmp_path):
    training = Training()
    with training.checkpointer(tmp_path, exact="latest") as ckpt:
        for step in (1, 2):
            training.step()
            ckpt.save(step)
        state = training.all_of_it()[:2]
        for point in spread(20, points(ckpt.restore)):
            training.step()
            interrupted(ckpt.restore, point)
            assert ckpt.restore() == 2
            assert training.all_of_it()[:2] == state
        training.step()
        assert ckpt.save(3).result().parent == 2
