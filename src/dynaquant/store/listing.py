"""The checkpoint files in a folder, listed while a writer may add and delete some."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dynaquant.errors import CheckpointError
from dynaquant.store.chain import ATTEMPTS
from dynaquant.store.container import is_missing

SUFFIX = ".dqc"
T = TypeVar("T")


def paths(folder: Path, prefix: str) -> list[Path]:
    """Returns the checkpoint files whose names begin with ``prefix``, by name.

    Raises CheckpointError if the folder cannot be read.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from error
    return [folder / name for name in sorted(names) if name.startswith(prefix) and name.endswith(SUFFIX)]


def listed(folder: Path, read: Callable[[Path], T]) -> tuple[list[T], list[CheckpointError]]:
    """Returns what ``read`` makes of the file of each step, and the errors of the files that cannot be read.

    Lists the folder again if a listed file was deleted before it was read.
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
        if not gone or set(gone) & set(paths(folder, "step-")):  # a link to nothing is missing, but was not deleted
            break
    return found, broken


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    found = CheckpointError(f"{path}: cannot be read ({error.strerror})")
    found.__cause__ = error
    return found
