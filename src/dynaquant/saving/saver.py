"""One save, from the live training to the hand-over to the writing thread. The stages are the lines of ``save``."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from typing import Any

from dynaquant.engine.bound import Bound
from dynaquant.engine.forms.form import StoredTensor
from dynaquant.garbage import collection_paused
from dynaquant.ranks.group import Group
from dynaquant.saving.assemble import Compressed
from dynaquant.saving.capture import Captured, capture
from dynaquant.saving.commit_stage import CommitStage
from dynaquant.saving.compressor import Compressor
from dynaquant.saving.memory import Memory
from dynaquant.saving.notes import not_finite_weights, note_on_not_finite, warn_of_not_finite
from dynaquant.saving.rank_zero import keep_earlier_training
from dynaquant.saving.record import Record, json_of, record_without_file, timed
from dynaquant.saving.schedule import Schedule
from dynaquant.saving.source import Source
from dynaquant.saving.training_source import TrainingSource
from dynaquant.saving.turn import Turn
from dynaquant.search.decision import Decision
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import NOT_FINITE, Header
from dynaquant.store.run import EXACT_WEIGHTS
from dynaquant.store.writing import Base, Checkpoint
from dynaquant.training.moment_correction import MomentCorrections
from dynaquant.training.objects import models_of
from dynaquant.training.snapshot import Snapshot

log = logging.getLogger("dynaquant")


class Saver:
    """Saves the states of one training. All ranks call ``save`` together, with the same step.

    objects: the objects of the training, by name. training: what they tell of its state. roles: overrides by glob
    pattern. turn: raises the errors of forbidden calls from inside ``evaluate``. corrections: of first moments after a
    restore. rank_0_only: names of tensors that are stored as on rank 0, although ranks may hold others. memory: at the
    start of the training.
    """

    def __init__(
        self,
        run: WritableRun,
        objects: Mapping[str, Any],
        roles: Mapping[str, str | Bound],
        schedule: Schedule,
        training: TrainingSource,
        compressor: Compressor,
        writer: CommitStage,
        turn: Turn,
        group: Group,
        corrections: MomentCorrections,
        rank_0_only: Collection[str],
        memory: Memory,
    ) -> None:
        self._run, self._objects, self._roles, self._group = run, objects, roles, group
        self._training, self._compressor, self._writer, self._turn = training, compressor, writer, turn
        self._corrections, self._rank_0_only = corrections, rank_0_only
        self._memory = replace(memory, displacements=training.displacements(), schedule=schedule)

    @property
    def schedule(self) -> Schedule:
        """When the next checkpoint is due."""
        return self._memory.schedule

    @collection_paused()
    def save(self, step: int, exact_weights: bool = False) -> Future[Record]:
        """Capture and compress the state, and hand it over to the writing thread.

        exact_weights: whether to keep the weights exactly, too, as long as the checkpoint has a tag.

        Changes nothing in this object before the hand-over, so a save that fails or is interrupted has no effect.
        """
        memory, schedule = self._memory, copy(self.schedule)
        schedule.saving(step)
        seconds: dict[str, float] = {}
        with timed(seconds, "wait"):
            if len(steps := set(self._group.all_gather(step))) > 1:
                raise ValueError(f"ranks save different steps: {', '.join(map(str, sorted(steps)))}")
            self._group.run_on_all_ranks(self._wait_for_last_write)
        with timed(seconds, "capture"):
            captured = capture(
                self._objects,
                self._roles,
                self._compressor.method.quantizes_vectors,
                self._run,
                self._writer.base,
                self._rank_0_only,
                memory.differed,
                self._group,
                self._training.updates.updated,
            )
            source = self._training.source(
                captured,
                memory.displacements,
                step=step,
                interval=schedule.steps_between,
                corrected=self._corrections.enabled,
                exact_weights=exact_weights,
            )
        compressed = self._compressed(source, seconds)
        with timed(seconds, "capture"):
            # A half-precision weight may be infinite where its master weight, which is stored, is not.
            as_levels = compressed.quantized_weights - source.master_of.keys()
            not_finite = not_finite_weights(captured, as_levels, self._group)
            compressed = captured.differences.add(compressed, self._group)
        cost = _cost(compressed.decision)
        schedule.saved(_typical_seconds(seconds, compressed.decision, memory.typical_cost(cost)))
        schedule.interval = self._group.from_rank_0(schedule.interval)
        self._measure_movement_from_here(schedule)
        new = set(compressed.notes) - memory.noted
        memory = replace(
            compressed.memory,
            schedule=schedule,
            costs=memory.after_search(cost),
            begun=True,
            diverged=bool(not_finite),
            differed=frozenset(captured.differences.names),
            noted=memory.noted | new,
        )
        future = self._handed_over(step, captured, source, compressed, memory, exact_weights, not_finite, seconds)
        self._memory = memory
        for note in sorted(new) if self._group.rank == 0 else ():
            log.log(logging.WARNING if note in captured.notes else logging.INFO, note)
        self._training.start_anew(schedule.soonest)
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
        if not header.summary.finite and self._group.rank == 0:
            warn_of_not_finite(header.step, self._run)
        own = {name: tensor for name, tensor in tensors.items() if name in restored}
        self._training.forget()
        schedule = copy(self.schedule)
        schedule.begin(header.step, header.record.get("interval"))
        self._measure_movement_from_here(schedule)
        memory = self._memory.restored(header, own, from_lossless_copy, self._training.learning_rate)
        self._memory = replace(memory, schedule=schedule)
        self._training.expect(schedule.soonest)

    def _measure_movement_from_here(self, schedule: Schedule) -> None:
        """With ``every=Moved(…)``, take the present weights as the reference of the next interval. Collective then."""
        if schedule.movement is not None:
            schedule.movement = schedule.movement.from_here(self._training.mean_squares(), schedule.interval)

    def _wait_for_last_write(self) -> None:
        self._writer.thread.wait()
        if not self._memory.begun:
            keep_earlier_training(self._run, self._group)

    def _compressed(self, source: Source, seconds: dict[str, float]) -> Compressed:
        """Compress the state. Puts back what ``evaluate`` has changed, also if interrupted."""
        before = Snapshot(models_of(self._objects), self._objects)
        try:
            compressed = self._compressor.compress(source, self._memory, self._writer.size_factor, seconds)
            self._group.run_on_all_ranks(self._turn.check)
        finally:
            before.put_back_surely()
        return compressed

    def _handed_over(
        self,
        step: int,
        captured: Captured,
        source: Source,
        compressed: Compressed,
        memory: Memory,
        exact_weights: bool,
        not_finite: list[str],
        seconds: dict[str, float],
    ) -> Future[Record]:
        decision = compressed.decision
        notes = [*compressed.notes, *self._corrections.notes]
        if not_finite:
            notes.append(note_on_not_finite(not_finite, self._run))
            if not self._memory.diverged and self._group.rank == 0:
                log.warning(notes[-1])
        record = json_of(decision, memory.schedule.interval, seconds, notes) | memory.to_record(source.displaced)
        record |= {NOT_FINITE: len(not_finite)} if not_finite else {}
        record["moments_corrected"] = self._corrections.count
        if exact_weights and compressed.assembled.lossless_copy is not None:
            record[EXACT_WEIGHTS] = True
        division = compressed.division
        checkpoint = Checkpoint(
            step,
            captured.tree,
            compressed.assembled.tensors,
            compressed.labels,
            record,
            coder=self._compressor.method.coder,
            lossless_copy=compressed.assembled.lossless_copy,
            frozen=source.frozen if division is None else (),
            depends_on=compressed.assembled.depends_on,
        )
        if division is None and self._group.rank > 0:  # rank 0 writes everything
            future: Future[Record] = Future()
            future.set_result(record_without_file(step, record))
            return future
        return self._writer.begin(checkpoint, division, decision.predicted)


def _typical_seconds(seconds: Mapping[str, float], decision: Decision, typical: float) -> float:
    """Return the seconds that training would have waited for this save if its search had cost ``typical``."""
    share = min(1.0, typical / _cost(decision)) if _cost(decision) > 0 else 1.0
    return seconds["wait"] + seconds["capture"] + share * seconds["search"]


def _cost(decision: Decision) -> float:
    """Return the cost of a search, in evaluations on all batches. Without a metric, every candidate counts as one."""
    return decision.equivalents or sum(trial.degradation is not None for trial in decision.trials)
