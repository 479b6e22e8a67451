"""Writes a file or folder atomically: to a temporary one beside it, which is synced and then renamed.

A killed process leaves its temporary file. The next process that writes the same output deletes it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from dynaquant.errors import CheckpointError
from dynaquant.store import locks
from dynaquant.store.files import add_disk_full_note, check_output, check_parent, sync, sync_parent

_LONGEST_STEM = 100
"""Bytes of the longest name that its temporary name begins with. A longer one is hashed, to stay within 255 bytes."""


@contextmanager
def atomic_file(out: Path) -> Iterator[BinaryIO]:
    """Yield a file to write into. It becomes ``out`` at the end of the block; on any error, nothing is left.

    After a power loss, too, ``out`` is either the old file or the whole new one. Raises CheckpointError if ``out``
    cannot be a file, OSError if it cannot be written.
    """
    check_output(out)
    with _temporary(out, lambda path: path.touch(exist_ok=False)) as temporary:
        with temporary.open("wb") as file:
            keep_mode(temporary, out)
            yield file
        sync(temporary)
        temporary.replace(out)


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
    with _temporary(out, Path.mkdir) as temporary:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        if replacing and out.exists():
            _swap(temporary, out)
        else:
            temporary.replace(out)


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


def keep_mode(new: Path, out: Path) -> None:
    """Give a file that will replace another one its permissions. A new name has those of the process."""
    with suppress(OSError):  # there is no other one, or the file system has no permissions
        new.chmod(stat.S_IMODE(out.stat().st_mode))


@contextmanager
def _temporary(out: Path, create: Callable[[Path], None]) -> Iterator[Path]:
    """Create a temporary file or folder beside ``out`` for the block, which renames it. After an error, delete it.

    Deletes those of killed processes, too. A lock says that a file is no leftover, and the system drops it when the
    process dies. On a file system without locks, leftovers are never deleted.
    """
    stem = out.name if len(os.fsencode(out.name)) <= _LONGEST_STEM else blake3(os.fsencode(out.name)).hexdigest(16)
    names = re.compile(re.escape(stem) + r"\.dynaquant-[0-9a-f]+(\.old)?\.tmp")
    for leftover in out.absolute().parent.iterdir():
        if names.fullmatch(leftover.name):
            _delete_unless_in_use(leftover)
    try:
        with ExitStack() as lock:
            while True:
                path = out.with_name(f"{stem}.dynaquant-{secrets.token_hex(4)}.tmp")
                create(path)
                # Until it is locked, another process may take it for a leftover, lock it, and delete it.
                with suppress(FileNotFoundError):
                    lock.enter_context(locks.locked(path))
                    if path.exists():
                        break
                lock.close()
            try:
                yield path
            except BaseException:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
                raise
    except BaseException as error:
        add_disk_full_note(error, out)
        raise
    sync_parent(out)


def _delete_unless_in_use(leftover: Path) -> None:
    if not locks.AVAILABLE:
        return
    with suppress(OSError):
        descriptor = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not locks.lock(descriptor):
                return
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        finally:
            os.close(descriptor)
