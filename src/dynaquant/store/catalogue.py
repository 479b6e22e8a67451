"""The catalogue of a run: one file with what a listing says of each checkpoint, so that it opens no other.

The catalogue is never trusted over the checkpoints. A line counts only if the file that it describes has the same
size and time of modification, or the same size and header, as the files of a copied run have. A lost, torn or stale
catalogue costs only time: what it lacks is read from the checkpoints, and the next writer makes it anew. A commit
appends a line: two JSON objects, with a tab between. The first is what every listing needs, the second is the record,
which most do not parse.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dynaquant.errors import CheckpointError
from dynaquant.store.atomic_files import atomic_file
from dynaquant.store.container import DISPLACED, CheckpointFile, Parent, Summary, is_step, stored_header
from dynaquant.store.entry import Entry
from dynaquant.store.files import open_file

NAME = "catalogue.jsonl"
_LARGEST = 1 << 28
"""A larger catalogue is not read: 3,000 checkpoints take a few megabytes."""
LEAST = 32
"""A run of fewer checkpoints gets no catalogue."""
_STALE_LINES = 100
"""A writer makes the catalogue anew once it has so many lines more than twice the checkpoints."""


@dataclass(frozen=True)
class Listed:
    """What a listing says of a checkpoint.

    path: of its own file. record: of its header, without ``displaced``. roles: raw and stored bytes of its tensors by
    role, without tensors whose values are not in it. size: bytes of its files.
    """

    path: Path
    summary: Summary
    record: dict[str, Any]
    roles: dict[str, tuple[int, int]]
    size: int

    @classmethod
    def of(cls, file: CheckpointFile) -> Listed:
        """Return what is listed of an opened checkpoint."""
        record = {key: value for key, value in file.header.record.items() if key != DISPLACED}
        return cls(file.path, file.header.summary, record, bytes_by_role(file.header.entries), file.total_size)


def bytes_by_role(entries: Iterable[Entry]) -> dict[str, tuple[int, int]]:
    """Return raw and stored bytes of tensors by role, without tensors whose values are not in the checkpoint."""
    roles: dict[str, tuple[int, int]] = {}
    for entry in entries:
        if not entry.external:
            raw, stored = roles.get(entry.label.role, (0, 0))
            roles[entry.label.role] = raw + entry.raw_size, stored + entry.stored_size
    return roles


@dataclass(frozen=True)
class Line:
    """A line of the catalogue. size, modified, address: of the checkpoint's own file. rest: the second object."""

    size: int
    modified: int
    address: str
    summary: Summary
    rest: bytes

    @classmethod
    def of(cls, file: CheckpointFile) -> Line:
        """Return the line of an opened checkpoint."""
        listed = Listed.of(file)
        rest = {"record": listed.record, "roles": listed.roles, "size": listed.size}
        modified = file.version[2] if file.version is not None else 0
        return cls(file.size, modified, file.address, listed.summary, _to_json(rest))

    def listed(self, path: Path) -> Listed:
        """Return what is listed of the checkpoint at a path. Raises ValueError if the line is damaged."""
        try:
            rest = json.loads(self.rest)
            roles = {role: (_size(raw), _size(stored)) for role, (raw, stored) in rest["roles"].items()}
            return Listed(path, self.summary, dict(rest["record"]), roles, _size(rest["size"]))
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}: its line in the catalogue is damaged ({error!r})") from None

    def to_bytes(self, name: str) -> bytes:
        """Return the line as the catalogue has it. name: of the checkpoint's file."""
        summary, parent = self.summary, self.summary.parent
        of_summary = asdict(summary) | {"frozen": sorted(summary.frozen), "parts": sorted(summary.parts)}
        first = {"file": name, "bytes": self.size, "modified": self.modified, "address": self.address}
        return _to_json(first | {"summary": of_summary | {"parent": parent and parent.to_json()}}) + b"\t" + self.rest

    @classmethod
    def from_bytes(cls, text: bytes) -> tuple[str, Line] | None:
        """Return the name and the content of a line; None if it is torn or is no such line."""
        first, _, rest = text.rstrip(b"\n").partition(b"\t")
        try:
            data = json.loads(first)
            found = data["summary"]
            parent = None if found["parent"] is None else Parent.from_json(found["parent"])
            sets = {"frozen": frozenset(found["frozen"]), "parts": frozenset(found["parts"])}
            summary = Summary(**found | sets | {"parent": parent})
            line = cls(_size(data["bytes"]), _size(data["modified"]), data["address"], summary, rest)
            names = data["file"], line.address, summary.identity, *summary.frozen, *summary.parts
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            return None
        valid = is_step(summary.step) and is_step(summary.sequence) and type(summary.finite) is bool
        valid = valid and isinstance(summary.metric, float | None) and (parent is None or parent.is_valid)
        return (names[0], line) if valid and all(type(name) is str for name in names) else None


class Catalogue:
    """The catalogue of a run's folder. It is read once, when the first checkpoint is looked up."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._lines: dict[str, Line] | None = None  # by the name of the checkpoint's file
        self._written = 0  # lines in the file
        self._changed = False  # whether there is more to know than the file says

    def find(self, name: str, status: os.stat_result) -> Line | None:
        """Return the line of a checkpoint, or None if the catalogue does not describe this file.

        name, status: of the file. If its time is another one, as after ``cp -r``, its header is read, but not parsed.
        """
        lines = self._known()
        line = lines.get(name)
        if line is None or line.size != status.st_size:
            return None
        if line.modified == status.st_mtime_ns:
            return line
        path = self._path.with_name(name)
        with suppress(CheckpointError, OSError), open_file(path) as file:  # whoever opens it says what is wrong
            if stored_header(file, status.st_size)[2] == line.address:
                lines[name] = line = replace(line, modified=status.st_mtime_ns)
                self._changed = True
                return line
        return None

    def remember(self, file: CheckpointFile) -> Line:
        """Return the line of a checkpoint that was opened, and keep it for ``find`` and ``renew``."""
        self._known()[file.path.name] = line = Line.of(file)
        self._changed = True
        return line

    def append(self, file: CheckpointFile) -> None:
        """Add a checkpoint that was just committed. An error of the system is not one of the commit."""
        with suppress(OSError):
            self._known()[file.path.name] = line = Line.of(file)
            if not self._written:
                self._changed = True
                self.renew(self._known())
                return
            # The new line begins a line, even if a killed process has left half of one.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
            try:
                os.write(descriptor, b"\n" + line.to_bytes(file.path.name) + b"\n")
            finally:
                os.close(descriptor)
            self._written += 1

    def forget(self, name: str) -> None:
        """Drop a checkpoint that was deleted. Its line stays in the file until ``renew``."""
        self._known().pop(name, None)

    def renew(self, names: Collection[str]) -> None:
        """Write the catalogue anew if it lacks one of these checkpoints, or has many lines that describe none.

        A small run has none.
        """
        known = {name: line for name, line in self._known().items() if name in names}
        if (self._changed and len(known) >= LEAST) or self._written > 2 * len(names) + _STALE_LINES:
            with suppress(OSError, CheckpointError), atomic_file(self._path) as out:
                out.write(b"".join(line.to_bytes(name) + b"\n" for name, line in known.items()))
                self._written = len(known)
            self._lines, self._changed = known, False

    def _known(self) -> dict[str, Line]:
        if self._lines is None:
            self._lines = {}
            with suppress(OSError, CheckpointError), open_file(self._path) as file:
                if os.fstat(file.fileno()).st_size <= _LARGEST:
                    for text in file:
                        if (found := Line.from_bytes(text)) is not None:
                            self._lines[found[0]] = found[1]
                            self._written += 1
        return self._lines


def _to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value
