"""Encodes a checkpoint in memory to a file, against the base of a delta, and verifies the written file.

One process writes a whole checkpoint into one file: streams and manifest. Several processes each write a part, which
is a file of boxes of tensors; one of them then writes the manifest, which refers to the parts.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dynaquant.engine.forms.form import StoredTensor, stored_equal
from dynaquant.engine.forms.scheme import Coder
from dynaquant.engine.forms.schemes import Reference, Sharded
from dynaquant.engine.forms.stored import can_refer_to, form_of, in_one, stored_hash, values_of
from dynaquant.engine.label import Label
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.dtypes import dtype_name
from dynaquant.errors import CheckpointError
from dynaquant.store.container import CheckpointFile, CheckpointWriter, Header, Parent
from dynaquant.store.decoding import holds
from dynaquant.store.entry import Entry
from dynaquant.store.files import add_disk_full_note, sync_parent, syncing
from dynaquant.store.layout import HashOfBoxes, PartFile, Plan, box_name, layout_of, part_name
from dynaquant.store.reading import load_boxes
from dynaquant.store.threads import WriteBehind, in_order


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: the JSON tree of a state, and its tensors with their labels, by name.

    coder: for the levels of weights. lossless_copy: the same tensors, all or the weights exactly, if one is kept.
    frozen: names of tensors that go into the run's file of frozen parameters.

    If several processes write it, ``tensors`` is what this process holds of each, and ``depends_on`` has the
    names of the tensors that others must be decoded after.
    """

    step: int
    tree: Any
    tensors: Mapping[str, StoredTensor]
    labels: Mapping[str, Label]
    record: dict[str, Any] = field(default_factory=dict)
    coder: Coder = "conditional"
    lossless_copy: Mapping[str, StoredTensor] | None = None
    frozen: Collection[str] = ()
    depends_on: Mapping[str, str] = field(default_factory=dict)


TEMPORARY = ".tmp"
"""What the name of a file that is being written ends with."""
Boxes = Mapping[tuple[str, Box], StoredTensor]
"""Stored tensors by the name of the tensor and the box."""


@dataclass(frozen=True)
class Base:
    """What the next delta is conditioned on: a checkpoint of the run, its tensors as stored, and their hashes.

    shapes: of a loaded checkpoint, those of the whole tensors, of which a rank may hold a part. of_part: whether the
    tensors are boxes, by their names in the part that this process has written or will write.
    """

    parent: Parent
    hashes: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    of_part: bool = False

    @classmethod
    def from_loaded(cls, header: Header, tensors: Mapping[str, StoredTensor]) -> Base:
        """Return the base for a checkpoint whose tensors were decoded from its file."""
        shapes = {entry.name: entry.shape for entry in header.entries}
        return cls(Parent(header.step, header.identity), _hashes(header), tensors, shapes)

    @classmethod
    def of_boxes(cls, parent: Parent, boxes: Boxes) -> Base:
        """Return the base for a part. boxes: of the parent."""
        named = {box_name(name, box): stored for (name, box), stored in boxes.items()}
        return cls(parent, {name: stored_hash(stored) for name, stored in named.items()}, named, of_part=True)

    @classmethod
    def from_written(cls, header: Header, tensors: Mapping[str, StoredTensor], before: Base | None) -> Base:
        """Return the base for a checkpoint that was just written, conditioned on ``before``.

        Its tensors are those that the file decodes to.
        """
        found = dict(tensors)
        for entry in header.entries:
            if entry.scheme.is_reference:
                # The values are the same, but they may have been quantized with another codebook to other levels.
                found.pop(entry.name)
                if before and entry.name in before.tensors:
                    found[entry.name] = before.tensors[entry.name]
        return cls(Parent(header.step, header.identity), _hashes(header), found)


def _hashes(header: Header) -> dict[str, str]:
    return {entry.name: entry.hash for entry in header.entries}


def coder_of(file: CheckpointFile) -> Coder:
    """Return the coder that a checkpoint's levels were coded with, to re-code them."""
    published = any(entry.scheme.coder == "rearranged" for entry in file.header.entries)
    return "rearranged" if published else "conditional"


@dataclass(frozen=True)
class Draft:
    """A file that is to be written.

    header: without the entries of ``tensors``; those of tensors in parts stay. labels: of the tensors. base: what the
    tensors are conditioned on; None for a keyframe. coder: for the levels of weights. again: whether the file is
    re-coded. Others may depend on its levels then, so these must not change.
    """

    header: Header
    tensors: Mapping[str, StoredTensor]
    labels: Mapping[str, Label]
    base: Base | None = None
    coder: Coder = "conditional"
    again: bool = False


def encode_entry(draft: Draft, name: str) -> tuple[Entry, bytes]:
    """Return the entry and the stream of a tensor."""
    label, base, stored = draft.labels[name], draft.base, form_of(draft.tensors[name])
    digest = stored.digest()
    parent = in_one(base.tensors.get(name)) if base else None
    if base is not None and base.hashes.get(name) == digest and can_refer_to(stored, parent, draft.again):
        return Entry(name, label, dtype_name(stored.dtype), stored.shape, digest, 0, Reference()), b""
    if stored.other is not None and draft.tensors.get(stored.other[0]) is not stored.other[1]:
        stored = form_of(stored.values())  # e.g. in units of a second moment that has changed since
    scheme, coded = stored.encode(parent, draft.coder)
    return Entry(name, label, dtype_name(stored.dtype), stored.shape, digest, len(coded), scheme), coded


def write_checkpoint(out: BinaryIO, draft: Draft, threads: int = 1) -> None:
    """Write a file: the streams of the tensors, then the header with their entries.

    threads: how many tensors are encoded at a time. Streams wait in memory to be written (``threads.MOST_BEHIND``), and
    with more than one thread also to be their turn (``threads.MOST_BYTES``). The file need not be on the disk
    afterwards (``files.syncing``).
    """
    entries = [entry for entry in draft.header.entries if entry.scheme.layout_number is not None]
    with WriteBehind(out) as file:
        writer = CheckpointWriter(file)
        for entry, coded in in_order(partial(encode_entry, draft), draft.tensors, threads, lambda each: len(each[1])):
            entries.append(entry)
            writer.add(coded)
        writer.finish(replace(draft.header, entries=tuple(entries)))


def verify_written(file: CheckpointFile, draft: Draft, threads: int = 1) -> None:
    """Decode a file that was just written and compare it with the tensors that were to be stored.

    threads: how many tensors are decoded at a time. Raises CheckpointError for the first wrong tensor.
    """
    parents = draft.base.tensors if draft.base else {}

    def is_right(entry: Entry) -> bool:
        # A reference has the hash of the base, which was verified when it was written or loaded.
        if entry.scheme.is_reference:
            return True
        wanted = draft.tensors[entry.name]
        if entry.scheme.is_exact:
            wanted = values_of(wanted)
        return holds(file, entry, parents.get(entry.name), draft.tensors, wanted)

    entries = [entry for entry in file.header.entries if entry.scheme.layout_number is None]
    for entry, right in zip(entries, in_order(is_right, entries, threads), strict=True):
        if not right:
            raise CheckpointError(f"{file.path}: tensor {entry.name} does not decode to the values that were stored")


def written_file(out: BinaryIO, draft: Draft, threads: int = 1) -> CheckpointFile:
    """Write a file, read it back and compare it while it gets on the disk. threads: as for ``write_checkpoint``."""
    write_checkpoint(out, draft, threads)
    with syncing(out):
        written = CheckpointFile(Path(out.name))
        verify_written(written, draft, threads)
    return written


@dataclass(frozen=True)
class WrittenPart:
    """What the manifest has to know of a part.

    hashes: of its boxes, in the order of the plan, 32 bytes each. sizes: of the streams, in bytes. needs_parent: for
    each box.
    """

    file: PartFile
    hashes: NDArray[np.uint8]
    sizes: NDArray[np.int64]
    needs_parent: NDArray[np.bool_]


def planned(name: str, label: Label, dtype: str, shape: Sequence[int], layout: int, second: str = "") -> Entry:
    """Return the entry of a tensor that is to be written in parts. second: the tensor that must be decoded before."""
    return Entry(name, label, dtype, tuple(shape), "", 0, Sharded(layout, 0, second, False))


def plan_of(header: Header) -> Plan:
    """Return the plan by which the parts of a checkpoint were written."""
    entries = tuple(entry for entry in header.entries if entry.scheme.layout_number is not None)
    return Plan(entries, header.layouts, len(header.parts))


def depends_on(stored: StoredTensor) -> str:
    """Return the name of the tensor that must be decoded before this one; an empty text if there is none."""
    other = form_of(stored).other
    return "" if other is None else other[0]


def read_boxes(chain: list[CheckpointFile], own: Iterable[tuple[Entry, Box]]) -> Boxes:
    """Read boxes of a checkpoint. chain: ``Run.chain`` of it."""
    by_name: dict[str, list[Box]] = {}
    for entry, box in own:
        by_name.setdefault(entry.name, []).append(box)
    read = load_boxes(chain, by_name.items())
    return {(name, box): stored for name, found in read for box, stored in zip(by_name[name], found, strict=True)}


def base_of_boxes(chain: list[CheckpointFile], own: Iterable[tuple[Entry, Box]]) -> Base:
    """Read boxes of a checkpoint, as far as it has them, as the base of a part."""
    header = chain[0].header
    there = [
        (entry, box)
        for entry, box in own
        if (known := header.by_name.get(entry.name)) and known.shape == entry.shape and not known.external
    ]
    return Base.of_boxes(Parent(header.step, header.identity), read_boxes(chain, there))


def write_part(
    folder: Path,
    own: Sequence[tuple[Entry, Box]],
    boxes: Boxes,
    manifest: Header,
    base: Base | None,
    again: bool = False,
) -> tuple[WrittenPart, Base]:
    """Write a part, make it durable, read it back and compare it with what was to be stored. Name it by its content.

    folder: of the parts. own: its boxes, in order. boxes: what is stored of them. manifest: begun. base: boxes
    of the last checkpoint, by their name in a part. Returns what the manifest has to know, and the next part's base.
    again: the part is re-coded, and others may depend on its levels. If this fails, a file may be left in the folder.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: this process does not see the folder for the parts of the checkpoint, which another one "
            "has made there: all processes need one folder on a file system that they share"
        )
    tensors: dict[str, StoredTensor] = {}
    labels: dict[str, Label] = {}
    for entry, box in own:
        name = box_name(entry.name, box)
        tensors[name], labels[name] = _in_part(boxes, boxes[entry.name, box], box), entry.label
    if base is not None:  # a box of another shape is not a parent
        fitting = {name: t for name, t in base.tensors.items() if name in tensors and t.shape == tensors[name].shape}
        base = replace(base, tensors=fitting, hashes={name: base.hashes[name] for name in fitting})
    header = Header(manifest.step, manifest.sequence, base.parent if base else None, None, (), {})
    temporary = folder / f"{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY}"
    try:
        with temporary.open("wb") as out:
            written = written_file(out, Draft(header, tensors, labels, base, again=again))
        path = folder / part_name(written.address)
        temporary.replace(path)
        sync_parent(path)
    except BaseException as error:
        error.add_note(f"while writing {temporary}; no checkpoint refers to it")
        add_disk_full_note(error, temporary)
        raise
    entries = written.header.entries
    found = WrittenPart(
        PartFile(written.address, written.size),
        np.frombuffer(bytes.fromhex("".join(entry.hash for entry in entries)), dtype=np.uint8).reshape(-1, 32),
        np.array([entry.size for entry in entries], dtype=np.int64),
        np.array([entry.needs_parent for entry in entries], dtype=bool),
    )
    return found, replace(Base.from_written(written.header, tensors, base), of_part=True)


def _in_part(boxes: Boxes, stored: StoredTensor, box: Box) -> StoredTensor:
    """Return a box that refers to other boxes of its part by the names that they have there."""
    if (needed := form_of(stored).other) is not None:
        name, own = needed
        other = boxes.get((name, box))
        if other is not None and stored_equal(other, own):
            return form_of(stored).with_other(box_name(name, box), other)
    return stored


def with_parts(header: Header, plan: Plan, written: Sequence[WrittenPart]) -> Header:
    """Return a header with what is in the parts, which are written. written: by number."""
    hash_of = [HashOfBoxes([place.box for place in layout]) for layout in plan.layouts]
    hashes = [part.hashes.tobytes().hex() for part in written]
    sizes = [part.sizes.tolist() for part in written]
    depends = [bool(part.needs_parent.any()) for part in written]
    next_box = [0] * len(written)
    entries = []
    for entry in plan.entries:
        # This runs once for every box of a checkpoint, of which there may be millions, so it does little.
        layout, held = layout_of(entry), []
        for place in plan.layouts[layout]:
            held.append((place.part, next_box[place.part]))
            next_box[place.part] += 1
        digest = hash_of[layout]([hashes[part][64 * i : 64 * i + 64] for part, i in held])
        stored = sum([sizes[part][i] for part, i in held])
        needs_parent = any(depends[part] and bool(written[part].needs_parent[i]) for part, i in held)
        scheme = Sharded(layout, stored, entry.scheme.depends_on or "", needs_parent)
        entries.append(replace(entry, hash=digest, scheme=scheme))
    files = tuple(part.file for part in written)
    return replace(header, entries=tuple(entries), parts=files, layouts=plan.layouts)
