"""Logs how long a search will take and that it still goes on, so that a training that waits for it is not silent."""

from __future__ import annotations

import logging
import time

from dynaquant.formatting import duration, plural

log = logging.getLogger("dynaquant")

FIRST = 10.0
"""Seconds after which a search is first mentioned."""
LONG = 1.0
"""Seconds of one evaluation from which on the first save says at once how long it will take."""
TYPICAL = 6
"""The first save of a smooth metric evaluates so many times at most: docs/decisions.md, "What does a save spend …"."""


def foretell(seconds: float) -> None:
    """Log at INFO how long the first save will take, unless it is short. seconds: of one evaluation on all batches."""
    if seconds >= LONG:
        log.info(
            "the first save evaluates the model up to %d times, about %s; later ones two to three times",
            TYPICAL,
            duration(TYPICAL * seconds),
        )


class SearchProgress:
    """Logs a line at INFO after ``FIRST`` seconds, then each time the search has taken twice as long.

    It logs between two candidates, in the thread that searches. There is no progress bar: a bar of ours would disturb
    those that the training or ``evaluate`` draws on the same terminal.
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
