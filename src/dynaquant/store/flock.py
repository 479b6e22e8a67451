"""Locks files and folders with ``flock``. The system drops the lock when the process dies."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl

    AVAILABLE = True
except ImportError:  # Windows has none
    AVAILABLE = False
"""Whether this system has ``flock``. Some of its file systems may still lack it."""
_UNSUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF}
"""Error numbers of ``flock`` on a file system without locks."""


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
