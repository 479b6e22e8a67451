"""Files of frozen parameters: what does not train is written once, for all checkpoints of a run (docs/format.md).

Such a file is a checkpoint file without deltas. Its name is its identity, which is a hash of all that it holds: the
same parameters make the same file.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from dynaquant.coding import stream
from dynaquant.coding.stream import StoredTensor
from dynaquant.codings import Frozen
from dynaquant.container import CheckpointFile, is_missing
from dynaquant.entry import Entry
from dynaquant.errors import CheckpointError
from dynaquant.external import External, omitted
from dynaquant.files import replacing
from dynaquant.memory import memory_for

PREFIX = "frozen-"
"""How the names of such files begin."""
_IDENTITY_DIGITS = 16
"""Of the identity, in a file's name. The whole identity is compared when the file is opened."""


def file_name(identity: str) -> str:
    """The name of the file of frozen parameters with this identity."""
    return f"{PREFIX}{identity[:_IDENTITY_DIGITS]}.dqc"


def opened(file: CheckpointFile, identity: str) -> CheckpointFile:
    """A file of frozen parameters that a checkpoint needs; it is opened once for each checkpoint.

    Raises CheckpointError when it is not beside the checkpoint, or holds something else.
    """
    if identity not in file.frozen:
        path = file.path.parent / file_name(identity)
        try:
            found = CheckpointFile(path)
        except CheckpointError as error:
            if not is_missing(error):
                raise
            raise CheckpointError(
                f"{file.path}: its frozen parameters are in {path.name}, which is not beside it"
            ) from None
        if found.header.identity != identity:
            raise CheckpointError(f"{path}: holds other frozen parameters than {file.path.name} refers to")
        file.frozen[identity] = found
    return file.frozen[identity]


def check(holder: CheckpointFile) -> None:
    """Decodes a file of frozen parameters. Raises CheckpointError when a tensor is damaged."""
    for entry in holder.header.entries:
        of_file(holder, entry).values()


def held(tensors: Mapping[str, StoredTensor], folder: Path) -> dict[str, External]:
    """Those of the tensors whose values lie in files of frozen parameters that are in a folder."""
    files = {name: stored for name, stored in tensors.items() if isinstance(stored, External)}
    identities = {stored.file for stored in files.values() if stored.file is not None}
    there = {identity for identity in identities if (folder / file_name(identity)).exists()}
    return {name: stored for name, stored in files.items() if stored.file in there}


def copy(holder: CheckpointFile, folder: Path) -> Path:
    """Copies a file of frozen parameters into the folder of another run."""
    path = folder / holder.path.name
    with holder.path.open("rb") as source, replacing(path) as out:
        shutil.copyfileobj(source, out)
    return path


def external(file: CheckpointFile, entry: Entry) -> External:
    """The tensor of an entry whose values are not in the checkpoint.

    Raises CheckpointError when the file of frozen parameters does not hold it.
    """
    coding = entry.coding
    if isinstance(coding, Frozen):
        holder = opened(file, coding.file)
        held = holder.header.by_name.get(entry.name)
        if held is None or held.hash != entry.hash or held.external or held.needs_parent:
            raise CheckpointError(f"{file.path}: {entry.name} is not in {holder.path.name}, where it should be")
        return of_file(holder, held)

    return omitted(entry.name, entry.dtype, entry.shape, entry.hash)


def of_file(holder: CheckpointFile, entry: Entry) -> External:
    """A tensor of a file of frozen parameters."""

    def values() -> Tensor:
        try:
            with memory_for(holder, entry):
                tensor = stream.values_of(stream.decode(entry, holder.read(entry), None))
        except ValueError as error:
            raise CheckpointError(f"{holder.path}: tensor {entry.name} is damaged ({error})") from error
        if stream.tensor_hash(tensor) != entry.hash:
            raise CheckpointError(f"{holder.path}: tensor {entry.name} does not decode to the values that were stored")
        return tensor

    return External(entry.dtype, entry.shape, entry.hash, holder.header.identity, values)
