"""The thread that writes checkpoints, one at a time, while training continues. A signal may interrupt at any point.

Python runs signal handlers in the main thread, between any two of its operations. The handler of Ctrl-C raises
KeyboardInterrupt there. That can leave Python code of ``threading`` and ``concurrent.futures`` half done: an executor
may start a second thread, and ``Thread.join`` may treat a running thread as ended. So other threads touch the writer
only by one assignment, one ``put``, or ``with`` on a plain lock. An interrupt cannot leave these half done.
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
_callback = threading.local()
"""``runs``: whether this thread is in a callback of a write."""


def check_process(process: int) -> None:
    """Raise RuntimeError unless this is the given process: a forked child has no writing thread."""
    if os.getpid() != process:
        raise RuntimeError(
            f"this Checkpointer belongs to process {process}, and this is process {os.getpid()}, a fork of it: use it "
            "in its own process, or make a new Checkpointer here, for another folder"
        )


class Write(Future[T]):
    """A write, and the future of its result. A write cannot be cancelled.

    ``result`` and ``exception`` raise RuntimeError in a forked child.
    """

    raised: bool = False
    """Whether ``result`` has raised its error, and not in a callback. Then nobody else needs to."""

    def __init__(self, action: Callable[[], T]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._action: Callable[[], T] | None = action
        self._process = os.getpid()
        self._runner: int | None = None  # the thread that runs it
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        """Run the write, in the writing thread. A second call does nothing."""
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
        except BaseException as error:  # a callback that calls ``sys.exit`` must not end the thread
            log.warning("a callback of a save's future failed: %r", error)
        finally:
            self._done.release()

    def wait(self) -> None:
        """Wait until the write is done. Raises RuntimeError if the write itself calls this, as it would never return.

        A callback of ``add_done_callback`` may call it: the write is done by then.
        """
        check_process(self._process)
        if self._runner == threading.get_ident():
            if not self.done():
                raise RuntimeError(
                    "the writing thread asked for the result of its own write (in log_to?), so it would wait forever; "
                    "use the record that log_to gets"
                )
            return
        # Not the future's own lock: an interrupt while taking it would leave it locked, and the writer would hang.
        with self._done:
            pass

    def result(self, timeout: float | None = None) -> T:
        """See ``Future.result``."""
        check_process(self._process)
        if timeout is None:
            self.wait()
        try:
            return super().result(timeout)
        except BaseException as error:
            if self.done() and error is super().exception(0) and not getattr(_callback, "runs", False):
                self.raised = True
            raise

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """See ``Future.add_done_callback``. What ``fn`` raises is only logged, whichever thread calls it."""

        def called(write: Future[T]) -> None:
            _callback.runs = True
            try:
                fn(write)
            finally:
                _callback.runs = False

        super().add_done_callback(called)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See ``Future.exception``."""
        check_process(self._process)
        if timeout is None:
            self.wait()
        return super().exception(timeout)


class BackgroundWriter(Generic[T]):
    """Runs writes in a thread of its own, in the order of ``hand_over``.

    owner: when it is garbage-collected, or the process ends, the thread ends after its last write. at_end: called in
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
        # Unlike ``atexit``, this is also called in processes of ``multiprocessing``, but not in forks of this one.
        self._at_exit = Finalize(None, self._end, exitpriority=0)
        try:
            self._thread.start()
        except BaseException:
            self._at_exit.cancel()
            self._writes.put(None)  # the thread may have started all the same
            raise
        self.process = os.getpid()
        # At the end of the process, Python calls this before ``_end``.
        Finalize(owner, self._finish, exitpriority=0)

    def _work(self) -> None:
        try:
            for write in iter(self._writes.get, None):
                write.run()
                del write  # frees its tensors before the next write
        finally:
            try:
                self._at_end()
            finally:
                self._ended.release()
                self._at_exit.cancel()

    @property
    def is_here(self) -> bool:
        """Whether the caller runs in the writing thread."""
        return threading.current_thread() is self._thread

    def hand_over(self, action: Callable[[], T]) -> Write[T]:
        """Begin a write. The previous write must be done (``wait``).

        If a signal interrupts this call, the write may have begun, may begin at the next ``wait``, or may be lost.
        """
        write = Write(action)
        self._last = write
        self._writes.put(write)
        return write

    def wait(self) -> None:
        """Wait for the last write and raise its error, unless ``result`` has. Does nothing in the writing thread.

        Raises RuntimeError in a forked child.
        """
        check_process(self.process)
        write = self._last
        if write is None or self.is_here:
            return
        self._writes.put(write)
        try:
            write.wait()
            if not write.raised:
                write.result()
        finally:
            if write.done():  # not done if a signal has interrupted the wait
                self._last = None

    def close(self) -> None:
        """End the thread after the last write, wait for it, and raise its error as ``wait`` does. May be called again.

        If the wait is interrupted, the thread still ends after the last write.
        """
        check_process(self.process)
        if self._last is not None:
            self._writes.put(self._last)
        self._end()
        self.wait()

    def _end(self) -> None:
        """End the thread and wait until it has called ``at_end``.

        Also called when the process ends: if the thread had the owner's last reference, nobody has waited for it, and
        the interpreter would end while the thread closes what it holds.
        """
        self._writes.put(None)
        with self._ended:
            pass

    def _finish(self) -> None:
        """Close, if nobody has called ``close``."""
        if self.is_here:  # the owner's last reference was in this thread
            self._writes.put(None)
            return
        try:
            self.close()
        except Exception as error:
            log.warning("the last checkpoint could not be written: %s", error)
