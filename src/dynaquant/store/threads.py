"""Work on other threads: a function of items on several, with results in order, and writes to a file on one of its own.

``begun`` and ``submitted`` also work while the interpreter ends and starts no more threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock, Semaphore
from types import TracebackType
from typing import BinaryIO, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_WAITING = 64
"""Items that are at work, or whose results wait because an earlier one is not ready."""
MOST_BYTES = 1 << 26
"""The size of the results that wait. Each item at work may add one more."""
WORTH_A_WRITE = 1 << 20
"""Bytes that are written together. A file that has no more needs no thread."""
MOST_BEHIND = 1 << 25
"""Bytes that wait to be written before the next ones are taken."""


def in_order(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    threads: int,
    size: Callable[[Result], int] = lambda _result: 0,
) -> Iterator[Result]:
    """Yield the function's result for each item.

    While a large item is at work on one thread, the other threads go on with the next items, as long as few results
    wait. size: returns the bytes of a result.
    """
    if threads == 1:
        yield from map(function, items)
        return
    free, lock, held = Semaphore(2 * threads), Lock(), 0

    def work(item: Item) -> Result:
        nonlocal held
        try:
            result = function(item)
            with lock:
                held += size(result)
            return result
        finally:
            free.release()

    def take() -> Result:
        nonlocal held
        result = waiting.popleft().result()
        with lock:
            held -= size(result)
        return result

    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            while waiting and (waiting[0].done() or len(waiting) >= MOST_WAITING or held >= MOST_BYTES):
                yield take()
            free.acquire()
            waiting.append(begun(pool, work, item))
        while waiting:
            yield take()


def begun(pool: ThreadPoolExecutor, work: Callable[[Item], Result], item: Item) -> Future[Result]:
    """Begin to work on an item in the pool; when the interpreter ends, which starts no more threads, do it at once."""
    if (future := submitted(pool, work, item)) is not None:
        return future
    done: Future[Result] = Future()
    try:
        done.set_result(work(item))
    except BaseException as error:
        done.set_exception(error)
    return done


def submitted(pool: ThreadPoolExecutor, work: Callable[[Item], Result], item: Item) -> Future[Result] | None:
    """Begin to work on an item in the pool. None when the interpreter ends: it starts no more threads."""
    try:
        return pool.submit(work, item)
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise
    return None


class WriteBehind:
    """A file whose ``write`` returns before the bytes are written, to be used in a ``with`` block.

    Call ``flush`` at its end: what is not written by then is dropped. After the block the file can be closed.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._pool = ThreadPoolExecutor(1, "dynaquant-write")
        self._gathered: list[bytes] = []
        self._size = 0  # of what is gathered
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._behind = 0  # bytes of what waits

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def write(self, data: bytes) -> None:
        """Append bytes, on the other thread. Raises the error of an earlier write if it has failed by now."""
        self._gathered.append(data)
        self._size += len(data)
        if self._size < WORTH_A_WRITE:
            return
        while self._behind > MOST_BEHIND or (self._waiting and self._waiting[0][0].done()):
            self._wait()
        if (written := submitted(self._pool, self._file.writelines, self._gathered)) is None:
            self._write_here()
            return
        self._waiting.append((written, self._size))
        self._behind += self._size
        self._gathered, self._size = [], 0

    def flush(self) -> None:
        """Wait until all is written, and hand it to the system. Raises the error of a write if there was one."""
        self._write_here()
        self._file.flush()

    def _write_here(self) -> None:
        """Write what is gathered on this thread, after all that waits."""
        while self._waiting:
            self._wait()
        self._file.writelines(self._gathered)
        self._gathered, self._size = [], 0

    def _wait(self) -> None:
        written, size = self._waiting.popleft()
        self._behind -= size
        written.result()
