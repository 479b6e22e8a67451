"""Where the checkpoints of a framework's folder are: pointers, and the folder of the run.

A pointer is a small file outside of a run that stands for one of its checkpoints. It names the run by its path from the
pointer's own folder, so both can be moved together. It is one line of JSON:
``{"dynaquant": "pointer", "run": "dynaquant", "step": 400, "identity": "…"}``.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from dynaquant.errors import CheckpointError, RunChangedError
from dynaquant.store.atomic_files import atomic_file
from dynaquant.store.container import CheckpointFile, is_step
from dynaquant.store.files import is_reference, open_file
from dynaquant.store.run import STEP, Run, checkpoint_paths

RUN_FOLDER = "dynaquant"
"""The folder of a run in the folder where a framework keeps its checkpoints."""
POINTER_FILE = "dynaquant.json"
"""The pointer in a folder that stands for a checkpoint."""
FRAMEWORK_FOLDER = "framework"
"""The folder in a run with a framework's files that do not change while it trains: configuration, tokenizer."""
FIRST_BYTES = b'{"dynaquant": "pointer"'
_LARGEST = 10_000
"""Maximum bytes of a pointer."""


@dataclass(frozen=True)
class Pointer:
    """The checkpoint that a pointer stands for."""

    path: Path
    run: Path
    step: int
    identity: str

    def file(self) -> CheckpointFile:
        """Open the checkpoint.

        Raises CheckpointError if it is missing or damaged, or if its step was saved again; RunChangedError if the
        pointer stands for another checkpoint by now.
        """
        try:
            return Run(self.run).holding(self.step, self.identity)
        except CheckpointError as error:
            if read_pointer(self.path) != self:
                raise RunChangedError(str(error)) from error
            raise


def found_at(path: Path) -> Path | Pointer:
    """Return what a path stands for: a pointer's checkpoint, the run in a framework's folder, or the path itself.

    A folder stands for the run in its folder ``dynaquant`` if it has no checkpoints of its own. Raises CheckpointError
    if a pointer is damaged.
    """
    if path.is_file():
        return read_pointer(path) or path
    if (path / POINTER_FILE).is_file():
        pointer = read_pointer(path / POINTER_FILE)
        if pointer is None:
            raise CheckpointError(
                f"{path / POINTER_FILE}: this pointer to a checkpoint is damaged; give the run and a step instead"
            )
        return pointer
    inner = path / RUN_FOLDER
    return inner if not checkpoint_paths(path, STEP) and checkpoint_paths(inner, STEP) else path


def run_at(path: Path) -> Run:
    """Return the run that a path is or stands for (``found_at``). There may be none yet."""
    found = found_at(path)
    return Run(found.run if isinstance(found, Pointer) else found)


def write_pointer(path: Path, file: CheckpointFile) -> None:
    """Write a pointer to a checkpoint of a run, atomically. Replaces what is at the path, also a link.

    Raises CheckpointError if the path cannot be a file, or cannot be expressed in the pointer.
    """
    run = os.path.relpath(file.path.parent.resolve(), path.parent.resolve())
    if not is_reference(run):
        raise CheckpointError(f"{file.path.parent}: a file cannot name this path; give the folder a printable name")
    content = {"dynaquant": "pointer", "run": run, "step": file.header.step, "identity": file.header.identity}
    with atomic_file(path) as out:
        out.write(json.dumps(content).encode() + b"\n")


def read_pointer(path: Path) -> Pointer | None:
    """Return what a pointer stands for; None if the file is none. Raises CheckpointError if its content is damaged."""
    try:
        with open_file(path) as file:
            content = file.read(_LARGEST)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if not content.startswith(FIRST_BYTES):
        return None
    try:
        found = json.loads(content)
        run, step, identity = found["run"], found["step"], found["identity"]
    except (ValueError, KeyError, RecursionError):
        run = step = identity = None
    if not (is_reference(run) and is_step(step) and isinstance(identity, str)):
        raise CheckpointError(f"{path}: this pointer to a checkpoint is damaged; give the run and a step instead")
    folder = path.resolve().parent / run
    if not folder.is_dir():
        raise CheckpointError(
            f"{path} stands for step {step} of the run {folder}, which is not there; move or copy both together, "
            "or make a file that stands alone, where both are: dynaquant decompress"
        )
    return Pointer(path, folder, step, identity)
