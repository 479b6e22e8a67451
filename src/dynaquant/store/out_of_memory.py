"""Explains the errors of tensors that cannot be decoded: they are damaged, or there is too little memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dynaquant.errors import CheckpointError
from dynaquant.formatting import in_bytes, plural
from dynaquant.store.container import CheckpointFile
from dynaquant.store.entry import Entry


@contextmanager
def explain_damage(file: CheckpointFile, entry: Entry) -> Iterator[None]:
    """Wrap a block that decodes a tensor. Raises CheckpointError for ValueErrors and if there is too little memory."""
    try:
        with explain_out_of_memory(file, entry):
            yield
    except ValueError as error:
        raise CheckpointError(f"{file.path}: tensor {entry.name} is damaged ({error})") from error


@contextmanager
def explain_out_of_memory(file: CheckpointFile, *entries: Entry) -> Iterator[None]:
    """Wrap a block that decodes these tensors of a file. A small file can claim that its tensors are large.

    Raises CheckpointError, with the memory they would take, if there is not enough.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):  # PyTorch's words
            raise
        what = f"tensor {entries[0].name}" if len(entries) == 1 else plural(len(entries), "tensor")
        raw, stored = (
            sum(sizes) for sizes in zip(*((entry.raw_size, entry.stored_size) for entry in entries), strict=True)
        )
        raise CheckpointError(
            f"{file.path}: there is not enough memory to decode {what}: the file claims {in_bytes(raw)} and stores "
            f"{in_bytes(stored)}; use a machine with more memory"
        ) from MemoryError(str(error))
