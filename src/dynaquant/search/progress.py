"""Logs that a search is still going on, so that a training that waits for a long one is not silent."""

from __future__ import annotations

import logging
import time

from dynaquant.formatting import duration, plural

log = logging.getLogger("dynaquant")

FIRST = 10.0
"""Seconds after which a search is first mentioned."""


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
