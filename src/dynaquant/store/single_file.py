"""One checkpoint file outside of a run: written atomically or in memory, and verified."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path

from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.label import Label
from dynaquant.errors import CheckpointError
from dynaquant.store.atomic_files import atomic_file
from dynaquant.store.container import CheckpointFile, Header, Parent
from dynaquant.store.files import is_reference, syncing
from dynaquant.store.writing import Base, verify_written, write_checkpoint

FIRST_SEQUENCE = 1
"""The sequence number of a file without a parent. A delta has that of its parent, plus one."""


def write_file(
    out: Path,
    draft: Header,
    tensors: Mapping[str, StoredTensor],
    labels: Mapping[str, Label],
    base: Base | None,
    threads: int = 1,
) -> CheckpointFile:
    """Write a checkpoint to a path, atomically: it is read back and verified before it has its name.

    draft: its header, whose entries are filled in. threads: how many tensors are encoded or decoded at a time.

    Raises CheckpointError if ``out`` cannot be a file, OSError if it cannot be written.
    """
    with atomic_file(out) as file:
        write_checkpoint(file, draft, tensors, labels, base, "conditional", threads=threads, durable=False)
        with syncing(file):
            written = CheckpointFile(Path(file.name))
            verify_written(written, tensors, base, threads)
    return written.renamed(out)


def write_in_memory(
    draft: Header,
    tensors: Mapping[str, StoredTensor],
    labels: Mapping[str, Label],
    base: Base | None,
    threads: int = 1,
) -> CheckpointFile:
    """Write a checkpoint to memory and verify it. ``read_all`` of the result returns its bytes."""
    out = io.BytesIO()
    write_checkpoint(out, draft, tensors, labels, base, "conditional", threads=threads)
    written = CheckpointFile(Path("the file in memory"), out.getvalue())
    verify_written(written, tensors, base, threads)
    return written


def as_parent(parent: CheckpointFile, out: Path | None) -> Parent:
    """Return how a delta at ``out`` names its parent: by a path from its folder, if both have one.

    Raises CheckpointError if the path has characters that a header cannot hold.
    """
    header = parent.header
    if out is None or parent.in_memory:
        return Parent(header.step, header.identity, "")
    reference = os.path.relpath(parent.path.resolve(), out.resolve().parent)
    if not is_reference(reference):
        raise CheckpointError(f"{parent.path}: a delta cannot name this path; give the parent a printable name")
    return Parent(header.step, header.identity, reference)
