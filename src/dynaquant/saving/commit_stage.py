"""Writes checkpoints to a run in the background: chooses the parent, commits, prunes, reports.

It runs in the writing threads of all ranks, and communicates over a group of its own. Rank 0 decides and reports. If
the state is divided, every rank writes its part; otherwise rank 0 writes all, and no other rank takes part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from dynaquant.errors import CheckpointError
from dynaquant.garbage import older_objects_skipped
from dynaquant.ranks.group import Group
from dynaquant.saving.background import BackgroundWriter
from dynaquant.saving.division import Division
from dynaquant.saving.log_to import in_one_line
from dynaquant.saving.record import Record, record_of, timed
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import CheckpointFile, Header, Parent
from dynaquant.store.retention import Retention, can_be_parent, prepare_replacement, prune
from dynaquant.store.writing import Base, Checkpoint, WrittenPart, write_part

log = logging.getLogger("dynaquant")


class CommitStage:
    """Writes the checkpoints of one training, one at a time, in a thread of every rank.

    group: for this object alone, since its threads run beside those that train. damaged: steps whose files do not
    decode; a restore adds to this set. log_to: called after every commit. release_run: called in the thread after the
    last write.
    """

    def __init__(
        self,
        run: WritableRun,
        group: Group,
        retention: Retention,
        damaged: set[int],
        log_to: Callable[[Record], Any] | None,
        release_run: Callable[[], Any],
    ) -> None:
        self._run, self._group, self._alone, self._retention = run, group, Group(alone=True), retention
        self._damaged, self._log_to = damaged, log_to
        self.base: Base | None = None
        """The checkpoint that was written or restored last. The next delta is conditioned on it."""
        self.size_factor = 1.0
        """Bytes that the weights of deltas take, relative to their predicted size."""
        self.thread = BackgroundWriter[Record](self, release_run)

    def begin(self, checkpoint: Checkpoint, division: Division | None, predicted: float | None) -> Future[Record]:
        """Begin to write a checkpoint. The previous write must be done.

        division: what each rank writes; None if rank 0, which calls this alone, writes all. predicted: bytes of its
        weights.
        """
        return self.thread.hand_over(partial(self._write, checkpoint, division, predicted))

    @older_objects_skipped()
    def _write(self, checkpoint: Checkpoint, division: Division | None, predicted: float | None) -> Record:
        group = self._alone if division is None else self._group
        seconds: dict[str, float] = {}
        with timed(seconds, "write"):
            file, notes = self._commit(checkpoint, division, group)
        record = group.made_by_rank_0(lambda: None if file is None else record_of(file, seconds, notes))
        assert record is not None
        if predicted and not record.keyframe and "weight" in record.roles:
            self.size_factor *= (record.roles["weight"].stored or predicted) / predicted
        if file is not None:  # this rank has written the manifest
            log.info(in_one_line(record))
            self._report(record)
        return record

    def _commit(
        self, checkpoint: Checkpoint, division: Division | None, group: Group
    ) -> tuple[CheckpointFile | None, list[str]]:
        """Commit a checkpoint and delete what is not kept. Returns its file, on rank 0, and notes for the record.

        If this fails on one rank it fails on all, and the run is as before.
        """
        step, run = checkpoint.step, self._run
        parent, notes = group.on_rank_0(lambda: self._prepare(step)) or (None, [])
        draft = group.made_by_rank_0(lambda: run.begin(step, parent, parts=division is not None))
        base = self.base if self.base is not None and self.base.parent == draft.parent else None
        try:
            part = group.run_on_all_ranks(lambda: self._write_part(checkpoint, division, base, draft))
            gathered = group.gather_to_rank_0(None if part is None else part[0])
            publish = partial(_published, run, draft, checkpoint, base, division, gathered)
            published = group.on_rank_0(publish)
        except BaseException:
            if group.rank == 0:
                run.abandon()
            raise
        self._damaged.discard(step)
        file = None if published is None else published[0]
        if division is None:
            self.base = None if published is None else published[1]
        else:
            committed = Parent(step, group.from_rank_0("" if file is None else file.header.identity))
            self.base = Base(committed, {}, {}, of_part=True) if part is None else replace(part[1], parent=committed)
        return file, notes + (group.on_rank_0(lambda: self._prune(step)) or [])

    def _write_part(
        self, checkpoint: Checkpoint, division: Division | None, base: Base | None, draft: Header
    ) -> tuple[WrittenPart, Base] | None:
        """Write this rank's part. Returns None if it has nothing to write, or if all lies in the manifest's file."""
        if division is None or (number := division.parts.get(self._group.rank)) is None:
            return None
        own = division.plan(checkpoint.labels, checkpoint.depends_on).boxes_of(number)
        beside = base if base is None or base.of_part else division.base_of_part(base)
        return write_part(self._run.parts_folder, own, division.boxes(checkpoint.tensors), draft, beside)

    def _prepare(self, step: int) -> tuple[Parent | None, list[str]]:
        """Return the parent of the next checkpoint, None for a keyframe, and notes on the one that it replaces."""
        parent = None if self.base is None else self.base.parent
        if parent is not None and not can_be_parent(self._run, parent, step, self._retention, self._damaged):
            parent = None
        replaces = self._run.path(step).exists()
        return parent, prepare_replacement(self._run, step, self._retention) if replaces else []

    def _prune(self, step: int) -> list[str]:
        try:
            return prune(self._run, self._retention, self._damaged)
        except Exception as error:
            error.add_note(f"step {step} is saved, but deleting older checkpoints failed")
            raise

    def _report(self, record: Record) -> None:
        if self._log_to is not None:
            try:
                self._log_to(record)
            except Exception as error:
                log.warning("step %d is saved, but log_to failed: %r", record.step, error)


def _published(
    run: WritableRun,
    draft: Header,
    checkpoint: Checkpoint,
    base: Base | None,
    division: Division | None,
    gathered: list[WrittenPart | None],
) -> tuple[CheckpointFile, Base]:
    """Publish the manifest. gathered: the part that each rank has written."""
    if division is None:
        return run.publish(draft, checkpoint, base)
    # Ranks have quantized all tensors, each its part, so rank 0 knows how all are stored.
    plan, written = division.plan(checkpoint.labels, checkpoint.depends_on), [part for part in gathered if part]
    if [len(part.hashes) for part in written] != [len(plan.boxes_of(number)) for number in range(plan.parts)]:
        raise CheckpointError(f"{run.folder}: ranks have written other tensors than rank 0 has planned")
    return run.publish(draft, checkpoint, plan=plan, parts=written)
