"""Decodes tensors of files of frozen parameters, and checks and copies such files."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from dynaquant.engine.forms.external import External, externals, omitted
from dynaquant.engine.forms.form import Coded, StoredTensor
from dynaquant.engine.forms.registry import decode
from dynaquant.engine.forms.stored import values_of
from dynaquant.engine.tensors.dtypes import dtype_named
from dynaquant.engine.tensors.hashing import tensor_hash
from dynaquant.errors import CheckpointError
from dynaquant.store.chain import frozen_name, open_frozen
from dynaquant.store.container import CheckpointFile
from dynaquant.store.entry import Entry
from dynaquant.store.files import sync, sync_parent
from dynaquant.store.out_of_memory import explain_damage


def verify(holder: CheckpointFile) -> None:
    """Decode a file of frozen parameters. Raises CheckpointError if a tensor is damaged."""
    for entry in holder.header.entries:
        tensor_in(holder, entry).values()


class FrozenFiles:
    """The files of frozen parameters in a run's folder. Remembers which of them could be decoded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._decodes: dict[str, bool] = {}  # by identity

    def available(self, tensors: Mapping[str, StoredTensor]) -> dict[str, External]:
        """Return those of the tensors that the next checkpoint need not store.

        These are omitted tensors, and tensors in files that exist and are not known to be damaged.
        """
        files = externals(tensors)
        there: set[str] = set()
        for identity in {stored.file for stored in files.values() if stored.file is not None}:
            if self._decodes.get(identity, True):
                with suppress(CheckpointError):
                    CheckpointFile(self._folder / frozen_name(identity))
                    there.add(identity)
        return {name: stored for name, stored in files.items() if stored.file is None or stored.file in there}

    def mark_sound(self, holder: CheckpointFile) -> None:
        """Remember that a file can be decoded, because it was just written and verified."""
        self._decodes[holder.header.identity] = True

    def verify(self, file: CheckpointFile) -> None:
        """Decode the files that a checkpoint needs, each of them once.

        Raises CheckpointError if one is damaged. From then on ``available`` leaves it out, so it is written again.
        """
        for identity in file.header.frozen:
            if not self._decodes.get(identity, False):
                self._decodes[identity] = False
                verify(open_frozen(file, identity))
                self._decodes[identity] = True


def copy_to(holder: CheckpointFile, folder: Path) -> None:
    """Verify a file of frozen parameters and copy it into another run's folder.

    Raises CheckpointError if a tensor is damaged.
    """
    verify(holder)
    path = folder / holder.path.name
    temporary = path.with_name(path.name + ".tmp")  # the next writer of the run deletes such a file if it is left
    try:
        temporary.write_bytes(holder.read_all())
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_parent(path)


def external_tensor(file: CheckpointFile, entry: Entry) -> External:
    """Return the tensor of an entry whose values are not in the checkpoint: frozen or omitted.

    Raises CheckpointError if the file of frozen parameters does not hold it.
    """
    if (identity := entry.scheme.frozen_file) is not None:
        holder = open_frozen(file, identity)
        found = holder.header.by_name.get(entry.name)
        fits = found is not None and (found.dtype, found.shape, found.hash) == (entry.dtype, entry.shape, entry.hash)
        if found is None or not fits or not found.scheme.is_exact or found.needs_parent:
            raise CheckpointError(f"{file.path}: {entry.name} is not in {holder.path.name}, where it should be")
        return tensor_in(holder, found)
    return omitted(entry.name, dtype_named(entry.dtype), torch.Size(entry.shape), entry.hash)


def tensor_in(holder: CheckpointFile, entry: Entry) -> External:
    """Return a tensor of a file of frozen parameters. Its values are decoded and checked when asked for."""
    dtype, shape = dtype_named(entry.dtype), torch.Size(entry.shape)

    def values() -> Tensor:
        with explain_damage(holder, entry):
            tensor = values_of(decode(entry.scheme, Coded(dtype, shape, holder.read(entry))))
        if tensor_hash(tensor) != entry.hash:
            raise CheckpointError(f"{holder.path}: tensor {entry.name} does not decode to the values that were stored")
        return tensor

    return External(dtype, shape, entry.hash, holder.header.identity, values)
