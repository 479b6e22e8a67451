"""The content of an open file, on a disk or in memory. Reads any part of it."""

from __future__ import annotations

import os
import weakref

_PIECE = 2**30
"""Bytes read in one call; some systems refuse 2 GiB and more."""


class InMemory:
    """The content of a file that is not on a disk."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read_at(self, offset: int, size: int) -> bytes:
        """Return the bytes from an offset on; fewer at the end."""
        return self._content[offset : offset + size]


class OnDisk:
    """A file's descriptor, which is closed when nothing refers to this object any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        # Not at exit: the background thread may still be writing the last checkpoint, and read it back.
        weakref.finalize(self, os.close, descriptor).atexit = False

    def read_at(self, offset: int, size: int) -> bytes:
        """Return the bytes from an offset on; fewer at the end of the file."""
        return read_at(self.descriptor, offset, size)


def read_at(descriptor: int, offset: int, size: int) -> bytes:
    """Return the bytes from an offset on; fewer at the end of the file."""
    parts = []
    while size:
        if hasattr(os, "pread"):  # preferred, because forked processes share the file position
            part = os.pread(descriptor, min(size, _PIECE), offset)
        else:
            os.lseek(descriptor, offset, os.SEEK_SET)
            part = os.read(descriptor, min(size, _PIECE))
        if not part:
            break
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return b"".join(parts)
