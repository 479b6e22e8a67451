"""Writes the checkpoints of several ranks: every rank its part, then rank 0 the file that refers to the parts.

It runs in the writing threads of all ranks, and communicates over a group of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.forms.stored import cut
from dynaquant.engine.label import Label
from dynaquant.engine.tensors.box import Box
from dynaquant.errors import CheckpointError
from dynaquant.ranks.group import Group
from dynaquant.saving.commit_stage import CommitStage
from dynaquant.saving.division import Division, boxes_of
from dynaquant.saving.rank_zero import on_rank_zero
from dynaquant.saving.record import Record, record_of
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import CheckpointFile, Header, Parent
from dynaquant.store.layout import box_name, part_name
from dynaquant.store.retention import Retention
from dynaquant.store.sharded_writing import Plan, ShardedTensor, WrittenPart, sharded_header, write_part
from dynaquant.store.writing import Base, Checkpoint


@dataclass(frozen=True)
class ShardedCheckpoint:
    """What a rank contributes to a checkpoint.

    tree, record: rank 0's count. tensors: what this rank writes of each, by name. labels, seconds: of all tensors;
    ``seconds`` has the names of the tensors that others must be decoded after.
    """

    step: int
    tree: Any
    tensors: Mapping[str, StoredTensor]
    labels: Mapping[str, Label]
    division: Division
    seconds: Mapping[str, str]
    record: dict[str, Any] = field(default_factory=dict)

    def plan(self) -> Plan:
        """Return which part holds which boxes. The same on all ranks."""
        numbers, layouts = self.division.layouts
        local, shards = self.division.local, self.division.shards
        tensors = tuple(
            ShardedTensor(
                name,
                self.labels[name],
                local[name].dtype,
                shards.of(name, local[name]).shape,
                number,
                self.seconds.get(name, ""),
            )
            for name, number in numbers.items()
        )
        return Plan(tensors, layouts, len(self.division.parts))

    def boxes(self, stored: Mapping[str, StoredTensor]) -> dict[tuple[str, Box], StoredTensor]:
        """Return the boxes that this rank writes. stored: what it holds of tensors; others are left out."""
        found = {}
        for name, tensor in stored.items():
            if name not in self.division.writers or not self.division.writes(name):
                continue
            shard = self.division.shards.of(name, self.division.local[name])
            if tensor.shape != shard.local_shape:
                continue
            for box, local in shard.boxes:
                found[name, box] = cut(tensor, local)
            if not shard.boxes and not shard.shape.numel():
                found[name, boxes_of(shard)[0]] = tensor
        return found


@dataclass(frozen=True)
class _Begun:
    """What rank 0 tells the others: the draft of the header, and the folder for the parts."""

    draft: Header
    folder: Path


class ShardedCommits:
    """Commits the checkpoints of several ranks, one after another. All methods are collective.

    group: for this object alone, since its thread runs beside the one that trains.
    """

    def __init__(self, run: WritableRun, group: Group) -> None:
        self._run, self._group = run, group
        self._last: Base | None = None  # boxes of the last checkpoint that this object has committed

    def commit(
        self, checkpoint: ShardedCheckpoint, base: Base | None, parent: Parent | None
    ) -> tuple[CheckpointFile | None, Base]:
        """Write a checkpoint. Returns its file, on rank 0, and the base for the next one.

        base: the last checkpoint, with this rank's part of each tensor. parent: that checkpoint if it can be the
        parent; None for a keyframe. Rank 0's counts. If this fails on one rank it fails on all, and the run is as
        before.
        """
        group, run = self._group, self._run
        begun = group.from_rank_0(on_rank_zero(lambda: self._begin(checkpoint, parent), group))
        assert begun is not None
        try:
            written = group.run_on_all_ranks(lambda: self._write(checkpoint, base, begun))
            # Ranks of a divided model have quantized all tensors, each its part, so rank 0 knows how all are stored.
            own = {} if checkpoint.division.shards.divided else checkpoint.seconds
            gathered = group.gather_to_rank_0((None if written is None else written[0], own))
            parts = [part for part, _ in gathered]
            for _, seconds in gathered:
                checkpoint = replace(checkpoint, seconds={**checkpoint.seconds, **seconds})
            file = on_rank_zero(lambda: run.publish(_header(checkpoint, begun, parts)), group)
        except BaseException:
            if group.rank == 0:
                run.abandon_parts(begun.folder)
            raise
        identity = group.from_rank_0(file.header.identity if file is not None else "")
        committed = Parent(checkpoint.step, identity)
        self._last = Base(committed, {}, {}) if written is None else replace(written[1], parent=committed)
        return file, self._last

    def _begin(self, checkpoint: ShardedCheckpoint, parent: Parent | None) -> _Begun:
        draft, folder = self._run.begin_parts(checkpoint.step)
        return _Begun(replace(draft, parent=parent), folder)

    def _boxes_of(self, base: Base, checkpoint: ShardedCheckpoint) -> Base:
        """Return the base of this rank's part: boxes by their name there."""
        if base is self._last:
            return base
        # It was restored. A tensor that had another shape is none of the present one's.
        local, shards = checkpoint.division.local, checkpoint.division.shards
        alike = {
            name: stored
            for name, stored in base.tensors.items()
            if name in local and base.shapes.get(name) == shards.of(name, local[name]).shape
        }
        boxes = checkpoint.boxes(alike)
        return Base.of_boxes(base.parent, {box_name(name, box): stored for (name, box), stored in boxes.items()})

    def _write(
        self, checkpoint: ShardedCheckpoint, base: Base | None, begun: _Begun
    ) -> tuple[WrittenPart, Base] | None:
        """Write this rank's part. Returns None if it has nothing to write."""
        number = checkpoint.division.parts.get(self._group.rank)
        if number is None:
            return None
        own, boxes = checkpoint.plan().boxes_of(number), checkpoint.boxes(checkpoint.tensors)
        known = base is not None and base.parent == begun.draft.parent  # a rank may not have written the last one
        beside = self._boxes_of(base, checkpoint) if base is not None and known else None
        return write_part(begun.folder / part_name(number), own, boxes, begun.draft, beside)


def _header(checkpoint: ShardedCheckpoint, begun: _Begun, parts: Sequence[WrittenPart | None]) -> Header:
    draft, plan = replace(begun.draft, tree=checkpoint.tree, record=checkpoint.record), checkpoint.plan()
    written = [part for part in parts if part is not None]
    if [len(part.hashes) for part in written] != [len(boxes) for boxes in plan.boxes]:
        raise CheckpointError(f"{begun.folder}: ranks have written other tensors than rank 0 has planned")
    return sharded_header(draft, begun.folder.name, plan, written)


class ShardedCommitStage(CommitStage):
    """Writes the checkpoints of several ranks, in a thread of every rank. Rank 0 decides and reports.

    group: for this object alone, since its threads run beside those that train. For the others, see ``CommitStage``.
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
        super().__init__(run, retention, damaged, log_to, release_run)
        self._group, self._commits = group, ShardedCommits(run, group)

    def _commit(self, checkpoint: Any) -> tuple[CheckpointFile | None, list[str]]:
        if isinstance(checkpoint, Checkpoint):  # rank 0 writes all of it, and no other rank is here
            return super()._commit(checkpoint)
        step = checkpoint.step
        prepared = on_rank_zero(lambda: (self._parent_for(step), self._make_room(step)), self._group)
        parent, notes = prepared or (None, [])
        file, self.base = self._commits.commit(checkpoint, self.base, None if parent is None else parent.parent)
        self._damaged.discard(step)
        notes += on_rank_zero(lambda: self._prune(step), self._group) or []
        return file, notes

    def _record(
        self, checkpoint: Any, file: CheckpointFile | None, seconds: dict[str, float], notes: list[str]
    ) -> Record:
        if isinstance(checkpoint, Checkpoint):
            return super()._record(checkpoint, file, seconds, notes)
        found = on_rank_zero(lambda: None if file is None else record_of(file, seconds, notes), self._group)
        record = self._group.from_rank_0(found)
        assert record is not None
        return record


def stage_for(
    ranks: int,
    run: WritableRun,
    retention: Retention,
    damaged: set[int],
    log_to: Callable[[Record], Any] | None,
    at_end: ExitStack,
) -> CommitStage:
    """Return the commit stage of a training with that many ranks. Collective.

    at_end: closed in the writing thread after the last write. For the others, see ``CommitStage``.
    """
    options = retention, damaged, log_to, at_end.close
    if ranks == 1:
        return CommitStage(run, *options)
    group = Group()
    at_end.callback(group.close)
    return ShardedCommitStage(run, group, *options)
