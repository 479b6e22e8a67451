"""Functions on a choice of processor cores, for libraries that look at their number when they are loaded."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


def on_cores(cores: set[int], function: Callable[..., Result], *arguments: Any) -> Result:
    """``function(*arguments)`` in a new process that has only these cores. The function is found by its name."""
    everything = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(function, arguments)
    finally:
        os.sched_setaffinity(0, everything)
