"""A run: the folder of one training's checkpoints, named by step. Lists, opens and decodes them.

Reading takes no lock. ``commit.py`` writes.
"""

from __future__ import annotations

import logging
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dynaquant.errors import CheckpointError, RunChangedError
from dynaquant.store.catalogue import Catalogue, Line, Listed
from dynaquant.store.chain import ATTEMPTS, chain_of, name_step_in_errors
from dynaquant.store.container import CheckpointFile, Header, Parent, Summary, is_step, open_if_exists
from dynaquant.store.files import is_missing, non_file_kind, user_path

if TYPE_CHECKING:
    from dynaquant.store.reading import Tensors

log = logging.getLogger("dynaquant")
T = TypeVar("T")

SUFFIX = ".dqc"
STEP = "step-"
"""What the name of a step's file begins with."""
REPLACED = "replaced-"
"""What the name of a checkpoint begins with that was replaced, but is kept for its tags."""
LOSSLESS_COPY = "exact"
"""Key of a record: the identity of the lossless copy, or None."""
EXACT_WEIGHTS = "exact_weights"
"""Key of a record: true if the copy is exact in its weights only, and has all other tensors as in the checkpoint."""
_COPY_NAME = re.compile(r"exact-\d{12,}-\d{12,}\.dqc")


def checkpoint_paths(folder: Path, prefix: str) -> list[Path]:
    """Return the checkpoint files whose names begin with ``prefix``, sorted by name.

    Raises CheckpointError if the folder cannot be read.
    """
    return [folder / name for name in _names(folder, prefix)]


def _names(folder: Path, prefix: str) -> list[str]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from error
    return sorted(name for name in names if name.startswith(prefix) and name.endswith(SUFFIX))


def read_each(folder: Path, prefix: str, read: Callable[[str], T]) -> tuple[list[T], list[CheckpointError]]:
    """Call ``read`` with the name of each file that begins with ``prefix``. Returns its results, and the errors of the
    files that cannot be read.

    Lists the folder again if a listed file was deleted before it was read. ``read`` gets no path, because to make one
    takes longer than to look at a file that is known.
    """
    for _ in range(ATTEMPTS):
        found: list[T] = []
        broken: list[CheckpointError] = []
        missing: list[str] = []
        for name in _names(folder, prefix):
            try:
                found.append(read(name))
            except (OSError, CheckpointError) as error:
                if is_missing(error):
                    missing.append(name)
                broken.append(error if isinstance(error, CheckpointError) else _unreadable(folder / name, error))
        # A missing file that is still listed is a dangling link. It was not deleted, so a retry would not help.
        if not missing or set(missing) & set(_names(folder, prefix)):
            break
    return found, broken


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    found = CheckpointError(f"{path}: cannot be read ({error.strerror})")
    found.__cause__ = error
    return found


class Run:
    """The checkpoints in a folder, to be read. ``commit.WritableRun`` also writes them.

    Reading raises RunChangedError if a writer replaces or deletes a needed file meanwhile;
    ``chain.retry_if_run_changed`` then reads again.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = user_path(folder)
        self.catalogue = Catalogue(self.folder)
        self._newest = 0  # highest sequence number in the last listing
        self._highest = 0  # highest sequence number ever seen here
        self._seen: set[int] = set()  # steps that this object has found in the folder
        self._warned_of: set[str] = set()  # errors of files that were skipped

    def path(self, step: int) -> Path:
        """Return the path of a step's file."""
        return self.folder / _name(step)

    def summaries(self) -> tuple[list[Summary], list[CheckpointError]]:
        """Return the checkpoints with valid headers, oldest commit first, and the errors of the others."""
        found, broken = read_each(self.folder, STEP, lambda name: self._line(name).summary)
        self._seen.update(summary.step for summary in found)
        self._newest = max((summary.sequence for summary in found), default=0)
        self._highest = max(self._highest, self._newest)
        return sorted(found, key=lambda summary: (summary.sequence, summary.step)), broken

    def _line(self, name: str) -> Line:
        # No path is made for a file that is known: that takes longer than to look at it.
        status = os.stat(os.path.join(self.folder, name))
        line = self.catalogue.find(name, status) or self.catalogue.remember(CheckpointFile(self.folder / name))
        self._check_name(name, line.summary.step)
        return line

    def listing(self) -> tuple[list[Listed], list[CheckpointError]]:
        """Like ``summaries``, but with records and sizes. With a catalogue, no checkpoint is opened."""

        def read(name: str) -> Listed:
            path, line = self.folder / name, self._line(name)
            try:
                return line.listed(path)
            except ValueError:
                return Listed.of(CheckpointFile(path))

        found, broken = read_each(self.folder, STEP, read)
        self._seen.update(listed.summary.step for listed in found)
        return sorted(found, key=lambda listed: (listed.summary.sequence, listed.summary.step)), broken

    def files(self) -> tuple[list[CheckpointFile], list[CheckpointError]]:
        """Like ``summaries``, but returns whole headers. The files are closed, because there may be many."""

        def read(name: str) -> CheckpointFile:
            file = self._closed(name)
            self._check_name(name, file.header.step)
            return file

        found, broken = read_each(self.folder, STEP, read)
        self._seen.update(file.header.step for file in found)
        return sorted(found, key=lambda file: (file.header.sequence, file.header.step)), broken

    def replaced_path(self, step: int, identity: str) -> Path:
        """Return the path of a checkpoint that was replaced, but is kept for its tags."""
        return self.folder / f"{REPLACED}{step:012d}-{identity[:16]}{SUFFIX}"

    def replaced(self) -> tuple[list[CheckpointFile], list[CheckpointError]]:
        """Return the replaced checkpoints that are kept, closed, lowest step first, and the errors of unreadable ones.

        All are keyframes. They are no steps of the run: ``summaries`` and ``files`` leave them out.
        """
        return read_each(self.folder, REPLACED, self._closed)

    def _closed(self, name: str) -> CheckpointFile:
        file = CheckpointFile(self.folder / name)
        file.close()
        return file

    def holding(self, step: int, identity: str) -> CheckpointFile:
        """Open the checkpoint of a step that has this identity, also if it was replaced and is kept for its tags.

        Raises CheckpointError if it is missing, or was replaced and is not kept.
        """
        file = open_if_exists(self.replaced_path(step, identity)) or self.file(step)
        if (file.header.step, file.header.identity) != (step, identity):
            raise CheckpointError(
                f"{self.folder}: step {step} was saved again, and the earlier checkpoint ({identity[:8]}…) is gone; "
                "give the step for the present one"
            )
        return file

    def _check_name(self, name: str, step: int) -> None:
        if name != _name(step):
            raise CheckpointError(f"{self.folder / name}: holds step {step}; was it renamed?")

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints with valid headers, oldest commit first."""
        return [summary.step for summary in self.summaries()[0]]

    def file(self, step: int) -> CheckpointFile:
        """Open the checkpoint of a step. Raises CheckpointError if it is missing or its header is damaged."""
        if hasattr(step, "__index__") and not isinstance(step, bool):  # an integer of NumPy
            step = operator.index(step)
        if not is_step(step):
            raise CheckpointError(f"{self.folder}: a step is an integer from 0 to 2**63 - 1")
        path = self.path(step)
        if (file := open_if_exists(path)) is None:
            seen = step in self._seen
            steps = ", ".join(map(str, sorted(summary.step for summary in self.summaries()[0]))) or "none"
            name = f"checkpoint of step {step}"
            what = f"the {name} no longer exists" if seen else f"there is no {name}"
            raise CheckpointError(f"{self.folder}: {what} (available steps: {steps})")
        self._check_name(path.name, file.header.step)
        self._seen.add(step)
        return file

    def newest(self) -> CheckpointFile:
        """Open the checkpoint that was committed last, of those with valid headers. Logs a warning of the others.

        Raises CheckpointError if there is none.
        """
        summaries, broken = self.summaries()
        if not summaries:
            if self.folder.is_dir():
                what = "there are no checkpoints here"
            else:
                kind = non_file_kind(self.folder)
                what = f"it is {kind}; give a file or a folder" if kind else "there is no such file or folder"
            raise broken[0] if broken else CheckpointError(f"{self.folder}: {what}")
        step = summaries[-1].step
        self.warn_of_skipped(step, broken)
        try:
            return self.file(step)
        except CheckpointError as error:
            if self.path(step).exists():
                raise
            raise RunChangedError(str(error)) from error

    def warn_of_skipped(self, newest: int, broken: Iterable[CheckpointError]) -> None:
        """Log a warning, once for each file that cannot be read: it may be newer than ``newest``, the step taken."""
        for reason in map(str, broken):
            if reason not in self._warned_of:
                self._warned_of.add(reason)
                log.warning("step %d is the newest that can be read; skipped %s", newest, reason)

    def chain(self, file: CheckpointFile, decoded: CheckpointFile | None = None) -> list[CheckpointFile]:
        """Open the files that a checkpoint is decoded from, itself first (``chain.chain_of``)."""
        return chain_of(file, self.path, decoded=decoded)

    def load(self, file: CheckpointFile) -> Tensors:
        """Decode the tensors of a checkpoint and check each against its hash (``reading.load_all``)."""
        # Decoding needs PyTorch, which takes seconds to import. All else here reads headers, and does without.
        from dynaquant.store.reading import load_all  # noqa: PLC0415

        with name_step_in_errors(file):
            return load_all(self.chain(file))

    def lossless_copy_paths(self) -> list[Path]:
        """Return the files of lossless copies, lowest step first."""
        return [path for path in checkpoint_paths(self.folder, "exact-") if _COPY_NAME.fullmatch(path.name)]

    def copy_path(self, header: Header | Summary) -> Path:
        """Return the path of a checkpoint's lossless copy. The sequence number makes it different for every commit."""
        return self.folder / f"exact-{header.step:012d}-{header.sequence:012d}{SUFFIX}"

    def lossless_copy(self, file: CheckpointFile) -> CheckpointFile | None:
        """Open the lossless copy of a checkpoint. Returns None if it was saved without one.

        The copy is a file beside the checkpoint, with its tensors before quantization. The next commit deletes it,
        unless it is exact in its weights only and its checkpoint has a tag; then returns None, too.

        Raises CheckpointError if the copy is damaged or that of another checkpoint, or if the copy of the newest
        checkpoint is missing.
        """
        header = file.header
        if (identity := header.record.get(LOSSLESS_COPY)) is None:
            return None
        path = self.copy_path(header)
        if (copy := open_if_exists(path)) is not None:
            if copy.header.identity != identity:
                raise CheckpointError(f"{path}: is not the lossless copy that was saved with step {header.step}")
            return copy
        if header.sequence >= self._newest:
            self.summaries()  # a newer checkpoint may have been committed meanwhile
        if header.sequence < self._newest:
            return None
        raise CheckpointError(
            f"checkpoint step {header.step}: its lossless copy, {path.name}, is not in {self.folder} (was it "
            "deleted by hand?)"
        )


def _name(step: int) -> str:
    return f"{STEP}{step:012d}{SUFFIX}"


def chain_lengths(summaries: Iterable[Summary], damaged: Collection[int] = ()) -> dict[Parent, int]:
    """Return those of a run's checkpoints that can be decoded, with the length of their chains: 1 for a keyframe.

    summaries: ``Run.summaries``. Leaves out the steps in ``damaged``, and all that depend on a damaged or missing one.
    """
    lengths: dict[Parent, int] = {}
    for summary in summaries:  # parents come before their children
        above = 0 if summary.parent is None else lengths.get(summary.parent)
        if above is not None and summary.step not in damaged:
            lengths[Parent(summary.step, summary.identity)] = above + 1
    return lengths


def is_of_run(file: CheckpointFile) -> bool:
    """Whether a file was written to a run, by a training or from files, and not alone."""
    header = file.header
    if "source" not in header.record or (header.parent is not None and header.parent.file is None):
        return True
    place = file.path.resolve()  # only its name tells a keyframe from a file that was written alone
    return not file.in_memory and place == Run(place.parent).path(header.step)
