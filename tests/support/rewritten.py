"""Rewrites the header, or the record in it, of a real checkpoint file, with correct checksums."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import zstandard
from crafted import file_of

PREAMBLE, TRAILER = 16, 40


def with_record(path: Path, **changes) -> None:
    """Replace fields in the record of a checkpoint file. Removes those whose value is ``...``."""

    def change(header) -> None:
        record = header["record"] | changes
        header["record"] = {name: value for name, value in record.items() if value is not ...}

    rewrite(path, change)


def rewrite(path: Path, change: Callable[[dict], object]) -> None:
    """Change the header of a checkpoint file. change: changes it in place."""
    content = path.read_bytes()
    stored_size, size = struct.unpack("<QQ", content[-TRAILER:][:16])
    streams, stored = content[PREAMBLE : -TRAILER - stored_size], content[-TRAILER - stored_size : -TRAILER]
    header = json.loads(stored if stored_size == size else zstandard.ZstdDecompressor().decompress(stored))
    change(header)
    version = struct.unpack("<Q", content[8:PREAMBLE])[0]
    path.write_bytes(file_of(header, streams, version=version))
