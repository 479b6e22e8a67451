"""The memory of this process, and the bytes of files."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


def memory_now() -> int:
    """Free unused memory and return the resident bytes of this process. ``peak_memory`` counts from then on."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def peak_memory() -> int:
    """Return the peak of resident bytes since ``memory_now``."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def stored_in(folder: Path) -> int:
    """Return the bytes of all files in a folder. Links count nothing."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
