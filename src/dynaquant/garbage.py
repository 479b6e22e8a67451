"""Spares Python's garbage collector searches while many objects are made, none of which is garbage.

The collector searches all objects of the process again whenever their number has grown by a quarter. In a training
with 200,000 objects one search takes a tenth of a second, and a checkpoint of many tensors consists of as many.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_paused = False
"""Whether the collector would run but for ``collection_paused``. It is set first, so that no interrupt gets between."""
_skipping = False
"""Whether ``older_objects_skipped`` has frozen the objects of the process."""


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the garbage collector, if it runs. Also a decorator. A metric of the user runs in ``collection_resumed``.

    Does nothing in other threads than the main one. A process that is forked meanwhile collects garbage.
    """
    global _paused  # noqa: PLW0603 - the collector is one, too
    if not gc.isenabled() or threading.current_thread() is not threading.main_thread():
        yield
        return
    gc.collect(1)  # young garbage shall not wait until all objects are searched again, after the checkpoint is written
    try:
        _paused = True
        gc.disable()
        yield
    finally:
        _resume()


@contextmanager
def collection_resumed() -> Iterator[None]:
    """Let the garbage collector run, if ``collection_paused`` has paused it: what runs inside may make garbage."""
    global _paused  # noqa: PLW0603
    if not _paused or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        _resume()
        yield
    finally:
        if gc.isenabled():  # otherwise the user has disabled it
            _paused = True
            gc.disable()


@contextmanager
def older_objects_skipped() -> Iterator[None]:
    """Let the garbage collector search only objects that are made from now on. Also a decorator, for any thread.

    It goes on to run, also for what other threads make meanwhile. What is older and becomes garbage waits. Does nothing
    if objects are frozen already, by the user or another thread.

    Does not collect first: after a pause, all objects of a save are young, and a search of them would hold up training.
    """
    global _skipping  # noqa: PLW0603 - the collector is one, too
    if gc.get_freeze_count():
        yield
        return
    _skipping = True
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _skipping = False


def _resume() -> None:
    global _paused  # noqa: PLW0603
    if _paused:
        gc.enable()
        _paused = False


def _forked() -> None:
    global _skipping  # noqa: PLW0603
    _resume()
    if _skipping:  # the thread that would end this is not in the child
        gc.unfreeze()
        _skipping = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
