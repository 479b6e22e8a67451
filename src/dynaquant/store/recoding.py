"""Re-codes checkpoints with the same values, bit for bit: against other parents, or into another run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from dynaquant.errors import CheckpointError
from dynaquant.store import frozen_tensors
from dynaquant.store.chain import open_frozen
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import CheckpointFile, Parent
from dynaquant.store.files import removing_empty_folders
from dynaquant.store.pointers import FRAMEWORK_FOLDER
from dynaquant.store.reading import load_all
from dynaquant.store.run import LOSSLESS_COPY, Run


def branch(run: Run, file: CheckpointFile, folder: Path) -> CheckpointFile:
    """Create a new run that begins with a checkpoint of another run. Returns the checkpoint in the new run.

    A training can continue there, and the old run stays. The lossless copy of the checkpoint and the files of a
    framework (``FRAMEWORK_FOLDER``) are copied, too, if there are any. Raises CheckpointError if the folder has
    checkpoints or such files already, or if the checkpoint cannot be decoded. On any error the folder is as before.
    """
    new, chain = WritableRun(folder), run.chain(file)
    with removing_empty_folders(folder), new.locked(), ExitStack() as undo:
        there, broken = new.summaries()
        if there or broken:
            raise CheckpointError(f"{folder}: it has checkpoints already; choose another folder for the branch")
        files, framework = run.folder / FRAMEWORK_FOLDER, folder / FRAMEWORK_FOLDER
        if files.is_dir() and os.path.lexists(framework):
            raise CheckpointError(
                f"{framework} is there already, and the branch gets a folder of this name; move it away, or choose "
                "another folder for the branch"
            )
        record = file.header.record
        copy = run.lossless_copy(file)
        if copy is None and LOSSLESS_COPY in record:
            record = {**record, LOSSLESS_COPY: None}
        # The lossless copy goes first: without its checkpoint it is ignored. After a later failure, such as in syncing
        # a name, both files are deleted, so that neither is left without the other.
        try:
            for identity in file.header.frozen:
                holder = open_frozen(file, identity)
                undo.callback((folder / holder.path.name).unlink, missing_ok=True)
                frozen_tensors.copy_to(holder, folder)
            if copy is not None:
                undo.callback((folder / copy.path.name).unlink, missing_ok=True)
                new.recode(run.chain(copy), None)
            if files.is_dir():
                undo.callback(shutil.rmtree, framework, ignore_errors=True)
                shutil.copytree(files, framework)
            path = new.path(file.header.step)
            undo.callback(path.unlink, missing_ok=True)
            written = new.recode(chain, None, record, path)
        except BaseException as error:
            error.add_note(f"nothing of the branch is left in {folder}")
            raise
        undo.pop_all()
    return written


def compact(run: WritableRun, keyframe_every: int) -> Iterator[int]:
    """Re-code a run in chains of ``keyframe_every`` checkpoints. Yields each step when it is done.

    A checkpoint whose chain is too long becomes a keyframe. A keyframe becomes a delta of the checkpoint committed
    before it, if the chain is not too long. The caller has locked the run, and may stop between any two steps. Raises
    CheckpointError if a checkpoint cannot be decoded; the checkpoints before it have been re-coded.
    """
    lengths: dict[Parent, int] = {}
    before: Parent | None = None
    last = -1  # a sequence number; in a folder put together by hand, several files may share one, and none is a parent
    for summary in run.summaries()[0]:
        file = run.file(summary.step)
        parent = file.header.parent
        base = before if last < summary.sequence else None
        if parent is not None and (base is None or parent != base):
            base = parent  # it is in another line of training
        if base is not None and lengths.get(base, keyframe_every) >= keyframe_every:
            base = None
        chain = run.chain(file)
        if base != parent:
            run.recode(chain, None if base is None else run.chain(run.file(base.step)))
        else:
            load_all(chain)  # an error here is that of the checkpoint, and not of one that depends on it
        before, last = Parent(summary.step, summary.identity), summary.sequence
        lengths[before] = 1 + (lengths[base] if base else 0)
        yield summary.step
