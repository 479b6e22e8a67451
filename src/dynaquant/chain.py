"""The files that a checkpoint is decoded from: found, kept open, and found anew when the run has moved on.

A reader takes no lock. A writer may delete a checkpoint, or put a re-coded one in its place, while a reader looks for
the parents of another. Files that are open can be read to their end whatever becomes of their names. So a reader opens
the whole chain first, and begins again where that fails because the writer was faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from dynaquant import frozen
from dynaquant.container import CheckpointFile, is_missing
from dynaquant.decoding import Tensors, load_tensors
from dynaquant.errors import CheckpointError, MovedOnError

_MOST_OPEN = 64
"""Files of one chain that are kept open. The rest of a longer one is opened whenever it is read."""
ATTEMPTS = 100
"""To read a run while it is written. One fails only where the writer has come a checkpoint further meanwhile."""

T = TypeVar("T")
PathOf = Callable[[int], Path]
"""The file of a step."""


def until_settled(read: Callable[[], T]) -> T:
    """What ``read`` returns. It is called again for as long as the run moves on while it reads, up to 100 times."""
    for _ in range(ATTEMPTS - 1):
        try:
            return read()
        except MovedOnError:
            continue
    return read()


@contextmanager
def noticing_moves(chain: list[CheckpointFile]) -> Iterator[None]:
    """Raises MovedOnError instead of an error where a file of the chain has been replaced or deleted since it was read.

    Any other error is one of files that are still there, and is there the next time as well.
    """
    try:
        yield
    except MovedOnError:
        raise
    except CheckpointError as error:
        if all(file.is_at(file.path) for file in chain):
            raise
        raise MovedOnError(str(error)) from error


def parent_of(file: CheckpointFile, path_of: PathOf) -> CheckpointFile | None:
    """The parent of a delta, found and identified; None for a keyframe.

    Raises CheckpointError when the parent is missing or another checkpoint than the one it was coded against.
    """
    parent = file.header.parent
    if parent is None:
        return None
    path = path_of(parent.step)
    what = f"checkpoint step {file.header.step}: its parent, step {parent.step} ({parent.identity[:8]}…),"
    try:
        found = CheckpointFile(path)
    except CheckpointError as error:
        if not is_missing(error):
            raise
        raise CheckpointError(f"{what} is not in {path.parent} (was it deleted by hand?)") from None
    if found.header.identity != parent.identity:
        raise CheckpointError(f"{what} has been replaced in {path.parent} by another checkpoint of that step")
    # Sequence numbers fall along a chain, so every chain ends, whatever the files say.
    if found.header.sequence >= file.header.sequence:
        raise CheckpointError(f"{what} claims in {path.parent} to have been written after it")
    return found


def chain_of(file: CheckpointFile, path_of: PathOf) -> list[CheckpointFile]:
    """The file, its parent, the parent's parent, …, up to the keyframe.

    Raises CheckpointError for a broken chain, MovedOnError where the writer has changed it meanwhile.
    """
    chain = [file]
    with noticing_moves(chain):
        for identity in file.header.frozen:
            frozen.opened(file, identity)
        while (parent := parent_of(chain[-1], path_of)) is not None:
            if len(chain) >= _MOST_OPEN:
                parent.close()
            chain.append(parent)
    return chain


def load_all(chain: list[CheckpointFile]) -> Tensors:
    """Decodes the tensors of the first file of a chain and checks each against its hash.

    Raises CheckpointError, naming file and tensor, when one cannot be decoded or is not what was stored.
    """
    file = chain[0]
    with naming(file), noticing_moves(chain):
        return load_tensors(chain, [entry.name for entry in file.header.entries])


@contextmanager
def naming(file: CheckpointFile) -> Iterator[None]:
    """Has errors of other files of a chain say which checkpoint needs them."""
    try:
        yield
    except MovedOnError:
        raise
    except CheckpointError as error:
        itself = f"checkpoint step {file.header.step}: "
        if str(error).startswith((itself, f"{file.path}: ")):
            raise
        raise CheckpointError(f"{itself}{error}") from error
