"""Atomic commits: writes checkpoints to a run, re-codes and deletes them.

A file is written under a temporary name, made durable, read back and verified. Only then is it renamed. So a
process that is killed at any point leaves the run unchanged. Parts come before the manifest, whose name is the commit.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynaquant.engine.forms.external import External
from dynaquant.engine.forms.stored import form_of, values_of
from dynaquant.errors import CheckpointError
from dynaquant.state.tree import state_dict_tree
from dynaquant.store.atomic_files import keep_mode
from dynaquant.store.chain import frozen_name, open_part, parent_of
from dynaquant.store.container import CheckpointFile, Header, Parent
from dynaquant.store.decoding import tensor_in
from dynaquant.store.files import add_disk_full_note, make_folder, sync, sync_parent
from dynaquant.store.frozen_tensors import FrozenFiles
from dynaquant.store.layout import FOLDER as PARTS
from dynaquant.store.layout import Plan
from dynaquant.store.locks import WriterLock, lock_for_writing
from dynaquant.store.reading import load_all
from dynaquant.store.run import LOSSLESS_COPY, STEP, SUFFIX, Run, checkpoint_paths
from dynaquant.store.unneeded import unneeded
from dynaquant.store.writing import (
    TEMPORARY,
    Base,
    Checkpoint,
    Draft,
    WrittenPart,
    base_of_boxes,
    coder_of,
    plan_of,
    read_boxes,
    with_parts,
    write_part,
    written_file,
)

log = logging.getLogger("dynaquant")

MIN_FROZEN_BYTES = 1 << 20
"""Frozen parameters get a file of their own from this size on. Smaller ones are stored in each checkpoint."""
_UNKNOWN_COMMITS = 2**32
"""Sequence numbers that a commit skips while a file cannot be read: more than a run ever uses. So that file does not
count as newer than the checkpoints committed since, if it becomes readable again."""


class WritableRun(Run):
    """A run that can also be written: ``commit``, ``recode``, ``delete``. Lock it with ``locked()`` while writing."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        self.frozen_files = FrozenFiles(self.folder)
        self._lock: WriterLock | None = None
        self._parts_begun = False  # whether parts may be there that no manifest refers to yet

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run for writing, and delete the temporary files and the parts that a killed writer has left.

        Raises CheckpointError if another process (or Checkpointer) is writing to the folder.
        """
        with lock_for_writing(self.folder) as lock:
            for leftover in (*self.folder.glob(f"*{SUFFIX}{TEMPORARY}"), *self.parts_folder.glob(f"*{TEMPORARY}")):
                if not leftover.is_dir():
                    leftover.unlink()
            self._lock = lock
            try:
                self.delete_unneeded()
                self.catalogue.renew([path.name for path in checkpoint_paths(self.folder, STEP)])
                yield
            finally:
                self._lock = None

    def leave_token(self) -> str:
        """Create an empty file with a random name in the folder, and return the name.

        Whoever sees the file sees this folder. The caller deletes it; if it is killed, the next writer does.
        """
        name = f"token-{secrets.token_hex(8)}{SUFFIX}{TEMPORARY}"
        (self.folder / name).touch(exist_ok=False)
        return name

    def check_lock(self) -> None:
        """Raise CheckpointError if the run was locked, and another folder has taken its place since."""
        if self._lock is not None:
            self._lock.check()

    @property
    def parts_folder(self) -> Path:
        """The folder of the parts."""
        return self.folder / PARTS

    def commit(self, checkpoint: Checkpoint, base: Base | None) -> tuple[CheckpointFile, Base]:
        """Write a checkpoint, conditioned on ``base`` (None: as a keyframe), and add it to the run (``publish``)."""
        return self.publish(self.begin(checkpoint.step, base.parent if base else None), checkpoint, base)

    def begin(self, step: int, parent: Parent | None, parts: bool = False) -> Header:
        """Begin a commit. Returns what is known of the manifest.

        parts: whether parts are written before it is published. Until then nothing refers to them, so ``abandon`` must
        be called if the commit fails. If this process is killed, the next writer deletes them.
        """
        self.check_lock()
        begun = Header(step, self._next_sequence(), parent, {}, (), {})
        if parts:
            self._begin_parts()
        return begun

    def _begin_parts(self) -> None:
        try:
            make_folder(self.parts_folder)
        except BaseException as error:
            add_disk_full_note(error, self.parts_folder)
            raise
        self._parts_begun = True

    def abandon(self) -> None:
        """Delete the parts of a commit that was begun and has failed."""
        if not self._parts_begun:
            return
        self._parts_begun = False
        with suppress(CheckpointError, OSError):  # the next writer deletes what is left
            self.check_lock()
            for leftover in self.parts_folder.glob(f"*{TEMPORARY}"):
                leftover.unlink()
            self.delete_unneeded()

    def publish(
        self,
        begun: Header,
        checkpoint: Checkpoint,
        base: Base | None = None,
        plan: Plan | None = None,
        parts: Sequence[WrittenPart] = (),
    ) -> tuple[CheckpointFile, Base]:
        """Write the manifest of a checkpoint, with its tensors in the same file, and add it to the run: the commit.

        begun: of ``begin``. plan, parts: if the tensors are in parts, which are all written; then the file has none.

        With a lossless copy, both files are written and verified first. Then the copy is renamed to its final name, and
        then the checkpoint, which completes the commit. Last, copies that are not needed any more are deleted.

        Replaces a checkpoint of the same step. The caller has made sure that no other depends on it, and that it is
        kept if it is named (``retention.prepare_replacement``). Returns the file and the base for the next commit. On
        any error the run is as before. One exception: if syncing the folder fails, the checkpoint is in place, and a
        note of the error says so.
        """
        header = replace(begun, tree=checkpoint.tree, record={**checkpoint.record, LOSSLESS_COPY: None})
        path, path_of_copy = self.path(checkpoint.step), self.copy_path(header)
        labels, frozen_tensors = checkpoint.labels, self._write_frozen(checkpoint)
        tensors = {**checkpoint.tensors, **frozen_tensors} if frozen_tensors else checkpoint.tensors
        if plan is not None:
            header, tensors = with_parts(header, plan, parts), {}
        with ExitStack() as undo:
            copy = None
            if checkpoint.lossless_copy is not None:
                of_copy = replace(header, record=checkpoint.record, parent=None)
                exact = {**checkpoint.lossless_copy, **frozen_tensors}
                copy = self._write_temporary(Draft(of_copy, exact, labels), path_of_copy)
                undo.callback(self._delete_uncommitted, copy.path)
                header.record[LOSSLESS_COPY] = copy.header.identity
            written = self._write_temporary(Draft(header, tensors, labels, base, checkpoint.coder), path)
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
        self._parts_begun = False
        if replaces:
            log.info("replaced step %d", checkpoint.step)
        self._newest = self._highest = header.sequence
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
        new = {name: values_of(tensor) for name, tensor in given.items() if not form_of(tensor).external}
        if sum(tensor.nbytes for tensor in new.values()) < MIN_FROZEN_BYTES:
            return {}
        header = Header(step=0, sequence=0, parent=None, tree=state_dict_tree(new), entries=(), record={})
        path = self.folder / f"frozen{SUFFIX}"
        written = self._write_temporary(Draft(header, new, checkpoint.labels), path)
        file = self._rename(written, path.with_name(frozen_name(written.header.identity)))
        self.frozen_files.mark_sound(file)
        return {entry.name: tensor_in(file, entry) for entry in file.header.entries}

    def delete_unneeded(self) -> None:
        """Delete what no checkpoint needs any more: frozen parameters, parts, replaced ones without a tag."""
        for path in unneeded(self, self._parts_begun):
            self.check_lock()
            path.unlink(missing_ok=True)
        if not self._parts_begun:
            with suppress(OSError):  # it is not there, or not empty
                self.parts_folder.rmdir()

    def _next_sequence(self) -> int:
        """Return a higher sequence number than the run has ever had, also in files that cannot be read now."""
        _, broken = self.summaries()
        found = self._highest + (_UNKNOWN_COMMITS if broken else 1)
        if found >= 2**63:
            raise CheckpointError(
                f"{self.folder}: a checkpoint has the sequence number {self._highest}, which no training reaches, so "
                "there is no higher number for the next commit; move its file out of the folder"
            )
        return found

    def _write_temporary(self, draft: Draft, path: Path, identity: str | None = None) -> CheckpointFile:
        """Write and verify a file under a temporary name. identity: that it must have, if it is re-coded."""
        self.check_lock()
        temporary = path.with_name(path.name + TEMPORARY)
        try:
            with temporary.open("wb") as out:
                written = written_file(out, draft)
            keep_mode(temporary, path)
            if identity not in (None, written.header.identity):
                raise CheckpointError(f"{temporary}: re-coding would change the values of {path.name}")
            for number in range(len(written.header.parts)):
                open_part(written, number)
            self._check_parent(written)
        except BaseException as error:
            error.add_note(f"while writing {temporary}; nothing else has changed")
            add_disk_full_note(error, path)
            self._delete_uncommitted(temporary)
            raise
        return written

    def _check_parent(self, written: CheckpointFile) -> None:
        """Raise CheckpointError if the parent of a delta is not there, or is another checkpoint."""
        # A file of which the catalogue has a line is read again only if it has changed since.
        if (parent := written.header.parent) is not None and parent.file is None:
            with suppress(OSError):
                path = self.path(parent.step)
                line = self.catalogue.find(path.name, path.stat())
                known = None if line is None else line.summary
                if known and known.identity == parent.identity and known.sequence < written.header.sequence:
                    return
        parent_of(written, self.path)

    def _delete_uncommitted(self, path: Path) -> None:
        """Delete a file that has not become part of the run, but not in a folder that has taken the run's place."""
        with suppress(CheckpointError, OSError):  # the next writer deletes what is left
            self.check_lock()
            path.unlink(missing_ok=True)

    def _rename(self, written: CheckpointFile, path: Path) -> CheckpointFile:
        """Give a verified file its final name and make the name durable. Returns the file under that name."""
        self.check_lock()
        written.path.replace(path)
        sync_parent(path)
        renamed = written.renamed(path)
        if path.name.startswith(STEP):
            self.catalogue.append(renamed)
        return renamed

    def recode(
        self,
        chain: list[CheckpointFile],
        base: list[CheckpointFile] | None,
        record: dict[str, Any] | None = None,
        path: Path | None = None,
    ) -> CheckpointFile:
        """Re-code a checkpoint of this run or another one: the same values in the same boxes, on another parent.

        chain: ``Run.chain`` of the checkpoint. base: that of the new parent; None for a keyframe. record: replaces the
        record of the file. path: of the new file, by default the name of the present one. Holds one part at a time.
        """
        file, above = chain[0], None if base is None else base[0].header
        plan, out = plan_of(file.header), path or self.folder / file.path.name
        parent = None if above is None else Parent(above.step, above.identity)
        header = replace(file.header, parent=parent, record=record or file.header.record)
        labels = {entry.name: entry.label for entry in file.header.entries}
        whole = [entry.name for entry in file.header.entries if entry.scheme.layout_number is None]
        try:
            written = []
            for number in range(plan.parts):
                self._begin_parts()
                own = plan.boxes_of(number)
                beside = None if base is None else base_of_boxes(base, own)
                boxes = read_boxes(chain, own)
                written.append(write_part(self.parts_folder, own, boxes, header, beside, again=True)[0])
            header = with_parts(header, plan, written)
            # All of the new parent is decoded, so that nothing is conditioned on a damaged checkpoint.
            beside = None if base is None or not whole else Base.from_loaded(base[0].header, load_all(base))
            tensors = load_all(chain, whole)
            draft = Draft(header, tensors, labels, beside, coder_of(file), again=True)
            renamed = self._rename(self._write_temporary(draft, out, file.header.identity), out)
        except BaseException:
            self.abandon()
            raise
        self._parts_begun = False
        if plan.parts and path is None:
            self.delete_unneeded()
        return renamed

    def delete(self, step: int) -> None:
        """Delete the file of a step, and its parts. The caller has made sure that no other checkpoint depends on it."""
        self.check_lock()
        self.path(step).unlink()
        self.catalogue.forget(self.path(step).name)
        sync(self.folder)
        self.delete_unneeded()

    def keep_replaced(self, file: CheckpointFile) -> None:
        """Keep a checkpoint whose step is to be saved again, as a keyframe that no other file of the run must wait for.

        It lasts as long as a tag names it. Raises CheckpointError if it cannot be decoded.
        """
        path = self.replaced_path(file.header.step, file.header.identity)
        if not path.exists():
            self.recode(self.chain(file), None, path=path)
