"""A storage with which DCP saves to a run: DCP plans which process writes what, and each writes a part.

Nothing is pickled: values that are not tensors go into the checkpoint's tree.
"""

from __future__ import annotations

import io
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as _StorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.label import Label
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.dtypes import dtype_name
from dynaquant.errors import StateError
from dynaquant.interop.dcp_folder import nested
from dynaquant.interop.state_source import dcp_source
from dynaquant.options import Deprecated, Keep, Quality, QualityName, options_of
from dynaquant.ranks.group import Group
from dynaquant.saving.compressor import Compressor
from dynaquant.saving.memory import Memory
from dynaquant.state.flatten import flatten
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import Header, Parent, Summary, is_step
from dynaquant.store.entry import Entry
from dynaquant.store.layout import Layout, Place, Plan, box_name
from dynaquant.store.retention import Retention, can_be_parent, prepare_replacement, prune
from dynaquant.store.writing import Base, Checkpoint, WrittenPart, depends_on, planned, write_part

log = logging.getLogger("dynaquant")
CheckpointId = str | os.PathLike[str] | None


@dataclass(frozen=True)
class _Commit:
    """What the coordinator tells each process: the draft of the manifest, the folder for parts, this process's number.

    parts, shapes: of the parent: addresses of its parts, shapes of its tensors. committed: addresses of the parts that
    were committed last, also if they are of no parent.
    """

    draft: Header
    folder: Path
    part: int = 0
    parts: frozenset[str] = frozenset()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    committed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Last:
    """What a process remembers of the last part that it wrote. The next save tells whether that was committed.

    address: of the part. base: its boxes. memories: after it was written, by the number of what is compressed together.
    before: the memories before.
    """

    address: str = ""
    base: Base | None = None
    memories: Mapping[int, Memory] = field(default_factory=dict)
    before: Mapping[int, Memory] = field(default_factory=dict)

    def base_for(self, commit: _Commit) -> Base | None:
        """Return what the next part is conditioned on: these boxes, if they are the parent's."""
        return self.base if self.address in commit.parts else None

    def memories_for(self, commit: _Commit) -> Mapping[int, Memory]:
        """Return the memories of the last part that was committed."""
        return self.memories if self.address in commit.committed else self.before


@dataclass(frozen=True)
class _WrittenBox:
    """What a process tells the coordinator of a box.

    number: of its part. part: the same object for all boxes of a process, so it is sent once. at: place of the box in
    the part. second: name of the tensor that must be decoded before.
    """

    number: int
    part: WrittenPart
    at: int
    label: Label
    second: str

    @property
    def size(self) -> int:
        """The size of the box's stream in bytes."""
        return int(self.part.sizes[self.at])


class StorageWriter(_StorageWriter):
    """A DCP storage that saves to a run. Use one object for all saves of a training: deltas need the save before.

    folder: of the run. quality: a preset, or a ``Quality`` with a ``max_degradation``. Weights are judged by how far
    they move. keep: ``last``, ``every`` and ``keyframe_every`` of a ``Keep``; by default, all checkpoints are kept.
    deprecated: fields of ``keep`` in place of it.

    The step of a checkpoint is the last number in its ``checkpoint_id``; without a number, one more than the last step.
    Raises CheckpointError if another process writes to the run.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        quality: QualityName | Quality = "balanced",
        keep: Keep | None = None,
        **deprecated: Unpack[Deprecated],
    ) -> None:
        super().__init__()
        takes, also = ("keep_last", "keep_every", "keyframe_every"), ("max_degradation",)
        quality, _, keep = options_of("StorageWriter", deprecated, quality, keep=keep, takes=takes, also=also)
        self._run = WritableRun(folder)
        self._compressor = Compressor(quality, None, Group(alone=True))  # each process decides for its own boxes
        self._retention = Retention(keep)
        self._id: CheckpointId = None
        self._held = ExitStack()  # the run's lock, on the coordinator, from planning to the end
        self._last = _Last()
        self._committed: Summary | None = None  # on the coordinator: the checkpoint that was committed last
        self._commit: _Commit | None = None  # on the coordinator

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        """Begin a new checkpoint. DCP calls this only if it has an id."""
        self._id = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Refuse what cannot be saved as one checkpoint. Raises ValueError for ``use_collectives=False``."""
        if kwargs.get("use_collectives") is False:
            raise ValueError("StorageWriter needs collectives: dcp.save(…, use_collectives=True), which is the default")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Take the run's lock, create a folder for the parts, and number the processes that write any.

        Raises StateError if elements of a tensor are missing.
        """
        if not all(plan.usable for plan in plans):
            raise ValueError("StorageWriter needs a plan for every save: give no planner with enable_plan_caching=True")
        _check_complete(plans)
        self.close()  # of a save that failed
        try:
            self._held.enter_context(self._run.locked())
            step = self._step()
            if self._run.path(step).exists():
                self._warn(prepare_replacement(self._run, step, self._retention))
            draft = self._run.begin(step, None, parts=True)
            self._held.callback(self._run.abandon)
            self._commit = self._begun(draft, self._run.parts_folder)
        except BaseException:
            self.close()
            raise
        with_tensors = [i for i, plan in enumerate(plans) if any(map(_is_tensor, plan.items))]
        numbers = {i: number for number, i in enumerate(with_tensors)}
        return [
            replace(plan, storage_data=replace(self._commit, part=numbers.get(i, 0))) for i, plan in enumerate(plans)
        ]

    def close(self) -> None:
        """Release the run's lock, which a save that failed on another process still holds. May be called again."""
        self._commit = None
        self._held.close()

    def _step(self) -> int:
        """Return the step of the new checkpoint. An id counts for one save only."""
        name, self._id = Path(self._id).name if self._id is not None else "", None
        numbers = re.findall(r"\d+", name)
        step = int(numbers[-1]) if numbers else max(self._run.steps(), default=0) + 1
        if not is_step(step):
            raise ValueError(f"the step in the id {name!r} is too large")
        return step

    def _begun(self, draft: Header, folder: Path) -> _Commit:
        """Return what processes must know. A checkpoint is conditioned on the last one that this object committed."""
        last = self._committed
        if last is None:
            return _Commit(draft, folder)
        parent, commit = Parent(last.step, last.identity), _Commit(draft, folder, committed=last.parts)
        if not can_be_parent(self._run, parent, draft.step, self._retention, ()):
            return commit
        header = self._run.file(last.step).header
        shapes = {entry.name: entry.shape for entry in header.entries}
        return replace(commit, draft=replace(draft, parent=parent), parts=header.summary.parts, shapes=shapes)

    def _warn(self, notes: Iterable[str]) -> None:
        for note in notes:
            log.warning("%s: %s", self._run.folder, note)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Quantize the tensors of the plan and write them as a part. Other values go to the coordinator as they are."""
        plain = [item for item in plan.items if not _is_tensor(item)]
        tensors = [item for item in plan.items if _is_tensor(item)]
        results = [WriteResult(item.index, 0, _plain_value(item, planner)) for item in plain]
        if tensors:
            results += self._write_part(tensors, planner, plan.storage_data)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_part(self, items: Sequence[WriteItem], planner: SavePlanner, commit: _Commit) -> list[WriteResult]:
        base, before = self._last.base_for(commit), self._last.memories_for(commit)
        boxes: dict[tuple[str, Box], StoredTensor] = {}
        own: list[tuple[Entry, Box]] = []
        ordered: list[WriteItem] = []
        resized: set[str] = set()  # boxes of tensors that the parent has in another shape, or not at all
        memories: dict[int, Memory] = {}
        for number, group in enumerate(_one_box_of_each(items)):
            # The planner may make a tensor only now, so each is looked up once, and kept until all are quantized.
            tensors = {item.index.fqn: _tensor(item, planner) for item in group}
            found = self._compressor.compress(dcp_source(tensors), before.get(number, Memory()), 1.0, {})
            memories[number] = found.memory
            for item in group:
                name, box = item.index.fqn, _box_of(item)
                stored = boxes[name, box] = found.assembled.tensors[name]
                if commit.shapes.get(name) != _shape_of(item):
                    resized.add(box_name(name, box))
                own.append((planned(name, found.labels[name], dtype_name(stored.dtype), stored.shape, 0), box))
                ordered.append(item)
        if base is not None:
            base = replace(base, tensors={name: box for name, box in base.tensors.items() if name not in resized})
        draft = commit.draft if base is not None else replace(commit.draft, parent=None)
        part, base = write_part(commit.folder, own, boxes, draft, base)
        self._last = _Last(part.file.address, base, memories, before)
        told = [
            _WrittenBox(commit.part, part, at, tensor.label, depends_on(boxes[tensor.name, box]))
            for at, (tensor, box) in enumerate(own)
        ]
        return [WriteResult(item.index, box.size, box) for item, box in zip(ordered, told, strict=True)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the manifest, which completes the commit, and delete what is not kept."""
        commit = self._commit
        assert commit is not None
        try:
            found = {result.index: result.storage_data for part in results for result in part}
            boxes = {index: stored for index, stored in found.items() if isinstance(stored, _WrittenBox)}
            plain = {index.fqn: value for index, value in found.items() if index not in boxes}
            plan, written = _plan_and_parts(metadata, boxes)
            checkpoint = Checkpoint(commit.draft.step, _tree_of(metadata, plain), {}, {}, {"format": "dcp"})
            file, _ = self._run.publish(commit.draft, checkpoint, plan=plan, parts=written)
            self._committed = file.header.summary
            self._warn(prune(self._run, self._retention))
        finally:
            self.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:  # noqa: ARG003
        """Return True: any text can name a checkpoint."""
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Return the id of the checkpoint."""
        return StorageMeta(checkpoint_id=self._id)


def _plain_value(item: WriteItem, planner: SavePlanner) -> Any:
    """Return a value that is not a tensor. Raises StateError if a checkpoint cannot hold it without pickle."""
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    try:
        value = torch.load(io.BytesIO(data.getvalue()), map_location="cpu", weights_only=True)
    except Exception as error:
        raise StateError(
            f"{item.index.fqn}: a checkpoint holds only tensors and plain values, and this is another object; leave it "
            f"out, or give its state_dict() ({error})"
        ) from error
    flatten({item.index.fqn: value})  # raises StateError, with the path
    return value


def _is_tensor(item: WriteItem) -> bool:
    return item.type != WriteItemType.BYTE_IO


def _tensor(item: WriteItem, planner: SavePlanner) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    return tensor.detach()


def _shape_of(item: WriteItem) -> torch.Size:
    assert item.tensor_data is not None
    return item.tensor_data.size


def _box_of(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return _box(item.tensor_data.chunk)


def _box(chunk: ChunkStorageMetadata) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _check_complete(plans: Iterable[SavePlan]) -> None:
    """Raise StateError if elements of a tensor are missing. DCP looks for them only if there are several processes."""
    missing: dict[str, int] = {}
    for item in (item for plan in plans for item in plan.items if _is_tensor(item)):
        name = item.index.fqn
        missing[name] = missing.get(name, _shape_of(item).numel()) - math.prod(_box_of(item).sizes)
    for name, count in missing.items():
        if count > 0:
            raise StateError(f"{name}: {count} of its elements are on no rank; give DCP all parts of the tensor")


def _one_box_of_each(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Return groups of items that have at most one box of each tensor, and the same box of all moments of a parameter.

    A first moment is quantized in units of the second moment of its group. Replicas share the boxes of a tensor, so a
    process may write other boxes of one than of the other.
    """
    groups: list[list[WriteItem]] = []
    known: dict[tuple[str, torch.Size], dict[Box, int]] = {}
    for item in items:
        numbers = known.setdefault((item.index.fqn.rpartition(".")[0], _shape_of(item)), {})
        number = numbers.setdefault(_box_of(item), len(numbers))
        if number == len(groups):
            groups.append([])
        groups[number].append(item)
    return groups


def _plan_and_parts(metadata: Metadata, boxes: Mapping[MetadataIndex, _WrittenBox]) -> tuple[Plan, list[WrittenPart]]:
    """Return the plan by which the parts were written, and what they hold, in its order."""
    layouts: dict[Layout, int] = {}
    tensors = []
    stored_at: dict[tuple[str, Box], _WrittenBox] = {}
    parts: dict[int, WrittenPart] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        places = []
        for chunk in entry.chunks:
            stored = boxes[MetadataIndex(name, chunk.offsets)]
            box = _box(chunk)
            places.append(Place(stored.number, box))
            stored_at[name, box], parts[stored.number] = stored, stored.part
        layout = layouts.setdefault(tuple(places), len(layouts))
        of_boxes = [stored_at[name, place.box] for place in places]
        # An empty box, or one that is stored exactly, says nothing about the others.
        second = max((stored.second for stored in of_boxes), default="")
        label = max(of_boxes, key=lambda stored: stored.size).label
        tensors.append(planned(name, label, dtype_name(entry.properties.dtype), entry.size, layout, second))
    plan = Plan(tuple(tensors), tuple(layouts), len(parts))
    written = []
    for number in range(plan.parts):
        part, order = parts[number], [stored_at[tensor.name, box].at for tensor, box in plan.boxes_of(number)]
        written.append(WrittenPart(part.file, part.hashes[order], part.sizes[order], part.needs_parent[order]))
    return plan, written


def _tree_of(metadata: Metadata, plain: Mapping[str, Any]) -> Any:
    """Return the tree of a state, from the names that DCP has given to its entries."""
    flat: dict[str, Any] = {
        name: plain[name] if isinstance(entry, BytesStorageMetadata) else torch.empty(0)
        for name, entry in metadata.state_dict_metadata.items()
    }
    tree, tensors = flatten(nested(flat, metadata.planner_data or {}))
    if others := tensors.keys() ^ (flat.keys() - plain.keys()):
        raise StateError(f"{min(others)}: a value that is not a tensor must not hold tensors")
    return tree
