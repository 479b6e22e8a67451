"""Names for checkpoints of a run. Each is a small file in the run's folder, so that a tag can be set while a training
writes to the run; retention keeps what is tagged."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass

from dynaquant.container import CheckpointFile
from dynaquant.errors import CheckpointError
from dynaquant.files import sync
from dynaquant.run import Run

FOLDER = "tags"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.+-]{0,99}")


@dataclass(frozen=True)
class Tag:
    """A name and the checkpoint that it was given to."""

    name: str
    step: int
    identity: str

    def marks(self, file: CheckpointFile) -> bool:
        """Whether that is the checkpoint; it is not when the step was saved again since."""
        return (self.step, self.identity) == (file.header.step, file.header.identity)


def tags_of(run: Run) -> list[Tag]:
    """The tags of a run by name. Files that are none are passed over."""
    found = []
    for path in sorted((run.folder / FOLDER).glob("*")):
        try:
            content = json.loads(path.read_text())
            tag = Tag(path.name, content["step"], content["identity"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if _NAME.fullmatch(tag.name) and type(tag.step) is int and type(tag.identity) is str:
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
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps({"step": tag.step, "identity": tag.identity}) + "\n")
        sync(temporary)
        if force:
            temporary.replace(path)
        else:
            os.link(temporary, path)  # fails where it is there, even if another process came first
    except FileExistsError:
        before = next((other for other in tags_of(run) if other.name == name), None)
        if before == tag:
            return tag
        of = f"step {before.step}" if before else "something"
        raise CheckpointError(f"{run.folder}: {name} is the tag of {of}; --force takes it from there") from None
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
    sync(run.folder)  # which has not had a folder of tags for long, perhaps
    return tag


def remove_tag(run: Run, name: str) -> None:
    """Takes a name away. Raises CheckpointError when there is no such tag."""
    path = run.folder / FOLDER / name
    if not _NAME.fullmatch(name) or not path.exists():
        raise CheckpointError(f"{run.folder}: there is no tag {name!r} ({_listed(tags_of(run))})")
    path.unlink()


def tagged_file(run: Run, name: str) -> CheckpointFile:
    """The checkpoint that has a name. Raises CheckpointError when there is none, or its step was saved again since."""
    known = tags_of(run)
    tag = next((tag for tag in known if tag.name == name), None)
    if tag is None:
        raise CheckpointError(f"{run.folder}: there is no tag {name!r} ({_listed(known)})")
    file = run.file(tag.step)
    if not tag.marks(file):
        raise CheckpointError(
            f"{run.folder}: step {tag.step} was saved again since it was tagged {name}; give the step, or tag it anew"
        )
    return file


def file_of(run: Run, step: int | str) -> CheckpointFile:
    """A checkpoint by its step or by a tag. Raises CheckpointError when there is none."""
    return tagged_file(run, step) if isinstance(step, str) else run.file(step)


def _listed(known: list[Tag]) -> str:
    return "tags: " + (", ".join(tag.name for tag in known) or "none")
