"""Temporary files and folders beside an output; deletes those that killed processes left."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dynaquant.store import file_lock


def temporary_beside(out: Path) -> Path:
    """Returns a temporary name beside ``out``. Deletes what killed processes have left there for ``out``.

    A process locks what it writes (``held``), and the system drops the lock when the process dies.
    """
    names = re.compile(re.escape(out.name) + r"\.dynaquant-\d+\.tmp")
    for stray in out.absolute().parent.iterdir():
        if names.fullmatch(stray.name):
            _delete_unless_held(stray)
    return out.with_name(f"{out.name}.dynaquant-{os.getpid()}.tmp")


@contextmanager
def held(temporary: Path) -> Iterator[None]:
    """Locks a temporary file or folder for the block, so that no other process takes it for a stray."""
    if not file_lock.AVAILABLE:
        yield
        return
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        file_lock.lock(descriptor)  # without locks, strays are never deleted
        yield
    finally:
        os.close(descriptor)


def _delete_unless_held(stray: Path) -> None:
    if not file_lock.AVAILABLE:
        return
    with suppress(OSError):
        descriptor = os.open(stray, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not file_lock.lock(descriptor):
                return
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                shutil.rmtree(stray)
            else:
                stray.unlink()
        finally:
            os.close(descriptor)
