"""A run: the folder of the checkpoints of one training. Listing, decoding, verifying, atomic commit.

Files are named by step. A checkpoint is there or not: it is written under a temporary name, made durable, read back
and verified, and only then renamed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dynaquant.coding import stream
from dynaquant.coding.stream import Coder, StoredTensor, stored_hash, values_of
from dynaquant.codings import Exact, Planes, Raw, Rearranged, Reference, other_of
from dynaquant.container import CheckpointFile, CheckpointWriter, Header, Parent, Summary
from dynaquant.entry import Entry
from dynaquant.errors import CheckpointError
from dynaquant.files import sync, tell_of_full_disk
from dynaquant.quantized import Rounded, Scaled
from dynaquant.roles import Label

SUFFIX = ".dqc"
_TEMPORARY = ".tmp"
Tensors = dict[str, StoredTensor]

_locked: set[int] = set()  # descriptors of the folders that this process holds for writing


def _let_go_in_child() -> None:
    # A forked child (a DataLoader's worker) would otherwise hold the run for as long as it outlives a killed training.
    for descriptor in _locked:
        os.close(descriptor)
    _locked.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: the JSON tree of a state, and its tensors with their labels, by name.

    coder: of the levels of weights. exact: the same tensors as they were, where they are to be kept for a while.
    """

    step: int
    tree: Any
    tensors: Mapping[str, StoredTensor]
    labels: Mapping[str, Label]
    record: dict[str, Any] = field(default_factory=dict)
    coder: Coder = "conditional"
    exact: Mapping[str, StoredTensor] | None = None


@dataclass(frozen=True)
class Base:
    """What the next delta is coded against: a checkpoint of the run, the hashes of its tensors, and they as stored."""

    parent: Parent
    hashes: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def loaded(cls, header: Header, tensors: Mapping[str, StoredTensor]) -> Base:
        """The base that a checkpoint makes whose tensors have been decoded from its file."""
        return cls(Parent(header.step, header.identity), _hashes(header), tensors)

    @classmethod
    def written(cls, header: Header, tensors: Mapping[str, StoredTensor], before: Base | None) -> Base:
        """The base that a checkpoint makes that was just written against ``before``: what its file decodes to."""
        found = dict(tensors)
        for entry in header.entries:
            if isinstance(entry.coding, Reference):
                # The same values, but what they were quantized to may be another codebook with other levels.
                found.pop(entry.name)
                if before and entry.name in before.tensors:
                    found[entry.name] = before.tensors[entry.name]
        return cls(Parent(header.step, header.identity), _hashes(header), found)


def _hashes(header: Header) -> dict[str, str]:
    return {entry.name: entry.hash for entry in header.entries}


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
            return _load_tensors(self.chain(file), [entry.name for entry in file.header.entries])
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
        written = self._written(draft, checkpoint.tensors, checkpoint.labels, base, checkpoint.coder, path)
        if checkpoint.exact is not None:  # in place first: without the other it is nothing, and does no harm
            try:
                self.write(replace(draft, parent=None), checkpoint.exact, checkpoint.labels, None, path=twin)
            except BaseException:
                written.path.unlink(missing_ok=True)
                raise
        file = self._placed(written, path)
        self._summaries[_version(file.path)] = file.header.summary
        for other in self.exact_paths():
            if checkpoint.exact is None or other != twin:
                other.unlink()
        return file, Base.written(file.header, checkpoint.tensors, base)

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
                    entry, coded = _encode_tensor(name, tensors, labels[name], base, coder, bool(draft.entries))
                    entries.append(entry)
                    writer.add(coded)
                writer.finish(replace(draft, entries=tuple(entries)))
            written = CheckpointFile(temporary)
            if draft.entries and written.header.identity != draft.identity:
                raise CheckpointError(f"{temporary}: re-coding would change the values of {path.name}")
            _verify(written, tensors, base)
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


def load_tensor(chain: list[CheckpointFile], name: str) -> StoredTensor:
    """Decodes one tensor of a checkpoint and what it needs, and checks it against its hash.

    chain: ``Run.chain`` of it. Raises CheckpointError when it is not there or does not decode to what was stored.
    """
    if name not in chain[0].header.by_name:
        raise CheckpointError(f"{chain[0].path}: there is no tensor {name!r}")
    return _load_tensors(chain, [name])[name]


def coder_of(file: CheckpointFile) -> Coder:
    """What the levels of a checkpoint were coded with, to code them again."""
    published = any(isinstance(entry.coding, Rearranged) for entry in file.header.entries)
    return "rearranged" if published else "conditional"


def _encode_tensor(
    name: str, tensors: Mapping[str, StoredTensor], label: Label, base: Base | None, coder: Coder, again: bool
) -> tuple[Entry, bytes]:
    """again: whether it is in a file already, and others may be coded against it as it is there."""
    stored = tensors[name]
    digest = stored_hash(stored)
    parent = base.tensors.get(name) if base else None
    if base is not None and base.hashes.get(name) == digest and (not again or _coded_alike(stored, parent)):
        return Entry(name, label, stored.dtype, stored.shape, digest, 0, Reference()), b""
    if isinstance(stored, Scaled) and tensors.get(stored.second_name) is not stored.second:
        stored = values_of(stored)  # in units of what its second moment was when it last changed
    elif isinstance(stored, Rounded) and tensors.get(stored.of_name) is not stored.of:
        stored = values_of(stored)
    coding, coded = stream.encode(stored, parent, coder)
    return Entry(name, label, stored.dtype, stored.shape, digest, len(coded), coding), coded


def _coded_alike(stored: StoredTensor, parent: StoredTensor | None) -> bool:
    """Whether a tensor that has the parent's values has its levels, too, so that one can stand for the other."""
    if isinstance(stored, Tensor):
        return isinstance(parent, Tensor)
    if isinstance(stored, Scaled) and isinstance(parent, Scaled):
        return stream.same(stored.units, parent.units)
    return parent is not None and stream.same(stored, parent)


def _dependent_last(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: other_of(entry.coding) is not None)


def needed_entries(chain: list[CheckpointFile], names: Collection[str]) -> list[list[Entry]]:
    """The entries that have to be decoded in each file of a chain so that those of ``names`` in the first one can be.

    What is made of another tensor comes after it.
    """
    needed = []
    wanted = dict.fromkeys(names)
    for i, file in enumerate(chain):
        known = file.header.by_name
        if missing := sorted(wanted.keys() - known.keys()):
            raise CheckpointError(f"{chain[i - 1].path}: tensor {missing[0]} is not in its parent, {file.path.name}")
        entries = [known[name] for name in wanted]
        others = {other for entry in entries if (other := other_of(entry.coding)) is not None}
        if missing := sorted(others - known.keys()):
            raise CheckpointError(f"{file.path}: a tensor is made of {missing[0]}, which is not in it")
        entries += [known[name] for name in others - wanted.keys()]
        needed.append(_dependent_last(entries))
        wanted = dict.fromkeys(entry.name for entry in entries if entry.needs_parent)
        if not wanted:
            break
    return needed


def _load_tensors(chain: list[CheckpointFile], names: Collection[str], all_: bool = False) -> Tensors:
    """Decodes tensors of the first file of a chain, from where they stand alone downwards, in the order of ``names``.

    all_: whether ancestors are checked against their hashes too, to find out which of them is damaged.
    """
    needed = needed_entries(chain, names)
    tensors: Tensors = {}
    for i, (file, entries) in reversed(list(enumerate(zip(chain, needed, strict=False)))):
        parents, tensors = tensors, {}
        for entry in entries:
            tensors[entry.name] = _decode_tensor(file, entry, parents.get(entry.name), tensors)
            if isinstance(entry.coding, Reference):
                _check_reference(file, entry, chain[i + 1])
        for entry in entries if i == 0 or all_ else []:
            try:
                digest = stored_hash(tensors[entry.name])
            except ValueError as error:
                raise CheckpointError(f"{file.path}: tensor {entry.name} is damaged ({error})") from error
            if digest != entry.hash:
                if not all_:
                    _load_tensors(chain, names, all_=True)
                raise CheckpointError(
                    f"{file.path}: tensor {entry.name} does not decode to the values that were stored"
                )
    return {name: tensors[name] for name in names}


def _check_reference(file: CheckpointFile, entry: Entry, parent: CheckpointFile) -> None:
    if parent.header.by_name[entry.name].hash != entry.hash:
        raise CheckpointError(f"{file.path}: tensor {entry.name} is not the tensor of its parent that it refers to")


def _decode_tensor(
    file: CheckpointFile, entry: Entry, parent: StoredTensor | None, others: Mapping[str, StoredTensor]
) -> StoredTensor:
    """others: tensors of the same file that were decoded before."""
    if isinstance(entry.coding, Reference):
        assert parent is not None
        return parent
    try:
        return stream.decode(entry, file.read(entry), parent, others.get(other_of(entry.coding) or ""))
    except ValueError as error:
        raise CheckpointError(f"{file.path}: tensor {entry.name} is damaged ({error})") from error


def _verify(file: CheckpointFile, tensors: Mapping[str, StoredTensor], base: Base | None) -> None:
    """Decodes a file just written and compares it with what was to be stored, whose hashes it holds.

    Raises CheckpointError for the first wrong tensor.
    """
    parents = base.tensors if base else {}
    for entry in file.header.entries:
        # The hash of a reference is that of the base, which was verified when it was written or loaded.
        if isinstance(entry.coding, Reference):
            continue
        wanted = tensors[entry.name]
        if isinstance(entry.coding, Exact | Planes | Raw):
            wanted = values_of(wanted)
        stored = _decode_tensor(file, entry, parents.get(entry.name), tensors)
        if not stream.same(stored, wanted):
            raise CheckpointError(f"{file.path}: tensor {entry.name} does not decode to the values that were stored")
