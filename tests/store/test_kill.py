"""kill -9 at any moment of a save, 200 times: the run always restores the last committed checkpoint."""

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from killed import build

from dynaquant.engine.forms.stored import values_of
from dynaquant.store.run import Run

SUPPORT = Path(__file__).parents[1] / "support"

KILLS = 100


@pytest.fixture(params=["grid", "published"])
def method(request) -> str:
    return request.param


@pytest.fixture
def trainer(tmp_path, method) -> Iterator[subprocess.Popen]:
    command = [sys.executable, SUPPORT / "killed.py", tmp_path / "run", method]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        yield process
        process.stdin.close()


def said(trainer: subprocess.Popen) -> tuple[str, int]:
    """Returns the next report of the trainer: a word, and a process number, a step or 0."""
    word, number = trainer.stdout.readline().split()
    return word, int(number)


def start(trainer: subprocess.Popen) -> int:
    """Starts a training. Returns its process number."""
    trainer.stdin.write("go\n")
    word, process = said(trainer)
    assert word == "started"
    return process


def kill(trainer: subprocess.Popen, process: int) -> dict[str, int]:
    """Kills the training. Returns the last number that it reported with each word."""
    os.kill(process, signal.SIGKILL)
    return dict(iter(lambda: said(trainer), ("ended", 0)))


def seconds_of_a_save(trainer: subprocess.Popen) -> float:
    """Returns what the first save of a process takes, longer than the next ones: it is the one to be killed."""
    found = []
    for _ in range(5):
        process, times = start(trainer), {}
        while "committed" not in times:
            word, _ = said(trainer)
            times[word] = time.perf_counter()
        kill(trainer, process)
        found.append(times["committed"] - times["saving"])
    return statistics.median(found)


def restore(folder: Path, method: str) -> int:
    """Restores into a new training. Returns the step, and asserts that the weights are those of that step."""
    model, ckpt = build(str(folder), method)
    with ckpt:
        assert list(folder.glob("*.tmp")) == []
        step = ckpt.restore() or 0
        assert ckpt.skipped == []
    assert torch.equal(model.bias.detach(), torch.full((200,), float(step)))
    return step


def check_all(run: Run, known: dict[int, str]) -> dict[int, str]:
    """Asserts that every checkpoint verifies and is the same as when first seen. Returns their identities."""
    summaries, broken = run.summaries()
    assert broken == []
    assert len(summaries) >= 3
    for summary in summaries:
        tensors = run.load(run.file(summary.step))
        assert torch.equal(values_of(tensors["model.bias"]), torch.full((200,), float(summary.step)))
        assert known.get(summary.step, summary.identity) == summary.identity
    return {summary.step: summary.identity for summary in summaries}


def test_a_kill_at_any_moment_loses_no_committed_checkpoint(tmp_path, trainer, method):
    folder, draw = tmp_path / "run", random.Random(0)
    duration = seconds_of_a_save(trainer)
    last, identities, inside = restore(folder, method), {}, 0
    for _ in range(KILLS):
        process, said_last = start(trainer), {}
        while "saving" not in said_last and draw.random() < 0.9:  # sometimes even before the first save
            said_last.update([said(trainer)])
        time.sleep(draw.uniform(0, 2 * duration))
        said_last |= kill(trainer, process)
        assert said_last.get("restored", last) == last
        committed = said_last.get("committed", last)
        strays = list(folder.glob("*.tmp"))
        last = restore(folder, method)
        assert committed <= last <= said_last.get("saving", committed)
        inside += bool(strays) or last > committed
        identities = check_all(Run(folder), identities)
        assert last == max(identities)
    assert inside >= KILLS / 5  # fewer on a busy machine, where a process is late
    _, ckpt = build(str(folder), method)
    with ckpt:
        ckpt.restore()
        ckpt.save(last + 1)
    assert len(list(folder.iterdir())) == 3
