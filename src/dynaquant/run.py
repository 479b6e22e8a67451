"""A run: the folder of the checkpoints of one training. Listing, decoding, verifying, atomic commit.

Files are named by step. A checkpoint is there or not: it is written under a temporary name, made durable, read back
and verified, and only then renamed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynaquant.coding.stream import Coder, StoredTensor
from dynaquant.container import CheckpointFile, CheckpointWriter, Header, Parent, Summary, version_of
from dynaquant.decoding import Tensors, load_tensors
from dynaquant.encoding import Base, Checkpoint, coder_of, encode_tensor, verify
from dynaquant.errors import CheckpointError
from dynaquant.files import sync, tell_of_full_disk
from dynaquant.lock import FolderLock, holding
from dynaquant.roles import Label

SUFFIX = ".dqc"
_TEMPORARY = ".tmp"


EXACT = "exact"
"""In a record: the identity of the lossless copy, None where none was kept. Version 0.1 had no such key."""
_UNKNOWN_COMMITS = 2**32
"""More commits than a run ever has. Files whose numbers cannot be read may stand for so many."""


class Run:
    """The checkpoints in a folder. Writing takes a lock, ``writer()``; reading takes none.

    A reader may find a checkpoint that a writer deletes or re-codes in that moment damaged; it need only read again.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._summaries: dict[tuple[int, int, int, int], Summary] = {}
        self._highest = 0  # of all sequence numbers that were ever seen here
        self._lock: FolderLock | None = None

    @contextmanager
    def writer(self) -> Iterator[None]:
        """Holds the run for writing, and clears away what a killed writer left.

        Raises CheckpointError when another process (or Checkpointer) is writing to the folder.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise CheckpointError(f"{self.folder} is a file; a run needs a folder") from None
        with holding(self.folder) as lock:
            for stray in self.folder.glob(f"*{SUFFIX}{_TEMPORARY}"):
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
        known, found, broken = self._summaries, {}, []
        for path in self._files("step-"):
            try:
                key = version_of(path.stat())
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
        self._highest = max([self._highest, *(summary.sequence for summary in found.values())])
        return sorted(found.values(), key=lambda summary: (summary.sequence, summary.step)), broken

    def _files(self, prefix: str) -> list[Path]:
        """The checkpoint files whose names begin so, by name. Raises CheckpointError when the folder cannot be read."""
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be read ({error.strerror})") from error
        return [self.folder / name for name in sorted(names) if name.startswith(prefix) and name.endswith(SUFFIX)]

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
                self.load(self.file(step))
            except CheckpointError as found:
                error = found
            else:
                return None
        return error

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

        With a lossless copy both are written and verified first. Then the copy gets its name, then the checkpoint,
        and the commit is done; then the copy of the checkpoint before goes.

        A checkpoint of the same step is replaced; the caller has made sure that no other needs it. Returns the file
        and the base for the next commit. On any error the run is as before.
        """
        draft = Header(
            step=checkpoint.step,
            sequence=self._next_sequence(),
            parent=base.parent if base else None,
            tree=checkpoint.tree,
            entries=(),
            record={**checkpoint.record, EXACT: None},
        )
        path, beside = self.path(checkpoint.step), self._exact_path(draft)
        labels = checkpoint.labels
        with ExitStack() as undo:
            copy = None
            if checkpoint.exact is not None:
                plain = replace(draft, record=checkpoint.record, parent=None)
                copy = self._written(plain, checkpoint.exact, labels, None, "conditional", beside)
                undo.callback(copy.path.unlink, missing_ok=True)
                draft.record[EXACT] = copy.header.identity
            written = self._written(draft, checkpoint.tensors, labels, base, checkpoint.coder, path)
            undo.callback(written.path.unlink, missing_ok=True)
            if copy is not None:
                # First, and beside that of the checkpoint before, which is the newest until the next renaming.
                undo.callback(lambda: None if written.is_at(path) else beside.unlink(missing_ok=True))
                self._placed(copy, beside)
            file = self._placed(written, path)
            undo.pop_all()
        self._summaries[version_of(path.stat())] = file.header.summary
        self._highest = draft.sequence
        try:
            for other in self.exact_paths():
                if copy is None or other != beside:
                    other.unlink()
        except OSError as error:
            error.add_note(f"step {checkpoint.step} is saved; removing the lossless copy of an older one failed")
            raise
        return file, Base.written(file.header, checkpoint.tensors, base)

    def _next_sequence(self) -> int:
        """A number higher than that of any checkpoint that the run has had, of files that cannot be read as well.

        Such a file may be whole again later. It must not count as newer then than what is committed now.
        """
        _, broken = self.summaries()
        found = self._highest + (_UNKNOWN_COMMITS if broken else 1)
        if found >= 2**63:
            raise CheckpointError(
                f"{self.folder}: a checkpoint has the sequence number {self._highest}, which leaves none for another; "
                "branch off into a new folder"
            )
        return found

    def exact_paths(self) -> list[Path]:
        """The files of lossless copies, oldest step first."""
        return self._files("exact-")

    def _exact_path(self, header: Header) -> Path:
        """Where the lossless copy of a checkpoint lies. Every commit has a name of its own for it."""
        return self.folder / f"exact-{header.step:012d}-{header.sequence:012d}{SUFFIX}"

    def exact(self, file: CheckpointFile) -> CheckpointFile | None:
        """The lossless copy of a checkpoint: a file with its tensors as they were. None where none was kept.

        The next commit removes it. Raises CheckpointError when it is not sound, or when the newest checkpoint's is
        missing.
        """
        header = file.header
        if EXACT not in header.record:
            return self._exact_of_old(header)
        identity = header.record[EXACT]
        if identity is None:
            return None
        path = self._exact_path(header)
        if path.exists():
            copy = CheckpointFile(path)
            if copy.header.identity != identity:
                raise CheckpointError(f"{path}: is not the lossless copy that was saved with step {header.step}")
            return copy
        self.summaries()
        if header.sequence < self._highest:
            return None
        raise CheckpointError(
            f"checkpoint step {header.step}: its lossless copy, {path.name}, is not in {self.folder} (was it "
            "deleted by hand?)"
        )

    def _exact_of_old(self, header: Header) -> CheckpointFile | None:
        """``exact`` for a checkpoint of version 0.1: its name has the step alone, so it may be of another commit."""
        path = self.folder / f"exact-{header.step:012d}{SUFFIX}"
        if not path.exists():
            return None
        copy = CheckpointFile(path)
        return copy if copy.header.sequence == header.sequence else None

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
        self._check_folder()
        written.path.replace(path)
        sync(self.folder)
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
