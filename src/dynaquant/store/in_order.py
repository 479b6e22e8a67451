"""Applies a function to items on several threads. The results come in the order of the items.

``begun`` and ``submitted`` also work while the interpreter ends and starts no more threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock, Semaphore
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_WAITING = 64
"""Items that are at work, or whose results wait because an earlier one is not ready."""
MOST_BYTES = 1 << 26
"""The size of the results that wait. Each item at work may add one more."""


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
