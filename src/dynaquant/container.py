"""One checkpoint file: preamble, streams, header, trailer (docs/format.md).

The header comes after the streams, so a writer never holds more than one stream. A reader believes nothing: every
length and count is checked against the file's real size before anything is allocated by it.
"""

from __future__ import annotations

import json
import os
import struct
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import zstandard
from blake3 import blake3

from dynaquant.entry import Entry
from dynaquant.errors import CheckpointError
from dynaquant.state import MAX_DEPTH, is_too_deep

FORMAT_VERSION = 2
"""What is written. Version 1 is read as well: it lacks some codings."""
MAGIC = b"\x89DQC\r\n\x1a\n"
"""First and last eight bytes of a file. As in PNG, they show a transfer that changed line ends."""

_PREAMBLE = struct.Struct("<8sQ")  # magic, format version
_TRAILER = struct.Struct("<QQ16s8s")  # stored header size, header size, checksum, magic
_MAX_HEADER_EXPANSION = 16


@dataclass(frozen=True)
class Parent:
    """The checkpoint that a delta was coded against."""

    step: int
    identity: str


@dataclass(frozen=True)
class Summary:
    """What one needs to know of a checkpoint to find its way in a run."""

    step: int
    sequence: int
    identity: str
    parent: Parent | None


@dataclass(frozen=True)
class Header:
    """Everything a checkpoint file says besides its streams.

    sequence: grows with every checkpoint committed to a run; the newest has the highest. parent: None for a keyframe.
    tree: the JSON tree of the state (``state.flatten``). record: what is known of the save and cannot be derived.
    """

    step: int
    sequence: int
    parent: Parent | None
    tree: Any
    entries: tuple[Entry, ...]
    record: dict[str, Any]

    @cached_property
    def identity(self) -> str:
        """The hash of what the checkpoint decodes to: a Merkle root over its tensors and its tree, 64 hex digits."""
        leaves = sorted((entry.name, entry.hash) for entry in self.entries)
        return blake3(_json([self.tree, leaves])).hexdigest()

    @property
    def summary(self) -> Summary:
        """The header without what is large."""
        return Summary(self.step, self.sequence, self.identity, self.parent)

    @cached_property
    def by_name(self) -> dict[str, Entry]:
        """The entries by the names of their tensors."""
        return {entry.name: entry for entry in self.entries}


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", errors="surrogatepass"
    )


class CheckpointWriter:
    """Writes one checkpoint into an open binary file: the streams in turn, then the header."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        file.write(_PREAMBLE.pack(MAGIC, FORMAT_VERSION))

    def add(self, stream: bytes) -> None:
        """Appends the stream of the next of the header's entries."""
        self._file.write(stream)

    def finish(self, header: Header) -> None:
        """Appends the header and makes the file durable."""
        parent = header.parent and {"step": header.parent.step, "identity": header.parent.identity}
        plain = _json(
            {
                "step": header.step,
                "sequence": header.sequence,
                "identity": header.identity,
                "parent": parent,
                "tree": header.tree,
                "tensors": [entry.to_json() for entry in header.entries],
                "record": header.record,
            }
        )
        stored = zstandard.ZstdCompressor(level=9).compress(plain)
        # Equal sizes in the trailer say that the header is not compressed.
        if len(stored) >= len(plain) or len(plain) > _MAX_HEADER_EXPANSION * len(stored):
            stored = plain
        self._file.write(stored)
        self._file.write(
            _TRAILER.pack(len(stored), len(plain), _checksum(_PREAMBLE.pack(MAGIC, FORMAT_VERSION), stored), MAGIC)
        )
        self._file.flush()
        os.fsync(self._file.fileno())


def _checksum(preamble: bytes, stored_header: bytes) -> bytes:
    return blake3(preamble + stored_header).digest(length=16)


class CheckpointFile:
    """A checkpoint file whose header has been read and checked. Streams are read when asked for.

    Raises CheckpointError, naming the file and what is wrong with it, when it is no whole checkpoint file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                plain, streams_end = self._read_header(file)
            self.header = self._parse(plain)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        self._offsets: dict[str, int] = {}
        position = _PREAMBLE.size
        for entry in self.header.entries:
            self._offsets[entry.name] = position
            position += entry.size
        if position != streams_end:
            raise CheckpointError(f"{path}: the sizes of its streams do not add up to the size of the file")

    def _read_header(self, file: BinaryIO) -> tuple[bytes, int]:
        start = file.read(_PREAMBLE.size)
        if start[:8] != MAGIC:
            raise CheckpointError("not a dynaquant checkpoint (or damaged in its first bytes)")
        if len(start) < _PREAMBLE.size or self.size < _PREAMBLE.size + _TRAILER.size:
            raise CheckpointError("truncated: only a beginning of a checkpoint is there")
        _, version = _PREAMBLE.unpack(start)
        if not 1 <= version <= FORMAT_VERSION:
            raise CheckpointError(
                f"format version {version}, and this dynaquant reads up to {FORMAT_VERSION}; install a newer one"
            )
        file.seek(self.size - _TRAILER.size)
        stored_size, plain_size, checksum, magic = _TRAILER.unpack(file.read(_TRAILER.size))
        if magic != MAGIC:
            raise CheckpointError("truncated, or damaged at its end")
        streams_end = self.size - _TRAILER.size - stored_size
        if streams_end < _PREAMBLE.size:
            raise CheckpointError("altered: its header would be larger than the file")
        file.seek(streams_end)
        stored = file.read(stored_size)
        if _checksum(start, stored) != checksum:
            raise CheckpointError("altered: its header does not have the checksum that was written with it")
        if plain_size == stored_size:
            return stored, streams_end
        if plain_size > _MAX_HEADER_EXPANSION * stored_size:
            raise CheckpointError("altered: its header claims to expand beyond the limit")
        try:
            if zstandard.frame_content_size(stored) != plain_size:
                raise CheckpointError("altered: its header has another size than it claims")
            return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False), streams_end
        except zstandard.ZstdError as error:
            raise CheckpointError(f"altered: its header cannot be decompressed ({error})") from None

    @staticmethod
    def _parse(plain: bytes) -> Header:
        try:
            data = json.loads(plain.decode("utf-8", errors="surrogatepass"), parse_constant=no_constant)
            parent = None if data["parent"] is None else Parent(data["parent"]["step"], data["parent"]["identity"])
            header = Header(
                step=data["step"],
                sequence=data["sequence"],
                parent=parent,
                tree=data["tree"],
                entries=tuple(Entry.from_json(entry) for entry in data["tensors"]),
                record=dict(data["record"]),
            )
            matches = data["identity"] == header.identity
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"altered: its header cannot be understood ({error!r})") from None
        numbers = [header.step, header.sequence] + ([parent.step] if parent else [])
        if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or (parent and type(parent.identity) is not str):
            raise CheckpointError("altered: its step, sequence number or parent is no such thing")
        if len(header.by_name) != len(header.entries):
            raise CheckpointError("altered: a tensor occurs twice")
        if is_too_deep(header.tree):
            raise CheckpointError(f"altered: its tree is nested more than {MAX_DEPTH} levels deep")
        if header.parent is None and any(entry.needs_parent for entry in header.entries):
            raise CheckpointError("altered: a tensor needs a parent, and the checkpoint has none")
        if not matches:
            raise CheckpointError("altered: its identity is not the hash of its contents")
        return header

    def moved(self, path: Path) -> CheckpointFile:
        """The same file after it was given another name."""
        found = copy(self)
        found.path = path
        return found

    def read(self, entry: Entry) -> bytes:
        """The stream of one tensor. Raises CheckpointError when the file cannot be read."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offsets[entry.name])
                stream = file.read(entry.size)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from error
        if len(stream) != entry.size:
            raise CheckpointError(f"{self.path}: truncated while it was open")
        return stream


def no_constant(constant: str) -> Any:
    """For ``json.loads``, which would take what is not JSON: NaN and the infinities."""
    raise ValueError(f"{constant} is not JSON")
