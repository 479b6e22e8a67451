"""Raises KeyboardInterrupt at chosen points at which Python could run a signal handler."""

import sys
from collections.abc import Callable
from pathlib import Path

import dynaquant

PACKAGE = str(Path(dynaquant.__file__).parent)


def interrupted(action: Callable[[], object], point: int, everywhere: bool = False) -> bool:
    """Run the action, and raise KeyboardInterrupt at the given point, counted from 0. Returns whether it was reached.

    Points are the starts of functions and the returns of built-in functions in this thread. CPython checks for signals
    there, and in loops, which are not counted. everywhere: count points in all code, not only in the package.
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
    return left < 0  # Python may ignore the exception, as in a weak reference's callback


def points(action: Callable[[], object], everywhere: bool = False) -> int:
    """Return how many points the action has."""
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
