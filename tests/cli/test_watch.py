"""``dynaquant watch``: the checkpoints of a run in a terminal, as they are saved."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import STEPS, call, data, failed, make_run
from torch import nn

import dynaquant as dq
from dynaquant.report.watched import WatchedRun
from dynaquant.store.container import CheckpointFile
from dynaquant.store.run import Run
from dynaquant.store.tags import set_tag


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_run(folder)
    set_tag(Run(folder), "best", Run(folder).file(60))
    return folder


def cells(shown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if line[:1] == "│"]


def test_once_prints_a_row_for_each_checkpoint_and_totals(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    shown = call("watch", run, "--once")
    rows = cells(shown)
    records = data("log", run)
    assert [int(row[0]) for row in rows] == STEPS
    assert [row[2] for row in rows] == ["keyframe", "delta of 20", "delta of 40", "keyframe"]
    assert [row[4] for row in rows] == [
        f"{sum(s['raw'] for s in r['roles'].values()) / r['total']['stored']:.1f}×" for r in records
    ]
    assert [row[7] for row in rows] == ["", "", "best", ""]
    assert re.search(r"4 checkpoints: [\d.]+ kB instead of [\d.]+ kB \([\d.]+×\); the last [\d.]+ \w+ ago", shown)


def test_json_is_the_log_with_times(run):
    seen = data("watch", run)
    expected = [each | {"committed": each["saved_at"]} for each in data("log", run)]
    assert [each | {"replaced": False} for each in seen] == expected


def test_ages_go_by_the_commit_not_by_the_file(tmp_path):
    make_run(tmp_path)
    before = [each["committed"] for each in data("watch", tmp_path)]
    assert before == sorted(before)
    call("compact", tmp_path, "--keyframe-every", "1")
    for step in STEPS:
        os.utime(Run(tmp_path).path(step), (0, 0))
    assert [each["committed"] for each in data("watch", tmp_path)] == before


def test_quality_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with dq.Checkpointer(tmp_path, nn.Linear(30, 30), evaluate=lambda m: float(m.weight.square().sum())) as ckpt:
        quality = ckpt.save(1).result().quality
    with dq.Checkpointer(tmp_path, nn.Linear(30, 30), quality="lossless") as ckpt:
        ckpt.save(2)
    assert [row[5] for row in cells(call("watch", tmp_path, "--once"))] == [f"{quality.degradation:+.2%}", "exact"]


def test_a_missing_run_is_an_error_with_once_and_a_pipe_without(tmp_path, run, monkeypatch, capsys):
    failed(monkeypatch, capsys, "does not exist", "watch", tmp_path / "no", "--once")
    failed(monkeypatch, capsys, "a pipe or a file: give --once", "watch", run)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    make_run(tmp_path)
    Run(tmp_path).path(40).write_bytes(b"nonsense")
    shown = call("watch", tmp_path, "--once")
    assert "1 file cannot be read" in shown
    assert "step-000000000040.dqc" in shown


def test_each_header_is_read_once(tmp_path, monkeypatch):
    opened = []
    plain = CheckpointFile.__init__
    monkeypatch.setattr(CheckpointFile, "__init__", lambda self, path: opened.append(path.name) or plain(self, path))
    watched = WatchedRun(tmp_path)
    assert watched.look() == ([], [])
    with dq.Checkpointer(tmp_path, nn.Linear(9, 9), keep=dq.Keep(last=2)) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step).result()
            watched.look()
    opened.clear()
    found, broken = watched.look()
    assert ([seen.record.step for seen in found], broken) == ([2, 3], [])
    assert opened == []


class Terminal:
    """The command in a terminal of 24 lines."""

    def __init__(self, folder: Path) -> None:
        self._end, inside = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dynaquant.cli", "watch", str(folder)],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "100", "LINES": "24", "TERM": "xterm"},
        )
        os.close(inside)

    def wait_for(self, pattern: str) -> None:
        """Read until the text that follows what was found before matches."""
        deadline = time.monotonic() + 120
        while (found := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < deadline, self.shown
            assert self.process.poll() is None, self.shown
            if select.select([self._end], [], [], 0.2)[0]:
                self.shown += os.read(self._end, 65536).decode(errors="replace")
        self.shown = self.shown[found.end() :]

    def interrupt(self) -> tuple[int, str]:
        """Press Ctrl-C. Returns the exit code and what was printed since."""
        os.killpg(self.process.pid, signal.SIGINT)
        deadline = time.monotonic() + 120
        while self.process.poll() is None or select.select([self._end], [], [], 0.1)[0]:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._end], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self._end, 65536).decode(errors="replace")
                except OSError:  # the process has closed the terminal
                    break
        os.close(self._end)
        return self.process.wait(60), self.shown


@pytest.fixture
def terminal(tmp_path):
    opened = Terminal(tmp_path / "run")
    yield opened
    opened.process.kill()
    opened.process.wait()


def test_the_table_grows_while_a_training_saves_and_ctrl_c_ends_it(terminal, tmp_path):
    terminal.wait_for("waiting for the first")
    model = nn.Linear(9, 9)
    with dq.Checkpointer(tmp_path / "run", model) as ckpt:
        for step in (100, 200):
            with torch.no_grad():
                model.weight += 1
            ckpt.save(step).result()
            terminal.wait_for(rf"│ {step} ")
        terminal.wait_for("2 checkpoints: ")
        for step in range(300, 3300, 100):
            ckpt.save(step).result()
        terminal.wait_for(r"│ 3200 ")
        assert "│ 100 " not in terminal.shown  # only the last ones have room
    code, rest = terminal.interrupt()
    assert code == 130  # as any command that Ctrl-C ends
    assert "Traceback" not in rest
    assert "\x1b[?25h" in rest  # the cursor is shown again
