"""What the processes of a DCP save tell its coordinator, and the manifest that it makes of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from dynaquant.engine.label import Label
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.dtypes import dtype_name
from dynaquant.errors import StateError
from dynaquant.interop.dcp_folder import nested
from dynaquant.state.flatten import flatten
from dynaquant.store.layout import Layout, Place, Plan
from dynaquant.store.writing import WrittenPart, planned


@dataclass(frozen=True)
class WrittenBox:
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


def plan_and_parts(metadata: Metadata, boxes: Mapping[MetadataIndex, WrittenBox]) -> tuple[Plan, list[WrittenPart]]:
    """Return the plan by which the parts were written, and what they hold, in its order."""
    layouts: dict[Layout, int] = {}
    tensors = []
    stored_at: dict[tuple[str, Box], WrittenBox] = {}
    parts: dict[int, WrittenPart] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        places = []
        for chunk in entry.chunks:
            stored = boxes[MetadataIndex(name, chunk.offsets)]
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
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


def tree_of(metadata: Metadata, plain: Mapping[str, Any]) -> Any:
    """Return the tree of a state, from the names that DCP has given to its entries."""
    flat: dict[str, Any] = {
        name: plain[name] if isinstance(entry, BytesStorageMetadata) else torch.empty(0)
        for name, entry in metadata.state_dict_metadata.items()
    }
    tree, tensors = flatten(nested(flat, metadata.planner_data or {}))
    if others := tensors.keys() ^ (flat.keys() - plain.keys()):
        raise StateError(f"{min(others)}: a value that is not a tensor must not hold tensors")
    return tree
