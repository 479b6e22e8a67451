"""Files of frozen parameters in a run's folder: finds those that can be used, checks and copies them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dynaquant.engine.forms.external import External, externals
from dynaquant.engine.forms.form import StoredTensor
from dynaquant.errors import CheckpointError
from dynaquant.store.chain import frozen_name, open_frozen
from dynaquant.store.container import CheckpointFile
from dynaquant.store.decoding import tensor_in
from dynaquant.store.files import sync, sync_parent


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
