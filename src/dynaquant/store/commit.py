"""Atomic commits: writes checkpoints to a run, re-codes and deletes them.

A file is written under a temporary name, made durable, read back and verified. Only then is it renamed. So a
process that is killed at any point leaves the run unchanged.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dynaquant.engine.forms.external import External
from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.forms.scheme import Coder
from dynaquant.engine.label import Label
from dynaquant.errors import CheckpointError
from dynaquant.state.tree import state_dict_tree
from dynaquant.store import frozen_files
from dynaquant.store.chain import open_part
from dynaquant.store.container import CheckpointFile, CheckpointWriter, Header, Parent, file_version
from dynaquant.store.files import add_disk_full_note, make_folder, sync, sync_parent
from dynaquant.store.frozen_tensors import FrozenFiles, tensor_in
from dynaquant.store.layout import FOLDER as PARTS
from dynaquant.store.layout import part_name
from dynaquant.store.listing import SUFFIX
from dynaquant.store.lossless_copies import LOSSLESS_COPY, copy_path
from dynaquant.store.reading import Tensors
from dynaquant.store.run import Run
from dynaquant.store.sharded_writing import boxes_in_part, boxes_of, plan_of, sharded_header, write_part
from dynaquant.store.unneeded import unneeded
from dynaquant.store.writer_lock import WriterLock, lock_for_writing
from dynaquant.store.writing import Base, Checkpoint, coder_of, verify_written, write_checkpoint

log = logging.getLogger("dynaquant")

_TEMPORARY = ".tmp"
MIN_FROZEN_BYTES = 1 << 20
"""Frozen parameters get a file of their own from this size on. Smaller ones are stored in each checkpoint."""
_UNKNOWN_COMMITS = 2**32
"""Sequence numbers that a commit skips while a file cannot be read: more than a run ever uses. So the new number is
higher than the unknown one in that file."""


class WritableRun(Run):
    """A run that can also be written: ``commit``, ``recode``, ``delete``. Lock it with ``locked()`` while writing."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        self.frozen_files = FrozenFiles(self.folder)
        self._lock: WriterLock | None = None
        self._unfinished: set[str] = set()  # names of folders whose parts are being written

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run for writing, and delete the temporary files and the parts that a killed writer has left.

        Raises CheckpointError if another process (or Checkpointer) is writing to the folder.
        """
        with lock_for_writing(self.folder) as lock:
            for leftover in self.folder.glob(f"*{SUFFIX}{_TEMPORARY}"):
                if not leftover.is_dir():
                    leftover.unlink()
            self._lock = lock
            try:
                self.delete_unneeded()
                yield
            finally:
                self._lock = None

    def leave_token(self) -> str:
        """Create an empty file with a random name in the folder, and return the name.

        Whoever sees the file sees this folder. The caller deletes it; if it is killed, the next writer does.
        """
        name = f"token-{secrets.token_hex(8)}{SUFFIX}{_TEMPORARY}"
        (self.folder / name).touch(exist_ok=False)
        return name

    def _check_lock(self) -> None:
        """Raise CheckpointError if the run was locked, and another folder has taken its place since."""
        if self._lock is not None:
            self._lock.check()

    def commit(self, checkpoint: Checkpoint, base: Base | None) -> tuple[CheckpointFile, Base]:
        """Write a checkpoint, conditioned on ``base`` (None: as a keyframe), verify it, and add it to the run.

        With a lossless copy, both files are written and verified first. Then the copy is renamed to its final name, and
        then the checkpoint, which completes the commit. Last, copies that are not needed any more are deleted.

        Replaces a checkpoint of the same step. The caller has made sure that no other depends on it, and that it is
        kept if it is named (``retention.prepare_replacement``). Returns the file and the base for the next commit. On
        any error the run is as before. One exception: if syncing the folder fails, the checkpoint is in place, and a
        note of the error says so.
        """
        draft = Header(
            step=checkpoint.step,
            sequence=self._next_sequence(),
            parent=base.parent if base else None,
            tree=checkpoint.tree,
            entries=(),
            record={**checkpoint.record, LOSSLESS_COPY: None},
        )
        path, path_of_copy = self.path(checkpoint.step), copy_path(self.folder, draft)
        labels, frozen_tensors = checkpoint.labels, self._write_frozen(checkpoint)
        # Without frozen tensors the mapping is not copied: it may compute each tensor on look-up.
        tensors = {**checkpoint.tensors, **frozen_tensors} if frozen_tensors else checkpoint.tensors
        with ExitStack() as undo:
            copy = None
            if checkpoint.lossless_copy is not None:
                copy = self._write_temporary(
                    replace(draft, record=checkpoint.record, parent=None),
                    {**checkpoint.lossless_copy, **frozen_tensors},
                    labels,
                    None,
                    "conditional",
                    path_of_copy,
                )
                undo.callback(self._delete_uncommitted, copy.path)
                draft.record[LOSSLESS_COPY] = copy.header.identity
            written = self._write_temporary(draft, tensors, labels, base, checkpoint.coder, path)
            undo.callback(self._delete_uncommitted, written.path)
            self.frozen_files.verify(written)
            if copy is not None:
                # The copy is renamed first. The copy of the previous checkpoint stays, because that checkpoint is the
                # newest until the next renaming. If that fails, the new copy is deleted, unless the checkpoint is in
                # place nevertheless.
                undo.callback(lambda: None if written.is_at(path) else self._delete_uncommitted(path_of_copy))
                self._rename(copy, path_of_copy)
            replaces = path.exists()
            file = self._rename(written, path)
            undo.pop_all()
        if replaces:
            log.info("replaced step %d", checkpoint.step)
        self._summaries[file_version(path.stat())] = file.header.summary
        self._newest = self._highest = draft.sequence
        try:
            self.delete_unneeded()
        except OSError as error:
            error.add_note(f"step {checkpoint.step} is saved; deleting files that only older checkpoints needed failed")
            raise
        return file, Base.from_written(file.header, tensors, base)

    def _write_frozen(self, checkpoint: Checkpoint) -> dict[str, External]:
        """Write a file of those frozen parameters that are not in one yet. Returns them as tensors of that file."""
        if not checkpoint.frozen:
            return {}
        given = {name: tensor for name, tensor in checkpoint.tensors.items() if name in checkpoint.frozen}
        new = {name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor)}
        if sum(tensor.nbytes for tensor in new.values()) < MIN_FROZEN_BYTES:
            return {}
        draft = Header(step=0, sequence=0, parent=None, tree=state_dict_tree(new), entries=(), record={})
        path = self.folder / f"frozen{SUFFIX}"
        written = self._write_temporary(draft, new, checkpoint.labels, None, "conditional", path)
        file = self._rename(written, path.with_name(frozen_files.file_name(written.header.identity)))
        self.frozen_files.mark_sound(file)
        return {entry.name: tensor_in(file, entry) for entry in file.header.entries}

    def delete_unneeded(self) -> None:
        """Delete what no checkpoint needs any more, such as frozen parameters, and replaced ones without a tag."""
        for path in unneeded(self, self._unfinished):
            self._check_lock()
            if path.is_dir():
                _delete_folder(path)
            else:
                path.unlink()

    def begin_parts(self, step: int) -> tuple[Header, Path]:
        """Create a folder for the parts of a checkpoint. Returns a draft of its header, and the folder.

        If the checkpoint is not published, ``abandon_parts`` deletes the folder. So does the next writer of the run.
        """
        self._check_lock()
        draft = Header(step, self._next_sequence(), None, {}, (), {})
        return draft, self._new_parts_folder(draft)

    def _new_parts_folder(self, draft: Header) -> Path:
        # Processes of a job that was killed may still write to their folder, so no name is used twice.
        folder = self.folder / f"{PARTS}{draft.step:012d}-{draft.sequence:012d}-{secrets.token_hex(4)}"
        self._unfinished.add(folder.name)
        try:
            make_folder(folder)
        except BaseException as error:
            self._unfinished.discard(folder.name)
            add_disk_full_note(error, folder)
            raise
        return folder

    def abandon_parts(self, folder: Path) -> None:
        """Delete a folder whose checkpoint was not published. Does nothing if it was."""
        if folder.name not in self._unfinished:
            return
        self._unfinished.discard(folder.name)
        with suppress(CheckpointError, OSError):  # the next writer deletes what is left
            self._check_lock()
            _delete_folder(folder)

    def publish(self, header: Header) -> CheckpointFile:
        """Write the file of a checkpoint whose parts are all written, and add it to the run: the commit.

        Replaces a checkpoint of the same step, as ``commit`` does. On any error the run is as before.
        """
        replaces = self.path(header.step).exists()
        file = self._publish(header, self.path(header.step))
        if replaces:
            log.info("replaced step %d", header.step)
        try:
            self.delete_unneeded()
        except OSError as error:
            error.add_note(f"step {header.step} is saved; deleting parts that no checkpoint needs failed")
            raise
        return file

    def _publish(self, header: Header, path: Path) -> CheckpointFile:
        """Write the file of a checkpoint whose parts are all written. path: its name."""
        assert header.parts is not None
        temporary = path.with_name(path.name + _TEMPORARY)
        with self._deleted_on_error(temporary, path):
            with temporary.open("wb") as out:
                CheckpointWriter(out).finish(header)
            written = CheckpointFile(temporary)
            for number in range(len(header.parts.files)):
                open_part(written, number)
            self.parent_of(written)
        try:
            file = self._rename(written, path)
        finally:
            if written.is_at(path):  # also if the file is in place, and only syncing its folder failed
                self._unfinished.discard(header.parts.folder)
        return file

    def _next_sequence(self) -> int:
        """Return a higher sequence number than the run has ever had, also in files that cannot be read now.

        Such a file may become readable again. Then it must not count as newer than the checkpoints committed since.
        """
        _, broken = self.summaries()
        found = self._highest + (_UNKNOWN_COMMITS if broken else 1)
        if found >= 2**63:
            raise CheckpointError(
                f"{self.folder}: a checkpoint has the sequence number {self._highest}, which no training reaches, so "
                "there is no higher number for the next commit; move its file out of the folder"
            )
        return found

    def write(
        self,
        draft: Header,
        tensors: Mapping[str, StoredTensor],
        labels: Mapping[str, Label],
        base: Base | None,
        coder: Coder = "conditional",
        path: Path | None = None,
    ) -> CheckpointFile:
        """Encode tensors, write them with the header ``draft`` and its entries, verify the file, and rename it.

        path: the default is the path of the draft's step. A draft with entries is a checkpoint to be re-coded: the new
        file must have its identity.
        """
        path = path or self.path(draft.step)
        return self._rename(self._write_temporary(draft, tensors, labels, base, coder, path), path)

    def _write_temporary(
        self,
        draft: Header,
        tensors: Mapping[str, StoredTensor],
        labels: Mapping[str, Label],
        base: Base | None,
        coder: Coder,
        path: Path,
    ) -> CheckpointFile:
        """Do what ``write`` does before it renames. Returns the verified file under a temporary name."""
        self._check_lock()
        temporary = path.with_name(path.name + _TEMPORARY)
        with self._deleted_on_error(temporary, path):
            with temporary.open("wb") as out:
                write_checkpoint(out, draft, tensors, labels, base, coder, again=bool(draft.entries))
            written = CheckpointFile(temporary)
            if draft.entries and written.header.identity != draft.identity:
                raise CheckpointError(f"{temporary}: re-coding would change the values of {path.name}")
            verify_written(written, tensors, base)
            self.parent_of(written)
        return written

    @contextmanager
    def _deleted_on_error(self, temporary: Path, path: Path) -> Iterator[None]:
        """Delete a temporary file if the block fails. path: the final name."""
        try:
            yield
        except BaseException as error:
            error.add_note(f"while writing {temporary}; nothing else has changed")
            add_disk_full_note(error, path)
            self._delete_uncommitted(temporary)
            raise

    def _delete_uncommitted(self, path: Path) -> None:
        """Delete a file that has not become part of the run, but not in a folder that has taken the run's place."""
        with suppress(CheckpointError, OSError):  # the next writer deletes what is left
            self._check_lock()
            path.unlink(missing_ok=True)

    def _rename(self, written: CheckpointFile, path: Path) -> CheckpointFile:
        """Give a verified file its final name and make the name durable. Returns the file under that name."""
        self._check_lock()
        written.path.replace(path)
        sync_parent(path)
        return written.renamed(path)

    def recode(
        self,
        file: CheckpointFile,
        tensors: Tensors,
        base: Base | None,
        record: dict[str, Any] | None = None,
        path: Path | None = None,
    ) -> CheckpointFile:
        """Re-code a checkpoint of this run or another one: the same values, conditioned on ``base``.

        tensors: as loaded from its file. record: replaces the record of the file. path: of the new file, by default the
        name of the present one. A sharded checkpoint keeps its boxes.
        """
        path = path or self.folder / file.path.name
        if file.header.parts is not None:
            above = None if base is None else self.chain(self.file(base.parent.step))
            return self.recode_parts(Run(file.path.parent).chain(file), above, record, path)
        labels = {entry.name: entry.label for entry in file.header.entries}
        draft = replace(file.header, parent=base.parent if base else None, record=record or file.header.record)
        return self.write(draft, tensors, labels, base, coder_of(file), path)

    def recode_parts(
        self,
        chain: list[CheckpointFile],
        base: list[CheckpointFile] | None,
        record: dict[str, Any] | None = None,
        path: Path | None = None,
    ) -> CheckpointFile:
        """Re-code the parts of a sharded checkpoint into a new folder, one by one, then the file that refers to them.

        chain: ``Run.chain`` of the checkpoint. base: that of the checkpoint that it is to be conditioned on; None for a
        keyframe. record, path: as for ``recode``. Holds one part at a time.
        """
        file, above = chain[0], None if base is None else base[0].header
        plan = plan_of(file.header)
        parent = None if above is None else Parent(above.step, above.identity)
        draft = replace(file.header, parent=parent, record=record or file.header.record)
        folder = self._new_parts_folder(draft)
        try:
            written = []
            for number, own in enumerate(plan.boxes):
                beside = None if base is None or parent is None else Base.of_boxes(parent, boxes_in_part(base, own))
                stored = boxes_of(chain, own)
                written.append(write_part(folder / part_name(number), own, stored, draft, beside, again=True)[0])
            header = sharded_header(draft, folder.name, plan, written)
            if header.identity != file.header.identity:
                raise CheckpointError(f"{folder}: re-coding would change the values of {file.path.name}")
            again = self._publish(header, path or self.folder / file.path.name)
            if path is None:
                self.delete_unneeded()
            return again
        except BaseException:
            self.abandon_parts(folder)
            raise

    def delete(self, step: int) -> None:
        """Delete the file of a step, and its parts. The caller has made sure that no other checkpoint depends on it."""
        self._check_lock()
        self.path(step).unlink()
        sync(self.folder)
        self.delete_unneeded()

    def keep_replaced(self, file: CheckpointFile) -> None:
        """Keep a checkpoint whose step is to be saved again, as a keyframe that no other file of the run must wait for.

        It lasts as long as a tag names it. Raises CheckpointError if it cannot be decoded.
        """
        path = self.replaced_path(file.header.step, file.header.identity)
        if not path.exists():
            self.recode(file, {} if file.header.parts else self.load(file), None, path=path)


def _delete_folder(folder: Path) -> None:
    """Delete a folder of parts and the parts in it. Files of others, and so the folder, stay."""
    for path in folder.glob(f"part-*{SUFFIX}"):
        path.unlink()
    with suppress(OSError):
        folder.rmdir()
