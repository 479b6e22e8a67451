"""One checkpoint file: preamble, streams, header, trailer (docs/format.md).

The header comes after the streams, so a writer never holds more than one stream. A reader trusts nothing: it checks
every length and count against the real size of the file before it allocates memory.
"""

from __future__ import annotations

import io
import json
import os
import struct
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import zstandard
from blake3 import blake3

from dynaquant.cached import cached_property
from dynaquant.errors import CheckpointError, RunChangedError, UnreadableError
from dynaquant.garbage import collection_paused
from dynaquant.state.tree import MAX_DEPTH, is_too_deep
from dynaquant.store.entry import Entry, check_features, required_features
from dynaquant.store.files import FileVersion, InMemory, OnDisk, file_version, is_missing, is_reference, open_file
from dynaquant.store.layout import Layout, PartFile, check_layouts, parts_from_json, parts_to_json
from dynaquant.store.threads import WriteBehind

FORMAT_VERSION = 1
"""The version that is written and read. A file that needs more says so in its header (``entry.check_features``)."""
MAGIC = b"\x89DQC\r\n\x1a\n"
"""First and last eight bytes of a file. As in PNG, they detect a transfer that changed line endings."""

_PREAMBLE = struct.Struct("<8sQ")  # magic, format version
_TRAILER = struct.Struct("<QQ16s8s")  # stored header size, header size, checksum, magic
_MAX_HEADER_EXPANSION = 16


@dataclass(frozen=True)
class Parent:
    """The checkpoint that a delta is conditioned on.

    file: its path, relative to the delta's folder; empty if one of the two is in memory. None in a run, where the step
    names the file.
    """

    step: int
    identity: str
    file: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the parent as a header keeps it."""
        return {"step": self.step, "identity": self.identity, **({} if self.file is None else {"file": self.file})}

    @classmethod
    def from_json(cls, data: Any) -> Parent:
        """Reverse ``to_json``. Raises KeyError or TypeError if a value is missing."""
        return cls(data["step"], data["identity"], data.get("file"))

    @property
    def is_valid(self) -> bool:
        """Whether all values are of the right type and in range."""
        return (
            is_step(self.step) and type(self.identity) is str and (self.file in (None, "") or is_reference(self.file))
        )


NOT_FINITE = "not_finite"
"""Key of a record: how many weights have infinite or NaN values."""
DISPLACED = "displaced"
"""Key of a record: how far each weight has moved since the training began. A listing leaves it out, as it is large."""


@dataclass(frozen=True)
class Summary:
    """A header without its large parts, enough to find a checkpoint and its parent in a run.

    frozen: identities of the files of frozen parameters that it needs. parts: addresses of its parts in other files.
    metric: of the weights as stored, if it was evaluated. finite: whether no weight is infinite or NaN, as far as
    recorded.
    """

    step: int
    sequence: int
    identity: str
    parent: Parent | None
    frozen: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    metric: float | None = None
    finite: bool = True


@dataclass(frozen=True)
class Header:
    """Everything in a checkpoint file except its streams: the manifest of the checkpoint.

    sequence: increases with every commit to a run; the newest checkpoint has the highest. parent: None for a keyframe.
    tree: the JSON tree of the state (``state.flatten``). record: facts about the save. parts: those in other files,
    with the layouts of the tensors there. All other tensors are in this file.
    """

    step: int
    sequence: int
    parent: Parent | None
    tree: Any
    entries: tuple[Entry, ...]
    record: dict[str, Any]
    parts: tuple[PartFile, ...] = ()
    layouts: tuple[Layout, ...] = ()

    @cached_property
    def identity(self) -> str:
        """Returns the hash of the decoded checkpoint: a Merkle root over its tensors and its tree, 64 hex digits."""
        leaves = sorted((entry.name, entry.hash) for entry in self.entries)
        return blake3(_json([self.tree, leaves])).hexdigest()

    @property
    def summary(self) -> Summary:
        """Returns the header without its large parts."""
        finite, parts = not self.record.get(NOT_FINITE), frozenset(part.address for part in self.parts)
        quality = self.record.get("quality")
        value = quality.get("restored") if isinstance(quality, dict) else None
        metric = value if isinstance(value, float) else None
        return Summary(self.step, self.sequence, self.identity, self.parent, self.frozen, parts, metric, finite)

    @property
    def frozen(self) -> frozenset[str]:
        """Returns the identities of the files of frozen parameters that the checkpoint needs."""
        return frozenset(filter(None, (entry.scheme.frozen_file for entry in self.entries)))

    @cached_property
    def by_name(self) -> dict[str, Entry]:
        """Returns the entries by tensor name."""
        return {entry.name: entry for entry in self.entries}


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", errors="surrogatepass"
    )


class CheckpointWriter:
    """Writes one checkpoint into an open binary file: the streams in turn, then the header."""

    def __init__(self, file: BinaryIO | WriteBehind) -> None:
        self._file = file
        file.write(_PREAMBLE.pack(MAGIC, FORMAT_VERSION))

    def add(self, stream: bytes) -> None:
        """Append the stream of the header's next entry."""
        self._file.write(stream)

    def finish(self, header: Header) -> None:
        """Append the header, and hand all to the system."""
        fields = {
            "requires": required_features(header.entries),
            "step": header.step,
            "sequence": header.sequence,
            "identity": header.identity,
            "parents": [] if header.parent is None else [header.parent.to_json()],
            "tree": header.tree,
            "tensors": [entry.to_json() for entry in header.entries],
            "record": header.record,
            **parts_to_json(header.parts, header.layouts),
        }
        plain, compressor = _json(fields), zstandard.ZstdCompressor(level=9)
        stored = compressor.compress(plain)
        if (missing := len(plain) / _MAX_HEADER_EXPANSION - len(stored)) > 0:  # readers refuse it: it expands too far
            # A byte of a hash is two digits, which are compressed to a byte.
            plain = _json({**fields, "padding": blake3(plain).hexdigest(length=64 + int(1.25 * missing))})
            stored = compressor.compress(plain)
        # Equal sizes in the trailer mean that the header is not compressed.
        if len(stored) >= len(plain) or len(plain) > _MAX_HEADER_EXPANSION * len(stored):
            stored = plain
        self._file.write(stored)
        self._file.write(
            _TRAILER.pack(len(stored), len(plain), checksum_of(_PREAMBLE.pack(MAGIC, FORMAT_VERSION), stored), MAGIC)
        )
        self._file.flush()


def checksum_of(preamble: bytes, stored_header: bytes) -> bytes:
    """Return the checksum of a header as it is stored, 16 bytes."""
    return blake3(preamble + stored_header).digest(length=16)


def stored_header(file: BinaryIO, size: int) -> tuple[bytes, int, str]:
    """Return the header of a file as it is stored, its size when it is decompressed, and the file's address.

    size: of the file. Raises CheckpointError if it is no checkpoint file, or its header has another checksum.
    """
    start = file.read(_PREAMBLE.size)
    if start[:8] != MAGIC:
        if start.startswith(b"PK") and b"/data.pkl" in file.read(512):  # a zip; its first name is there
            what = "a file of torch.save, not a dynaquant checkpoint"
            raise CheckpointError(f"{what}: read it with torch.load, or compress it with 'dynaquant compress'")
        raise CheckpointError("not a dynaquant checkpoint (or damaged in its first bytes)")
    if len(start) < _PREAMBLE.size or size < _PREAMBLE.size + _TRAILER.size:
        raise CheckpointError("truncated: the file ends too early")
    _, version = _PREAMBLE.unpack(start)
    if version != FORMAT_VERSION:
        raise UnreadableError(
            f"format version {version}, but this dynaquant reads version {FORMAT_VERSION}; install a newer one"
        )
    file.seek(size - _TRAILER.size)
    stored_size, plain_size, checksum, magic = _TRAILER.unpack(file.read(_TRAILER.size))
    if magic != MAGIC:
        raise CheckpointError("truncated, or damaged at its end")
    streams_end = size - _TRAILER.size - stored_size
    if streams_end < _PREAMBLE.size:
        raise CheckpointError("altered: its header would be larger than the file")
    file.seek(streams_end)
    stored = file.read(stored_size)
    if checksum_of(start, stored) != checksum:
        raise CheckpointError("altered: its header does not have the checksum that was written with it")
    return stored, plain_size, checksum.hex()


class CheckpointFile:
    """A checkpoint file whose header has been read and checked. Streams are read when asked for.

    The file stays open while this object is referred to, so it can be read even after it was replaced or deleted.

    content: of a file in memory. The path then is only its name in errors.

    Raises CheckpointError, which names the file and its fault, if it is not a complete checkpoint file.
    """

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        self.path = path
        self.frozen: dict[str, CheckpointFile] = {}
        """The opened files of frozen parameters that it needs, by identity (``chain.open_frozen``)."""
        self.parts: dict[int, CheckpointFile] = {}
        """The opened parts in other files, by number (``chain.open_part``)."""
        self.address = ""
        """The checksum of its header, 32 hexadecimal digits. A part's file is named by it."""
        self.version: FileVersion | None = None
        """Of the file on the disk (``file_version``); None in memory."""
        self._open: OnDisk | InMemory | None
        if content is not None:
            self.size, self._open = len(content), InMemory(content)
            self.header, streams_end = self._checked(io.BytesIO(content))
        else:
            try:
                with open_file(path) as file:
                    status = os.fstat(file.fileno())
                    self.size, self.version = status.st_size, file_version(status)
                    self.header, streams_end = self._checked(file)
                    self._open = OnDisk(os.dup(file.fileno()))
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        self._offsets: dict[str, int] = {}
        position = _PREAMBLE.size
        for entry in self.header.entries:
            self._offsets[entry.name] = position
            position += entry.size
        if position != streams_end:
            raise CheckpointError(f"{path}: the sizes of its streams do not add up to the size of the file")

    @collection_paused()
    def _checked(self, file: BinaryIO) -> tuple[Header, int]:
        try:
            plain, streams_end = self._read_header(file)
            return self._parse(plain), streams_end
        except CheckpointError as error:
            raise type(error)(f"{self.path}: {error}") from None
        except MemoryError as error:
            raise CheckpointError(f"{self.path}: its header needs more memory than there is") from error

    def _read_header(self, file: BinaryIO) -> tuple[bytes, int]:
        stored, plain_size, self.address = stored_header(file, self.size)
        stored_size, streams_end = len(stored), self.size - _TRAILER.size - len(stored)
        if plain_size == stored_size:
            return stored, streams_end
        if plain_size > _MAX_HEADER_EXPANSION * stored_size:
            raise CheckpointError("altered: its header claims to expand beyond the limit")
        try:
            if zstandard.frame_content_size(stored) != plain_size:
                raise CheckpointError("altered: its header does not have the size that it claims")
            return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False), streams_end
        except zstandard.ZstdError as error:
            raise CheckpointError(f"altered: its header cannot be decompressed ({error})") from None

    @staticmethod
    def _parse(plain: bytes) -> Header:
        try:
            data = json.loads(plain.decode("utf-8", errors="surrogatepass"), parse_constant=reject_constant)
            check_features(data["requires"])
            parents = [Parent.from_json(parent) for parent in data["parents"]]
            if len(parents) > 1:
                raise ValueError(f"it has {len(parents)} parents")
            parts, layouts = parts_from_json(data)
            header = Header(
                step=data["step"],
                sequence=data["sequence"],
                parent=parents[0] if parents else None,
                tree=data["tree"],
                entries=tuple(Entry.from_json(entry) for entry in data["tensors"]),
                record=dict(data["record"]),
                parts=parts,
                layouts=layouts,
            )
            check_layouts(layouts, header.entries)
            matches = data["identity"] == header.identity
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"altered: its header cannot be parsed ({error!r})") from None
        parent = header.parent
        if not is_step(header.step) or not is_step(header.sequence) or (parent and not parent.is_valid):
            raise CheckpointError("altered: its step, sequence number or parent has the wrong type or is out of range")
        if len(header.by_name) != len(header.entries):
            raise CheckpointError("altered: a tensor occurs twice")
        if is_too_deep(header.tree):
            raise CheckpointError(f"altered: its tree is nested more than {MAX_DEPTH} levels deep")
        if header.parent is None and any(entry.needs_parent for entry in header.entries):
            raise CheckpointError("altered: a tensor needs a parent, but the checkpoint has none")
        if not matches:
            raise CheckpointError("altered: its identity is not the hash of its contents")
        return header

    @property
    def in_memory(self) -> bool:
        """Whether the file is not on a disk, so that its path is only a name."""
        return self.version is None

    @property
    def total_size(self) -> int:
        """Bytes of the file and of the parts of the checkpoint."""
        return self.size + sum(part.size for part in self.header.parts)

    def close(self) -> None:
        """Close the file, to limit the number of open files. Reading a stream then opens it again.

        Raises RunChangedError then if the file was replaced.
        """
        if not self.in_memory:
            self._open = None

    def is_at(self, path: Path) -> bool:
        """Whether the file at the path is this one. True also if the system cannot tell now, or in memory."""
        if self.version is None:
            return True
        try:
            return file_version(path.stat()) == self.version
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def read_all(self) -> bytes:
        """Return the whole file, even if it was replaced or deleted since it was opened."""
        return self._content().read_at(0, self.size)

    def renamed(self, path: Path) -> CheckpointFile:
        """Return the same open file under another name."""
        found = copy(self)
        found.path = path
        return found

    def read(self, entry: Entry) -> bytes:
        """Return the stream of one tensor. Raises CheckpointError if the file cannot be read."""
        try:
            stream = self._content().read_at(self._offsets[entry.name], entry.size)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from error
        if len(stream) != entry.size:
            raise CheckpointError(f"{self.path}: truncated while it was open")
        return stream

    def _content(self) -> OnDisk | InMemory:
        if self._open is not None:
            return self._open
        with open_file(self.path) as file:
            if file_version(os.fstat(file.fileno())) != self.version:
                raise RunChangedError(f"{self.path}: was replaced while it was read")
            return OnDisk(os.dup(file.fileno()))


def is_step(value: Any) -> bool:
    """Whether a value read from a file can be a step: an integer from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value < 2**63


def open_if_exists(path: Path) -> CheckpointFile | None:
    """Open a checkpoint file. Returns None if there is no file of that name."""
    try:
        return CheckpointFile(path)
    except CheckpointError as error:
        if is_missing(error):
            return None
        raise


def reject_constant(constant: str) -> Any:
    """Make ``json.loads`` raise ValueError for NaN and the infinities, which are not JSON."""
    raise ValueError(f"{constant} is not JSON")
