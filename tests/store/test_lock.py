"""A run has one writer, also if its folder is moved or replaced, and on file systems without ``flock``."""

import errno
import fcntl
import json
import os
import subprocess
import sys

import pytest
import torch
from committed import checkpoint_of, series
from faults import checkpoint_of as with_copy
from training import bits
from without_root import without_root

import dynaquant as dq
from dynaquant.errors import CheckpointError
from dynaquant.store import locks
from dynaquant.store.commit import WritableRun
from dynaquant.store.recoding import branch as branch_run
from dynaquant.store.retention import Retention, prune
from dynaquant.store.run import Run


@pytest.fixture
def run(tmp_path) -> WritableRun:
    (tmp_path / "run").mkdir()
    return WritableRun(tmp_path / "run")


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# The folder is not writable


@pytest.mark.parametrize("name", ["run", "run/new", "run/new/newer"])
def test_a_folder_that_is_not_writable_is_refused_at_once(run, name):
    run.folder.chmod(0o555)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"no checkpoint can be saved here, as .*/run is not writable .*dq\.load"):
        without_root(lambda: dq.Checkpointer(run.folder.parent / name, model))
    assert contents(run.folder) == {}


def test_a_folder_that_is_not_writable_can_be_read(run):
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with dq.Checkpointer(run.folder, model, quality="lossless") as ckpt:
        ckpt.save(1)
    run.folder.chmod(0o555)
    before = contents(run.folder)
    assert without_root(lambda: dq.load_into(other, run.folder)) == []
    assert torch.equal(other.weight, model.weight)
    assert bits(without_root(lambda: dq.load(run.folder))["model"]) == bits(model.state_dict())
    assert without_root(lambda: dq.follow(run.folder, other).update()) == 1
    with pytest.raises(CheckpointError, match="no checkpoint can be saved here"):
        without_root(lambda: dq.Checkpointer(run.folder, model))
    without_root(lambda: branch_run(run, run.file(1), run.folder.parent / "own"))
    with dq.Checkpointer(run.folder.parent / "own", other) as ckpt:
        assert ckpt.restore() == 1
    assert contents(run.folder) == before


# The folder was moved or replaced


def moved_away(folder, replaced: bool) -> None:
    folder.rename(folder.with_name("away"))
    if replaced:
        folder.mkdir()


@pytest.mark.parametrize(
    ("replaced", "reason"), [(True, "is another folder than the one that was opened"), (False, "no longer exists")]
)
def test_nothing_is_written_if_another_folder_has_taken_the_place_of_the_locked_one(run, replaced, reason):
    with run.locked():
        series(run, [1, 2])
        before = contents(run.folder)
        moved_away(run.folder, replaced)
        with pytest.raises(CheckpointError, match=reason):
            run.commit(checkpoint_of(3, {"w": torch.randn(8, 5)}), None)
        with pytest.raises(CheckpointError, match=reason):
            run.delete(1)
        assert contents(run.folder.with_name("away")) == before
        assert not replaced or contents(run.folder) == {}


def test_a_folder_that_was_deleted_and_created_again_counts_as_another_one(run):
    with run.locked():
        run.folder.rmdir()
        run.folder.mkdir()
        with WritableRun(run.folder).locked(), pytest.raises(CheckpointError, match="is another folder"):
            series(run, [1])
        assert contents(run.folder) == {}


def test_nothing_is_committed_if_the_folder_is_moved_while_a_checkpoint_is_written(run, monkeypatch):
    written = WritableRun._write_temporary

    def slow(self, *options):
        found = written(self, *options)
        moved_away(run.folder, True)
        return found

    with run.locked():
        monkeypatch.setattr(WritableRun, "_write_temporary", slow)
        with pytest.raises(CheckpointError, match="is another folder"):
            series(run, [1])
        assert contents(run.folder) == {}
    assert Run(run.folder.with_name("away")).steps() == []


def test_writing_continues_after_the_folder_is_put_back(run):
    with run.locked():
        series(run, [1])
        moved_away(run.folder, True)
        with pytest.raises(CheckpointError, match="put the old one back"):
            series(run, [2])
        run.folder.rmdir()
        run.folder.with_name("away").rename(run.folder)
        series(run, [2, 3])
        assert prune(run, Retention(dq.Keep(last=2))) == []
    assert run.steps() == [2, 3]


def test_a_training_whose_run_was_replaced_gets_an_error_and_loses_nothing(tmp_path):
    model = torch.nn.Linear(4, 4)
    with dq.Checkpointer(tmp_path / "run", model) as first:
        first.save(1).result()
        moved_away(tmp_path / "run", True)
        with dq.Checkpointer(tmp_path / "run", model) as second:
            assert isinstance(first.save(2).exception(), CheckpointError)
            second.save(7).result()
        with pytest.raises(CheckpointError, match="is another folder"):
            first.wait()
    assert Run(tmp_path / "run").steps() == [7]
    assert Run(tmp_path / "away").steps() == [1]


# Folders without flock


@pytest.fixture
def no_flock(monkeypatch):
    """A file system without flock, like some Lustre and NFS mounts."""

    def unsupported(*_):
        raise OSError(code, os.strerror(code))

    code = errno.ENOLCK
    monkeypatch.setattr(fcntl, "flock", unsupported)


@pytest.mark.parametrize("code", ["ENOLCK", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EINVAL", "EBADF"])
def test_a_folder_that_cannot_be_locked_gets_a_lock_file(run, monkeypatch, code):
    def unsupported(*_):
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with run.locked():
        series(run, [1])
        with pytest.raises(CheckpointError, match=r"process \d+ on .* is writing to this run") as caught, run.locked():
            pass
        assert f"process {os.getpid()} on " in str(caught.value)
        assert f"delete {run.folder / locks.LOCK_FILE}" in str(caught.value)
        series(run, [2])
    assert sorted(contents(run.folder)) == ["step-000000000001.dqc", "step-000000000002.dqc"]
    with run.locked():
        pass


def test_other_errors_of_flock_are_raised(run, monkeypatch):
    def failing(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", failing)
    with pytest.raises(OSError, match="Input/output error"), run.locked():
        pass


HOLDS = """
import errno, fcntl, os, signal, sys
def unsupported(*_):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = unsupported
from pathlib import Path
from dynaquant.store.locks import lock_for_writing
with lock_for_writing(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("no_flock")
def test_a_run_stays_locked_until_the_other_process_ends_even_if_it_is_killed(run):
    command = [sys.executable, "-c", HOLDS, run.folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=rf"process {other.pid} on .* is writing to this run"), run.locked():
            pass
        other.stdin.write("\n")
    assert (run.folder / locks.LOCK_FILE).exists()
    with run.locked():
        series(run, [1])
    assert run.steps() == [1]


def owned_by(run: Run, **owner) -> None:
    known = {"machine": locks._machine(), "pid": os.getpid(), "token": "of another process"}
    (run.folder / locks.LOCK_FILE).write_text(json.dumps({**known, **owner}))


@pytest.mark.usefixtures("no_flock")
def test_a_process_of_another_machine_is_never_assumed_to_have_ended(run):
    owned_by(run, machine="elsewhere pid:[1]", pid=2**30)
    with pytest.raises(CheckpointError, match=r"on elsewhere .*If it no longer runs, delete"), run.locked():
        pass
    (run.folder / locks.LOCK_FILE).unlink()
    with run.locked():
        series(run, [1])


@pytest.mark.usefixtures("no_flock")
def test_the_lock_of_a_killed_process_with_the_same_number_is_taken_over(run):
    owned_by(run)
    with run.locked():
        series(run, [1])


@pytest.mark.usefixtures("no_flock")
@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"pid": "x"}'])
def test_a_lock_file_without_an_owner_is_kept(run, content):
    (run.folder / locks.LOCK_FILE).write_text(content)
    with pytest.raises(CheckpointError, match="is writing to this run, or was killed while doing so"), run.locked():
        pass
    assert (run.folder / locks.LOCK_FILE).read_text() == content


@pytest.mark.usefixtures("no_flock")
def test_a_writer_whose_lock_file_was_replaced_stops_writing(run):
    with run.locked():
        series(run, [1])
        owned_by(run, pid=1)
        with pytest.raises(CheckpointError, match="no longer names this process but process 1 on"):
            series(run, [2])
    assert (run.folder / locks.LOCK_FILE).exists()  # the file belongs to another writer
    assert run.steps() == [1]


@pytest.mark.usefixtures("no_flock")
def test_a_forked_child_that_leaves_the_block_does_not_release_the_lock(run):
    held = locks.lock_for_writing(run.folder)
    held.__enter__()
    child = os.fork()
    if child == 0:
        try:
            held.__exit__(None, None, None)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (run.folder / locks.LOCK_FILE).exists()
    held.__exit__(None, None, None)
    assert not (run.folder / locks.LOCK_FILE).exists()


def test_files_of_another_writer_in_the_new_folder_are_left_alone(run, monkeypatch):
    names = ["step-000000000001.dqc.tmp", "exact-000000000001-000000000001.dqc"]
    written = WritableRun._write_temporary

    def slow(self, *options):
        found = written(self, *options)
        if not run.folder.with_name("away").exists():
            moved_away(run.folder, True)
            for name in names:
                (run.folder / name).write_text("of another writer")
        return found

    with run.locked():
        monkeypatch.setattr(WritableRun, "_write_temporary", slow)
        with pytest.raises(CheckpointError, match="is another folder"):
            run.commit(with_copy(1, 1), None)
        assert sorted(contents(run.folder)) == sorted(names)
