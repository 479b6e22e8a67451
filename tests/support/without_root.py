"""Runs code without root's permission to write anywhere."""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

T = TypeVar("T")

_VERSION_3 = 0x20080522
_ROOTS = 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH


def without_root(action: Callable[[], T]) -> T:
    """Return what the action returns, called in a thread that permissions of files bind, also if the user is root."""
    with ThreadPoolExecutor(1) as pool:  # Linux has capabilities for each thread; those dropped do not come back
        pool.submit(_drop_capabilities).result()
        return pool.submit(action).result()


def _drop_capabilities() -> None:
    if os.geteuid() != 0:
        return
    system = ctypes.CDLL(None, use_errno=True)
    if not hasattr(system, "capset"):
        pytest.skip("this system cannot drop what root may do")
    header, sets = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert system.capget(header, sets) == 0
    for i in (0, 1, 2):  # effective, permitted, inheritable
        sets[i] &= ~_ROOTS
    assert system.capset(header, sets) == 0
