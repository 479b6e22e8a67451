"""A storage with which DCP loads from a run: each process decodes the boxes that it asks for."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as _StorageReader
from torch.futures import Future

from dynaquant.engine.forms.stored import values_of
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.dtypes import dtype_named
from dynaquant.errors import CheckpointError, RunChangedError
from dynaquant.state.flatten import unflatten
from dynaquant.state.tree import dict_items, tensor_name
from dynaquant.store.chain import retry_if_run_changed
from dynaquant.store.container import CheckpointFile
from dynaquant.store.decoding import places_of
from dynaquant.store.reading import load_boxes
from dynaquant.store.run import Run
from dynaquant.store.tags import open_step_or_tag


class StorageReader(_StorageReader):
    """A DCP storage that loads from a run, whoever has saved to it and on however many processes.

    folder: of the run. step: a step or a tag; by default the newest checkpoint. Raises CheckpointError if there is
    none, or if it is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int | str | None = None) -> None:
        super().__init__()
        self._run, self._step = Run(folder), step
        self._chain: list[CheckpointFile] = []
        self._nodes: dict[str, Any] = {}  # of the tree, by the names that DCP gives to entries

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return names, shapes and boxes of the tensors of the checkpoint, and the names of all other values."""
        self._chain = retry_if_run_changed(self._open)
        file = self._chain[0]
        found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        paths: dict[str, tuple[str | int, ...]] = {}
        self._nodes = {}
        for path, node in _leaves(file.header.tree, ()):
            key = ".".join(map(str, path))
            paths[key], self._nodes[key] = path, node
            name = tensor_name(node)
            if name is None:
                found[key] = BytesStorageMetadata()
                continue
            entry = file.header.by_name[name]
            divided = entry.scheme.layout_number is not None
            boxes = [place.box for place in places_of(file, entry)] if divided else [Box.whole(entry.shape)]
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
            properties = TensorProperties(dtype=dtype_named(entry.dtype))
            found[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        return Metadata(found, planner_data=paths)

    def _open(self) -> list[CheckpointFile]:
        file = self._run.newest() if self._step is None else open_step_or_tag(self._run, self._step)
        return self._run.chain(file)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the checkpoint is open since ``read_metadata``."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to the plan which checkpoint this process has opened."""
        return replace(plan, storage_data=self._chain[0].header.summary)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged. Raises CheckpointError if the processes have opened different checkpoints."""
        opened = {(plan.storage_data.step, plan.storage_data.identity) for plan in plans}
        if len(opened) > 1:
            steps = " and ".join(str(step) for step, _ in sorted(opened))
            raise CheckpointError(
                f"{self._run.folder}: processes have opened different checkpoints, of steps {steps}. If one was saved "
                "meanwhile, load again, or give StorageReader a step; if the folder lies on local disks, use one that "
                "all processes share"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Decode what the plan asks for, one tensor at a time, and compare it with its hash."""
        by_tensor: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                data = io.BytesIO()
                torch.save(unflatten(self._nodes[item.storage_index.fqn], {}), data)
                data.seek(0)
                planner.load_bytes(item, data)
            else:
                by_tensor.setdefault(tensor_name(self._nodes[item.storage_index.fqn]) or "", []).append(item)
        retry_if_run_changed(lambda: self._read_tensors(by_tensor, planner))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_tensors(self, left: dict[str, list[ReadItem]], planner: LoadPlanner) -> None:
        """Read tensors, and remove each from ``left``. If a writer has replaced files, open them for another try."""
        wanted = [(name, [_wanted(item) for item in items]) for name, items in left.items()]
        try:
            for name, boxes in load_boxes(self._chain, wanted):
                for item, stored in zip(left[name], boxes, strict=True):
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(values_of(stored))
                    planner.commit_tensor(item, target)
                del left[name]
        except RunChangedError:
            opened = self._chain[0].header
            file = self._run.file(opened.step)  # re-coded, or replaced
            if file.header.identity != opened.identity:
                raise CheckpointError(f"{file.path}: was saved again while it was loaded; load again") from None
            self._chain = self._run.chain(file)
            raise

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str] | None) -> bool:  # noqa: ARG003
        """Return True: the run is given to the reader."""
        return True


def _wanted(item: ReadItem) -> Box:
    begin = item.storage_index.offset or torch.Size([0] * len(item.storage_offsets))
    return Box(tuple(a + b for a, b in zip(begin, item.storage_offsets, strict=True)), tuple(item.lengths))


def _leaves(node: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the entries of a state as DCP divides it: it goes into dictionaries, and lists that hold tensors."""
    kind = next(iter(node)) if isinstance(node, dict) else None
    if kind in ("dict", "ordered_dict"):
        for key, inner in dict_items(node):
            yield from _leaves(inner, (*path, str(unflatten(key, {}))))
    elif isinstance(node, list) and any(isinstance(inner, list | dict) and _goes_deeper(inner) for inner in node):
        for i, inner in enumerate(node):
            yield from _leaves(inner, (*path, i))
    else:
        yield path, node


def _goes_deeper(node: Any) -> bool:
    if isinstance(node, list):
        return any(_goes_deeper(inner) for inner in node)
    return isinstance(node, dict) and next(iter(node)) in ("dict", "ordered_dict", "tensor", "parameter")
