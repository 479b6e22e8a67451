"""Holding a run's folder for one writer, and noticing when the folder at its path is another one.

``flock`` on the folder itself: the system drops it when the process dies, however it dies. Some network file systems
have no ``flock``. There a file in the folder names the process that holds it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from dynaquant.errors import CheckpointError
from dynaquant.store import file_lock
from dynaquant.store.files import make_folder

LOCK_FILE = "writer.lock"
"""The file that stands for a lock where there is no ``flock``."""

_locked: set[int] = set()  # descriptors of the folders that this process holds for writing
_tokens: set[str] = set()  # of the lock files that this process holds


def _let_go_in_child() -> None:
    # A forked child (a DataLoader's worker) would otherwise hold the run for as long as it outlives a killed training.
    for descriptor in _locked:
        os.close(descriptor)
    _locked.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class FolderLock:
    """A folder that this process holds for writing, as ``holding`` gives it."""

    def __init__(self, folder: Path, descriptor: int, file: _LockFile | None) -> None:
        self._folder, self._file = folder, file
        # No other folder gets the same numbers while the descriptor is open.
        self._identity = _identity(os.fstat(descriptor))

    def check(self) -> None:
        """Raises CheckpointError when the folder at the path is not the one that is held."""
        try:
            there = _identity(os.stat(self._folder))
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(
                f"{self._folder} is not there any more, so nothing was written: it was moved or deleted, or the "
                "working directory changed, while it was open for writing; put it back, or close this Checkpointer and "
                "make a new one"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{self._folder}: cannot be read ({error.strerror}); nothing was written") from error
        if there != self._identity:
            raise CheckpointError(
                f"{self._folder} is another folder than the one that was opened for writing, so nothing was written: "
                "it was replaced meanwhile; put the old one back, or close this Checkpointer and make a new one"
            )
        if self._file is not None:
            self._file.check()


@contextmanager
def holding(folder: Path) -> Iterator[FolderLock]:
    """Holds a folder for writing, and makes it where it is not there.

    Raises CheckpointError when another process, or another part of this one, holds it, or a file is in the way.
    """
    if not file_lock.AVAILABLE:
        raise CheckpointError(f"{folder}: runs can be written on Linux and macOS only; this system reads them")
    make_folder(folder)
    process = os.getpid()
    descriptor = os.open(folder, os.O_RDONLY)
    _locked.add(descriptor)
    file = None
    try:
        held = file_lock.lock(descriptor)
        if held is False:
            raise CheckpointError(
                f"{folder}: another Checkpointer, here or in another process, is writing to this run; "
                "close it or use another folder"
            )
        if held is None:
            file = _LockFile(folder)
        yield FolderLock(folder, descriptor, file)
    finally:
        if file is not None:
            file.release()
        if descriptor in _locked and os.getpid() == process:  # a forked child may have the number for another file
            _locked.remove(descriptor)
            file_lock.unlock(descriptor)  # a child forked just now may not have let go yet
            os.close(descriptor)


class _LockFile:
    """A lock that is a file naming its owner. It outlives a killed process.

    On the same machine the next writer sees that the process is gone and takes the lock. Processes of other machines
    cannot be looked for, so there a user has to delete the file.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._token = uuid4().hex
        self._owner = {"machine": _machine(), "pid": os.getpid(), "token": self._token}
        owner = self._read()
        if owner is not None and _is_gone(owner):
            self._path.unlink(missing_ok=True)
        try:
            with self._path.open("x") as file:
                try:
                    json.dump(self._owner, file)
                    file.flush()
                except BaseException:  # nobody could take a lock that names no owner
                    self._path.unlink(missing_ok=True)
                    raise
        except FileExistsError:
            raise CheckpointError(
                f"{folder}: {_in_words(owner)} is writing to this run, or was killed while it did; close it or use "
                f"another folder. If it no longer runs, delete {self._path}"
            ) from None
        _tokens.add(self._token)

    def check(self) -> None:
        """Raises CheckpointError when another process has taken the lock: it found the same owner gone as this one."""
        if (owner := self._read()) != self._owner:
            raise CheckpointError(
                f"{self._path} no longer names this process but {_in_words(owner)}, so nothing was written; one run "
                "needs one writer: close this Checkpointer"
            )

    def release(self) -> None:
        """Lets the lock go, unless this is a forked child of the process that holds it."""
        _tokens.discard(self._token)
        if self._owner["pid"] == os.getpid() and self._read() == self._owner:
            self._path.unlink(missing_ok=True)

    def _read(self) -> Any:
        try:
            return json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return None


def _machine() -> str:
    """What a process number belongs to: the host and, as containers number processes on their own, the namespace."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _is_gone(owner: Any) -> bool:
    """Whether the owner of a lock file certainly runs no longer."""
    if not isinstance(owner, dict) or owner.get("machine") != _machine() or type(owner.get("pid")) is not int:
        return False
    if owner["pid"] == os.getpid():
        return owner.get("token") not in _tokens  # a process that had the same number
    try:
        os.kill(owner["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False


def _in_words(owner: Any) -> str:
    if not isinstance(owner, dict):
        return "another process"
    return f"process {owner.get('pid')} on {str(owner.get('machine')).split(' ', 1)[0]}"
