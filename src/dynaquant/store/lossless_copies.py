"""Names and opens lossless copies. A copy is a file with a checkpoint's tensors before quantization.

A commit writes the copy beside its checkpoint, and deletes the copy of the previous checkpoint (``commit.py``). A copy
may be exact in its weights only, and have all other tensors as in the checkpoint. Such a copy stays as long as its
checkpoint has a tag.
"""

from __future__ import annotations

import re
from pathlib import Path

from dynaquant.errors import CheckpointError
from dynaquant.store.container import CheckpointFile, Header, Summary, open_if_exists
from dynaquant.store.listing import SUFFIX, checkpoint_paths

LOSSLESS_COPY = "exact"
"""Key of a record: the identity of the lossless copy, or None."""
EXACT_WEIGHTS = "exact_weights"
"""Key of a record: true if the copy is exact in its weights only."""
_NAME = re.compile(r"exact-\d{12,}-\d{12,}\.dqc")


def copy_paths(folder: Path) -> list[Path]:
    """Return the files of lossless copies in a run's folder, lowest step first."""
    return [path for path in checkpoint_paths(folder, "exact-") if _NAME.fullmatch(path.name)]


def copy_path(folder: Path, header: Header | Summary) -> Path:
    """Return the path of a checkpoint's lossless copy. The sequence number makes it different for every commit."""
    return folder / f"exact-{header.step:012d}-{header.sequence:012d}{SUFFIX}"


def has_copy(header: Header) -> bool:
    """Whether a checkpoint was committed with a lossless copy."""
    return header.record.get(LOSSLESS_COPY) is not None


def open_copy(folder: Path, header: Header) -> CheckpointFile | None:
    """Return the lossless copy of a checkpoint, or None if there is none in the folder.

    Raises CheckpointError if the file is damaged or is the copy of another checkpoint.
    """
    if not has_copy(header):
        return None
    path = copy_path(folder, header)
    copy = open_if_exists(path)
    if copy is not None and copy.header.identity != header.record[LOSSLESS_COPY]:
        raise CheckpointError(f"{path}: is not the lossless copy that was saved with step {header.step}")
    return copy
