"""Finds damage in a checkpoint or a run. In a run each file is decoded once, after its parent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from dynaquant.engine.forms.form import StoredTensor
from dynaquant.errors import CheckpointError, UnreadableError
from dynaquant.store import frozen_tensors
from dynaquant.store.chain import dependent_last, error_with_step, open_frozen, retry_if_run_changed
from dynaquant.store.container import CheckpointFile, Summary
from dynaquant.store.decoding import check_reference, check_values, decode_entry
from dynaquant.store.entry import Entry
from dynaquant.store.reading import Tensors
from dynaquant.store.run import Run


@dataclass(frozen=True)
class _Decoded:
    """A checkpoint while its children are verified.

    tensors: those that could be decoded, even if their hash is wrong. wrong: the errors of damaged tensors, by name.
    """

    file: CheckpointFile
    tensors: Tensors
    wrong: dict[str, CheckpointError]


def damage(run: Run, step: int) -> CheckpointError | None:
    """Decode a checkpoint and the files of frozen parameters that it needs. Returns the error; None if it is sound."""
    return _error_of(lambda: _decode_whole(run, run.file(step)))


def damage_of_file(path: Path) -> CheckpointError | None:
    """Decode a checkpoint file, which may need others beside it. Returns the error; None if it is sound."""
    return _error_of(lambda: _decode_whole(Run(path.parent), CheckpointFile(path)))


def _decode_whole(run: Run, file: CheckpointFile) -> None:
    run.load(file)
    for identity in file.header.frozen:
        frozen_tensors.verify(open_frozen(file, identity))


def _damage_of_copy(run: Run, step: int) -> CheckpointError | None:
    """Decode the lossless copy of a checkpoint, if there is one. Returns the error; None if it is sound."""

    def load() -> None:
        if (copy := run.lossless_copy(run.file(step))) is not None:
            run.load(copy)

    return _error_of(load)


def may_be_sound(error: BaseException) -> bool:
    """Whether an error does not come from the contents of a file, but from the system, or from what is missing here."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError | MemoryError | UnreadableError):
        cause = cause.__cause__
    return cause is not None


def _alone(error: CheckpointError) -> CheckpointError:
    """Return an error with the same message, but without the traceback, which keeps tensors alive."""
    return UnreadableError(str(error)) if may_be_sound(error) else CheckpointError(str(error))


def _error_of(load: Callable[[], None]) -> CheckpointError | None:
    try:
        retry_if_run_changed(load)
    except CheckpointError as error:
        return error
    return None


def verify_run(run: Run) -> Iterator[tuple[int, CheckpointError | None]]:
    """Decode every checkpoint of a run and the lossless copy of the newest one, and compare values with their hashes.

    Yields each step once, with its error; None if it is sound. Leaves out a checkpoint that the writer deletes
    meanwhile. Decodes a checkpoint that seems damaged a second time, because the writer may have re-coded it just then.
    At most log2(n) + 2 of n checkpoints are in memory.
    """
    damaged: set[int] = set()
    for step, error in _walk(run, run.steps()):
        if error is None:
            yield step, None
        else:
            damaged.add(step)
    again = dict(_walk(run, damaged)) if damaged else {}
    for step in damaged:
        error = again[step] if step in again else damage(run, step)
        if error is None or run.path(step).exists():
            yield step, error


def _walk(run: Run, steps: Collection[int]) -> Iterator[tuple[int, CheckpointError | None]]:
    """Yield steps, parents before their children, each with its error; None if it is sound."""
    summaries = run.summaries()[0]
    by_step = {summary.step: summary for summary in summaries}
    wanted, sizes = set(steps), dict.fromkeys(by_step, 0)
    children: dict[int | None, list[int]] = defaultdict(list)
    for summary in reversed(summaries):  # children come before their parents
        parent = _parent(summary, by_step)
        if summary.step in wanted or sizes[summary.step]:
            sizes[summary.step] += 1
            children[parent].append(summary.step)
            if parent is not None:
                sizes[parent] += sizes[summary.step]
    sound: set[str] = set()
    waiting: list[tuple[int, _Decoded | CheckpointError | None]] = [(step, None) for step in children[None]]
    while waiting:
        step, above = waiting.pop()
        found = _decode(run, step, above, sound)
        # The largest branch is pushed first and so comes last: by then nothing else needs the tensors above it.
        waiting += [(child, found) for child in sorted(children[step], key=sizes.__getitem__, reverse=True)]
        error = found if isinstance(found, CheckpointError) else next(iter(found.wrong.values()), None)
        del found, above
        if step in wanted:
            yield step, _damage_of_copy(run, step) if error is None else error_with_step(step, run.path(step), error)


def _parent(summary: Summary, by_step: dict[int, Summary]) -> int | None:
    """Return the parent's step, if it is in the run. Sequence numbers fall along a chain, so there is no cycle."""
    found = by_step.get(summary.parent.step) if summary.parent else None
    if found is None or summary.parent is None or found.identity != summary.parent.identity:
        return None
    return found.step if found.sequence < summary.sequence else None


def _decode(
    run: Run, step: int, above: _Decoded | CheckpointError | None, sound: set[str]
) -> _Decoded | CheckpointError:
    """Return a decoded checkpoint, or an error if no tensor of it can be decoded.

    above: the result for its parent. sound: identities of the files of frozen parameters that are known to be sound;
    this function adds to it.
    """
    try:
        file = run.file(step)
        if isinstance(above, CheckpointError):
            return above
        parent = file.header.parent
        if (above and (above.file.header.step, above.file.header.identity)) != (
            parent and (parent.step, parent.identity)
        ):
            # Its parent is not in the run (``load`` says so), or it was re-coded since the run was listed.
            return _with_frozen(_Decoded(file, run.load(file), {}), sound)
    except CheckpointError as error:
        return _alone(error)
    tensors: Tensors = {}
    wrong: dict[str, CheckpointError] = {}
    for entry in dependent_last(file.header.entries):
        try:
            tensors[entry.name] = _decode_with_parent(file, entry, above, tensors, wrong)
            _check(file, entry, above, tensors[entry.name])
        except CheckpointError as error:
            wrong[entry.name] = _alone(error)
    return _with_frozen(_Decoded(file, tensors, wrong), sound)


def _with_frozen(found: _Decoded, sound: set[str]) -> _Decoded:
    """Return ``found`` with the damage of the files of frozen parameters that it needs. sound: as for ``_decode``."""
    for identity in found.file.header.frozen - sound:
        try:
            frozen_tensors.verify(open_frozen(found.file, identity))
            sound.add(identity)
        except CheckpointError as error:
            found.wrong[identity] = _alone(error)
    return found


def _decode_with_parent(
    file: CheckpointFile, entry: Entry, above: _Decoded | None, tensors: Tensors, wrong: dict[str, CheckpointError]
) -> StoredTensor:
    other = entry.scheme.depends_on
    if other is not None and other not in tensors:
        missing = f"{file.path}: a tensor depends on {other}, which is not in the file"
        raise _alone(wrong.get(other) or CheckpointError(missing))
    parent = None
    if above is not None and entry.needs_parent:
        parent = above.tensors.get(entry.name)
        if parent is None:
            missing = f"{file.path}: tensor {entry.name} is not in its parent, {above.file.path.name}"
            raise _alone(above.wrong.get(entry.name) or CheckpointError(missing))
    return decode_entry(file, entry, parent, tensors)


def _check(file: CheckpointFile, entry: Entry, above: _Decoded | None, stored: StoredTensor) -> None:
    """Compare the values with their hash. If those of the parent are wrong too, raise the parent's error."""
    if above is not None and entry.scheme.is_reference:
        check_reference(file, entry, above.file)
        if entry.name in above.wrong:
            raise _alone(above.wrong[entry.name])
        return
    try:
        check_values(file, entry, stored)
    except CheckpointError as error:
        of_parent = above.wrong.get(entry.name) if above is not None and entry.needs_parent else None
        raise _alone(of_parent or error) from None
