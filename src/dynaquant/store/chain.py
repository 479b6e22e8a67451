"""Opens the files that a checkpoint is decoded from, and retries if the writer changes the run meanwhile.

A reader takes no lock. While it looks for the parents of a checkpoint, a writer may delete or re-code them. An open
file can be read to its end even if its name is deleted or replaced. So a reader opens the whole chain first, and
retries if the writer changed the run in between.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

from dynaquant.errors import CheckpointError, RunChangedError, UnreadableError
from dynaquant.garbage import collection_paused
from dynaquant.store.container import CheckpointFile, Parent, open_if_exists
from dynaquant.store.entry import Entry
from dynaquant.store.files import is_missing
from dynaquant.store.layout import FOLDER, part_name

_MOST_OPEN = 64
"""How many files of one chain are kept open. The others are opened each time they are read."""
ATTEMPTS = 100
"""How often a read is retried. A retry is needed only if the writer committed during the read."""
FROZEN = "frozen-"
"""What the name of a file of frozen parameters begins with (docs/format.md)."""
_FROZEN_NAME = re.compile(r"frozen-[0-9a-f]{16}\.dqc")

T = TypeVar("T")
PathOf = Callable[[int], Path]
"""The file of a step."""


def retry_if_run_changed(read: Callable[[], T]) -> T:
    """Return what ``read`` returns. Calls it again while it raises RunChangedError, up to 100 times in all."""
    for _ in range(ATTEMPTS - 1):
        try:
            return read()
        except RunChangedError:
            continue
    return read()


@contextmanager
def detect_run_changes(chain: list[CheckpointFile]) -> Iterator[None]:
    """Turn a CheckpointError of the block into RunChangedError if a file of the chain was replaced or deleted.

    If all files are unchanged, the error is real, and a retry would not help.
    """
    try:
        yield
    except RunChangedError:
        raise
    except CheckpointError as error:
        if all(file.is_at(file.path) for file in chain):
            raise
        raise RunChangedError(str(error)) from error


def parent_of(file: CheckpointFile, path_of: PathOf, given: Sequence[CheckpointFile] = ()) -> CheckpointFile | None:
    """Return the opened parent of a delta; None for a keyframe.

    given: files that are open already; the parent may be among them.

    Raises CheckpointError if the parent is missing, or is not the checkpoint that the delta was coded against.
    """
    parent = file.header.parent
    if parent is None:
        return None
    # Sequence numbers fall along a chain, so every chain ends, whatever the files say.
    older = [other for other in given if other.header.sequence < file.header.sequence]
    if among := next((other for other in older if other.header.identity == parent.identity), None):
        return among
    if parent.file is not None:
        return _parent_beside(file, parent.identity, parent.file)
    path = path_of(parent.step)
    what = f"checkpoint step {file.header.step}: its parent, step {parent.step} ({parent.identity[:8]}…),"
    if (found := open_if_exists(path)) is None:
        raise CheckpointError(f"{what} is not in {path.parent} (was it deleted by hand?)")
    if found.header.identity != parent.identity:
        raise CheckpointError(f"{what} has been replaced in {path.parent} by another checkpoint of that step")
    if found.header.sequence >= file.header.sequence:
        raise CheckpointError(f"{what} has a later sequence number in {path.parent}, so it is not the parent")
    return found


def _parent_beside(file: CheckpointFile, identity: str, reference: str) -> CheckpointFile:
    """Return the parent of a single file, which names it by a path from its own folder."""
    if not reference:
        raise CheckpointError(f"{file.path}: its parent ({identity[:8]}…) has no path; in Python, give it as parent=")
    # The writer named the parent from the real folder of the file, which may be reached by a link.
    path = Path(os.path.realpath(file.path.resolve().parent / reference))
    what = f"{file.path}: its parent {path} ({identity[:8]}…)"
    advice = "put it back there, or in Python, give it as parent="
    if (found := open_if_exists(path)) is None:
        raise UnreadableError(f"{what} is missing; {advice}")
    if found.header.identity != identity:
        raise CheckpointError(f"{what} holds another state now; {advice}")
    if found.header.sequence >= file.header.sequence:
        raise CheckpointError(f"{what} has a later sequence number, so it is not the parent")
    return found


@collection_paused()
def chain_of(
    file: CheckpointFile,
    path_of: PathOf,
    given: Sequence[CheckpointFile] = (),
    decoded: CheckpointFile | None = None,
) -> list[CheckpointFile]:
    """Return the file, its parent, the parent's parent, …, up to the keyframe.

    given: as for ``parent_of``. decoded: a checkpoint whose tensors the caller has. If the chain leads to it, the chain
    ends there: it is the last of the list, and may have been deleted since.

    Raises CheckpointError for a broken chain, RunChangedError if the writer has changed the chain meanwhile.
    """
    chain = [file]
    with detect_run_changes(chain):
        for identity in file.header.frozen:
            open_frozen(file, identity)
        while True:
            above = chain[-1].header.parent
            if decoded is not None and above == Parent(decoded.header.step, decoded.header.identity):
                return [*chain, decoded]
            # Of a file elsewhere in the chain, the error says so, but not which checkpoint was wanted.
            with nullcontext() if above is None or above.file is not None else name_step_in_errors(file):
                parent = parent_of(chain[-1], path_of, given)
            if parent is None:
                return chain
            if len(chain) >= _MOST_OPEN:
                parent.close()
            chain.append(parent)


def error_with_step(step: int, path: Path, error: CheckpointError) -> CheckpointError:
    """Return an error like this one, prefixed by the step unless its text names the checkpoint already."""
    itself = f"checkpoint step {step}: "
    named = str(error).startswith((itself, f"{path}: "))
    return error if named else type(error)(f"{itself}{error}")


@contextmanager
def name_step_in_errors(file: CheckpointFile) -> Iterator[None]:
    """Add the name of the checkpoint to errors of other files in its chain."""
    try:
        yield
    except RunChangedError:
        raise
    except CheckpointError as error:
        if (named := error_with_step(file.header.step, file.path, error)) is error:
            raise
        raise named from error


def frozen_name(identity: str) -> str:
    """Return the name of the file of frozen parameters with this identity, of which 16 digits are enough.

    Such a file is a checkpoint file without deltas. A run stores frozen parameters once, for all its checkpoints: the
    same parameters make the same file. The whole identity is compared when the file is opened.
    """
    return f"{FROZEN}{identity[:16]}.dqc"


def is_frozen_name(name: str) -> bool:
    """Whether this is the name of a file of frozen parameters. Users may have put other files into the folder."""
    return _FROZEN_NAME.fullmatch(name) is not None


def open_frozen(file: CheckpointFile, identity: str) -> CheckpointFile:
    """Return a file of frozen parameters that a checkpoint needs. Opens it once for each checkpoint.

    Raises CheckpointError if it is not beside the checkpoint, or holds other parameters.
    """
    if identity not in file.frozen:
        path = file.path.parent / frozen_name(identity)
        if (found := open_if_exists(path)) is None:
            raise CheckpointError(f"{file.path}: its frozen parameters are in {path.name}, which is not beside it")
        if found.header.identity != identity:
            raise CheckpointError(f"{path}: holds other frozen parameters than {file.path.name} refers to")
        file.frozen[identity] = found
    return file.frozen[identity]


def part_paths(file: CheckpointFile) -> list[Path]:
    """Return the paths of the parts of a checkpoint that are not in its own file."""
    return [file.path.parent / FOLDER / part_name(part.address) for part in file.header.parts]


def open_part(file: CheckpointFile, number: int) -> CheckpointFile:
    """Return a part that is not in the checkpoint's own file. Reads its header once for each checkpoint.

    Raises CheckpointError if it is not there, is damaged, or is another part.
    """
    if number not in file.parts:
        wanted = file.header.parts[number]
        path = file.path.parent / FOLDER / part_name(wanted.address)
        try:
            part = CheckpointFile(path)
        except CheckpointError as error:
            if not is_missing(error):
                raise
            # The cause tells retention that the file cannot be read now. It may be back later.
            raise CheckpointError(f"{file.path}: its part {path.name} is not in {FOLDER}") from error
        if (part.address, part.size) != (wanted.address, wanted.size):
            raise CheckpointError(f"{path}: is not the part that {file.path.name} refers to")
        part.close()  # a checkpoint may have more parts than a process may have open files
        file.parts[number] = part
    return file.parts[number]


def dependent_last(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries; those that depend on other tensors of the same checkpoint come last."""
    return sorted(entries, key=lambda entry: entry.scheme.depends_on is not None)


def needed_entries(chain: list[CheckpointFile], names: Collection[str]) -> list[list[Entry]]:
    """Return, for each file of a chain, the entries to decode so that ``names`` can be decoded in the first file.

    An entry that depends on another one of its file comes after it.
    """
    needed = []
    wanted = dict.fromkeys(names)
    for i, file in enumerate(chain):
        known = file.header.by_name
        if missing := sorted(name for name in wanted if name not in known):  # not a difference: it looks at all known
            raise CheckpointError(f"{chain[i - 1].path}: tensor {missing[0]} is not in its parent, {file.path.name}")
        entries = [known[name] for name in wanted]
        others = {other for entry in entries if (other := entry.scheme.depends_on) is not None}
        if missing := sorted(name for name in others if name not in known):
            raise CheckpointError(f"{file.path}: a tensor depends on {missing[0]}, which is not in the file")
        entries += [known[name] for name in others - wanted.keys()]
        needed.append(dependent_last(entries))
        wanted = dict.fromkeys(entry.name for entry in entries if entry.needs_parent)
        if not wanted:
            break
    return needed
