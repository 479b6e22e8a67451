"""The checkpoints of a run as they appear, while a training writes to it. Reads each file's header once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaquant.errors import CheckpointError
from dynaquant.saving.record import Record, record_of
from dynaquant.store.files import FileVersion, file_version
from dynaquant.store.pointers import run_at
from dynaquant.store.tags import tags_of


@dataclass(frozen=True)
class Seen:
    """A checkpoint of a run. committed: when it was saved, in seconds since 1970. tags: its names."""

    record: Record
    committed: float
    tags: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {**self.record.to_json(), "committed": self.committed, "tags": list(self.tags)}


class WatchedRun:
    """A run that is looked at again and again. The folder need not exist yet.

    folder: of the run, or what stands for it (``pointers.run_at``).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run = run_at(folder)
        self._records: dict[FileVersion, Record] = {}

    def look(self) -> tuple[list[Seen], list[CheckpointError]]:
        """Return the checkpoints, oldest commit first, and the errors of files that cannot be read."""
        if not self._records:
            self._run = run_at(self._folder)  # a framework may have made its folder meanwhile
        listing, broken = self._run.listing()
        try:
            tags = tags_of(self._run)
        except CheckpointError as error:
            tags, broken = [], [*broken, error]
        found: list[Seen] = []
        records: dict[FileVersion, Record] = {}
        for listed in listing:
            path = listed.path
            try:
                status = path.stat()
                version = file_version(status)
                record = self._records.get(version) or record_of(listed)
            except FileNotFoundError:  # the training has deleted it since it was listed
                continue
            except CheckpointError as error:
                if path.exists():
                    broken.append(error)
                continue
            records[version] = record
            own = tuple(tag.name for tag in tags if tag.refers_to(listed.summary))
            # Re-coding writes the file again, and copying may change its time.
            committed = status.st_mtime if record.saved_at is None else record.saved_at
            found.append(Seen(record, committed, own))
        self._records = records
        return found, broken
