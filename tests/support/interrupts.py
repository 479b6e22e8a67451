"""Interrupts at given points: KeyboardInterrupt raised where Python would run the handler of a signal."""

import sys
from collections.abc import Callable
from pathlib import Path

import dynaquant

PACKAGE = str(Path(dynaquant.__file__).parent)


def interrupted(action: Callable[[], object], point: int, everywhere: bool = False) -> bool:
    """Runs the action and raises KeyboardInterrupt at its n-th point, the first being 0. Whether it came to that.

    The points are where functions begin and where calls of built-in functions return, which is where CPython looks for
    signals (loops apart), in this thread; in the package's own code, or in all that it calls.
    """
    left = point

    def profile(frame, event, _argument) -> None:
        nonlocal left
        if event not in ("call", "c_return") or not (everywhere or frame.f_code.co_filename.startswith(PACKAGE)):
            return
        left -= 1
        if left == -1:
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return left < 0  # where Python ignores what is raised, as in a weak reference's callback


def points(action: Callable[[], object], everywhere: bool = False) -> int:
    """How many points the action has."""
    count = 0

    def profile(frame, event, _argument) -> None:
        nonlocal count
        count += event in ("call", "c_return") and (everywhere or frame.f_code.co_filename.startswith(PACKAGE))

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count
