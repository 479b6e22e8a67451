"""A run: the folder of the checkpoints of one training. Listing, decoding, verifying, atomic commit.

Files are named by step. A checkpoint is there or not: it is written under a temporary name, made durable, read back
and verified, and only then renamed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dynaquant.coding.encoder import Coder
from dynaquant.errors import CheckpointError, MovedOnError
from dynaquant.state.roles import Label
from dynaquant.state.tree import state_dict_tree
from dynaquant.store import frozen
from dynaquant.store.chain import chain_of, load_all, naming, parent_of
from dynaquant.store.container import (
    CheckpointFile,
    Header,
    Parent,
    Summary,
    Version,
    is_missing,
    is_step,
    opened,
    version_of,
)
from dynaquant.store.files import kind_of, sync, sync_name, tell_of_full_disk
from dynaquant.store.listing import SUFFIX, listed, paths
from dynaquant.store.lock import FolderLock, holding
from dynaquant.store.reading import Tensors
from dynaquant.store.writing import Base, Checkpoint, coder_of, verify_written, write_checkpoint
from dynaquant.tensors.stored import External, StoredTensor

_TEMPORARY = ".tmp"
_COPY = re.compile(r"exact-\d{12,}(-\d{12,})?\.dqc")
FROZEN_FROM = 1 << 20
"""Bytes of frozen parameters for which a file of their own is worth having; fewer are stored in each checkpoint."""
LOSSLESS_COPY = "exact"
"""In a record: the identity of the lossless copy, None where none was kept. Version 0.1 had no such key."""
_UNKNOWN_COMMITS = 2**32
"""More commits than a run ever has. Files whose numbers cannot be read may stand for so many."""


class Run:
    """The checkpoints in a folder. Writing takes a lock, ``writer()``; reading takes none.

    What is read may raise MovedOnError where a writer has replaced or deleted it meanwhile; ``chain.until_settled``
    begins again then.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._summaries: dict[Version, Summary] = {}
        self._newest = 0  # the highest sequence number when the run was listed last
        self._highest = 0  # and of all that were ever seen here
        self._seen: set[int] = set()  # steps that were there
        self._lock: FolderLock | None = None
        self.frozen = frozen.Files(self.folder)

    @contextmanager
    def writer(self) -> Iterator[None]:
        """Holds the run for writing, and clears away what a killed writer left.

        Raises CheckpointError when another process (or Checkpointer) is writing to the folder.
        """
        with holding(self.folder) as lock:
            for stray in self.folder.glob(f"*{SUFFIX}{_TEMPORARY}"):
                if not stray.is_dir():
                    stray.unlink()
            self._lock = lock
            try:
                yield
            finally:
                self._lock = None

    def _check_folder(self) -> None:
        """Raises CheckpointError when the folder is held for writing and another one has come in its place."""
        if self._lock is not None:
            self._lock.check()

    def path(self, step: int) -> Path:
        """The file of a step."""
        return self.folder / f"step-{step:012d}{SUFFIX}"

    def summaries(self) -> tuple[list[Summary], list[CheckpointError]]:
        """All checkpoints whose headers are sound, oldest commit first, and what is wrong with the others."""
        known = self._summaries

        def read(path: Path) -> tuple[Version, Summary]:
            version = version_of(path.stat())
            summary = known.get(version) or CheckpointFile(path).header.summary
            self._check_name(path, summary.step)
            return version, summary

        found, broken = listed(self.folder, read)
        self._summaries = dict(found)
        self._seen.update(summary.step for _, summary in found)
        self._newest = max((summary.sequence for _, summary in found), default=0)
        self._highest = max(self._highest, self._newest)
        return sorted(self._summaries.values(), key=lambda summary: (summary.sequence, summary.step)), broken

    def files(self) -> tuple[list[CheckpointFile], list[CheckpointError]]:
        """The same with their whole headers. The files are closed, as there may be many."""

        def read(path: Path) -> CheckpointFile:
            file = CheckpointFile(path)
            self._check_name(path, file.header.step)
            file.close()
            return file

        found, broken = listed(self.folder, read)
        self._seen.update(file.header.step for file in found)
        return sorted(found, key=lambda file: (file.header.sequence, file.header.step)), broken

    def _check_name(self, path: Path, step: int) -> None:
        if self.path(step) != path:
            raise CheckpointError(f"{path}: holds step {step}; was it renamed?")

    def steps(self) -> list[int]:
        """The steps of all checkpoints whose headers are sound, oldest commit first."""
        return [summary.step for summary in self.summaries()[0]]

    def file(self, step: int) -> CheckpointFile:
        """The checkpoint of a step. Raises CheckpointError when it is not there or not sound."""
        if not is_step(step):
            raise CheckpointError(f"{self.folder}: a step is an integer from 0 to 2**63 - 1")
        path = self.path(step)
        try:
            file = CheckpointFile(path)
        except CheckpointError as error:
            if not is_missing(error):
                raise
            seen = step in self._seen
            steps = ", ".join(str(summary.step) for summary in self.summaries()[0]) or "none"
            what = (
                f"the checkpoint of step {step} is no longer there"
                if seen
                else f"there is no checkpoint of step {step}"
            )
            raise CheckpointError(f"{self.folder}: {what} (there are: {steps})") from None
        self._check_name(path, file.header.step)
        self._seen.add(step)
        return file

    def newest(self) -> CheckpointFile:
        """The checkpoint that was committed last. Raises CheckpointError when there is none that is sound."""
        summaries, broken = self.summaries()
        if not summaries:
            if self.folder.is_dir():
                what = "there are no checkpoints here"
            else:
                kind = kind_of(self.folder)
                what = f"it is {kind}; give a file or a folder" if kind else "there is no such file or folder"
            raise broken[0] if broken else CheckpointError(f"{self.folder}: {what}")
        step = summaries[-1].step
        try:
            return self.file(step)
        except CheckpointError as error:
            if self.path(step).exists():
                raise
            raise MovedOnError(str(error)) from error

    def parent_of(self, file: CheckpointFile) -> CheckpointFile | None:
        """The parent of a delta (``chain.parent_of``); None for a keyframe."""
        return parent_of(file, self.path)

    def chain(self, file: CheckpointFile) -> list[CheckpointFile]:
        """The files that a checkpoint is decoded from, itself first (``chain.chain_of``)."""
        return chain_of(file, self.path)

    def load(self, file: CheckpointFile) -> Tensors:
        """Decodes the tensors of a checkpoint and checks each against its hash (``chain.load_all``)."""
        with naming(file):
            return load_all(self.chain(file))

    def chain_lengths(self, damaged: Collection[int] = ()) -> dict[Parent, int]:
        """Every checkpoint that can be decoded, with the length of its chain: 1 for a keyframe.

        Missing are those of the steps in ``damaged``, and those that build on a damaged or missing checkpoint.
        """
        lengths: dict[Parent, int] = {}
        for summary in self.summaries()[0]:  # parents come before their children
            above = 0 if summary.parent is None else lengths.get(summary.parent)
            if above is not None and summary.step not in damaged:
                lengths[Parent(summary.step, summary.identity)] = above + 1
        return lengths

    def commit(self, checkpoint: Checkpoint, base: Base | None) -> tuple[CheckpointFile, Base]:
        """Writes a checkpoint against ``base`` (None: as a keyframe), verifies it, and makes it part of the run.

        With a lossless copy both are written and verified first. Then the copy gets its name, then the checkpoint,
        and the commit is done; then the copy of the checkpoint before goes.

        A checkpoint of the same step is replaced; the caller has made sure that no other needs it. Returns the file
        and the base for the next commit. On any error the run is as before, but for one from syncing the folder:
        the checkpoint is in place then, as a note of the error says.
        """
        draft = Header(
            step=checkpoint.step,
            sequence=self._next_sequence(),
            parent=base.parent if base else None,
            tree=checkpoint.tree,
            entries=(),
            record={**checkpoint.record, LOSSLESS_COPY: None},
        )
        path, beside = self.path(checkpoint.step), self._lossless_copy_path(draft)
        labels, aside = checkpoint.labels, self._freeze(checkpoint)
        tensors = {**checkpoint.tensors, **aside} if aside else checkpoint.tensors
        with ExitStack() as undo:
            copy = None
            if checkpoint.lossless_copy is not None:
                plain = replace(draft, record=checkpoint.record, parent=None)
                copy = self._written(plain, {**checkpoint.lossless_copy, **aside}, labels, None, "conditional", beside)
                undo.callback(self._take_back, copy.path)
                draft.record[LOSSLESS_COPY] = copy.header.identity
            written = self._written(draft, tensors, labels, base, checkpoint.coder, path)
            undo.callback(self._take_back, written.path)
            self.frozen.check(written)
            if copy is not None:
                # First, and beside that of the checkpoint before, which is the newest until the next renaming.
                undo.callback(lambda: None if written.is_at(path) else self._take_back(beside))
                self._placed(copy, beside)
            file = self._placed(written, path)
            undo.pop_all()
        self._summaries[version_of(path.stat())] = file.header.summary
        self._newest = self._highest = draft.sequence
        try:
            for other in self.lossless_copy_paths():
                if copy is None or other != beside:
                    other.unlink()
            self.drop_unneeded_frozen()
        except OSError as error:
            error.add_note(f"step {checkpoint.step} is saved; removing what only older ones needed failed")
            raise
        return file, Base.written(file.header, tensors, base)

    def _freeze(self, checkpoint: Checkpoint) -> dict[str, External]:
        """Writes frozen parameters that are in no file of their own yet into one; where they are from now on."""
        if not checkpoint.frozen:
            return {}
        given = {name: tensor for name, tensor in checkpoint.tensors.items() if name in checkpoint.frozen}
        new = {name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor)}
        if sum(tensor.nbytes for tensor in new.values()) < FROZEN_FROM:
            return {}
        draft = Header(step=0, sequence=0, parent=None, tree=state_dict_tree(new), entries=(), record={})
        path = self.folder / f"frozen{SUFFIX}"
        written = self._written(draft, new, checkpoint.labels, None, "conditional", path)
        holder = self._placed(written, path.with_name(frozen.file_name(written.header.identity)))
        self.frozen.wrote(holder)
        return {entry.name: frozen.of_file(holder, entry) for entry in holder.header.entries}

    def drop_unneeded_frozen(self) -> None:
        """Deletes files of frozen parameters that no checkpoint needs any more.

        None is deleted while a checkpoint cannot be read: it may need any of them.
        """
        summaries, broken = self.summaries()
        needed = {frozen.file_name(identity) for summary in summaries for identity in summary.frozen}
        for path in paths(self.folder, frozen.PREFIX):
            if not broken and frozen.is_name(path.name) and path.name not in needed:
                self._check_folder()
                path.unlink()

    def _next_sequence(self) -> int:
        """A number higher than that of any checkpoint that the run has had, of files that cannot be read as well.

        Such a file may be whole again later. It must not count as newer then than what is committed now.
        """
        _, broken = self.summaries()
        found = self._highest + (_UNKNOWN_COMMITS if broken else 1)
        if found >= 2**63:
            raise CheckpointError(
                f"{self.folder}: a checkpoint has the sequence number {self._highest}, which leaves none for another "
                "and which no training gets to; take its file out of the folder"
            )
        return found

    def lossless_copy_paths(self) -> list[Path]:
        """The files of lossless copies, oldest step first."""
        return [path for path in paths(self.folder, "exact-") if _COPY.fullmatch(path.name)]

    def _lossless_copy_path(self, header: Header) -> Path:
        """Where the lossless copy of a checkpoint lies. Every commit has a name of its own for it."""
        return self.folder / f"exact-{header.step:012d}-{header.sequence:012d}{SUFFIX}"

    def lossless_copy(self, file: CheckpointFile) -> CheckpointFile | None:
        """The lossless copy of a checkpoint: a file with its tensors as they were. None where none was kept.

        The next commit removes it. Raises CheckpointError when it is not sound, or when the newest checkpoint's is
        missing.
        """
        header = file.header
        if LOSSLESS_COPY not in header.record:
            return self._lossless_copy_of_version_0_1(header)
        identity = header.record[LOSSLESS_COPY]
        if identity is None:
            return None
        path = self._lossless_copy_path(header)
        if (copy := opened(path)) is not None:
            if copy.header.identity != identity:
                raise CheckpointError(f"{path}: is not the lossless copy that was saved with step {header.step}")
            return copy
        if header.sequence >= self._newest:
            self.summaries()  # there may be a newer one by now
        if header.sequence < self._newest:
            return None
        raise CheckpointError(
            f"checkpoint step {header.step}: its lossless copy, {path.name}, is not in {self.folder} (was it "
            "deleted by hand?)"
        )

    def _lossless_copy_of_version_0_1(self, header: Header) -> CheckpointFile | None:
        """``exact`` for a checkpoint of version 0.1: its name has the step alone, so it may be of another commit."""
        copy = opened(self.folder / f"exact-{header.step:012d}{SUFFIX}")
        return copy if copy is not None and copy.header.sequence == header.sequence else None

    def write(
        self,
        draft: Header,
        tensors: Mapping[str, StoredTensor],
        labels: Mapping[str, Label],
        base: Base | None,
        coder: Coder = "conditional",
        path: Path | None = None,
    ) -> CheckpointFile:
        """Encodes tensors and writes them under ``draft`` with its entries filled in; verifies; renames.

        path: where to, if not to the file of the draft's step. A draft that has entries is a checkpoint to be re-coded:
        the new file must have its identity.
        """
        path = path or self.path(draft.step)
        return self._placed(self._written(draft, tensors, labels, base, coder, path), path)

    def _written(
        self,
        draft: Header,
        tensors: Mapping[str, StoredTensor],
        labels: Mapping[str, Label],
        base: Base | None,
        coder: Coder,
        path: Path,
    ) -> CheckpointFile:
        """``write`` up to the renaming: verified, under a temporary name."""
        self._check_folder()
        temporary = path.with_name(path.name + _TEMPORARY)
        try:
            with temporary.open("wb") as out:
                write_checkpoint(out, draft, tensors, labels, base, coder)
            written = CheckpointFile(temporary)
            if draft.entries and written.header.identity != draft.identity:
                raise CheckpointError(f"{temporary}: re-coding would change the values of {path.name}")
            verify_written(written, tensors, base)
            self.parent_of(written)
        except BaseException as error:
            error.add_note(f"while writing {temporary}; nothing else has changed")
            tell_of_full_disk(error, path)
            self._take_back(temporary)
            raise
        return written

    def _take_back(self, path: Path) -> None:
        """Deletes a file that has not become part of the run, but never in a folder that came in the place of it."""
        with suppress(CheckpointError, OSError):  # the next writer clears away what stays
            self._check_folder()
            path.unlink(missing_ok=True)

    def _placed(self, written: CheckpointFile, path: Path) -> CheckpointFile:
        """The file that was written, under its name from now on."""
        self._check_folder()
        written.path.replace(path)
        sync_name(path)
        return written.moved(path)

    def recode(
        self, file: CheckpointFile, tensors: Tensors, base: Base | None, record: dict[str, Any] | None = None
    ) -> CheckpointFile:
        """Writes a checkpoint, of this run or another one, anew: the same values, coded against ``base``.

        tensors: as loaded from its file. record: if not that of the file.
        """
        labels = {entry.name: entry.label for entry in file.header.entries}
        draft = replace(file.header, parent=base.parent if base else None, record=record or file.header.record)
        return self.write(draft, tensors, labels, base, coder_of(file), self.folder / file.path.name)

    def delete(self, step: int) -> None:
        """Removes the file of a step. The caller has made sure that no other checkpoint needs it."""
        self._check_folder()
        self.path(step).unlink()
        sync(self.folder)
