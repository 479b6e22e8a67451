"""The thread that writes checkpoints while training goes on: one write at a time, sound wherever a signal interrupts.

Python runs signal handlers in the main thread, between any two of its operations, and that of Ctrl-C raises
KeyboardInterrupt there. What ``threading`` and ``concurrent.futures`` do in Python can be left half done by it: an
executor may start a second thread, ``Thread.join`` may take a running thread for an ended one. So what other threads do
here with the writer is one assignment, ``put`` of a ``SimpleQueue``, or ``with`` of a plain lock: done or not done.
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
    """Raises RuntimeError in any process but the given one: a forked child has no thread that writes."""
    if os.getpid() != process:
        raise RuntimeError(
            f"this Checkpointer belongs to process {process}, and this is process {os.getpid()}, a fork of it: use it "
            "in its own process, or make another Checkpointer here, for another folder"
        )


class Write(Future[T]):
    """A write that was handed over, and the future of its result. It cannot be cancelled.

    ``result`` and ``exception`` raise RuntimeError in a forked child.
    """

    def __init__(self, action: Callable[[], T]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._action: Callable[[], T] | None = action
        self._process = os.getpid()
        self._runner: int | None = None  # the thread that does it
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        """Does it, in the writer's thread; once, however often it was handed over."""
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
        """Waits until it is done. In the thread that does it, as in a callback of ``add_done_callback``, it is by then.

        Raises RuntimeError there before it is done.
        """
        check_process(self._process)
        if self._runner == threading.get_ident():
            if not self.done():
                raise RuntimeError("the result of a write was asked for in the thread that writes (by log_to?)")
            return
        # Not by the future's own lock: interrupted while it takes that, it would keep it, and the writer wait for ever.
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

    owner: when it is garbage-collected or the process ends, the thread ends after the last write. at_end: called in the
    thread when it ends.
    """

    def __init__(self, owner: object, at_end: Callable[[], Any]) -> None:
        self._at_end = at_end
        self._last: Write[T] | None = None
        self._writes: SimpleQueue[Write[T] | None] = SimpleQueue()
        self._ended = threading.Lock()
        self._ended.acquire()
        # A daemon, as others are joined before ``_finish`` is called, and this one waits for its next write.
        self._thread = threading.Thread(target=self._work, name="dynaquant", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._writes.put(None)  # it may have started all the same
            raise
        self.process = os.getpid()
        # Unlike ``atexit`` it is also called in processes of ``multiprocessing``, and not in forks of this one.
        Finalize(owner, self._finish, exitpriority=0)

    def _work(self) -> None:
        try:
            for write in iter(self._writes.get, None):
                write.run()
                del write  # what it was about is not kept until the next one
        finally:
            try:
                self._at_end()
            finally:
                self._ended.release()

    @property
    def is_here(self) -> bool:
        """Whether the caller is in the writer's thread."""
        return threading.current_thread() is self._thread

    def hand_over(self, action: Callable[[], T]) -> Write[T]:
        """Begins a write. The one before must be done (``wait``).

        When this is interrupted, the write is begun, will be by the next call of ``wait``, or was not handed over.
        """
        write = Write(action)
        self._last = write
        self._writes.put(write)
        return write

    def wait(self) -> None:
        """Waits for the last write and raises what went wrong in it, once. In the writer's thread it does nothing.

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
            if write.done():  # not when a signal has ended the waiting
                self._last = None

    def close(self) -> None:
        """Has the thread end after the last write, waits for that, and raises what went wrong in it.

        When the waiting is interrupted, the thread still ends after the last write. Safe to call again.
        """
        check_process(self.process)
        if self._last is not None:
            self._writes.put(self._last)
        self._writes.put(None)
        with self._ended:
            pass
        self.wait()

    def _finish(self) -> None:
        """What ``close`` does, where nobody has called it."""
        if self.is_here:  # it had the last reference to the owner
            self._writes.put(None)
            return
        try:
            self.close()
        except Exception as error:
            log.warning("the last checkpoint could not be written: %s", error)
