"""One save, from the live training to the hand-over to the writing thread. The stages are the lines of ``save``."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from copy import copy
from functools import partial
from typing import Any

from dynaquant.engine.bound import Bound
from dynaquant.engine.tensors.stored import StoredTensor
from dynaquant.ranks.group import Group
from dynaquant.saving import displacements, finite
from dynaquant.saving.capture import Captured, capture
from dynaquant.saving.commit_stage import CommitStage
from dynaquant.saving.compressed import Compressed
from dynaquant.saving.compressor import Compressor
from dynaquant.saving.rank_zero import keep_earlier_training, written_by_rank_zero
from dynaquant.saving.record import Record, json_of
from dynaquant.saving.schedule import Schedule
from dynaquant.saving.sharded_commit import ShardedCheckpoint
from dynaquant.saving.timing import timed
from dynaquant.saving.turn import Turn
from dynaquant.search.decision import Decision
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import NOT_FINITE, Header
from dynaquant.store.lossless_copies import EXACT_WEIGHTS
from dynaquant.store.writing import Base, Checkpoint
from dynaquant.training.moment_correction import MomentCorrections
from dynaquant.training.objects import models_of
from dynaquant.training.snapshot import Snapshot

log = logging.getLogger("dynaquant")

TYPICAL_EQUIVALENTS = 2.0
"""What a search is expected to cost before any was measured, in evaluations on all batches: one of the weights in
training, one of the candidate that is chosen."""
SEARCHES_REMEMBERED = 9
"""An automatic schedule expects the median cost of so many searches."""


class Saver:
    """Saves the states of one training. All ranks call ``save`` together, with the same step.

    objects: the objects of the training, by name. roles: overrides by glob pattern. turn: raises the errors of
    forbidden calls from inside ``evaluate``. corrections: of first moments after a restore. rank_0_only: names of
    tensors that are stored as on rank 0, although ranks may hold others.
    """

    def __init__(
        self,
        run: WritableRun,
        objects: Mapping[str, Any],
        roles: Mapping[str, str | Bound],
        schedule: Schedule,
        compressor: Compressor,
        writer: CommitStage,
        turn: Turn,
        group: Group,
        corrections: MomentCorrections,
        rank_0_only: Collection[str],
    ) -> None:
        self._run, self._objects, self._roles, self._group = run, objects, roles, group
        self._compressor, self._writer, self._turn = compressor, writer, turn
        self._corrections, self._rank_0_only = corrections, rank_0_only
        self._differed: Collection[str] | None = None  # names of tensors that differed between ranks; None: unknown
        self.schedule = schedule
        self._costs = deque([TYPICAL_EQUIVALENTS], maxlen=SEARCHES_REMEMBERED)  # of the last searches
        self._has_checkpoint = False  # whether this training has saved or restored one
        self._noted: set[str] = set()  # notes that were logged
        self._diverged = False  # whether weights were infinite or NaN at the last save or restore

    def save(self, step: int, exact_weights: bool = False) -> Future[Record]:
        """Capture and compress the state, and hand it over to the writing thread.

        exact_weights: whether to keep the weights exactly, too, as long as the checkpoint has a tag.

        Changes nothing in this object before the hand-over, so a save that fails or is interrupted has no effect.
        """
        schedule = copy(self.schedule)
        schedule.saving(step)
        seconds: dict[str, float] = {}
        with timed(seconds, "wait"):
            self._group.run_on_all_ranks(self._wait_for_last_write)
        with timed(seconds, "capture"):
            captured = capture(
                self._objects,
                self._roles,
                self._compressor.on_grid,
                self._run,
                self._writer.base,
                self._rank_0_only,
                self._differed,
                self._group,
                self._compressor.updates.updated,
            )
            not_finite = finite.not_finite(captured, self._group)
        compressed = self._compressed(step, captured, schedule.steps_between, exact_weights, seconds)
        cost = _cost(compressed.decision)
        typical = statistics.median_low([*self._costs, cost])
        schedule.saved(_typical_seconds(seconds, compressed.decision, typical))
        schedule.interval = self._group.from_rank_0(schedule.interval)
        self._measure_movement_from_here(schedule)
        future = self._handed_over(step, captured, compressed, schedule.interval, exact_weights, not_finite, seconds)
        self.schedule = schedule
        self._costs.append(cost)
        self._has_checkpoint = True
        self._diverged = bool(not_finite)
        self._log_new(set(compressed.notes) - set(captured.notes))
        self._differed = captured.differences.names
        self._compressor.saved(compressed, schedule.soonest)
        self._corrections.saved()
        return future

    def resume(
        self,
        header: Header,
        stored: Mapping[str, StoredTensor],
        tensors: Mapping[str, StoredTensor],
        restored: Collection[str],
        from_lossless_copy: bool,
    ) -> None:
        """Continue from a restored checkpoint.

        stored: the checkpoint's tensors by their stored names, as far as this rank has decoded them. tensors: those of
        this rank's state, by name. restored: names of the tensors that models and optimizers got. from_lossless_copy:
        whether they got the values of the lossless copy instead.
        """
        self._writer.base = Base.from_loaded(header, stored)
        self._has_checkpoint, self._differed = True, None
        self._diverged = not header.summary.finite
        if self._diverged and self._group.rank == 0:
            finite.warn_of_restored(header.step, self._run)
        self._compressor.resume(header, {n: t for n, t in tensors.items() if n in restored}, from_lossless_copy)
        self.schedule.begin(header.step, header.record.get("interval"))
        self._measure_movement_from_here(self.schedule)
        self._compressor.expect(self.schedule.soonest)

    def _log_new(self, notes: set[str]) -> None:
        """Log notes that no earlier save had, on one rank."""
        for note in sorted(notes - self._noted) if self._group.rank == 0 else ():
            log.info(note)
        self._noted |= notes

    def _measure_movement_from_here(self, schedule: Schedule) -> None:
        """With ``every=Moved(…)``, take the present weights as the reference of the next interval. Collective then."""
        if schedule.movement is not None:
            schedule.movement = schedule.movement.from_here(self._compressor.mean_squares(), schedule.interval)

    def _wait_for_last_write(self) -> None:
        self._writer.thread.wait()
        if not self._has_checkpoint:
            keep_earlier_training(self._run, self._group)

    def _compressed(
        self, step: int, captured: Captured, interval: int | None, exact_weights: bool, seconds: dict[str, float]
    ) -> Compressed:
        """Compress the state. Puts back what ``evaluate`` has changed, also if interrupted."""
        before = Snapshot(models_of(self._objects), self._objects)
        try:
            compressed = self._compressor.compress(
                captured, step, interval, self._corrections.enabled, exact_weights, seconds
            )
            self._group.run_on_all_ranks(self._turn.check)
        finally:
            try:
                before.put_back()
            except BaseException:  # a signal interrupted it
                before.put_back()
                raise
        return compressed

    def _handed_over(
        self,
        step: int,
        captured: Captured,
        compressed: Compressed,
        interval: int | None,
        exact_weights: bool,
        not_finite: list[str],
        seconds: dict[str, float],
    ) -> Future[Record]:
        decision = compressed.decision
        notes = [*compressed.notes, *self._corrections.notes]
        if not_finite:
            notes.append(finite.said_of(not_finite, self._run))
            if not self._diverged and self._group.rank == 0:
                log.warning(notes[-1])
        history = decision.history or self._compressor.manager.history
        record = json_of(decision, history, interval, seconds, notes)
        record |= {NOT_FINITE: len(not_finite)} if not_finite else {}
        record["moments_corrected"] = self._corrections.count
        record["displaced"] = displacements.to_json(compressed.displaced)
        if exact_weights and compressed.assembled.lossless_copy is not None:
            record[EXACT_WEIGHTS] = True
        if compressed.budget is not None:
            record["training_budget"] = compressed.budget.to_json()
        if (division := compressed.division) is not None:
            part = ShardedCheckpoint(
                step,
                captured.tree,
                compressed.assembled.tensors,
                compressed.labels,
                division,
                compressed.assembled.seconds,
                record,
            )
            return self._writer.begin(part, decision.predicted)
        checkpoint = Checkpoint(
            step,
            captured.tree,
            compressed.assembled.tensors,
            compressed.labels,
            record,
            coder=self._compressor.coder,
            lossless_copy=compressed.assembled.lossless_copy,
            frozen=compressed.frozen,
        )
        begin = partial(self._writer.begin, checkpoint, decision.predicted)
        return written_by_rank_zero(step, record, begin, self._group)


def _typical_seconds(seconds: Mapping[str, float], decision: Decision, typical: float) -> float:
    """Return the seconds that training would have waited for this save if its search had been a typical one.

    typical: the cost of a typical search, in evaluations on all batches.
    """
    share = min(1.0, typical / _cost(decision)) if _cost(decision) > 0 else 1.0
    return seconds["wait"] + seconds["capture"] + share * seconds["search"]


def _cost(decision: Decision) -> float:
    """Return the cost of a search, in evaluations on all batches. Without a metric, every candidate counts as one."""
    return decision.equivalents or sum(trial.degradation is not None for trial in decision.trials)
