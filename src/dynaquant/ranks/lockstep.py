"""``Lockstep``: steps that ranks take together, although some want fewer or fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dynaquant.ranks.group import Group

T = TypeVar("T")


class Lockstep:
    """Steps that the ranks of a group take together, until none wants another one or one has failed.

    Ranks that want no more steps, take none, or have failed still answer the others, so none of them waits.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._ended = group.size == 1

    def another(self, wanted: bool) -> bool:
        """Return whether the ranks take another step: one of them wants it, and none has failed. Collective."""
        return wanted if self._group.size == 1 else self._answer(wanted, failed=False)

    def fail(self) -> None:
        """End the steps of all ranks. Those that are in a step answer after it. Collective with ``another``."""
        if not self._ended:
            self._answer(wanted=False, failed=True)

    def run(self, action: Callable[[], T]) -> T:
        """Run an action that takes this rank's steps, or none, and answer the other ranks until they have ended.

        If it raises, the steps of all ranks end. The others learn of the error from ``run_on_all_ranks``. Collective.
        """
        try:
            result = action()
        except Exception:
            self.fail()
            raise
        while not self._ended:
            self._answer(wanted=False, failed=False)
        return result

    def _answer(self, wanted: bool, failed: bool) -> bool:
        self._ended = True  # also if a rank has died and this raises
        answers = self._group.all_gather((wanted, failed))
        self._ended = any(failed for _, failed in answers) or not any(wanted for wanted, _ in answers)
        return not self._ended
