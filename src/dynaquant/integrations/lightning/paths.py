"""The paths that Lightning names, and the checkpoints of the run that they stand for."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dynaquant.errors import CheckpointError
from dynaquant.options import KEYFRAME_EVERY
from dynaquant.store.commit import WritableRun
from dynaquant.store.pointers import RUN_FOLDER, Pointer, read_pointer
from dynaquant.store.retention import recode_dependents
from dynaquant.store.run import Run, chain_lengths
from dynaquant.store.tags import tags_of
from dynaquant.store.writing import Base

log = logging.getLogger("dynaquant")


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path. Raises CheckpointError for an address of another file system."""
    if "://" in str(path):
        raise CheckpointError(
            f"{path}: runs are written to local and shared folders only; give ModelCheckpoint a dirpath"
        )
    return Path(path)


def begins_with(path: Path, start: bytes) -> bool:
    """Whether a file begins with these bytes."""
    with path.open("rb") as file:
        return file.read(len(start)) == start


def is_of(pointer: Pointer, run: Run) -> bool:
    """Whether a pointer stands for a checkpoint of a run."""
    return pointer.run.resolve() == run.folder


def paths_beside(place: Path) -> list[Path]:
    """Return the other files in a folder that stand for checkpoints of its run, newest first."""
    run = Run(place.parent.resolve() / RUN_FOLDER)
    age = {summary.step: -number for number, summary in enumerate(run.summaries()[0])}
    found: dict[int, Path] = {}
    for pointer in _pointers_to(run, place):
        if pointer.step in age:
            found.setdefault(pointer.step, place.with_name(pointer.path.name))
    return [found[step] for step in sorted(found, key=age.__getitem__)]


def base_for(run: WritableRun, place: Path, replaced: Pointer | None) -> Base | None:
    """Return the newest checkpoint with a short chain, to condition the next one on. None if there is none.

    replaced: what is about to be deleted. Its delta would have to be re-coded.
    """
    deleted = replaced.step if replaced is not None and not is_named(run, replaced.step, place) else None
    summaries = run.summaries()[0]
    lengths = {known.step: length for known, length in chain_lengths(summaries).items()}
    steps = [summary.step for summary in summaries if summary.step != deleted]
    if not steps or lengths.get(steps[-1], KEYFRAME_EVERY) >= KEYFRAME_EVERY:
        return None
    file = run.file(steps[-1])
    try:
        return Base.from_loaded(file.header, run.load(file))
    except CheckpointError as error:
        log.warning("the next checkpoint is a keyframe, as the last one cannot be read: %s", error)
        return None


def delete_unnamed(run: WritableRun, step: int) -> None:
    """Delete a checkpoint unless a pointer or a tag names it, and re-code what depends on it."""
    if is_named(run, step) or not run.path(step).exists():
        return
    needed, notes = recode_dependents(run, {step})
    if step not in needed:
        run.delete(step)
    for note in notes:
        log.warning("%s: %s", run.folder, note)


def is_named(run: WritableRun, step: int, but: Path | None = None) -> bool:
    """Whether a tag or a pointer beside the run names a step. but: a pointer that does not count."""
    if any(tag.step == step for tag in tags_of(run)):
        return True
    return any(pointer.step == step for pointer in _pointers_to(run, but))


def _pointers_to(run: Run, but: Path | None) -> Iterator[Pointer]:
    """Yield the pointers beside a run that stand for its checkpoints, by name. but: a pointer that does not count."""
    for path in sorted(run.folder.parent.iterdir()):
        with suppress(CheckpointError):
            pointer = read_pointer(path) if path.is_file() and (but is None or path.name != but.name) else None
            if pointer is not None and is_of(pointer, run):
                yield pointer


def is_of_tuner(path: str | os.PathLike[str]) -> bool:
    """Whether a Tuner saves here what it puts back after its trials: it must come back bit for bit."""
    return os.path.basename(path).startswith((".lr_find_", ".scale_batch_size_"))


def pointer_at(place: Path) -> Pointer | None:
    """Return the pointer at a path; None if there is none, or a damaged one."""
    if not place.is_file():
        return None
    try:
        return read_pointer(place)
    except CheckpointError as error:
        log.warning("%s", error)
        return None
