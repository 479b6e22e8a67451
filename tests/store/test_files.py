"""Files and folders are written atomically, also if power is lost."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import dynaquant as dq
from dynaquant.interop.packing import Packer, compress
from dynaquant.store import locks
from dynaquant.store.atomic_files import atomic_file, atomic_folder
from dynaquant.store.run import Run
from dynaquant.store.tags import remove_tag, set_tag, tags_of
from dynaquant.store.verifying import damage


@pytest.fixture
def done(monkeypatch):
    """Records syncs and renames in their order, as pairs of the operation and the file."""
    order = []

    def noting(what, do, path_of):
        def noted(first, *others, **options):
            order.append((what, path_of(first)))
            return do(first, *others, **options)

        return noted

    monkeypatch.setattr(os, "fsync", noting("durable", os.fsync, lambda number: os.readlink(f"/proc/self/fd/{number}")))
    monkeypatch.setattr(os, "replace", noting("named", os.replace, str))
    monkeypatch.setattr(os, "link", noting("named", os.link, str))
    return order


def test_a_file_is_synced_before_it_is_renamed_and_its_folder_afterwards(tmp_path, done):
    with atomic_file(tmp_path / "out") as file:
        file.write(b"whole")
    temporary = done[0][1]
    assert Path(temporary).name.startswith("out.dynaquant-")
    assert done == [("durable", temporary), ("named", temporary), ("durable", str(tmp_path))]
    assert (tmp_path / "out").read_bytes() == b"whole"


def test_a_folder_and_its_files_are_synced_before_it_is_renamed_and_its_parent_afterwards(tmp_path, done):
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_bytes(b"whole")
        (folder / "index").write_text("{}")
    temporary = done[-2][1]
    assert sorted(done[:-2]) == [
        ("durable", f"{temporary}{inside}") for inside in ("", "/deep", "/deep/file", "/index")
    ]
    assert done[-2:] == [("named", temporary), ("durable", str(tmp_path))]


def test_checkpoints_compressed_files_and_tags_are_synced_before_they_are_renamed(tmp_path, done):
    with dq.Checkpointer(tmp_path / "run", nn.Linear(4, 4)) as ckpt:
        ckpt.save(1).result()
    set_tag(Run(tmp_path / "run"), "best", Run(tmp_path / "run").file(1))
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    compress(tmp_path / "m.pt", tmp_path / "m.dqc", Packer())
    names = [i for i, (what, _) in enumerate(done) if what == "named"]
    assert len(names) == 3
    for i in names:
        assert done[i - 1] == ("durable", done[i][1])
        assert done[i + 1] == ("durable", os.path.dirname(done[i][1]))


def half(place) -> None:
    with place as out:
        if isinstance(out, Path):
            (out / "file").write_text("half")
        else:
            out.write(b"half")
        raise ZeroDivisionError


def test_an_error_leaves_no_file_behind_and_changes_none(tmp_path):
    (tmp_path / "out").write_text("precious")
    for place in (atomic_file(tmp_path / "out"), atomic_folder(tmp_path / "new")):
        with pytest.raises(ZeroDivisionError):
            half(place)
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out").read_text() == "precious"


def test_a_folder_is_replaced_by_a_whole_one_or_stays(tmp_path, monkeypatch):
    out, replace = tmp_path / "out", os.replace
    out.mkdir()
    (out / "old").touch()

    def failing(source, target):
        if target == out and not str(source).endswith(".old.tmp"):
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    with pytest.raises(ZeroDivisionError):
        half(atomic_folder(out, replacing=True))
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", failing)
        with pytest.raises(OSError, match="Input/output error"), atomic_folder(out, replacing=True):
            pass
    assert os.listdir(out) == ["old"]
    with atomic_folder(out, replacing=True) as folder:
        (folder / "new").touch()
    assert os.listdir(out) == ["new"]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127], ids=["letters", "two bytes each"])
def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path, name):
    for _ in "12":
        dq.save({"w": torch.ones(2)}, tmp_path / name)
    (tmp_path / name).unlink()
    for _ in "12":
        with atomic_folder(tmp_path / name, replacing=True) as folder:
            (folder / "file").touch()
    assert os.listdir(tmp_path) == [name]


def test_the_names_of_new_folders_are_synced(tmp_path, done, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with dq.Checkpointer("a/b/run", nn.Linear(4, 4)) as ckpt:
        made = {path for what, path in done if what == "durable"}
        assert made == {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")}
        ckpt.save(1).result()
    done.clear()
    set_tag(Run("a/b/run"), "best", Run("a/b/run").file(1))
    assert ("durable", str(tmp_path / "a" / "b" / "run")) in done
    done.clear()
    remove_tag(Run("a/b/run"), "best")
    assert done == [("durable", str(tmp_path / "a" / "b" / "run" / "tags"))]


@pytest.fixture
def folder_sync_fails_with(monkeypatch):
    """Makes syncing any folder fail, as CIFS and some file systems of FUSE do; returns what sets the error's number."""
    number, fsync = [errno.EINVAL], os.fsync

    def failing(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number[0], os.strerror(number[0]))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    return lambda error: number.__setitem__(0, error)


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_that_cannot_sync_folders_takes_files_runs_and_tags(tmp_path, folder_sync_fails_with, error):
    folder_sync_fails_with(error)
    model = nn.Linear(4, 4)
    dq.save(model.state_dict(), tmp_path / "m.dqc", quality="lossless")
    assert torch.equal(dq.load(tmp_path / "m.dqc")["weight"], model.weight)
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "deep").mkdir()
    with dq.Checkpointer(tmp_path / "new" / "run", model, quality="lossless") as ckpt:
        ckpt.save(1).result()
        ckpt.tag("mine")
        ckpt.save(2)
        ckpt.wait()
    remove_tag(Run(tmp_path / "new" / "run"), "mine")
    assert Run(tmp_path / "new" / "run").steps() == [1, 2]


def test_a_folder_that_a_broken_disk_does_not_sync_is_an_error(tmp_path, folder_sync_fails_with):
    folder_sync_fails_with(errno.EIO)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}'"):
        dq.save({"w": torch.ones(3)}, tmp_path / "m.dqc")


@pytest.fixture
def failing_sync(monkeypatch):
    """Makes syncing a folder fail once it holds a file whose name begins with one of these names."""
    names, fsync = set(), os.fsync

    def failing(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path) and any(name.startswith(tuple(names)) for name in os.listdir(path)):
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    return names


def test_the_error_names_a_folder_that_cannot_be_synced_and_the_checkpoint_is_in_place(tmp_path, failing_sync):
    with dq.Checkpointer(tmp_path, nn.Linear(4, 4)) as ckpt:
        ckpt.save(1).result()
        failing_sync.add("step-000000000002")
        ckpt.save(2)
        with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}'") as caught:
            ckpt.save(3)
        path = tmp_path / "step-000000000002.dqc"
        assert caught.value.__notes__ == [f"{path} is in place, but a power loss may undo that; check the disk"]
        failing_sync.clear()
        assert ckpt.restore() == 2
        ckpt.save(3).result()
    assert Run(tmp_path).steps() == [1, 2, 3]
    assert all(damage(Run(tmp_path), step) is None for step in (1, 2, 3))


def test_the_error_names_the_folder_of_any_other_file_that_cannot_be_synced(tmp_path, failing_sync):
    failing_sync.add("out")
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}'") as caught:  # noqa: SIM117
        with atomic_file(tmp_path / "out") as file:
            file.write(b"whole")
    assert "out is in place" in caught.value.__notes__[0]
    assert (tmp_path / "out").read_bytes() == b"whole"


KILLED = """
import os, signal, sys
import dynaquant as dq
from dynaquant.store import files
from dynaquant.store import tags
from dynaquant.store.run import Run
run = Run(sys.argv[1])
os.link = os.replace = lambda *_others, **_options: os.kill(os.getpid(), signal.SIGKILL)
tags.set_tag(run, "killed", run.file(1))
"""


def test_setting_a_tag_deletes_the_temporary_files_of_a_killed_process(tmp_path):
    with dq.Checkpointer(tmp_path, nn.Linear(4, 4)) as ckpt:
        ckpt.save(1).result()
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False, timeout=60)
    assert done.returncode < 0
    run = Run(tmp_path)
    assert [path.suffix for path in (tmp_path / "tags").iterdir()] == [".tmp"]
    assert tags_of(run) == []
    set_tag(run, "best", run.file(1))
    assert [path.name for path in (tmp_path / "tags").iterdir()] == ["best"]


def test_a_new_writer_deletes_the_temporary_files_of_a_killed_one(tmp_path):
    with dq.Checkpointer(tmp_path, nn.Linear(4, 4)) as ckpt:
        ckpt.save(1).result()
    for name in ("step-000000000002.dqc.tmp", "exact-000000000002.dqc.tmp"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / "step-000000000003.dqc.tmp").mkdir()  # a writer leaves no such folder
    with dq.Checkpointer(tmp_path, nn.Linear(4, 4)):
        assert sorted(os.listdir(tmp_path)) == ["step-000000000001.dqc", "step-000000000003.dqc.tmp"]


def test_a_new_file_has_the_permissions_of_the_one_that_it_replaces(tmp_path):
    path = tmp_path / "state.dqc"
    dq.save({"w": torch.ones(8)}, path)
    path.chmod(0o600)
    dq.save({"w": torch.zeros(8)}, path)
    assert path.stat().st_mode & 0o777 == 0o600
    with dq.Checkpointer(tmp_path / "run", nn.Linear(64, 64), keep=dq.Keep(last=1)) as ckpt:
        ckpt.save(1).result()
        own = Run(tmp_path / "run").path(1)
        own.chmod(0o600)
        ckpt.save(1).result()
    assert own.stat().st_mode & 0o777 == 0o600


def test_threads_may_write_the_same_file_and_the_last_one_wins(tmp_path):
    def write(number: int) -> None:
        for _ in range(20):
            with atomic_file(tmp_path / "out") as file:
                file.write(bytes([number]) * 1000)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    assert len(set((tmp_path / "out").read_bytes())) == 1
    assert os.listdir(tmp_path) == ["out"]


def test_a_temporary_file_that_another_process_took_for_a_leftover_is_made_again(tmp_path, monkeypatch):
    deleted = []

    @contextmanager
    def locked_too_late(path):
        if not deleted:
            path.unlink()
            deleted.append(path)
        with real(path) as found:
            yield found

    real = locks.locked
    monkeypatch.setattr(locks, "locked", locked_too_late)
    with atomic_file(tmp_path / "out") as file:
        file.write(b"whole")
    assert deleted
    assert (tmp_path / "out").read_bytes() == b"whole"
