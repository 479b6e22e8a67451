"""Files of frozen parameters: a run stores such parameters once, for all its checkpoints (docs/format.md).

Such a file is a checkpoint file without deltas. Its name is its identity, a hash of its contents, so the same
parameters make the same file.
"""

from __future__ import annotations

import re

from dynaquant.errors import CheckpointError
from dynaquant.store.container import CheckpointFile, open_if_exists

PREFIX = "frozen-"
"""Prefix of the names of these files."""
_NAME = re.compile(r"frozen-[0-9a-f]{16}\.dqc")
_IDENTITY_DIGITS = 16
"""Digits of the identity in a file's name. The whole identity is compared when the file is opened."""


def file_name(identity: str) -> str:
    """Return the name of the file of frozen parameters with this identity."""
    return f"{PREFIX}{identity[:_IDENTITY_DIGITS]}.dqc"


def is_frozen_name(name: str) -> bool:
    """Whether this is the name of a file of frozen parameters. Users may have put other files into the folder."""
    return _NAME.fullmatch(name) is not None


def open_frozen(file: CheckpointFile, identity: str) -> CheckpointFile:
    """Return a file of frozen parameters that a checkpoint needs. Opens it once for each checkpoint.

    Raises CheckpointError if it is not beside the checkpoint, or holds other parameters.
    """
    if identity not in file.frozen:
        path = file.path.parent / file_name(identity)
        if (found := open_if_exists(path)) is None:
            raise CheckpointError(f"{file.path}: its frozen parameters are in {path.name}, which is not beside it")
        if found.header.identity != identity:
            raise CheckpointError(f"{path}: holds other frozen parameters than {file.path.name} refers to")
        file.frozen[identity] = found
    return file.frozen[identity]
