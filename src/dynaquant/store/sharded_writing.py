"""Writes the parts of a sharded checkpoint, and the file that refers to them.

Each process writes its own part, and reads it back. Then one of them writes the checkpoint's own file, whose name
completes the commit. Until then nothing refers to the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dynaquant.engine.forms.form import StoredTensor, stored_equal
from dynaquant.engine.forms.schemes import Sharded
from dynaquant.engine.forms.stored import form_of
from dynaquant.engine.label import Label
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.dtypes import dtype_name, dtype_named
from dynaquant.errors import CheckpointError
from dynaquant.state.tree import state_dict_tree
from dynaquant.store.container import CheckpointFile, Header
from dynaquant.store.entry import Entry
from dynaquant.store.files import add_disk_full_note, sync_parent
from dynaquant.store.layout import HashOfBoxes, Layout, PartFile, Parts, box_name
from dynaquant.store.reading import load_boxes
from dynaquant.store.writing import Base, verify_written, write_checkpoint


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor of a sharded checkpoint.

    layout: index in the plan's layouts. second: the name of the tensor that must be decoded first, or an empty text.
    """

    name: str
    label: Label
    dtype: torch.dtype
    shape: torch.Size
    layout: int
    second: str = ""


@dataclass(frozen=True)
class Plan:
    """Which part holds which boxes of which tensors. All processes have the same plan."""

    tensors: tuple[ShardedTensor, ...]
    layouts: tuple[Layout, ...]
    parts: int

    @property
    def boxes(self) -> list[list[tuple[ShardedTensor, Box]]]:
        """The boxes of every part, in the order in which it holds them. Many, if there are many parts."""
        return [self.boxes_of(number) for number in range(self.parts)]

    def boxes_of(self, part: int) -> list[tuple[ShardedTensor, Box]]:
        """Return the boxes of a part, in the order in which it holds them."""
        own = self._by_part.get(part, {})
        return [(tensor, box) for tensor in self.tensors for box in own.get(tensor.layout, ())]

    @cached_property
    def _by_part(self) -> dict[int, dict[int, list[Box]]]:
        """The boxes of each part by layout."""
        found: dict[int, dict[int, list[Box]]] = {}
        for number, layout in enumerate(self.layouts):
            for place in layout:
                found.setdefault(place.part, {}).setdefault(number, []).append(place.box)
        return found


@dataclass(frozen=True)
class WrittenPart:
    """What the file of the checkpoint has to know of a part.

    hashes: (boxes, 32), uint8, in the order of the plan. sizes: of the streams, in bytes. needs_parent: for each box.
    """

    file: PartFile
    hashes: NDArray[np.uint8]
    sizes: NDArray[np.int64]
    needs_parent: NDArray[np.bool_]


def plan_of(header: Header) -> Plan:
    """Return the plan by which a sharded checkpoint was written."""
    assert header.parts is not None
    tensors = tuple(
        ShardedTensor(
            entry.name,
            entry.label,
            dtype_named(entry.dtype),
            torch.Size(entry.shape),
            number,
            entry.scheme.depends_on or "",
        )
        for entry in header.entries
        if (number := entry.scheme.layout_number) is not None
    )
    return Plan(tensors, header.parts.layouts, len(header.parts.files))


def second_of(stored: StoredTensor) -> str:
    """Return the name of the tensor that must be decoded before this one; an empty text if there is none."""
    other = form_of(stored).other
    return "" if other is None else other[0]


Boxes = Mapping[tuple[str, Box], StoredTensor]
"""Stored tensors by the name of the tensor and the box."""


def boxes_of(chain: list[CheckpointFile], own: Iterable[tuple[ShardedTensor, Box]]) -> Boxes:
    """Read boxes of a checkpoint. chain: ``Run.chain`` of it."""
    by_name: dict[str, list[Box]] = {}
    for tensor, box in own:
        by_name.setdefault(tensor.name, []).append(box)
    read = load_boxes(chain, by_name.items())
    return {(name, box): stored for name, found in read for box, stored in zip(by_name[name], found, strict=True)}


def boxes_in_part(chain: list[CheckpointFile], own: Iterable[tuple[ShardedTensor, Box]]) -> dict[str, StoredTensor]:
    """Read boxes of a checkpoint, as far as it has them, and return them by their name in a part."""
    known = chain[0].header.by_name
    there = [
        (tensor, box)
        for tensor, box in own
        if tensor.name in known and known[tensor.name].shape == tensor.shape and not known[tensor.name].external
    ]
    return {box_name(name, box): stored for (name, box), stored in boxes_of(chain, there).items()}


def write_part(
    path: Path,
    own: Sequence[tuple[ShardedTensor, Box]],
    boxes: Boxes,
    draft: Header,
    base: Base | None,
    again: bool = False,
) -> tuple[WrittenPart, Base]:
    """Write a part, make it durable, read it back and compare it with what was to be stored.

    path: of the part. own: its boxes, in order. boxes: what is stored of them. draft: of the checkpoint. base: boxes of
    the last checkpoint, by their name in a part. Returns what the checkpoint has to know, and the next part's base.
    again: the part is re-coded, and others may depend on its levels. If this fails, a file may be left at the path.
    """
    if not path.parent.is_dir():
        raise CheckpointError(
            f"{path.parent}: this process does not see the folder for the parts of the checkpoint, which another one "
            "has made there: all processes need one folder on a file system that they share"
        )
    tensors: dict[str, StoredTensor] = {}
    labels: dict[str, Label] = {}
    for tensor, box in own:
        name = box_name(tensor.name, box)
        tensors[name], labels[name] = _in_part(boxes, boxes[tensor.name, box], box), tensor.label
    if base is not None:  # a box of another shape is not a parent
        fitting = {name: t for name, t in base.tensors.items() if name in tensors and t.shape == tensors[name].shape}
        base = replace(base, tensors=fitting, hashes={name: base.hashes[name] for name in fitting})
    header = Header(draft.step, draft.sequence, base.parent if base else None, state_dict_tree(tensors), (), {})
    try:
        with path.open("xb") as out:
            write_checkpoint(out, header, tensors, labels, base, "conditional", again)
        written = CheckpointFile(path)
        verify_written(written, tensors, base)
        sync_parent(path)
    except BaseException as error:
        error.add_note(f"while writing {path}; no checkpoint refers to it")
        add_disk_full_note(error, path)
        raise
    entries = written.header.entries
    found = WrittenPart(
        PartFile(written.header.identity, written.size),
        np.frombuffer(bytes.fromhex("".join(entry.hash for entry in entries)), dtype=np.uint8).reshape(-1, 32),
        np.array([entry.size for entry in entries], dtype=np.int64),
        np.array([entry.needs_parent for entry in entries], dtype=bool),
    )
    return found, Base.from_written(written.header, tensors, base)


def _in_part(boxes: Boxes, stored: StoredTensor, box: Box) -> StoredTensor:
    """Return a box that refers to other boxes of its part by the names that they have there."""
    if (needed := form_of(stored).other) is not None:
        name, own = needed
        other = boxes.get((name, box))
        if other is not None and stored_equal(other, own):
            return form_of(stored).with_other(box_name(name, box), other)
    return stored


def sharded_header(draft: Header, folder: str, plan: Plan, written: Sequence[WrittenPart]) -> Header:
    """Return the header of the checkpoint's own file. folder: name of the folder of its parts. written: by number."""
    parts = Parts(folder, tuple(part.file for part in written), plan.layouts)
    hash_of = [HashOfBoxes([place.box for place in layout]) for layout in plan.layouts]
    hashes = [part.hashes.tobytes().hex() for part in written]
    sizes = [part.sizes.tolist() for part in written]
    depends = [bool(part.needs_parent.any()) for part in written]
    next_box = [0] * len(written)
    entries = []
    for tensor in plan.tensors:
        # This runs once for every box of a checkpoint, of which there may be millions, so it does little.
        held = []
        for place in plan.layouts[tensor.layout]:
            held.append((place.part, next_box[place.part]))
            next_box[place.part] += 1
        digest = hash_of[tensor.layout]([hashes[part][64 * i : 64 * i + 64] for part, i in held])
        stored = sum([sizes[part][i] for part, i in held])
        needs_parent = any(depends[part] and bool(written[part].needs_parent[i]) for part, i in held)
        scheme = Sharded(tensor.layout, stored, tensor.second, needs_parent)
        entries.append(Entry(tensor.name, tensor.label, dtype_name(tensor.dtype), tensor.shape, digest, 0, scheme))
    return replace(draft, entries=tuple(entries), parts=parts)
