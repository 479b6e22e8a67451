"""The thread that writes checkpoints while training goes on, one at a time. A signal may interrupt at any point.

Python runs signal handlers in the main thread, between any two of its operations. The handler of Ctrl-C raises
KeyboardInterrupt there. That can leave Python code of ``threading`` and ``concurrent.futures`` half done: an executor
may start a second thread, and ``Thread.join`` may take a running thread for an ended one. So other threads touch the
writer only by one assignment, one ``put``, or ``with`` on a plain lock. An interrupt cannot leave these half done.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

log = logging.getLogger("dynaquant")
T = TypeVar("T")


def check_process(process: int) -> None:
    """Raises RuntimeError in any other process: a forked child has no thread that writes."""
    if os.getpid() != process:
        raise RuntimeError(
            f"this Checkpointer belongs to process {process}, and this is process {os.getpid()}, a fork of it: use it "
            "in its own process, or make another Checkpointer here, for another folder"
        )


class Write(Future[T]):
    """A write, and the future of its result. It cannot be cancelled.

    ``result`` and ``exception`` raise RuntimeError in a forked child.
    """

    def __init__(self, action: Callable[[], T]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._action: Callable[[], T] | None = action
        self._process = os.getpid()
        self._runner: int | None = None  # the thread that runs it
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        """Runs the write, in the writer's thread. Does nothing when called again."""
        action, self._action = self._action, None
        if action is None:
            return
        self._runner = threading.get_ident()
        try:
            try:
                result = action()
            except BaseException as error:
                self.set_exception(error)
            else:
                self.set_result(result)
        except BaseException as error:  # the thread outlives a callback that calls ``sys.exit``
            log.warning("a callback of a save's future failed: %r", error)
        finally:
            self._done.release()

    def wait(self) -> None:
        """Waits until the write is done. Raises RuntimeError if the write itself calls this, as it would never return.

        A callback of ``add_done_callback`` may call it: the write is done by then.
        """
        check_process(self._process)
        if self._runner == threading.get_ident():
            if not self.done():
                raise RuntimeError("the result of a write was asked for in the thread that writes (by log_to?)")
            return
        # Not the future's own lock: an interrupt while taking it would leave it locked, and the writer would hang.
        with self._done:
            pass

    def result(self, timeout: float | None = None) -> T:
        """As ``Future.result``."""
        check_process(self._process)
        if timeout is None:
            self.wait()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As ``Future.exception``."""
        check_process(self._process)
        if timeout is None:
            self.wait()
        return super().exception(timeout)


class BackgroundWriter(Generic[T]):
    """Runs writes in a thread of its own, in the order in which they are handed over.

    owner: the thread ends, after the last write, when this is garbage-collected or the process ends. at_end: called in
    the thread when it ends.
    """

    def __init__(self, owner: object, at_end: Callable[[], Any]) -> None:
        self._at_end = at_end
        self._last: Write[T] | None = None
        self._writes: SimpleQueue[Write[T] | None] = SimpleQueue()
        self._ended = threading.Lock()
        self._ended.acquire()
        # A daemon: Python joins other threads before it calls ``_finish``, and this one waits for its next write.
        self._thread = threading.Thread(target=self._work, name="dynaquant", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._writes.put(None)  # it may have started nevertheless
            raise
        self.process = os.getpid()
        # Unlike ``atexit``, this is also called in processes of ``multiprocessing``, but not in forks of this one.
        Finalize(owner, self._finish, exitpriority=0)

    def _work(self) -> None:
        try:
            for write in iter(self._writes.get, None):
                write.run()
                del write  # frees its tensors before the next write comes
        finally:
            try:
                self._at_end()
            finally:
                self._ended.release()

    @property
    def is_here(self) -> bool:
        """Whether the caller runs in the writer's thread."""
        return threading.current_thread() is self._thread

    def hand_over(self, action: Callable[[], T]) -> Write[T]:
        """Begins a write. The one before must be done (``wait``).

        If interrupted, the write has begun, or begins with the next ``wait``, or was not handed over.
        """
        write = Write(action)
        self._last = write
        self._writes.put(write)
        return write

    def wait(self) -> None:
        """Waits for the last write and raises its error, once. In the writer's thread it does nothing.

        Raises RuntimeError in a forked child.
        """
        check_process(self.process)
        write = self._last
        if write is None or self.is_here:
            return
        self._writes.put(write)
        try:
            write.result()
        finally:
            if write.done():  # not if a signal has interrupted the wait
                self._last = None

    def close(self) -> None:
        """Ends the thread after the last write, waits for that, and raises the write's error.

        If the wait is interrupted, the thread still ends after the last write. Safe to call again.
        """
        check_process(self.process)
        if self._last is not None:
            self._writes.put(self._last)
        self._writes.put(None)
        with self._ended:
            pass
        self.wait()

    def _finish(self) -> None:
        """Does what ``close`` does, if it was not called."""
        if self.is_here:  # this thread had the last reference to the owner
            self._writes.put(None)
            return
        try:
            self.close()
        except Exception as error:
            log.warning("the last checkpoint could not be written: %s", error)
