"""Names for checkpoints of a run. Each is a small file in the run's folder, so that a tag can be set while a training
writes to the run; retention keeps what is tagged."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from dynaquant.errors import CheckpointError
from dynaquant.store import flock
from dynaquant.store.container import CheckpointFile, is_step
from dynaquant.store.files import make_folder, open_file, sync, sync_parent
from dynaquant.store.run import Run

FOLDER = "tags"
_LARGEST = 1000
"""Bytes of a tag's file at most."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.+-]{0,99}")


@dataclass(frozen=True)
class Tag:
    """A name and the checkpoint that it was given to."""

    name: str
    step: int
    identity: str

    def refers_to(self, file: CheckpointFile) -> bool:
        """Whether that is the checkpoint; it is not when the step was saved again since."""
        return (self.step, self.identity) == (file.header.step, file.header.identity)


def tags_of(run: Run) -> list[Tag]:
    """The tags of a run by name. Files that are none are passed over."""
    found = []
    for path in sorted((run.folder / FOLDER).glob("*")):
        try:
            with open_file(path) as file:
                text = file.read(_LARGEST + 1)
            if len(text) > _LARGEST:
                continue
            content = json.loads(text.decode())
            tag = Tag(path.name, content["step"], content["identity"])
        except (CheckpointError, OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if _NAME.fullmatch(tag.name) and is_step(tag.step) and type(tag.identity) is str:
            found.append(tag)
    return found


def set_tag(run: Run, name: str, file: CheckpointFile, force: bool = False) -> Tag:
    """Gives a name to a checkpoint. force: takes it from another one that has it.

    Raises CheckpointError for a name that cannot be one, or that another checkpoint has.
    """
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{name!r} cannot be a tag: at most 100 letters, digits and . _ + -, the first a letter or _ (not to look "
            "like a step)"
        )
    tag = Tag(name, file.header.step, file.header.identity)
    path = run.folder / FOLDER / name
    make_folder(path.parent)
    with flock.locked(path.parent, wait=True) as alone:
        if alone:  # what is still there is of a process that was killed
            for stray in path.parent.glob(".*.tmp"):
                stray.unlink()
        _place(run, tag, path, force)
    return tag


def _place(run: Run, tag: Tag, path: Path, force: bool) -> None:
    """Writes the file of a tag, whole or not at all."""
    temporary = path.with_name(f".{tag.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps({"step": tag.step, "identity": tag.identity}) + "\n")
        sync(temporary)
        if force:
            temporary.replace(path)
        else:
            os.link(temporary, path)  # fails where it is there, even if another process came first
    except FileExistsError:
        before = next((other for other in tags_of(run) if other.name == tag.name), None)
        if before == tag:
            return
        of = f"step {before.step}" if before else "something"
        raise CheckpointError(f"{run.folder}: {tag.name} is the tag of {of}; --force takes it from there") from None
    finally:
        temporary.unlink(missing_ok=True)
    sync_parent(path)


def remove_tag(run: Run, name: str) -> None:
    """Takes a name away. Raises CheckpointError when there is no such tag."""
    path = run.folder / FOLDER / name
    if not _NAME.fullmatch(name) or not path.exists() or path.is_dir():
        raise CheckpointError(f"{run.folder}: there is no tag {name!r} ({_listed(tags_of(run))})")
    path.unlink()
    try:
        sync(path.parent)
    except OSError as error:
        error.add_note(f"the tag {name} is gone, but may be back after a power cut; check the disk")
        raise


def tagged_file(run: Run, name: str) -> CheckpointFile:
    """The checkpoint that has a name. Raises CheckpointError when there is none, or its step was saved again since."""
    known = tags_of(run)
    tag = next((tag for tag in known if tag.name == name), None)
    if tag is None:
        raise CheckpointError(f"{run.folder}: there is no tag {name!r} ({_listed(known)})")
    file = run.file(tag.step)
    if not tag.refers_to(file):
        raise CheckpointError(
            f"{run.folder}: step {tag.step} was saved again since it was tagged {name}; give the step, or tag it anew"
        )
    return file


def open_step_or_tag(run: Run, step: int | str) -> CheckpointFile:
    """A checkpoint by its step or by a tag. Raises CheckpointError when there is none."""
    return tagged_file(run, step) if isinstance(step, str) else run.file(step)


def _listed(known: list[Tag]) -> str:
    return "tags: " + (", ".join(tag.name for tag in known) or "none")
