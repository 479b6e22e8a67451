"""Tells how long a search will take and that it still goes on, so that a training that waits for it is not silent."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dynaquant.formatting import duration, plural

log = logging.getLogger("dynaquant")

FIRST = 10.0
"""Seconds after which a search is first mentioned."""
LONG = 1.0
"""Seconds of one evaluation from which on the first save says at once how long it will take."""
TYPICAL = 6
"""The first save of a smooth metric evaluates so many times at most: docs/decisions.md, "What does a save spend …"."""


def foretell(seconds: float) -> None:
    """Say how long the first save will take, unless it is short. seconds: of one evaluation on all batches."""
    if seconds >= LONG:
        log.info(
            "the first save evaluates the model up to %d times, about %s; later ones two to three times",
            TYPICAL,
            duration(TYPICAL * seconds),
        )
        _BAR.draw(1, TYPICAL, f"about {duration((TYPICAL - 1) * seconds)} left")


class SearchLog:
    """Logs a line at INFO after ``FIRST`` seconds, then each time the search has taken twice as long.

    On a terminal it also draws a bar, once evaluations are long, and removes it at the end. Both happen between two
    candidates, in the thread that searches. So a bar that ``evaluate`` draws meanwhile, and one of the training, which
    waits, have the line for themselves; what they leave there is overwritten.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = FIRST

    def scored(self, count: int) -> None:
        """Note that so many candidates have been scored."""
        seconds = time.monotonic() - self._began
        if seconds >= self._next:
            self._next = 2 * seconds
            log.info("still searching after %s: %s scored", duration(seconds), plural(count, "candidate"))
        if seconds >= LONG * count:
            _BAR.draw(count + 1, max(TYPICAL, count + 2), f"{plural(count, 'candidate')} in {duration(seconds)}")


class _Bar:
    """A line on the terminal that stderr is. Elsewhere it is never there."""

    def __init__(self) -> None:
        self._is_there = False

    def draw(self, done: int, total: int, text: str) -> None:
        """Draw the bar on the current line, and leave the cursor at its beginning."""
        if not sys.stderr.isatty():
            return
        from rich.console import Console  # noqa: PLC0415 (only terminals need it)
        from rich.progress_bar import ProgressBar  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415

        line = Table.grid(padding=(0, 1))
        line.add_row("dynaquant", ProgressBar(total, done, width=20), f"{done}/{total} evaluations, {text}")
        console = Console(stderr=True)
        with console.capture() as drawn:
            console.print(line, no_wrap=True, end="")
        self._is_there = True
        print(f"\r{drawn.get().rstrip()}\x1b[K", end="\r", file=sys.stderr, flush=True)

    def remove(self) -> None:
        """Clear the line, if the bar is there."""
        if self._is_there:
            self._is_there = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


_BAR = _Bar()


@contextmanager
def bar_removed() -> Iterator[None]:
    """Remove the bar when the block ends, however it ends."""
    try:
        yield
    finally:
        _BAR.remove()
