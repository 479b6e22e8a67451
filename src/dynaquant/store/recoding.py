"""Checkpoints coded anew, with the same values bit for bit: against other parents, or in another run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from dynaquant.errors import CheckpointError
from dynaquant.store import frozen
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import CheckpointFile, Parent
from dynaquant.store.files import removing_empty_folders
from dynaquant.store.lossless_copies import LOSSLESS_COPY
from dynaquant.store.run import Run
from dynaquant.store.writing import Base


def branch(run: Run, file: CheckpointFile, folder: Path) -> CheckpointFile:
    """A new run that begins with a checkpoint of another one; a training goes on from there while the old line stays.

    What was kept as it was (``exact="latest"``) is taken along. Raises CheckpointError when there are checkpoints in
    the folder already, or that of the run cannot be decoded. On any error the folder is as before, or not there.
    """
    new = WritableRun(folder)
    tensors = run.load(file)
    with removing_empty_folders(folder), new.locked(), ExitStack() as undo:
        there, broken = new.summaries()
        if there or broken:
            raise CheckpointError(f"{folder}: there are checkpoints in it; give the branch a folder of its own")
        record = file.header.record
        # The lossless copy goes first: without the other file it is nothing, and does no harm. What is put in place by
        # a step that then fails, as syncing its name may, is taken away as well: never one of the two alone.
        twin = run.lossless_copy(file)
        if twin is None and LOSSLESS_COPY in record:
            record = {**record, LOSSLESS_COPY: None}
        try:
            for identity in file.header.frozen:
                holder = frozen.open_frozen(file, identity)
                undo.callback((folder / holder.path.name).unlink, missing_ok=True)
                frozen.copy_to(holder, folder)
            if twin is not None:
                undo.callback((folder / twin.path.name).unlink, missing_ok=True)
                new.recode(twin, run.load(twin), None)
            undo.callback((folder / file.path.name).unlink, missing_ok=True)
            written = new.recode(file, tensors, None, record)
        except BaseException as error:
            error.add_note(f"nothing of the branch is left in {folder}")
            raise
        undo.pop_all()
    return written


def compact(run: WritableRun, keyframe_every: int) -> Iterator[int]:
    """Codes a run anew, in chains of ``keyframe_every`` checkpoints; yields each step when that is done.

    A checkpoint whose chain is too long becomes a keyframe; a keyframe is coded against the one committed before it
    where the chain is not too long. The caller holds the run for writing; it may be interrupted between any two steps.
    Raises CheckpointError when a checkpoint cannot be decoded; those before it are done.
    """
    lengths: dict[Parent, int] = {}
    before: Base | None = None
    last = -1  # sequence number; in a folder put together by hand several may have the same, and be no one's parents
    for summary in run.summaries()[0]:
        file = run.file(summary.step)
        tensors = run.load(file)
        parent = file.header.parent
        base = before if last < summary.sequence else None
        if parent is not None and (base is None or parent != base.parent):
            older = run.chain(file)[1]  # another line of training
            base = Base.from_loaded(older.header, run.load(older))
        if base is not None and lengths.get(base.parent, keyframe_every) >= keyframe_every:
            base = None
        if (base.parent if base else None) != parent:
            file = run.recode(file, tensors, base)
        before = Base.from_written(file.header, tensors, base)
        last = summary.sequence
        lengths[before.parent] = 1 + (lengths[base.parent] if base else 0)
        yield summary.step
