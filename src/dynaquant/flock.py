"""Locks on open files and folders that the system drops when a process dies, where the system has them."""

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
"""Whether this system has such locks at all. Some of its file systems may have none."""
_NOT_THERE = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF}


def lock(descriptor: int, wait: bool = False) -> bool | None:
    """Locks what a descriptor has open, for this process alone.

    wait: until nobody else holds it. Returns False where somebody does, and None where the file system has no locks.
    Raises OSError for any other fault.
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
    """Lets go, also for forked processes that have the descriptor as well."""
    if AVAILABLE:
        with suppress(OSError):  # where there are no locks there is nothing to let go
            fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextmanager
def alone_in(folder: Path) -> Iterator[bool]:
    """Waits until no other process is in such a block for the same folder; says whether the system can tell."""
    if not AVAILABLE:
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield lock(descriptor, wait=True) is True
        unlock(descriptor)
    finally:
        os.close(descriptor)
