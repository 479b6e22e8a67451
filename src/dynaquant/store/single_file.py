"""One checkpoint file outside of a run: written atomically or in memory, and verified."""

from __future__ import annotations

import io
import os
from pathlib import Path

from dynaquant.errors import CheckpointError
from dynaquant.store.atomic_files import atomic_file
from dynaquant.store.container import CheckpointFile, Header, Parent
from dynaquant.store.files import is_reference
from dynaquant.store.writing import Base, Checkpoint, Draft, verify_written, write_checkpoint, written_file


def write_file(
    out: Path,
    checkpoint: Checkpoint,
    parent: CheckpointFile | None = None,
    base: Base | None = None,
    threads: int = 1,
) -> CheckpointFile:
    """Write a checkpoint to a path, atomically: it is read back and verified before it has its name.

    If the path is a symbolic link, that stays, and the file is where it points, as with ``torch.save``.

    parent: what the checkpoint is conditioned on, with its tensors in ``base``. threads: how many tensors are encoded
    or decoded at a time.

    Raises CheckpointError if ``out`` cannot be a file, OSError if it cannot be written.
    """
    out = out.resolve() if out.is_symlink() else out
    draft = _draft(checkpoint, parent, base, out)
    with atomic_file(out) as file:
        written = written_file(file, draft, threads)
    return written.renamed(out)


def write_in_memory(
    checkpoint: Checkpoint, parent: CheckpointFile | None = None, base: Base | None = None, threads: int = 1
) -> CheckpointFile:
    """Write a checkpoint to memory and verify it. ``read_all`` of the result returns its bytes."""
    out, draft = io.BytesIO(), _draft(checkpoint, parent, base, None)
    write_checkpoint(out, draft, threads)
    written = CheckpointFile(Path("the file in memory"), out.getvalue())
    verify_written(written, draft, threads)
    return written


def _draft(checkpoint: Checkpoint, parent: CheckpointFile | None, base: Base | None, out: Path | None) -> Draft:
    sequence, above = (1, None) if parent is None else (parent.header.sequence + 1, _as_parent(parent, out))
    header = Header(checkpoint.step, sequence, above, checkpoint.tree, (), checkpoint.record)
    return Draft(header, checkpoint.tensors, checkpoint.labels, base, checkpoint.coder)


def _as_parent(parent: CheckpointFile, out: Path | None) -> Parent:
    """Return how a delta at ``out`` names its parent: by a path from its folder, if both have one."""
    header = parent.header
    if out is None or parent.in_memory:
        return Parent(header.step, header.identity, "")
    reference = os.path.relpath(parent.path.resolve(), out.resolve().parent)
    if not is_reference(reference):
        raise CheckpointError(f"{parent.path}: a delta cannot name this path; give the parent a printable name")
    return Parent(header.step, header.identity, reference)
