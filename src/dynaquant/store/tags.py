"""Names for checkpoints of a run. A tagged checkpoint is neither deleted nor lost when its step is saved again.

Each tag is a small file in a folder of the run, so that a tag can be set while a training writes to the run.
"""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from dynaquant.errors import CheckpointError
from dynaquant.store import locks
from dynaquant.store.container import CheckpointFile, Header, Summary, is_step
from dynaquant.store.files import make_folder, open_file, sync, sync_parent
from dynaquant.store.run import Run

FOLDER = "tags"
_LARGEST = 1000
"""Maximum bytes of a tag's file."""
_LINKS_UNSUPPORTED = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""Error numbers of ``os.link`` on a file system without hard links, such as exFAT and buckets mounted by FUSE."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.+-]{0,99}")


@dataclass(frozen=True)
class Tag:
    """A name and the checkpoint that it refers to."""

    name: str
    step: int
    identity: str

    def refers_to(self, checkpoint: Header | Summary) -> bool:
        """Whether the tag refers to this checkpoint, and not to another one of the same step."""
        return (self.step, self.identity) == (checkpoint.step, checkpoint.identity)


def tags_of(run: Run) -> list[Tag]:
    """Return the tags of a run, sorted by name. Skips files that are not tags.

    Raises CheckpointError if a tag cannot be read now: retention must not delete what it names.
    """
    folder, found = run.folder / FOLDER, []
    try:
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
    except OSError as error:
        raise _unreadable(folder, error) from error
    for name in names:
        try:
            with open_file(folder / name) as file:
                text = file.read(_LARGEST + 1)
            if len(text) > _LARGEST:
                continue
            content = json.loads(text.decode())
            tag = Tag(name, content["step"], content["identity"])
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):  # removed meanwhile, or a link to nothing
                continue
            raise _unreadable(folder / name, error) from error
        except (CheckpointError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if _NAME.fullmatch(tag.name) and is_step(tag.step) and type(tag.identity) is str:
            found.append(tag)
    return found


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read ({error.strerror}), so it is not known which checkpoints have a tag; make it readable, "
        "or delete it"
    )


def set_tag(run: Run, name: str, file: CheckpointFile, force: bool = False) -> Tag:
    """Tag a checkpoint. force: if another checkpoint has the tag, move it.

    Raises CheckpointError if the name is not allowed, or if another checkpoint has the tag.
    """
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{name!r} cannot be a tag: at most 100 letters, digits and . _ + -, the first a letter or _ (a "
            "number would look like a step)"
        )
    tag = Tag(name, file.header.step, file.header.identity)
    path = run.folder / FOLDER / name
    make_folder(path.parent)
    with locks.locked(path.parent) as alone:
        if alone:  # temporary files here were left by killed processes
            for leftover in path.parent.glob(".*.tmp"):
                leftover.unlink()
        _write_tag(run, tag, path, force)
    return tag


def _write_tag(run: Run, tag: Tag, path: Path, force: bool) -> None:
    temporary = path.with_name(f".{tag.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps({"step": tag.step, "identity": tag.identity}) + "\n")
        sync(temporary)
        if force:
            temporary.replace(path)
        else:
            _name_if_free(temporary, path)
    except FileExistsError:
        before = next((other for other in tags_of(run) if other.name == tag.name), None)
        if before == tag:
            return
        of = f"step {before.step}" if before else "another file"
        raise CheckpointError(f"{run.folder}: {tag.name} is the tag of {of}; --force moves it") from None
    finally:
        temporary.unlink(missing_ok=True)
    sync_parent(path)


def _name_if_free(temporary: Path, path: Path) -> None:
    """Give a file its name. Raises FileExistsError if there is a file of that name."""
    try:
        os.link(temporary, path)  # fails if the tag exists, even if another process has just created it
    except OSError as error:
        if error.errno not in _LINKS_UNSUPPORTED:
            raise
        if os.path.lexists(path):  # whoever else creates tags waits for the lock of the folder
            raise FileExistsError from None
        temporary.replace(path)


def remove_tag(run: Run, name: str) -> None:
    """Remove a tag. Raises CheckpointError if there is no such tag."""
    path = run.folder / FOLDER / name
    if not _NAME.fullmatch(name) or not path.exists() or path.is_dir():
        raise CheckpointError(f"{run.folder}: there is no tag {name!r} ({_listed(tags_of(run))})")
    path.unlink()
    try:
        sync(path.parent)
    except OSError as error:
        error.add_note(f"the tag {name} is removed, but a power loss may undo that; check the disk")
        raise


def tagged_file(run: Run, name: str) -> CheckpointFile:
    """Open the tagged checkpoint, also if its step was saved again since. Raises CheckpointError if there is none."""
    known = tags_of(run)
    tag = next((tag for tag in known if tag.name == name), None)
    if tag is None:
        advice = "; a step is a number, not a text" if name.isdecimal() else ""
        raise CheckpointError(f"{run.folder}: there is no tag {name!r} ({_listed(known)}){advice}")
    return run.holding(tag.step, tag.identity)


def is_tagged(run: Run, file: CheckpointFile) -> bool:
    """Whether a tag refers to a checkpoint."""
    return any(tag.refers_to(file.header) for tag in tags_of(run))


def open_step_or_tag(run: Run, step: int | str) -> CheckpointFile:
    """Open a checkpoint by its step or a tag. Raises CheckpointError if there is none."""
    return tagged_file(run, step) if isinstance(step, str) else run.file(step)


def _listed(known: list[Tag]) -> str:
    return "tags: " + (", ".join(tag.name for tag in known) or "none")
