"""Forked and ending processes: the last write is finished, and a child neither hangs nor disturbs its parent."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from watched_training import Training, held, while_it_writes

from dynaquant.cached import cached_property
from dynaquant.store.run import Run

SCRIPT = """
import multiprocessing, os, sys, time
import torch
import torch._dynamo  # a Checkpointer imports it, and each fork would
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
    """Return the result or the error of an action in a forked child; empty if the child hangs or dies."""
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


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "while writing"])
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


def test_a_child_can_use_a_cached_property_that_another_thread_computes_while_it_is_forked():
    begun, end = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, slow):
            self._slow = slow

        @cached_property
        def value(self):
            if self._slow:
                begun.set()
                end.wait()
            return 3

    slow = Slow(slow=True)
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    begun.wait()
    if (child := os.fork()) == 0:
        signal.alarm(60)  # ends the child if it waits
        os._exit(Slow(slow=False).value)
    status = os.waitpid(child, 0)[1]
    end.set()
    thread.join()
    assert status == 3 << 8


def save_once(folder) -> None:
    Training().checkpointer(folder).save(1)
