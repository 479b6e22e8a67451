"""Converts runs and files of format version 4, which was never released, to version 1. Goes with the first release.

Streams are the same in both versions, so nothing is decoded: they are copied behind another header. The identity of a
checkpoint stays, so tags, pointers and parents of deltas do.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from dynaquant.engine.tensors.box import Box
from dynaquant.errors import CheckpointError
from dynaquant.store.atomic_files import atomic_file
from dynaquant.store.container import MAGIC, CheckpointFile, CheckpointWriter, Header, Parent, checksum_of
from dynaquant.store.entry import Entry
from dynaquant.store.files import is_file_name, make_folder, open_file
from dynaquant.store.layout import FOLDER, PartFile, Place, part_name
from dynaquant.store.listing import SUFFIX
from dynaquant.store.writer_lock import lock_for_writing

VERSION = 4
_PREAMBLE, _TRAILER = struct.Struct("<8sQ"), struct.Struct("<QQ16s8s")
_PIECE = 1 << 26


@dataclass(frozen=True)
class _Old:
    """A file of version 4: its header, and the bytes of its streams."""

    path: Path
    header: dict[str, Any]
    streams: int


def convert(path: Path) -> Iterator[Path]:
    """Convert a run, or a single file, in place. Yields each file of a checkpoint when it is done.

    Each file is replaced atomically, and files of version 1 are left alone, so a conversion that was interrupted can be
    started again. Raises CheckpointError if a file is damaged or of another version, or a process writes to the run.
    """
    with nullcontext() if path.is_file() else lock_for_writing(path):
        files = [path] if path.is_file() else sorted(path.glob(f"*{SUFFIX}"))
        for each in files:
            old = _opened(each)
            if old is not None:
                _convert(old)
                yield each


def _opened(path: Path) -> _Old | None:
    """Read the header of a file of version 4. Returns None for a file of version 1."""
    with open_file(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        start = file.read(_PREAMBLE.size)
        if len(start) < _PREAMBLE.size or start[:8] != MAGIC or size < _PREAMBLE.size + _TRAILER.size:
            raise CheckpointError(f"{path}: not a dynaquant checkpoint, or truncated")
        (version,) = struct.unpack("<Q", start[8:])
        if version == 1:
            CheckpointFile(path)  # raises if it is one of the unreleased version 1, which came before version 4
            return None
        if version != VERSION:
            raise CheckpointError(f"{path}: format version {version}; only version {VERSION} can be converted")
        file.seek(size - _TRAILER.size)
        stored_size, plain_size, checksum, magic = _TRAILER.unpack(file.read(_TRAILER.size))
        end = size - _TRAILER.size - stored_size
        file.seek(max(end, 0))
        stored = file.read(stored_size)
        if magic != MAGIC or end < _PREAMBLE.size or checksum_of(start, stored) != checksum:
            raise CheckpointError(f"{path}: its header is damaged")
        try:
            plain = stored if plain_size == stored_size else zstandard.ZstdDecompressor().decompress(stored)
            return _Old(path, json.loads(plain.decode("utf-8", errors="surrogatepass")), end - _PREAMBLE.size)
        except (ValueError, zstandard.ZstdError) as error:
            raise CheckpointError(f"{path}: its header cannot be read ({error})") from None


def _convert(old: _Old) -> None:
    """Write a checkpoint, and before it its parts, in version 1."""
    try:
        parts = old.header.get("parts")
        header = _header(old.header, old.header["tree"])
        if parts is not None:
            header = _with_parts(old.path.parent, header, parts)
        matches = header.identity == old.header["identity"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{old.path}: its header cannot be read ({error!r})") from None
    if not matches:
        raise CheckpointError(f"{old.path}: its identity is not the hash of its contents")
    with atomic_file(old.path) as out:
        _write(out, old, header)
        CheckpointFile(Path(out.name))
    if parts is not None:
        with suppress(OSError):  # what is left counts as other files
            for path in (old.path.parent / parts["folder"]).glob(f"part-*{SUFFIX}"):
                path.unlink()
            (old.path.parent / parts["folder"]).rmdir()


def _header(data: dict[str, Any], tree: Any) -> Header:
    parent = None if data["parent"] is None else Parent.from_json(data["parent"])
    entries = tuple(Entry.from_json(entry) for entry in data["tensors"])
    return Header(data["step"], data["sequence"], parent, tree, entries, dict(data["record"]))


def _with_parts(folder: Path, header: Header, parts: dict[str, Any]) -> Header:
    """Convert the parts of a checkpoint. Returns its header with their addresses."""
    if not is_file_name(parts["folder"]):
        raise ValueError(f"the folder of its parts is {parts['folder']!r}")
    make_folder(folder / FOLDER)
    files = []
    for number, (identity, _) in enumerate(parts["files"]):
        old = _opened(folder / parts["folder"] / f"part-{number:05d}{SUFFIX}")
        if old is None or old.header["identity"] != identity:
            raise CheckpointError(f"{folder / parts['folder']}: part {number} is not that of the checkpoint")
        temporary = folder / FOLDER / f"converted-{number}.tmp"  # the next writer deletes it if it is left
        with atomic_file(temporary) as out:
            _write(out, old, _header(old.header, None))
        written = CheckpointFile(temporary)
        temporary.replace(folder / FOLDER / part_name(written.address))
        files.append(PartFile(written.address, written.size))
    layouts = tuple(
        tuple(Place(part, Box(tuple(offsets), tuple(sizes))) for part, offsets, sizes in layout)
        for layout in parts["layouts"]
    )
    return Header(
        header.step, header.sequence, header.parent, header.tree, header.entries, header.record, tuple(files), layouts
    )


def _write(out: BinaryIO, old: _Old, header: Header) -> None:
    """Write the streams of a file, and a header of version 1."""
    writer, left = CheckpointWriter(out), old.streams
    with open_file(old.path) as file:
        file.seek(_PREAMBLE.size)
        while left:
            piece = file.read(min(left, _PIECE))
            if not piece:
                raise CheckpointError(f"{old.path}: truncated while it was read")
            writer.add(piece)
            left -= len(piece)
    writer.finish(header)
