"""Checks, opens, reads and syncs files and folders; explains the errors of a full disk."""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from dynaquant.errors import CheckpointError, UnreadableError
from dynaquant.store.threads import begun

_DISK_FULL = {
    errno.ENOSPC: "the disk is full: free some space and try again, or choose a path on another disk",
    errno.EDQUOT: "your disk quota is used up: free some space and try again, or choose a path on another disk",
    errno.EFBIG: "the file exceeds the largest size allowed there: choose a path on another disk, or raise the limit",
}
_UNAVAILABLE = {
    errno.EACCES: "its permissions forbid reading it",
    errno.EPERM: "its permissions forbid reading it",
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n), or close some",
    errno.ENFILE: "too many files are open on this machine",
    errno.ESTALE: "the network file system has lost sight of it: try again, or mount the file system anew",
    errno.ETIMEDOUT: "the file system does not answer: try again",
    errno.ENOTCONN: "the file system is not connected: mount it anew",
}
"""Errors of the system that say nothing of the content of a file, unlike EIO, which a bad sector gives."""


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return a path that a user gave, with the home folder in place of ``~``.

    Raises ValueError for an empty text, which would mean the working directory.
    """
    text = os.fspath(path)
    if not text:
        raise ValueError("the path is empty (a variable that is not set?); give '.' for the working directory")
    return Path(os.path.expanduser(text))


def raise_if_unavailable(error: CheckpointError) -> None:
    """Raise UnreadableError if a file could not be read, but is not damaged as far as that tells."""
    cause = underlying_os_error(error)
    if cause is not None and cause.errno in _UNAVAILABLE:
        where = f"{cause.filename}: " if cause.filename else ""
        raise UnreadableError(
            f"{where}{_UNAVAILABLE[cause.errno]}. It may be sound, so no older checkpoint was taken in its place; "
            "restore(step=…) takes one"
        ) from error


def underlying_os_error(error: BaseException) -> OSError | None:
    """Return the OSError that caused an error, or None. PyTorch raises RuntimeErrors in place of OSErrors."""
    found: BaseException | None = error
    while found is not None and not (isinstance(found, OSError) and found.errno is not None):
        found = found.__cause__ or found.__context__
    return found


def add_disk_full_note(error: BaseException, out: Path) -> None:
    """If a full disk caused the error, adds a note: which file was being written, and what the user can do."""
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        error.filename = str(out)
        error.add_note(_DISK_FULL[error.errno])


_FOLDERS_CAN_BE_OPENED = hasattr(os, "O_DIRECTORY")
"""False on Windows. It cannot sync a folder, and syncs a file only through a descriptor opened for writing."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def non_file_kind(path: Path) -> str | None:
    """Return what is at the path, e.g. "a folder"; None if it is a regular file or nothing is there."""
    try:
        return _non_file_kind(path.stat())
    except OSError:
        return None


def _non_file_kind(status: os.stat_result) -> str | None:
    return None if stat.S_ISREG(status.st_mode) else _KINDS.get(stat.S_IFMT(status.st_mode), "something else")


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises CheckpointError for anything else: a FIFO would wait for a writer, and a device has no end. Raises OSError
    if the file cannot be opened.
    """
    kind = non_file_kind(path)  # checked before opening, because opening a device has side effects
    if kind is None:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        kind = _non_file_kind(os.fstat(descriptor))
        if kind is None:
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    raise CheckpointError(f"{path} is {kind}, not a file")


_PIECE = 2**30
"""Bytes read in one call; some systems refuse 2 GiB and more."""


class InMemory:
    """The content of an open file that is not on a disk."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read_at(self, offset: int, size: int) -> bytes:
        """Return the bytes from an offset on; fewer at the end."""
        return self._content[offset : offset + size]


class OnDisk:
    """The content of an open file: its descriptor, which is closed when nothing refers to this object any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        # Not at exit: the background thread may still be writing the last checkpoint, and read it back.
        weakref.finalize(self, os.close, descriptor).atexit = False

    def read_at(self, offset: int, size: int) -> bytes:
        """Return the bytes from an offset on; fewer at the end of the file."""
        parts = []
        while size:
            if hasattr(os, "pread"):  # preferred, because forked processes share the file position
                part = os.pread(self.descriptor, min(size, _PIECE), offset)
            else:
                os.lseek(self.descriptor, offset, os.SEEK_SET)
                part = os.read(self.descriptor, min(size, _PIECE))
            if not part:
                break
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)


_FOLDERS_CANNOT_BE_SYNCED = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""Error numbers of ``fsync`` of a folder on a file system that cannot do it, such as CIFS and some of FUSE."""


def sync(path: Path) -> None:
    """Make a file's content durable, or the names of the files in a folder.

    Some file systems cannot sync a folder. There, the system itself decides when the names are durable. Raises OSError,
    naming the file or folder, if this fails.
    """
    if not _FOLDERS_CAN_BE_OPENED and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if _FOLDERS_CAN_BE_OPENED else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno in _FOLDERS_CANNOT_BE_SYNCED and stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


@contextmanager
def syncing(file: BinaryIO) -> Iterator[None]:
    """Make a file's content durable while the block runs: it is on the disk at the end of the block.

    Raises OSError, naming the file, if this fails.
    """
    with ThreadPoolExecutor(1) as pool:
        synced = begun(pool, os.fsync, file.fileno())
        yield
        try:
            synced.result()
        except OSError as error:
            error.filename = file.name
            raise


def sync_parent(path: Path) -> None:
    """Make the name of a file or folder durable, after it was created or renamed.

    Raises OSError if this fails. The error names the parent folder, and its note says that the file is in place.
    """
    try:
        sync(path.parent)
    except OSError as error:
        error.add_note(f"{path} is in place, but a power loss may undo that; check the disk")
        raise


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and make their names durable.

    Raises CheckpointError if a file is in the way, OSError if a folder cannot be created.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        there = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), folder)
        what = non_file_kind(there) or ("a file" if there.exists() else "a link to nothing")
        raise CheckpointError(f"{there} is {what}; a run needs a folder") from None
    for path in reversed(missing):
        sync_parent(path)


def check_writable(folder: Path) -> None:
    """Raise CheckpointError if no file can be created in a folder, or the folder itself cannot be created."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if there.is_dir() and not os.access(there, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{folder}: no checkpoint can be saved here, as {there} is not writable (permissions, or a read-only file "
            "system); make it writable, or give another folder. To read a run: dq.load, dq.load_into or dq.follow; to "
            "continue it in another folder: dynaquant branch"
        )


@contextmanager
def removing_empty_folders(folder: Path) -> Iterator[None]:
    """At the end of the block, deletes the folder and its parents if the block created them and left them empty."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        with suppress(OSError):  # a folder that is not empty stays
            for path in missing:
                path.rmdir()


def check_output(out: Path) -> None:
    """Raise CheckpointError if ``out`` is a folder, FIFO or device, or lies in a folder that does not exist."""
    if (kind := non_file_kind(out)) is not None:
        raise CheckpointError(f"{out} is {kind}; give the name of a file" + (" in it" if kind == "a folder" else ""))
    check_parent(out)


def check_parent(out: Path) -> None:
    """Raise CheckpointError if the folder of ``out`` does not exist."""
    if not out.absolute().parent.is_dir():
        raise CheckpointError(f"{out.parent} is not a folder; create it first, or choose another path")


def is_reference(text: Any) -> bool:
    """Whether a value read from a file can be a relative path to another file."""
    return isinstance(text, str) and text != "" and text.isprintable() and not Path(text).is_absolute()


def is_file_name(text: Any) -> bool:
    """Whether a value read from a file is a plain file name, which cannot lead out of the folder it is used in."""
    return isinstance(text, str) and text not in ("", "..") and Path(text).name == text and text.isprintable()


FileVersion = tuple[int, int, int, int]


def file_version(status: os.stat_result) -> FileVersion:
    """Return a value that changes if the file at a path is replaced or modified."""
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def is_missing(error: BaseException) -> bool:
    """Whether an error means that there is no file of that name."""
    return isinstance(error, FileNotFoundError) or isinstance(error.__cause__, FileNotFoundError)
