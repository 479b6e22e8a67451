"""Allows one call of a Checkpointer at a time, and refuses other calls meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class _Call:
    name: str
    thread: int = field(default_factory=threading.get_ident)
    refused: RuntimeError | None = None


class Turn:
    """Lets one call run at a time. Other calls raise an error instead of waiting."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._call: _Call | None = None

    def run(self, name: str, action: Callable[[], T]) -> T:
        """Return the action's result. Raises RuntimeError, naming both calls, if another call is running."""
        mine = _Call(name)
        # The turn must be given back wherever a signal interrupts. So it is taken inside the ``try``, and given back
        # without a function call.
        try:
            with self._mutex:
                if self._call is not None:
                    raise _refusal(mine, self._call)
                self._call = mine
            return action()
        finally:
            if self._call is mine:
                self._call = None

    def check(self) -> None:
        """Raise the error of a call that was made from inside the current one, even if the caller has caught it."""
        if self._call is not None and self._call.refused is not None:
            raise self._call.refused


def _refusal(call: _Call, running: _Call) -> RuntimeError:
    if call.thread == running.thread:
        where = f"from inside it (by evaluate, or an object's state_dict): call {call.name} after it has returned"
    else:
        where = "from another thread: use a Checkpointer from one thread"
    error = RuntimeError(f"{call.name} was called while {running.name} of the same Checkpointer was running, {where}")
    if call.thread == running.thread:
        running.refused = error
    return error
