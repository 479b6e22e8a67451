"""Commits are atomic: if one fails or is killed, the newest checkpoint stays, with its lossless copy."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import faults
import pytest
import torch
from committed import damage_levels, series
from crafted import header, write
from faults import STEPS, at_call, checkpoint_of, commit_all
from training import bits

import dynaquant as dq
from dynaquant.errors import CheckpointError
from dynaquant.restore.stored_checkpoint import load_lossless_copy
from dynaquant.store.commit import WritableRun
from dynaquant.store.recoding import branch
from dynaquant.store.run import Run


def assert_newest(folder, numbers: tuple[int, ...]) -> int:
    """Asserts that a new process finds one of these commits as the newest, with its lossless copy. Returns which."""
    run = Run(folder)
    summaries, broken = run.summaries()
    assert broken == []
    if not summaries:
        assert 0 in numbers
        return 0
    file = run.file(summaries[-1].step)
    number = int(run.load(file)["number"][0])
    assert number in numbers
    assert file.header.step == STEPS[number - 1]
    skipped: list[CheckpointError] = []
    found = load_lossless_copy(run, file, skipped, run.load)
    assert skipped == []
    assert found is not None
    assert float(found[1]["number"][0]) == number + 0.5
    return number


def assert_next_commit_works(folder) -> None:
    """Asserts that the next commit leaves only its own lossless copy, and no temporary file."""
    run = WritableRun(folder)
    with run.locked():
        run.commit(checkpoint_of(1, 4), None)
    assert_newest(folder, (4,))
    names = os.listdir(folder)
    assert sum(name.startswith("exact-") for name in names) == 1
    assert not any(name.endswith(".tmp") for name in names)


# Lossless copies


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_at_any_call_loses_neither_the_newest_checkpoint_nor_its_lossless_copy(tmp_path, when):
    n, failed = 0, True
    while failed:
        n += 1
        folder, done, failed = tmp_path / str(n), [0], False

        def fail() -> None:
            raise OSError(errno.EIO, "Input/output error")

        run = WritableRun(folder)
        with run.locked(), at_call(n, when, fail):
            try:
                commit_all(run, done.append)
            except OSError:
                failed = True
        assert_newest(folder, (done[-1], done[-1] + 1) if failed else (4,))
        if failed and done[-1]:  # the same process continues
            with run.locked():
                run.commit(checkpoint_of(1, 4), None)
            assert_newest(folder, (4,))
        assert_next_commit_works(folder)
    assert n > 40


@pytest.fixture
def killer():
    command = [sys.executable, Path(faults.__file__)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        yield process
        process.stdin.close()


def test_a_kill_before_any_call_loses_neither_the_newest_checkpoint_nor_its_lossless_copy(tmp_path, killer):
    n, end = 0, "killed"
    while end == "killed":
        n += 1
        folder = tmp_path / str(n)
        folder.mkdir()
        killer.stdin.write(f"{folder} {n}\n")
        *done, end = killer.stdout.readline().split()
        last = int(done[-1]) if done else 0
        assert_newest(folder, (last, last + 1) if end == "killed" else (4,))
        assert_next_commit_works(folder)
    assert n > 40


def test_a_lossless_copy_of_another_commit_is_ignored(tmp_path):
    run = WritableRun(tmp_path)
    run.commit(checkpoint_of(1, 1), None)
    run.commit(checkpoint_of(1, 2), None)
    stray = next(tmp_path.glob("exact-*"))
    kept = stray.read_bytes()
    run.commit(checkpoint_of(1, 3, copy=False), None)
    for name in (stray.name, "exact-000000000001-000000000003.dqc", "exact-000000000001.dqc"):
        (tmp_path / name).write_bytes(kept)
    assert Run(tmp_path).lossless_copy(Run(tmp_path).file(1)) is None


def saved(folder, model, steps=(1, 2)) -> None:
    with dq.Checkpointer(folder, model, keep=dq.Keep(lossless_copy=True)) as ckpt:
        for step in steps:
            ckpt.save(step).result()


def test_restore_says_that_the_lossless_copy_is_missing(tmp_path, caplog):
    model = torch.nn.Linear(64, 64)
    saved(tmp_path, model)
    exact = bits(model.state_dict())
    with dq.Checkpointer(tmp_path, model, keep=dq.Keep(lossless_copy=True)) as ckpt:
        assert ckpt.restore(1) == 1
        assert ckpt.skipped == []  # its copy was deleted by the next save, as always
        assert ckpt.restore() == 2
        assert ckpt.skipped == []
        assert bits(model.state_dict()) == exact
        next(tmp_path.glob("exact-*")).unlink()
        with caplog.at_level(logging.WARNING):
            assert ckpt.restore() == 2
        assert bits(model.state_dict()) != exact
        (reason,) = ckpt.skipped
        assert str(reason) == (
            "checkpoint step 2: its lossless copy, exact-000000000002-000000000002.dqc, is not in "
            f"{tmp_path} (was it deleted by hand?)"
        )
        assert str(reason) in caplog.text


def test_a_branch_from_a_checkpoint_whose_lossless_copy_was_deleted_is_restored_without_a_warning(tmp_path):
    saved(tmp_path / "run", torch.nn.Linear(8, 8))
    run = Run(tmp_path / "run")
    branch(run, run.file(1), tmp_path / "new")
    with dq.Checkpointer(tmp_path / "new", torch.nn.Linear(8, 8), keep=dq.Keep(lossless_copy=True)) as ckpt:
        assert ckpt.restore() == 1
        assert ckpt.skipped == []


# Sequence numbers


def hidden_as(path: Path, how: str, monkeypatch) -> None:
    """Makes a file unreadable for a while. Its content is kept in the file ``kept``."""
    path.rename(path.with_name("kept"))
    if how == "an error of the disk":
        opened = Path.open

        def failing(self, *options, **others):
            if self == path and os.path.getsize(path) == 0:
                raise OSError(errno.EIO, "Input/output error")
            return opened(self, *options, **others)

        path.touch()
        monkeypatch.setattr(Path, "open", failing)
    elif how == "a stale handle":
        path.symlink_to(path.name)  # the system fails to follow it
    elif how == "truncated":
        path.write_bytes(path.with_name("kept").read_bytes()[:-1])
    elif how == "damaged":
        content = bytearray(path.with_name("kept").read_bytes())
        content[-60] ^= 1
        path.write_bytes(content)


def back(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.with_name("kept").rename(path)


HIDDEN = ["an error of the disk", "a stale handle", "truncated", "damaged"]


@pytest.mark.parametrize("how", [*HIDDEN, "missing"])
def test_a_file_that_becomes_readable_again_counts_as_older_than_later_commits(tmp_path, how, monkeypatch):
    run = WritableRun(tmp_path)
    series(run, [10, 20, 30])
    hidden_as(run.path(30), how, monkeypatch)
    assert run.steps() == [10, 20]
    run.commit(checkpoint_of(21, 1), None)
    run.commit(checkpoint_of(22, 2), None)
    back(run.path(30))
    run.commit(checkpoint_of(23, 3), None)
    assert Run(tmp_path).steps() == [10, 20, 30, 21, 22, 23]
    assert [summary.sequence for summary in Run(tmp_path).summaries()[0]][:3] == [1, 2, 3]


@pytest.mark.parametrize("how", HIDDEN)
def test_a_new_process_that_cannot_read_the_newest_checkpoint_continues_from_the_one_before(tmp_path, how, monkeypatch):
    model = torch.nn.Linear(8, 8)
    with dq.Checkpointer(tmp_path, model) as ckpt:
        for step in (10, 20, 30):
            ckpt.save(step).result()
    path = Run(tmp_path).path(30)
    hidden_as(path, how, monkeypatch)
    for step, before in ((21, 20), (22, 21)):
        with dq.Checkpointer(tmp_path, model) as ckpt:
            assert ckpt.restore() == before
            assert [str(path) in str(error) for error in ckpt.skipped] == [True]
            ckpt.save(step).result()
    back(path)
    with dq.Checkpointer(tmp_path, model) as ckpt:
        assert ckpt.restore() == 22
        assert ckpt.skipped == []
    assert Run(tmp_path).steps() == [10, 20, 30, 21, 22]


def test_two_files_that_become_readable_again_count_as_older_than_later_commits(tmp_path):
    run = WritableRun(tmp_path)
    series(run, [10, 20, 30, 40, 50])
    for step in (20, 30):
        run.delete(step)
    kept = {step: run.path(step).read_bytes() for step in (40, 50)}
    for step in kept:
        run.path(step).write_bytes(b"not a checkpoint")
    WritableRun(tmp_path).commit(checkpoint_of(11, 1), None)
    for step, content in kept.items():
        run.path(step).write_bytes(content)
    assert Run(tmp_path).steps() == [10, 40, 50, 11]


def test_nothing_is_committed_if_the_folder_cannot_be_read(tmp_path, monkeypatch):
    run = WritableRun(tmp_path)
    series(run, [1, 2])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def failing(_folder):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", failing)
        with pytest.raises(CheckpointError, match=r"cannot be read \(Stale file handle\)"):
            WritableRun(tmp_path).commit(checkpoint_of(3, 3), None)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_damaged_values_leave_no_gap_in_the_sequence_numbers(tmp_path):
    run = WritableRun(tmp_path)
    series(run, [1, 2])
    damage_levels(run, 2)
    run.commit(checkpoint_of(3, 3), None)
    assert [summary.sequence for summary in run.summaries()[0]] == [1, 2, 3]


def test_the_highest_sequence_number_in_a_crafted_file_is_an_error(tmp_path):
    write(tmp_path, header(sequence=2**63 - 1))
    with pytest.raises(CheckpointError, match=r"no higher number for the next commit; move its file out"):
        WritableRun(tmp_path).commit(checkpoint_of(2, 2), None)
    assert os.listdir(tmp_path) == ["step-000000000001.dqc"]
