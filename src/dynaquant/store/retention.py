"""Decides which checkpoints of a run to keep. Deletes the others, after it has re-coded their dependent deltas.

Re-coding changes no values, so it changes no identity. References to a re-coded checkpoint stay valid.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from dynaquant.errors import CheckpointError
from dynaquant.options import Keep
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import Parent, Summary
from dynaquant.store.run import Run, chain_lengths
from dynaquant.store.tags import set_tag, tags_of
from dynaquant.store.verifying import damage, may_be_sound

log = logging.getLogger("dynaquant")


@dataclass(frozen=True)
class Retention:
    """Keeps the newest usable checkpoints, the multiples of a step, and the best, as ``keep`` says.

    If the weights of some are infinite or NaN, also keeps the ``keep.last`` newest whose weights are finite. The best
    have the lowest metric, with ``higher_is_better`` the highest; of equal ones, newer count as better.
    """

    keep: Keep = Keep()  # noqa: RUF009  (frozen)
    higher_is_better: bool = False

    def steps_to_delete(
        self,
        steps: list[int],
        usable: Collection[int],
        metrics: Mapping[int, float] | None = None,
        diverged: Collection[int] = (),
    ) -> list[int]:
        """Return the steps to delete. Only usable ones count as kept.

        steps: in the order of their commits. metrics: by step, of those whose metric was evaluated. diverged: steps
        with infinite or NaN weights.
        """
        known, most = [step for step in steps if step in usable], self.keep.last or 1
        if not known or self.keep.keeps_all:
            return []
        kept = {*self.best(known, metrics or {}), *[step for step in known if step not in diverged][-most:]}
        older, every = steps[: steps.index(known[-most:][0])], self.keep.every
        return [step for step in older if not (every and step % every == 0) and step not in kept]

    def best(self, steps: list[int], metrics: Mapping[int, float]) -> list[int]:
        """Return the ``keep.best`` steps with the best metric. steps: in the order of their commits."""
        scored = [step for step in reversed(steps) if step in metrics]
        return sorted(scored, key=metrics.__getitem__, reverse=self.higher_is_better)[: self.keep.best or 0]


def recode_dependents(run: WritableRun, steps: Collection[int]) -> tuple[set[int], list[str]]:
    """Re-code every checkpoint whose parent is among ``steps``, so that the files of ``steps`` can be deleted.

    Each is conditioned on its nearest ancestor that stays, or becomes a keyframe. Values and identities stay, bit for
    bit. The caller has locked the run. If a checkpoint is damaged and re-coding fails, its file stays as it is.
    Returns the steps that such files still depend on, and a note for each of these files.

    Raises CheckpointError if a file cannot be read now: it may be sound later, and may depend on any of the steps.
    """
    summaries = _readable_summaries(run)
    by_step = {summary.step: summary for summary in summaries}
    needed: set[int] = set()
    notes = []
    for summary in summaries:
        if summary.step in steps or not _depends_on(summary, steps, by_step):
            continue
        try:
            _recode_without(run, summary.step, steps)
        except CheckpointError as error:
            _raise_if_unreadable(error)
            notes.append(f"step {summary.step} could not be re-coded, so the steps it depends on were kept: {error}")
            ancestor: Summary | None = summary
            while ancestor and ancestor.parent and ancestor.parent.step not in needed:
                needed.add(ancestor.parent.step)
                ancestor = by_step.get(ancestor.parent.step)
    return needed, notes


def prepare_replacement(run: WritableRun, step: int, retention: Retention) -> list[str]:
    """Re-code what depends on a step, so that another checkpoint can be committed in its place.

    If a tag names the checkpoint of the step, a copy is kept beside the run's steps as long as the tag does. If it is
    among the best that the retention keeps, it gets a tag first.

    A damaged checkpoint that depends on the step can be neither re-coded nor restored. It does not prevent the
    replacement; otherwise a training could not continue after a file is damaged. Its own dependents are re-coded, too,
    if they decode. Returns a note for each damaged checkpoint, and for one that is kept.

    Raises CheckpointError if a checkpoint that decodes could not be re-coded, or if a file cannot be read now. The step
    must not be replaced then.
    """
    summaries = _readable_summaries(run)
    by_step = {summary.step: summary for summary in summaries}
    replaced_or_damaged = {step}
    notes = []
    for summary in summaries:  # parents come before their children
        if summary.step in replaced_or_damaged or not _depends_on(summary, replaced_or_damaged, by_step):
            continue
        try:
            _recode_without(run, summary.step, replaced_or_damaged)
        except CheckpointError as error:
            _raise_if_unreadable(error)
            if damage(run, summary.step) is None:
                raise CheckpointError(
                    f"{run.folder}: step {step} was not replaced, because step {summary.step} depends on it and could "
                    f"not be re-coded ({error}); save under another step, or run 'dynaquant verify {run.folder}'"
                ) from error
            replaced_or_damaged.add(summary.step)
            notes.append(
                f"step {summary.step} was damaged, and step {step}, which it depended on, was replaced: {error}"
            )
    return notes + _keep_named(run, step, retention)


def _keep_named(run: WritableRun, step: int, retention: Retention) -> list[str]:
    """Keep the checkpoint of a step that is to be replaced if it has a tag or is among the best. Returns notes."""
    try:
        file = run.file(step)
        names = [tag.name for tag in tags_of(run) if tag.refers_to(file.header)]
        if not names and step not in _best_steps(run, retention):
            return []
        run.keep_replaced(file)
        if not names:
            names = [set_tag(run, f"replaced-{step}-{file.header.identity[:8]}", file).name]
    except CheckpointError as error:
        _raise_if_unreadable(error)
        tagged = any(tag.step == step for tag in tags_of(run))
        return [f"step {step} was damaged, so it was replaced in spite of its tag: {error}"] if tagged else []
    note = f"the earlier checkpoint of step {step} is kept; its tag is {' and '.join(names)}"
    log.info(note)
    return [note]


def _best_steps(run: Run, retention: Retention) -> list[int]:
    summaries = run.summaries()[0]
    usable = {checkpoint.step for checkpoint in chain_lengths(summaries)}
    return retention.best([summary.step for summary in summaries if summary.step in usable], _metrics(summaries))


def _readable_summaries(run: Run) -> list[Summary]:
    """Return the run's summaries, oldest commit first. Raises CheckpointError if a header cannot be read now."""
    summaries, broken = run.summaries()
    for error in broken:
        _raise_if_unreadable(error)
    return summaries


def _depends_on(summary: Summary, steps: Collection[int], by_step: Mapping[int, Summary]) -> bool:
    """Whether a checkpoint's parent is among the steps, and is still the one that it was conditioned on."""
    parent = summary.parent
    if parent is None or parent.step not in steps:
        return False
    return parent.step not in by_step or by_step[parent.step].identity == parent.identity


def _raise_if_unreadable(error: CheckpointError) -> None:
    if may_be_sound(error):
        raise error


def _recode_without(run: WritableRun, step: int, steps: Collection[int]) -> None:
    """Re-code a checkpoint on its first ancestor that is none of ``steps`` and decodes, or as a keyframe."""
    chain = run.chain(run.file(step))
    for ancestor in chain[1:]:
        if ancestor.header.step not in steps:
            try:
                run.recode(chain, run.chain(ancestor))
                return
            except CheckpointError as error:  # the ancestor may be damaged in tensors that this one does not need
                _raise_if_unreadable(error)
    run.recode(chain, None)


def steps_to_delete(run: Run, retention: Retention, damaged: Collection[int] = ()) -> list[int]:
    """Return the steps of a run that the retention does not keep and that have no tag.

    damaged: steps whose files are known not to decode. They and their dependent deltas do not count as kept. Raises
    CheckpointError if a tag cannot be read now, or a header, and there is something to delete.
    """
    if retention.keep.keeps_all:
        return []
    summaries, broken = run.summaries()
    usable = {checkpoint.step for checkpoint in chain_lengths(summaries, damaged)}
    named = {(tag.step, tag.identity) for tag in tags_of(run)}
    tagged = {summary.step for summary in summaries if (summary.step, summary.identity) in named}
    in_order = [summary.step for summary in summaries]
    steps = retention.steps_to_delete(in_order, usable, _metrics(summaries), _diverged(summaries))
    found = [step for step in steps if step not in tagged]
    for error in broken if found else ():  # the file may be a checkpoint to keep, or depend on one of these
        _raise_if_unreadable(error)
    return found


def can_be_parent(run: Run, parent: Parent, step: int, retention: Retention, damaged: Collection[int]) -> bool:
    """Whether ``step`` can be conditioned on ``parent``: its chain is complete and short, and it will not be deleted.

    damaged: steps whose files are known not to decode.
    """
    summaries, longest = run.summaries()[0], retention.keep.keyframe_every
    lengths = chain_lengths(summaries, damaged)
    others = [summary for summary in summaries if summary.step != step]
    steps = [summary.step for summary in others] + [step]
    usable = {checkpoint.step for checkpoint in lengths} | {step}
    to_delete = retention.steps_to_delete(steps, usable, _metrics(others), _diverged(others))
    deleted = parent.step == step or parent.step in to_delete
    return lengths.get(parent, longest) < longest and not deleted


def _metrics(summaries: Iterable[Summary]) -> dict[int, float]:
    return {summary.step: summary.metric for summary in summaries if summary.metric is not None}


def _diverged(summaries: Iterable[Summary]) -> set[int]:
    return {summary.step for summary in summaries if not summary.finite}


def damaged_among_kept(
    run: Run, retention: Retention, with_progress: Callable[[list[int]], Iterable[int]] = lambda steps: steps
) -> set[int]:
    """Return the steps that would be kept but cannot be decoded.

    They must not count as kept, or every sound checkpoint might be deleted. with_progress: yields the steps that it is
    given, while it shows the progress.
    """
    damaged: set[int] = set()
    checked: set[int] = set()
    while new := [s for s in run.steps() if s not in {*checked, *steps_to_delete(run, retention, damaged)}]:
        for step in with_progress(new):
            checked.add(step)
            if damage(run, step) is not None:
                damaged.add(step)
    return damaged


def prune(run: WritableRun, retention: Retention, damaged: Collection[int] = ()) -> list[str]:
    """Delete ``steps_to_delete``. The caller has locked the run. Returns the notes of ``recode_dependents``.

    What no kept checkpoint depends on goes first: on a full disk, that makes space for the files that re-coding writes.
    """
    try:
        steps = steps_to_delete(run, retention, damaged)
        if not steps:
            return []
        used = _steps_with_dependents(_readable_summaries(run), steps)
    except CheckpointError as error:
        return [f"nothing was deleted: {error}"]
    _delete(run, [step for step in steps if step not in used])
    if not used:
        return []
    try:
        needed, notes = recode_dependents(run, used)
    except CheckpointError as error:
        return [f"what other checkpoints depend on was not deleted: {error}"]
    _delete(run, [step for step in steps if step in used - needed])
    return notes


def _steps_with_dependents(summaries: list[Summary], steps: Collection[int]) -> set[int]:
    """Return those of ``steps`` that another checkpoint needs, through whatever chain. summaries: in order."""
    by_step = {summary.step: summary for summary in summaries}
    used: set[int] = set()
    for summary in reversed(summaries):  # children come before their parents
        others_need_it = summary.step not in steps or summary.step in used
        if others_need_it and summary.parent and _depends_on(summary, steps, by_step):
            used.add(summary.parent.step)
    return used


def _delete(run: WritableRun, steps: list[int]) -> None:
    """Delete checkpoints, children first, so that the others can be loaded after a crash in between."""
    for step in reversed(steps):
        run.delete(step)
    if steps:
        log.info("deleted %s %s", "steps" if len(steps) > 1 else "step", ", ".join(map(str, steps)))
