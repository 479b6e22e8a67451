"""Files of frozen parameters: what does not train is written once, for all checkpoints of a run (docs/format.md).

Such a file is a checkpoint file without deltas. Its name is its identity, which is a hash of all that it holds: the
same parameters make the same file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from dynaquant.coding.decoder import decode
from dynaquant.coding.schemes import BytePlanes, Frozen, Lossless, Raw
from dynaquant.errors import CheckpointError
from dynaquant.store.container import CheckpointFile, is_missing
from dynaquant.store.entry import Entry
from dynaquant.store.files import sync, sync_name
from dynaquant.store.memory import memory_for
from dynaquant.tensors.dequantize import values_of
from dynaquant.tensors.hashing import tensor_hash
from dynaquant.tensors.stored import External, StoredTensor, omitted

PREFIX = "frozen-"
"""How the names of such files begin."""
_NAME = re.compile(r"frozen-[0-9a-f]{16}\.dqc")
_CODINGS = (Raw, BytePlanes, Lossless)
"""Of tensors in such files."""
_IDENTITY_DIGITS = 16
"""Of the identity, in a file's name. The whole identity is compared when the file is opened."""


def file_name(identity: str) -> str:
    """The name of the file of frozen parameters with this identity."""
    return f"{PREFIX}{identity[:_IDENTITY_DIGITS]}.dqc"


def is_name(name: str) -> bool:
    """Whether a file of this name can be one of frozen parameters. Others are somebody else's."""
    return _NAME.fullmatch(name) is not None


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


class Files:
    """The files of frozen parameters in the folder of a run, and which of them are known to decode."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._decodes: dict[str, bool] = {}  # by identity

    def held(self, tensors: Mapping[str, StoredTensor]) -> dict[str, External]:
        """Those of the tensors that were omitted, or whose values lie in files that are there and not known to be
        damaged."""
        files = {name: stored for name, stored in tensors.items() if isinstance(stored, External)}
        there: set[str] = set()
        for identity in {stored.file for stored in files.values() if stored.file is not None}:
            if self._decodes.get(identity, True):
                with suppress(CheckpointError):
                    CheckpointFile(self._folder / file_name(identity))
                    there.add(identity)
        return {name: stored for name, stored in files.items() if stored.file is None or stored.file in there}

    def wrote(self, holder: CheckpointFile) -> None:
        """Takes note of a file that was just written and read back."""
        self._decodes[holder.header.identity] = True

    def check(self, file: CheckpointFile) -> None:
        """Decodes the files that a checkpoint needs, each of them once.

        Raises CheckpointError when one is damaged. ``held`` leaves it out from then on, so that it is written anew.
        """
        for identity in file.header.frozen:
            if not self._decodes.get(identity, False):
                self._decodes[identity] = False
                check(opened(file, identity))
                self._decodes[identity] = True


def copy(holder: CheckpointFile, folder: Path) -> None:
    """Copies a file of frozen parameters, once it is known to be sound, into the folder of another run.

    Raises CheckpointError when a tensor is damaged.
    """
    check(holder)
    path = folder / holder.path.name
    temporary = path.with_name(path.name + ".tmp")  # the writer of a run clears such names away
    try:
        temporary.write_bytes(holder.content())
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_name(path)


def external(file: CheckpointFile, entry: Entry) -> External:
    """The tensor of an entry whose values are not in the checkpoint.

    Raises CheckpointError when the file of frozen parameters does not hold it.
    """
    scheme = entry.scheme
    if isinstance(scheme, Frozen):
        holder = opened(file, scheme.file)
        found = holder.header.by_name.get(entry.name)
        fits = found is not None and (found.dtype, found.shape, found.hash) == (entry.dtype, entry.shape, entry.hash)
        if found is None or not fits or not isinstance(found.scheme, _CODINGS) or found.needs_parent:
            raise CheckpointError(f"{file.path}: {entry.name} is not in {holder.path.name}, where it should be")
        return of_file(holder, found)

    return omitted(entry.name, entry.dtype, entry.shape, entry.hash)


def of_file(holder: CheckpointFile, entry: Entry) -> External:
    """A tensor of a file of frozen parameters."""

    def values() -> Tensor:
        try:
            with memory_for(holder, entry):
                tensor = values_of(decode(entry.scheme, entry.dtype, entry.shape, holder.read(entry), None))
        except ValueError as error:
            raise CheckpointError(f"{holder.path}: tensor {entry.name} is damaged ({error})") from error
        if tensor_hash(tensor) != entry.hash:
            raise CheckpointError(f"{holder.path}: tensor {entry.name} does not decode to the values that were stored")
        return tensor

    return External(entry.dtype, entry.shape, entry.hash, holder.header.identity, values)
