"""Arguments that several commands take, and opening the runs and files that they name."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynaquant.cli import output
from dynaquant.errors import CheckpointError
from dynaquant.store.files import non_file_kind

if TYPE_CHECKING:
    from dynaquant.restore.stored_checkpoint import StoredCheckpoint
    from dynaquant.store.catalogue import Listed
    from dynaquant.store.container import CheckpointFile
    from dynaquant.store.run import Run

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of checkpoints.", show_default=False)]
RunOrFile = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of checkpoints, or one checkpoint file.", show_default=False)
]
Step = Annotated[
    str | None,
    typer.Argument(metavar="STEP", help="Step or tag of the checkpoint.", show_default="the newest checkpoint"),
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def run_of(folder: Path) -> tuple[Run, list[CheckpointError]]:
    """Return the run in a folder, and the errors of its unreadable files. Raises CheckpointError if there is no run."""
    from dynaquant.store.pointers import Pointer, found_at
    from dynaquant.store.run import Run

    if not folder.is_dir():
        what = f"is {non_file_kind(folder) or 'a file'}" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {what}; give the folder that a Checkpointer writes to")
    found = found_at(folder)
    if isinstance(found, Pointer):
        raise CheckpointError(
            f"{folder} stands for one checkpoint, step {found.step} of the run {found.run}; give the folder of the run"
        )
    run = Run(found)
    summaries, broken = run.summaries()
    if not summaries and not broken:
        raise CheckpointError(f"{folder}: there are no checkpoints in this folder (files named step-….dqc)")
    return run, broken


def open_run(folder: Path) -> tuple[Run, list[Listed]]:
    """Return the run in a folder and its readable checkpoints, at least one. Warns of each unreadable file."""
    run = run_of(folder)[0]
    listing, broken = run.listing()
    for error in broken:
        _warn_once(f"dynaquant: skipped {error}")
    if not listing:
        raise CheckpointError(f"{folder}: no checkpoint of this run can be read")
    return run, listing


@cache
def _warn_once(message: str) -> None:  # a command may open its run several times
    output.print_error(message)


def checkpoint(path: Path, step: str | None) -> CheckpointFile:
    """Return a checkpoint of a run by its step or tag (None: the newest), or the checkpoint in a single file."""
    from dynaquant.store.container import CheckpointFile
    from dynaquant.store.pointers import Pointer, found_at
    from dynaquant.store.tags import open_step_or_tag

    found = found_at(path)
    if isinstance(found, Pointer) or path.is_file():
        if step is not None:
            raise CheckpointError(f"{path} is one checkpoint, not a run with steps; leave out STEP")
        return found.file() if isinstance(found, Pointer) else CheckpointFile(path)
    run, listing = open_run(path)
    return open_step_or_tag(run, listing[-1].summary.step if step is None else _step_or_tag(step))


def open_stored(path: Path, step: str | None) -> StoredCheckpoint:
    """Open the same checkpoint for reading its tensors."""
    from dynaquant.restore.stored_checkpoint import StoredCheckpoint
    from dynaquant.store.pointers import Pointer, found_at

    if step is None and path.is_dir() and not isinstance(found_at(path), Pointer):
        run_of(path)  # says what else a folder is; to take the newest warns of unreadable files
    else:
        checkpoint(path, step)  # warns of unreadable files
    return StoredCheckpoint(path, None if step is None else _step_or_tag(step))


def _step_or_tag(step: str) -> int | str:
    return int(step) if re.fullmatch(r"[0-9]{1,19}", step) else step


def must_not_exist(out: Path, force: bool) -> None:
    """Raise CheckpointError if an output exists, unless ``force`` allows replacing it."""
    if out.exists() and not force:
        advice = "" if out.is_dir() else ", or --force to replace it"
        raise CheckpointError(f"{out} exists; give another name{advice}")
