"""Lists the checkpoint files in a folder, while a writer may add and delete some."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dynaquant.errors import CheckpointError
from dynaquant.store.chain import ATTEMPTS
from dynaquant.store.files import is_missing

SUFFIX = ".dqc"
STEP = "step-"
"""What the name of a step's file begins with."""
REPLACED = "replaced-"
"""What the name of a checkpoint begins with that was replaced, but is kept for its tags."""
T = TypeVar("T")


def checkpoint_paths(folder: Path, prefix: str) -> list[Path]:
    """Return the checkpoint files whose names begin with ``prefix``, sorted by name.

    Raises CheckpointError if the folder cannot be read.
    """
    return [folder / name for name in _names(folder, prefix)]


def _names(folder: Path, prefix: str) -> list[str]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from error
    return sorted(name for name in names if name.startswith(prefix) and name.endswith(SUFFIX))


def read_each(folder: Path, prefix: str, read: Callable[[str], T]) -> tuple[list[T], list[CheckpointError]]:
    """Call ``read`` with the name of each file that begins with ``prefix``. Returns its results, and the errors of the
    files that cannot be read.

    Lists the folder again if a listed file was deleted before it was read. ``read`` gets no path, because to make one
    takes longer than to look at a file that is known.
    """
    for _ in range(ATTEMPTS):
        found: list[T] = []
        broken: list[CheckpointError] = []
        missing: list[str] = []
        for name in _names(folder, prefix):
            try:
                found.append(read(name))
            except (OSError, CheckpointError) as error:
                if is_missing(error):
                    missing.append(name)
                broken.append(error if isinstance(error, CheckpointError) else _unreadable(folder / name, error))
        # A missing file that is still listed is a dangling link. It was not deleted, so a retry would not help.
        if not missing or set(missing) & set(_names(folder, prefix)):
            break
    return found, broken


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    found = CheckpointError(f"{path}: cannot be read ({error.strerror})")
    found.__cause__ = error
    return found
