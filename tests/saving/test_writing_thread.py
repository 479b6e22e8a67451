"""The thread that writes checkpoints: what ``log_to`` and callbacks may do in it, and when it ends."""

import gc
import logging
import subprocess
import sys
import threading

import pytest
from watched_training import Training, writers

from dynaquant.store.run import Run


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
    assert f"{name} was called in the writing thread" in caplog.text
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
    assert "asked for the result of its own write" in caplog.text


def test_a_write_cannot_be_cancelled(tmp_path):
    with Training().checkpointer(tmp_path) as ckpt:
        assert not ckpt.save(1).cancel()
    assert Run(tmp_path).steps() == [1]


def test_a_garbage_collected_checkpointer_releases_the_run_and_ends_its_thread(tmp_path):
    before = writers()
    for step in (1, 2):
        ckpt = Training().checkpointer(tmp_path)
        ckpt.save(step).result()
        del ckpt
        gc.collect()
    assert Run(tmp_path).steps() == [1, 2]
    assert writers() == before


LAST_REFERENCE_IN_THE_THREAD = """
import sys, threading, time
from pathlib import Path
from dynaquant.saving.background import BackgroundWriter

class Owner:
    pass

def end():
    ends.set()
    time.sleep(0.5)
    Path(sys.argv[1]).write_text("ended")

owner, released, ends = Owner(), threading.Event(), threading.Event()
writer = BackgroundWriter(owner, end)
writer.hand_over(lambda owner=owner: released.wait(30))
del owner
released.set()
ends.wait(30)
"""


def test_the_process_waits_for_a_thread_that_had_the_last_reference_to_its_owner(tmp_path):
    command = [sys.executable, "-c", LAST_REFERENCE_IN_THE_THREAD, str(tmp_path / "end")]
    subprocess.run(command, check=True, timeout=120)
    assert (tmp_path / "end").read_text() == "ended"
