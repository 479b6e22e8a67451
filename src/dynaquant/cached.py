"""``cached_property`` that a forked process can use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

T = TypeVar("T")


class cached_property(functools.cached_property[T]):  # noqa: N801 - named as what it replaces
    """``functools.cached_property`` without the lock that it has before Python 3.12.

    That lock is one for all objects of a class. If the writing thread holds it while the process forks, the child
    inherits it locked, and waits for ever. Without it, two threads may compute the same value.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        super().__init__(function)
        self.lock = nullcontext()
