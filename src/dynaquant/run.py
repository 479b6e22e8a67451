"""A run: the folder of the checkpoints of one training. Listing, decoding, verifying, atomic commit.

Files are named by step. A checkpoint is there or not: it is written under a temporary name, made durable, read back
and verified, and only then renamed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from dynaquant import frozen
from dynaquant.coding.stream import Coder, StoredTensor
from dynaquant.container import CheckpointFile, CheckpointWriter, Header, Parent, Summary
from dynaquant.decoding import Tensors, load_tensors
from dynaquant.encoding import Base, Checkpoint, coder_of, encode_tensor, verify
from dynaquant.errors import CheckpointError
from dynaquant.external import External
from dynaquant.files import sync, tell_of_full_disk
from dynaquant.roles import Label
from dynaquant.state import tree_of

SUFFIX = ".dqc"
_TEMPORARY = ".tmp"
FROZEN_FROM = 1 << 20
"""Bytes of frozen parameters for which a file of their own is worth having; fewer are stored in each checkpoint."""

_locked: set[int] = set()  # descriptors of the folders that this process holds for writing


def _let_go_in_child() -> None:
    # A forked child (a DataLoader's worker) would otherwise hold the run for as long as it outlives a killed training.
    for descriptor in _locked:
        os.close(descriptor)
    _locked.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def _version(path: Path) -> tuple[int, int, int]:
    """What changes when a file does."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


class Run:
    """The checkpoints in a folder. Writing takes a lock, ``writer()``; reading takes none.

    A reader may find a checkpoint that a writer deletes or re-codes in that moment damaged; it need only read again.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._summaries: dict[tuple[int, int, int], Summary] = {}
        self._sound_frozen: set[str] = set()  # files of frozen parameters that were decoded, by identity

    @contextmanager
    def writer(self) -> Iterator[None]:
        """Holds the run for writing, and clears away what a killed writer left.

        Raises CheckpointError when another process (or Checkpointer) is writing to the folder.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise CheckpointError(f"{self.folder} is a file; a run needs a folder") from None
        descriptor = os.open(self.folder, os.O_RDONLY)
        _locked.add(descriptor)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"{self.folder}: another Checkpointer, here or in another process, is writing to this run; "
                    "close it or use another folder"
                ) from None
            for stray in self.folder.glob(f"*{SUFFIX}{_TEMPORARY}"):
                stray.unlink()
            yield
        finally:
            if descriptor in _locked:
                _locked.remove(descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked just now may not have let go yet
                os.close(descriptor)

    def path(self, step: int) -> Path:
        """The file of a step."""
        return self.folder / f"step-{step:012d}{SUFFIX}"

    def summaries(self) -> tuple[list[Summary], list[CheckpointError]]:
        """All checkpoints whose headers are sound, oldest commit first, and what is wrong with the others."""
        known, found, broken = self._summaries, {}, []
        for path in sorted(self.folder.glob(f"step-*{SUFFIX}")):
            try:
                key = _version(path)
                summary = known.get(key) or CheckpointFile(path).header.summary
                if self.path(summary.step) != path:
                    raise CheckpointError(f"{path}: holds step {summary.step}; was it renamed?")
                found[key] = summary
            except FileNotFoundError:
                continue  # deleted by its writer since it was listed
            except OSError as error:
                unreadable = CheckpointError(f"{path}: cannot be read ({error.strerror})")
                unreadable.__cause__ = error
                broken.append(unreadable)
            except CheckpointError as error:
                broken.append(error)
        self._summaries = found
        return sorted(found.values(), key=lambda summary: (summary.sequence, summary.step)), broken

    def steps(self) -> list[int]:
        """The steps of all checkpoints whose headers are sound, oldest commit first."""
        return [summary.step for summary in self.summaries()[0]]

    def file(self, step: int) -> CheckpointFile:
        """The checkpoint of a step. Raises CheckpointError when it is not there or not sound."""
        path = self.path(step)
        if not path.exists():
            steps = ", ".join(str(summary.step) for summary in self.summaries()[0]) or "none"
            raise CheckpointError(f"{self.folder}: there is no checkpoint of step {step} (there are: {steps})")
        file = CheckpointFile(path)
        if file.header.step != step:
            raise CheckpointError(f"{path}: holds step {file.header.step}; was it renamed?")
        return file

    def parent_of(self, file: CheckpointFile) -> CheckpointFile | None:
        """The parent of a delta, found and identified; None for a keyframe.

        Raises CheckpointError when the parent is missing or another checkpoint than the one it was coded against.
        """
        parent = file.header.parent
        if parent is None:
            return None
        what = f"checkpoint step {file.header.step}: its parent, step {parent.step} ({parent.identity[:8]}…),"
        path = self.path(parent.step)
        if not path.exists():
            raise CheckpointError(f"{what} is not in {self.folder} (was it deleted by hand?)")
        found = CheckpointFile(path)
        if found.header.identity != parent.identity:
            raise CheckpointError(f"{what} has been replaced in {self.folder} by another checkpoint of that step")
        # Sequence numbers fall along a chain, so every chain ends, whatever the files say.
        if found.header.sequence >= file.header.sequence:
            raise CheckpointError(f"{what} claims in {self.folder} to have been written after it")
        return found

    def chain(self, file: CheckpointFile) -> list[CheckpointFile]:
        """The file, its parent, the parent's parent, …, up to the keyframe. Raises CheckpointError for a broken one."""
        chain = [file]
        while (parent := self.parent_of(chain[-1])) is not None:
            chain.append(parent)
        return chain

    def load(self, file: CheckpointFile) -> Tensors:
        """Decodes the tensors of a checkpoint and checks each against its hash.

        Raises CheckpointError, naming file and tensor, when one cannot be decoded or is not what was stored.
        """
        try:
            return load_tensors(self.chain(file), [entry.name for entry in file.header.entries])
        except CheckpointError as error:
            itself = f"checkpoint step {file.header.step}: "
            if str(error).startswith((itself, f"{file.path}: ")):
                raise
            raise CheckpointError(f"{itself}{error}") from error

    def damage(self, step: int) -> CheckpointError | None:
        """What is wrong with a checkpoint, by decoding it; twice, as a writer may have re-coded it in that moment."""
        error = None
        for _ in range(2):
            try:
                file = self.file(step)
                self.load(file)
                self._check_frozen(file)
            except CheckpointError as found:
                error = found
            else:
                return None
        return error

    def _check_frozen(self, file: CheckpointFile) -> None:
        """Decodes the files of frozen parameters that a checkpoint needs, each of them once for all checkpoints."""
        for identity in file.header.frozen - self._sound_frozen:
            holder = frozen.opened(file, identity)
            for entry in holder.header.entries:
                frozen.of_file(holder, entry).values()
            self._sound_frozen.add(identity)

    def damage_of_exact(self, step: int) -> CheckpointError | None:
        """What is wrong with the file of a checkpoint as it was, if it was kept."""
        try:
            if (twin := self.exact(self.file(step))) is not None:
                self.load(twin)
        except CheckpointError as error:
            return error
        return None

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

        A checkpoint of the same step is replaced; the caller has made sure that no other needs it. Returns the file
        and the base for the next commit. On any error the run is as before.
        """
        youngest = max((summary.sequence for summary in self.summaries()[0]), default=0)
        draft = Header(
            step=checkpoint.step,
            sequence=youngest + 1,
            parent=base.parent if base else None,
            tree=checkpoint.tree,
            entries=(),
            record=checkpoint.record,
        )
        path, twin = self.path(checkpoint.step), self._exact_path(checkpoint.step)
        aside = self._freeze(checkpoint)
        tensors = {**checkpoint.tensors, **aside}
        written = self._written(draft, tensors, checkpoint.labels, base, checkpoint.coder, path)
        if checkpoint.exact is not None:  # in place first: without the other it is nothing, and does no harm
            try:
                exact = {**checkpoint.exact, **aside}
                self.write(replace(draft, parent=None), exact, checkpoint.labels, None, path=twin)
            except BaseException:
                written.path.unlink(missing_ok=True)
                raise
        file = self._placed(written, path)
        self._summaries[_version(file.path)] = file.header.summary
        for other in self.exact_paths():
            if checkpoint.exact is None or other != twin:
                other.unlink()
        self.drop_unneeded_frozen()
        return file, Base.written(file.header, tensors, base)

    def _freeze(self, checkpoint: Checkpoint) -> dict[str, External]:
        """Writes frozen parameters that are in no file of their own yet into one; where they are from now on."""
        given = {name: tensor for name, tensor in checkpoint.tensors.items() if name in checkpoint.frozen}
        new = {name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor)}
        if sum(tensor.nbytes for tensor in new.values()) < FROZEN_FROM:
            return {}
        draft = Header(step=0, sequence=0, parent=None, tree=tree_of(new), entries=(), record={})
        path = self.folder / f"frozen{SUFFIX}"
        written = self._written(draft, new, checkpoint.labels, None, "conditional", path)
        holder = self._placed(written, path.with_name(frozen.file_name(written.header.identity)))
        return {entry.name: frozen.of_file(holder, entry) for entry in holder.header.entries}

    def held(self, tensors: Mapping[str, StoredTensor]) -> dict[str, External]:
        """Those of the tensors whose values lie in files of frozen parameters that are in the folder."""
        there = {path.name for path in frozen.paths(self.folder)}
        files = {name: stored for name, stored in tensors.items() if isinstance(stored, External) and stored.file}
        return {name: stored for name, stored in files.items() if frozen.file_name(stored.file or "") in there}

    def drop_unneeded_frozen(self) -> None:
        """Deletes files of frozen parameters that no checkpoint needs any more.

        None is deleted while a checkpoint cannot be read: it may need any of them.
        """
        summaries, broken = self.summaries()
        needed = {frozen.file_name(identity) for summary in summaries for identity in summary.frozen}
        for path in frozen.paths(self.folder):
            if not broken and path.name not in needed:
                path.unlink()

    def exact_paths(self) -> list[Path]:
        """The files of checkpoints with their tensors as they were, oldest step first."""
        return sorted(self.folder.glob(f"exact-*{SUFFIX}"))

    def _exact_path(self, step: int) -> Path:
        return self.folder / f"exact-{step:012d}{SUFFIX}"

    def exact(self, file: CheckpointFile) -> CheckpointFile | None:
        """The file of the same checkpoint with its tensors as they were, if it was kept.

        Raises CheckpointError when it is not sound.
        """
        path = self._exact_path(file.header.step)
        if not path.exists():
            return None
        twin = CheckpointFile(path)
        # One of another commit of that step: its writer was killed before it came to this one.
        return twin if twin.header.sequence == file.header.sequence else None

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
        temporary = path.with_name(path.name + _TEMPORARY)
        try:
            with temporary.open("wb") as out:
                writer = CheckpointWriter(out)
                entries = []
                for name in tensors:
                    entry, coded = encode_tensor(name, tensors, labels[name], base, coder, bool(draft.entries))
                    entries.append(entry)
                    writer.add(coded)
                writer.finish(replace(draft, entries=tuple(entries)))
            written = CheckpointFile(temporary)
            if draft.entries and written.header.identity != draft.identity:
                raise CheckpointError(f"{temporary}: re-coding would change the values of {path.name}")
            verify(written, tensors, base)
            self.parent_of(written)
        except BaseException as error:
            error.add_note(f"while writing {temporary}; nothing else has changed")
            tell_of_full_disk(error, path)
            temporary.unlink(missing_ok=True)
            raise
        return written

    def _placed(self, written: CheckpointFile, path: Path) -> CheckpointFile:
        """The file that was written, under its name from now on."""
        written.path.replace(path)
        sync(self.folder)
        return written.moved(path)

    def recode(self, file: CheckpointFile, tensors: Tensors, base: Base | None) -> CheckpointFile:
        """Writes a checkpoint, of this run or another one, anew: the same values, coded against ``base``.

        tensors: as loaded from its file.
        """
        labels = {entry.name: entry.label for entry in file.header.entries}
        draft = replace(file.header, parent=base.parent if base else None)
        return self.write(draft, tensors, labels, base, coder_of(file), self.folder / file.path.name)

    def delete(self, step: int) -> None:
        """Removes the file of a step. The caller has made sure that no other checkpoint needs it."""
        self.path(step).unlink()
        sync(self.folder)
