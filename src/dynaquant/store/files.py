"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from dynaquant.errors import CheckpointError
from dynaquant.store.temporaries import held, temporary_beside

_FULL = {
    errno.ENOSPC: "the disk is full: make room there and try again, or give a place on another disk",
    errno.EDQUOT: "your share of the disk is used up: make room there and try again, or give a place on another disk",
    errno.EFBIG: "files may not be that large there: give a place on another disk, or raise the limit",
}


def system_error(error: BaseException) -> OSError | None:
    """An error of the system that another one comes from; PyTorch makes RuntimeErrors of them that do not say so."""
    found: BaseException | None = error
    while found is not None and not (isinstance(found, OSError) and found.errno is not None):
        found = found.__cause__ or found.__context__
    return found


def tell_of_full_disk(error: BaseException, out: Path) -> None:
    """Adds to an error, where it comes from a full disk, which file was to be written, and what can be done."""
    if isinstance(error, OSError) and error.errno in _FULL:
        error.filename = str(out)
        error.add_note(_FULL[error.errno])


_FOLDERS_CAN_BE_OPENED = hasattr(os, "O_DIRECTORY")
"""Not on Windows, which cannot sync a folder, and a file only through a descriptor that can be written to."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def kind_of(path: Path) -> str | None:
    """What is there instead of a regular file; None for a regular file, or where nothing is."""
    try:
        return _kind(path.stat())
    except OSError:
        return None


def _kind(status: os.stat_result) -> str | None:
    return None if stat.S_ISREG(status.st_mode) else _KINDS.get(stat.S_IFMT(status.st_mode), "something else")


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file to be read.

    Raises CheckpointError for anything else: a FIFO would wait for a writer, and a device has no end. Raises OSError
    when the file cannot be opened.
    """
    kind = kind_of(path)  # before it is opened, which does things to a device
    if kind is None:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        kind = _kind(os.fstat(descriptor))
        if kind is None:
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    raise CheckpointError(f"{path} is {kind}, and no file")


def sync(path: Path) -> None:
    """Makes what a file holds, or which files a folder has under which names, durable.

    Raises OSError, which names the file or the folder, when that cannot be done.
    """
    if not _FOLDERS_CAN_BE_OPENED and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if _FOLDERS_CAN_BE_OPENED else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def sync_name(path: Path) -> None:
    """Makes the name durable that a file or a folder has just got.

    Raises OSError, which names the folder that it lies in and says that the file is there, when that cannot be done.
    """
    try:
        sync(path.parent)
    except OSError as error:
        error.add_note(f"{path} is in place, but may be gone after a power cut; check the disk")
        raise


def make_folder(folder: Path) -> None:
    """Makes a folder, and those it lies in, where they are not there yet. Their names are durable.

    Raises CheckpointError where a file is in the way, OSError when a folder cannot be made.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        there = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), folder)
        raise CheckpointError(f"{there} is {kind_of(there) or 'a file'}; a run needs a folder") from None
    for path in reversed(missing):
        sync_name(path)


@contextmanager
def replacing(out: Path) -> Iterator[BinaryIO]:
    """A file to write into, which becomes ``out`` at the end of the block or, on any error, leaves nothing behind.

    After a power cut, too, ``out`` is what it was or whole: the file is durable before it gets its name.
    Raises CheckpointError when ``out`` cannot be a file, OSError when the file cannot be written.
    """
    check_output(out)
    temporary = temporary_beside(out)
    file = temporary.open("xb")  # before the try: a file that is there already is not ours to delete
    try:
        with held(temporary):
            with file:
                yield file
            sync(temporary)
            temporary.replace(out)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        tell_of_full_disk(error, out)
        raise
    sync_name(out)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes ``out`` at the end of the block or, on any error, leaves nothing behind.

    It is durable before it gets its name, as in ``replacing``.

    Raises CheckpointError when ``out`` is there already and not an empty folder.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise CheckpointError(f"{out} is there already, and not an empty folder; give another name")
    _check_parent(out)
    temporary = temporary_beside(out)
    temporary.mkdir()
    try:
        with held(temporary):
            yield temporary
            for path in (*temporary.rglob("*"), temporary):
                sync(path)
            temporary.replace(out)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        tell_of_full_disk(error, out)
        raise
    sync_name(out)


@contextmanager
def nothing_empty(folder: Path) -> Iterator[None]:
    """Takes away the folder, and those it lies in, that the block has made and put nothing into."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        with suppress(OSError):  # as it is when there is something in it
            for path in missing:
                path.rmdir()


def check_output(out: Path) -> None:
    """Raises CheckpointError where no file can be written: for a folder, a FIFO, a device, a folder that is missing."""
    if (kind := kind_of(out)) is not None:
        raise CheckpointError(f"{out} is {kind}; give the name of a file" + (" in it" if kind == "a folder" else ""))
    _check_parent(out)


def _check_parent(out: Path) -> None:
    if not out.absolute().parent.is_dir():
        raise CheckpointError(f"{out.parent} is no folder; make it first, or give another name")


def is_file_name(text: Any) -> bool:
    """Whether something that stands in a file is a name that leads nowhere but into the folder it is used in."""
    return isinstance(text, str) and text not in ("", "..") and Path(text).name == text and text.isprintable()
