"""When the next checkpoint is due: after a number of steps, as often as its cost allows, or as far as weights move."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable

from dynaquant.options import Auto, Every, Moved
from dynaquant.saving.movement import Movement

FIRST = 50
"""Steps to the first checkpoint of an automatic schedule: gradients of this many steps are recorded."""
MAX_OVERHEAD = 0.005
REPAID = 0.25
"""If saves have taken more than ``max_overhead``, the share of the excess that the next interval compensates."""


class Schedule:
    """Steps between checkpoints.

    With ``Auto``, the interval follows from the measured cost of a save. If one save costs more (a search from
    scratch), the next intervals are longer. movement: of the weights, if ``every`` is a ``Moved``. clock: returns
    seconds.
    """

    def __init__(
        self,
        every: Every | None,
        movement: Movement | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._auto = every if isinstance(every, Auto) else None
        if every == Auto():
            self._auto = Auto(max_overhead=MAX_OVERHEAD)
        self._clock = clock
        self.movement = movement
        self.interval: int | None = (
            FIRST if self._auto else None if isinstance(every, Auto | Moved | None) else int(every)
        )
        """Steps from one checkpoint to the next, as known now. With ``Moved``, the length of the last interval."""
        self._last_step: int | None = None
        self._save: tuple[int, float] | None = None
        self._since = clock()
        self._trained = self._spent = 0.0
        self._seconds_per_step: float | None = None

    @property
    def soonest(self) -> int | None:
        """Steps from the last checkpoint to the earliest one that may follow; None if unknown."""
        return Movement.first_look(self.interval) if self.movement is not None and self.interval else self.interval

    @property
    def steps_between(self) -> int | None:
        """Steps between two checkpoints: the interval, or else the steps since the last one. None if unknown.

        Valid between ``saving`` and ``saved``.
        """
        if self.interval is not None or self._save is None or self._last_step is None:
            return self.interval
        return self._save[0] - self._last_step if self._save[0] > self._last_step else None

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due at ``step``. Raises ValueError without ``every``."""
        step = operator.index(step)
        if self.interval is None and self.movement is None:
            raise ValueError("due() needs Checkpointer(…, every=steps), every=dq.Auto() or every=dq.Moved(…)")
        if self._last_step is None and (self._auto or self.movement is not None):
            self._last_step = step - 1  # training begins at this step
        last = self._last_step or 0
        if self.movement is not None:
            return self.movement.reached(step - last)
        assert self.interval is not None
        return step >= (last + self.interval if self._auto else (last // self.interval + 1) * self.interval)

    def begin(self, step: int, interval: int | None = None) -> None:
        """Note that training continues from a restored ``step``. interval: the one stored with it."""
        self._last_step, self._since, self._seconds_per_step = step, self._clock(), None
        valid = isinstance(interval, int) and 1 <= interval < 2**63  # the file may hold anything
        if valid and (self._auto or self.movement is not None):
            self.interval = interval

    def saving(self, step: int) -> None:
        """Note that a save of ``step`` begins. It counts only if ``saved`` follows."""
        self._save = step, self._clock()

    def saved(self, typical: float) -> None:
        """Note that the save has returned. typical: seconds that such a save takes without a search from scratch."""
        if self._save is None:
            raise ValueError("no save has begun")
        (step, begun), now = self._save, self._clock()
        training = begun - self._since  # the time since the last save
        if self._last_step is not None and step > self._last_step:
            self._seconds_per_step = training / (step - self._last_step)
            if self.movement is not None:
                self.interval = step - self._last_step
        self._trained += training
        self._spent += now - begun
        self._last_step, self._since, self._save = step, now, None
        if self._auto and self._seconds_per_step:
            self.interval = max(1, math.ceil(self._seconds(self._auto, typical) / self._seconds_per_step))

    def _seconds(self, auto: Auto, cost: float) -> float:
        """Return how many seconds of training to wait before the next save. cost: seconds of a save."""
        wanted = 0.0
        if auto.max_overhead is not None:
            excess = max(self._spent - auto.max_overhead * self._trained, 0.0)
            wanted = (cost + REPAID * excess) / auto.max_overhead
        if auto.mean_time_between_failures is not None:
            wanted = max(wanted, daly(cost, auto.mean_time_between_failures))
        return wanted


def daly(cost: float, mean_time_between_failures: float) -> float:
    """Return the interval between saves, in seconds of training, that loses the least time to saves and failures.

    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation 37; its leading
    term ``√(2·cost·M)`` is Young's of 1974.
    """
    m = mean_time_between_failures
    if cost >= 2 * m:
        return m
    x = cost / (2 * m)
    return math.sqrt(2 * cost * m) * (1 + math.sqrt(x) / 3 + x / 9) - cost
