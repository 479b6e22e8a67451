"""The checkpoint files in a folder, listed while a writer may add and delete some."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dynaquant.chain import ATTEMPTS
from dynaquant.container import is_missing
from dynaquant.errors import CheckpointError

SUFFIX = ".dqc"
T = TypeVar("T")


def paths(folder: Path, prefix: str) -> list[Path]:
    """The checkpoint files whose names begin so, by name. Raises CheckpointError when the folder cannot be read."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from error
    return [folder / name for name in sorted(names) if name.startswith(prefix) and name.endswith(SUFFIX)]


def listed(folder: Path, read: Callable[[Path], T]) -> tuple[list[T], list[CheckpointError]]:
    """What ``read`` makes of the file of every step, and what is wrong with the others.

    The list is made anew where a file on it is deleted before it is read, or all could be gone.
    """
    for _ in range(ATTEMPTS):
        found: list[T] = []
        broken: list[CheckpointError] = []
        gone: list[Path] = []
        for path in paths(folder, "step-"):
            try:
                found.append(read(path))
            except (OSError, CheckpointError) as error:
                if is_missing(error):
                    gone.append(path)
                broken.append(error if isinstance(error, CheckpointError) else _unreadable(path, error))
        if not gone or set(gone) & set(paths(folder, "step-")):  # a link that leads nowhere is not deleted
            break
    return found, broken


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    found = CheckpointError(f"{path}: cannot be read ({error.strerror})")
    found.__cause__ = error
    return found
