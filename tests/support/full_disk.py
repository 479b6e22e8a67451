"""Simulates a disk with too little space."""

import os
import resource
from contextlib import contextmanager


@contextmanager
def files_of_at_most(size: int):
    """Make the kernel refuse to let a file grow beyond ``size`` bytes (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}
