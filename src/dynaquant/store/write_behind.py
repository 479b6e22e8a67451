"""Writes to a file on a thread of its own, so that the next bytes are made while the system takes the last ones."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import BinaryIO

from dynaquant.store.in_order import submitted

WORTH_A_WRITE = 1 << 20
"""Bytes that are written together. A file that has no more needs no thread."""
MOST_BEHIND = 1 << 25
"""Bytes that wait to be written before the next ones are taken."""


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
