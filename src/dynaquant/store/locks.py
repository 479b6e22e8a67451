"""Locks that the system drops when a process dies, however it dies; one writer per run.

The lock of a run is ``flock`` on its folder. Some network file systems have no ``flock``. There, a file in the folder
names the process that holds the lock. A writer also notices if another folder takes the place of the run's.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from dynaquant.errors import CheckpointError
from dynaquant.store.files import check_writable, make_folder

try:
    import fcntl

    AVAILABLE = True
except ImportError:  # Windows has none
    AVAILABLE = False
"""Whether this system has ``flock``. Some of its file systems may still lack it."""
_UNSUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF}
"""Error numbers of ``flock`` on a file system without locks."""

LOCK_FILE = "writer.lock"
"""The lock on file systems without ``flock``."""

_locked: set[int] = set()  # descriptors of the folders that this process has locked
_tokens: set[str] = set()  # of the lock files that this process holds


def lock(descriptor: int, wait: bool = False) -> bool | None:
    """Lock the open file or folder for this process alone. Returns whether it got the lock.

    Returns None if the file system has no locks. wait: wait until no other process holds the lock. Raises OSError if
    locking fails for another reason.
    """
    if not AVAILABLE:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return None
    return True


def unlock(descriptor: int) -> None:
    """Unlock the file or folder, also for forked processes that share the descriptor."""
    if AVAILABLE:
        with suppress(OSError):  # the file system may have no locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Lock a file or folder for the block, as soon as no other process does. Yields False if there are no locks."""
    if not AVAILABLE:
        yield False
        return
    descriptor, process = os.open(path, os.O_RDONLY), os.getpid()
    try:
        yield lock(descriptor, wait=True) is True
    finally:
        try:
            if os.getpid() == process:  # a child forked meanwhile must not unlock for its parent
                unlock(descriptor)  # and it may have the descriptor open
        finally:
            os.close(descriptor)


def _release_in_child() -> None:
    # Otherwise a forked child (a DataLoader's worker) that outlives a killed training would keep the run locked.
    for descriptor in _locked:
        os.close(descriptor)
    _locked.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class WriterLock:
    """The lock on a run's folder, held by this process. ``lock_for_writing`` takes it."""

    def __init__(self, folder: Path, descriptor: int, file: _LockFile | None) -> None:
        self._folder, self._file = folder, file
        # No other folder gets the same numbers while the descriptor is open.
        self._identity = _identity(os.fstat(descriptor))

    def check(self) -> None:
        """Raise CheckpointError if the folder at the path is not the locked one, or another process took the lock."""
        try:
            there = _identity(os.stat(self._folder))
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(
                f"{self._folder} no longer exists, so nothing was read or written: it was moved or deleted, or the "
                "working directory changed, while the run was open for writing; put it back, or close this "
                "Checkpointer and create a new one"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{self._folder}: cannot be read ({error.strerror}); nothing was written") from error
        if there != self._identity:
            raise CheckpointError(
                f"{self._folder} is another folder than the one that was opened for writing, so nothing was read or "
                "written: it was replaced meanwhile; put the old one back, or close this Checkpointer and create "
                "a new one"
            )
        if self._file is not None:
            self._file.check()


@contextmanager
def lock_for_writing(folder: Path) -> Iterator[WriterLock]:
    """Lock a run's folder for the block, and create the folder if it is missing.

    Raises CheckpointError if another process, or another part of this one, holds the lock, if the folder is not
    writable, or if a file is in the way.
    """
    if not AVAILABLE:
        raise CheckpointError(f"{folder}: runs can be written on Linux and macOS only; this system reads them")
    check_writable(folder)
    make_folder(folder)
    process = os.getpid()
    descriptor = os.open(folder, os.O_RDONLY)
    _locked.add(descriptor)
    file = None
    try:
        got = lock(descriptor)
        if got is False:
            raise CheckpointError(
                f"{folder}: another Checkpointer, here or in another process, is writing to this run; "
                "close it or use another folder"
            )
        if got is None:
            file = _LockFile(folder)
        yield WriterLock(folder, descriptor, file)
    finally:
        if file is not None:
            file.release()
        if descriptor in _locked and os.getpid() == process:  # in a forked child, the number may be another file's
            _locked.remove(descriptor)
            unlock(descriptor)  # a child forked just now may not have closed it yet
            os.close(descriptor)


class _LockFile:
    """A lock in form of a file that names its owner. It outlives a killed process.

    On the same machine, the next writer notices that the process is gone and takes the lock. Processes of other
    machines cannot be checked, so there a user has to delete the file.
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
                except BaseException:  # nobody could take over a lock file that names no owner
                    self._path.unlink(missing_ok=True)
                    raise
        except FileExistsError:
            raise CheckpointError(
                f"{folder}: {_in_words(owner)} is writing to this run, or was killed while doing so; close it or use "
                f"another folder. If it no longer runs, delete {self._path}"
            ) from None
        _tokens.add(self._token)

    def check(self) -> None:
        """Raise CheckpointError if another process has taken the lock. Two may find the same owner gone."""
        if (owner := self._read()) != self._owner:
            raise CheckpointError(
                f"{self._path} no longer names this process but {_in_words(owner)}, so nothing was written; a run can "
                "have one writer only: close this Checkpointer"
            )

    def release(self) -> None:
        """Release the lock, unless this is a forked child of the process that holds it."""
        _tokens.discard(self._token)
        if self._owner["pid"] == os.getpid() and self._read() == self._owner:
            self._path.unlink(missing_ok=True)

    def _read(self) -> Any:
        try:
            return json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return None


def _machine() -> str:
    """Return the host and the PID namespace, within which a process number is unique."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _is_gone(owner: Any) -> bool:
    """Whether the owner of a lock file has ended for certain."""
    if not isinstance(owner, dict) or owner.get("machine") != _machine() or type(owner.get("pid")) is not int:
        return False
    if owner["pid"] == os.getpid():
        return owner.get("token") not in _tokens  # an ended process that had the same number
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
