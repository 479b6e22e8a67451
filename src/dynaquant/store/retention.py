"""Which checkpoints of a run are kept, and how the others go: whatever was coded against them is re-coded first.

Re-coding changes no value, so it changes no identity; what refers to a re-coded checkpoint stays valid.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from dynaquant.errors import CheckpointError
from dynaquant.store.container import CheckpointFile, Summary
from dynaquant.store.run import Run
from dynaquant.store.tags import tags_of
from dynaquant.store.verifying import damage
from dynaquant.store.writing import Base


@dataclass(frozen=True)
class Retention:
    """Keeps the ``keep_last`` newest usable checkpoints, and every step that is a multiple of ``keep_every``.

    Both None: everything is kept. Only ``keep_every``: the newest is kept as well. Raises ValueError below 1.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if any(limit is not None and limit < 1 for limit in (self.keep_last, self.keep_every)):
            raise ValueError(f"keep_last and keep_every must be at least 1: {self}")

    def superfluous(self, steps: list[int], usable: Collection[int]) -> list[int]:
        """The steps that need not be kept, of steps in the order of their commits. Only usable ones count as kept."""
        newest = [step for step in steps if step in usable][-(self.keep_last or 1) :]
        if (self.keep_last is None and self.keep_every is None) or not newest:
            return []
        older = steps[: steps.index(newest[0])]
        return [step for step in older if not (self.keep_every and step % self.keep_every == 0)]


def release(run: Run, steps: Collection[int]) -> tuple[set[int], list[str]]:
    """Re-codes every checkpoint whose parent is among ``steps``, so that their files can be deleted.

    It is coded against its nearest ancestor that stays, or as a keyframe. Values and identities stay, bit for bit.
    The caller holds the run for writing. Where something is damaged and re-coding fails, the file is left as it is.
    Returns the steps that such files still depend on, and a note for each of them.

    Raises CheckpointError when a file cannot be read at the moment: it may be whole, and may depend on anything.
    """
    summaries = _readable(run)
    by_step = {summary.step: summary for summary in summaries}
    needed: set[int] = set()
    notes = []
    for summary in summaries:
        if summary.step in steps or not _builds_on(summary, steps, by_step):
            continue
        try:
            _recode_without(run, summary.step, steps)
        except CheckpointError as error:
            _raise_if_unreadable(error)
            notes.append(f"step {summary.step} could not be re-coded, so what it depends on was kept: {error}")
            ancestor: Summary | None = summary
            while ancestor and ancestor.parent and ancestor.parent.step not in needed:
                needed.add(ancestor.parent.step)
                ancestor = by_step.get(ancestor.parent.step)
    return needed, notes


def make_way(run: Run, step: int) -> list[str]:
    """Re-codes what depends on a step, as ``release`` does, so that another checkpoint can be committed in its place.

    What does not decode can be neither re-coded nor restored, and does not keep the step from being replaced, or a
    training could not go on past a damaged file; but what depends on that and does decode is re-coded, too. Returns a
    note for each that was damaged.

    Raises CheckpointError where a checkpoint that decodes could not be re-coded, or a file cannot be read at the
    moment; the step is not to be replaced then.
    """
    summaries = _readable(run)
    by_step = {summary.step: summary for summary in summaries}
    going = {step}
    notes = []
    for summary in summaries:  # parents come before their children
        if summary.step in going or not _builds_on(summary, going, by_step):
            continue
        try:
            _recode_without(run, summary.step, going)
        except CheckpointError as error:
            _raise_if_unreadable(error)
            if damage(run, summary.step) is None:
                raise CheckpointError(
                    f"{run.folder}: step {step} was not replaced, as step {summary.step} depends on it and could not "
                    f"be re-coded ({error}); save under another step, or run 'dynaquant verify {run.folder}'"
                ) from error
            going.add(summary.step)
            notes.append(f"step {summary.step} was damaged, and step {step}, on which it built, was replaced: {error}")
    return notes


def _readable(run: Run) -> list[Summary]:
    """What the headers of a run say, oldest commit first. Raises CheckpointError when one cannot be read just now."""
    summaries, broken = run.summaries()
    for error in broken:
        _raise_if_unreadable(error)
    return summaries


def _builds_on(summary: Summary, steps: Collection[int], by_step: Mapping[int, Summary]) -> bool:
    """Whether the parent of a checkpoint is among the steps, and is still the one that it was coded against."""
    parent = summary.parent
    if parent is None or parent.step not in steps:
        return False
    return parent.step not in by_step or by_step[parent.step].identity == parent.identity


def _raise_if_unreadable(error: CheckpointError) -> None:
    """Raises an error that comes from the system, or from too little memory, and not from what a file holds."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError | MemoryError):
            raise error
        cause = cause.__cause__


def _recode_without(run: Run, step: int, steps: Collection[int]) -> None:
    file = run.file(step)
    tensors = run.load(file)
    run.recode(file, tensors, _nearest(run, [other for other in run.chain(file)[1:] if other.header.step not in steps]))


def _nearest(run: Run, ancestors: Iterable[CheckpointFile]) -> Base | None:
    """The first that decodes; a child may need nothing of what is damaged in its parent."""
    for ancestor in ancestors:
        try:
            return Base.loaded(ancestor.header, run.load(ancestor))
        except CheckpointError as error:
            _raise_if_unreadable(error)
    return None


def superfluous(run: Run, retention: Retention, damaged: Collection[int] = ()) -> list[int]:
    """The steps of a run that the retention does not keep and that have no tag.

    damaged: steps whose files are known not to decode. They, and what was coded against them, do not count as kept.
    """
    usable = {checkpoint.step for checkpoint in run.chain_lengths(damaged)}
    tagged = {tag.step for tag in tags_of(run)}
    steps = retention.superfluous([summary.step for summary in run.summaries()[0]], usable)
    return [step for step in steps if step not in tagged]


def can_be_parent(
    run: Run, base: Base, step: int, retention: Retention, keyframe_every: int, damaged: Collection[int]
) -> bool:
    """Whether ``step`` can be coded against ``base``: its chain is whole and short, and it is there to stay.

    keyframe_every: the most checkpoints in a chain. damaged: steps whose files are known not to decode.
    """
    lengths = run.chain_lengths(damaged)
    steps = [summary.step for summary in run.summaries()[0] if summary.step != step] + [step]
    usable = {checkpoint.step for checkpoint in lengths} | {step}
    leaves = base.parent.step == step or base.parent.step in retention.superfluous(steps, usable)
    return lengths.get(base.parent, keyframe_every) < keyframe_every and not leaves


def damaged_among_kept(
    run: Run, retention: Retention, shown: Callable[[list[int]], Iterable[int]] = lambda steps: steps
) -> set[int]:
    """What would be kept and does not decode; it must not count as kept, or all that is sound might go.

    shown: passes on the steps of a round while it shows how far that has come.
    """
    damaged: set[int] = set()
    checked: set[int] = set()
    while new := [s for s in run.steps() if s not in {*checked, *superfluous(run, retention, damaged)}]:
        for step in shown(new):
            checked.add(step)
            if damage(run, step) is not None:
                damaged.add(step)
    return damaged


def prune(run: Run, retention: Retention, damaged: Collection[int] = ()) -> list[str]:
    """Deletes what is ``superfluous``. The caller holds the run for writing. Returns ``release``'s notes."""
    steps = superfluous(run, retention, damaged)
    if not steps:
        return []
    try:
        needed, notes = release(run, steps)
    except CheckpointError as error:
        return [f"nothing was deleted: {error}"]
    for step in reversed(steps):  # children first: what is left by a crash in between can still be loaded
        if step not in needed:
            run.delete(step)
    run.drop_unneeded_frozen()
    return notes
