"""Locks files and folders. The system drops the lock when the process dies."""

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
"""Whether this system has such locks. Some of its file systems may still have none."""
_NOT_THERE = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF}


def lock(descriptor: int, wait: bool = False) -> bool | None:
    """Locks the open file or folder for this process alone. Returns whether it got the lock.

    wait: until no other process holds it. Returns None if the file system has no locks. Raises OSError for any other
    fault.
    """
    if not AVAILABLE:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        return None
    return True


def unlock(descriptor: int) -> None:
    """Unlocks, also for forked processes that share the descriptor."""
    if AVAILABLE:
        with suppress(OSError):  # the file system may have no locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextmanager
def alone_in(folder: Path) -> Iterator[bool]:
    """Locks the folder for the block. Yields False if the file system has no locks."""
    if not AVAILABLE:
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield lock(descriptor, wait=True) is True
        unlock(descriptor)
    finally:
        os.close(descriptor)
