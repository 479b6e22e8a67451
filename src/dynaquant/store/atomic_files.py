"""Writes a file or folder atomically: to a temporary one beside it, which is synced and then renamed.

A killed process leaves its temporary file. The next process that writes the same output deletes it.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dynaquant.errors import CheckpointError
from dynaquant.store import flock
from dynaquant.store.files import add_disk_full_note, check_output, check_parent, sync, sync_parent


@contextmanager
def atomic_file(out: Path) -> Iterator[BinaryIO]:
    """Yield a file to write into. It becomes ``out`` at the end of the block; on any error, nothing is left.

    After a power loss, too, ``out`` is either the old file or the whole new one. Raises CheckpointError if ``out``
    cannot be a file, OSError if it cannot be written.
    """
    check_output(out)
    temporary = temporary_path(out)
    file = temporary.open("xb")  # outside the try block: if the file exists already, it must not be deleted
    try:
        with in_use(temporary):
            with file:
                yield file
            sync(temporary)
            temporary.replace(out)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        add_disk_full_note(error, out)
        raise
    sync_parent(out)


@contextmanager
def atomic_folder(out: Path, replacing: bool = False) -> Iterator[Path]:
    """Yield a folder to write into. It becomes ``out`` at the end of the block; on any error, nothing is left.

    After a power loss, too, ``out`` is either missing or whole. replacing: whether it takes the place of an older
    folder, which stays as it is until the new one is whole. Raises CheckpointError if ``out`` exists and is not an
    empty folder, or, if replacing, not a folder.
    """
    if out.exists() and not (out.is_dir() and (replacing or not any(out.iterdir()))):
        raise CheckpointError(f"{out} exists and is not an empty folder; choose another name")
    check_parent(out)
    temporary = temporary_path(out)
    temporary.mkdir()
    try:
        with in_use(temporary):
            yield temporary
            for path in (*temporary.rglob("*"), temporary):
                sync(path)
            if replacing and out.exists():
                _swap(temporary, out)
            else:
                temporary.replace(out)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        add_disk_full_note(error, out)
        raise
    sync_parent(out)


def _swap(new: Path, out: Path) -> None:
    """Put a folder in the place of another one, which is deleted. Both are there again if that fails."""
    old = new.with_suffix(".old.tmp")
    out.replace(old)
    try:
        new.replace(out)
    except BaseException:
        old.replace(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def temporary_path(out: Path) -> Path:
    """Return a temporary path beside ``out``. Deletes the temporary files of killed processes for ``out``.

    A process locks the file that it writes (``in_use``), and the system drops the lock when the process dies.
    """
    names = re.compile(re.escape(out.name) + r"\.dynaquant-\d+(\.old)?\.tmp")
    for leftover in out.absolute().parent.iterdir():
        if names.fullmatch(leftover.name):
            _delete_unless_in_use(leftover)
    return out.with_name(f"{out.name}.dynaquant-{os.getpid()}.tmp")


@contextmanager
def in_use(temporary: Path) -> Iterator[None]:
    """Lock a temporary file or folder for the block, so that no other process deletes it as a leftover.

    On a file system without locks, leftovers are never deleted.
    """
    with flock.locked(temporary, wait=False):
        yield


def _delete_unless_in_use(leftover: Path) -> None:
    if not flock.AVAILABLE:
        return
    with suppress(OSError):
        descriptor = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not flock.lock(descriptor):
                return
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        finally:
            os.close(descriptor)
