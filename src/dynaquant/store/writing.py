"""Encodes a checkpoint in memory to a file, against the base of a delta, and verifies the written file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.forms.scheme import Coder
from dynaquant.engine.forms.schemes import Reference
from dynaquant.engine.forms.stored import can_refer_to, form_of, in_one, stored_hash, values_of
from dynaquant.engine.label import Label
from dynaquant.engine.tensors.dtypes import dtype_name
from dynaquant.errors import CheckpointError
from dynaquant.store.container import CheckpointFile, CheckpointWriter, Header, Parent
from dynaquant.store.entry import Entry
from dynaquant.store.in_order import in_order
from dynaquant.store.reading import holds


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: the JSON tree of a state, and its tensors with their labels, by name.

    coder: for the levels of weights. lossless_copy: the tensors before quantization, if one is kept. frozen: names
    of tensors that go into the run's file of frozen parameters.
    """

    step: int
    tree: Any
    tensors: Mapping[str, StoredTensor]
    labels: Mapping[str, Label]
    record: dict[str, Any] = field(default_factory=dict)
    coder: Coder = "conditional"
    lossless_copy: Mapping[str, StoredTensor] | None = None
    frozen: Collection[str] = ()


@dataclass(frozen=True)
class Base:
    """What the next delta is conditioned on: a checkpoint of the run, its tensors as stored, and their hashes.

    shapes: of a loaded checkpoint, those of the whole tensors, of which a rank may hold a part.
    """

    parent: Parent
    hashes: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def from_loaded(cls, header: Header, tensors: Mapping[str, StoredTensor]) -> Base:
        """Return the base for a checkpoint whose tensors were decoded from its file."""
        shapes = {entry.name: entry.shape for entry in header.entries}
        return cls(Parent(header.step, header.identity), _hashes(header), tensors, shapes)

    @classmethod
    def of_boxes(cls, parent: Parent, boxes: Mapping[str, StoredTensor]) -> Base:
        """Return the base for a part. boxes: of the parent, by their name in a part."""
        return cls(parent, {name: stored_hash(stored) for name, stored in boxes.items()}, boxes)

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


def encode_entry(
    name: str, tensors: Mapping[str, StoredTensor], label: Label, base: Base | None, coder: Coder, again: bool
) -> tuple[Entry, bytes]:
    """Return the entry and the stream of a tensor.

    again: True when re-coding. Other files may depend on its levels, so these must not change.
    """
    stored = form_of(tensors[name])
    digest = stored.digest()
    parent = in_one(base.tensors.get(name)) if base else None
    if base is not None and base.hashes.get(name) == digest and can_refer_to(stored, parent, again):
        return Entry(name, label, dtype_name(stored.dtype), stored.shape, digest, 0, Reference()), b""
    if stored.other is not None and tensors.get(stored.other[0]) is not stored.other[1]:
        stored = form_of(stored.values())  # e.g. in units of a second moment that has changed since
    scheme, coded = stored.encode(parent, coder)
    return Entry(name, label, dtype_name(stored.dtype), stored.shape, digest, len(coded), scheme), coded


def write_checkpoint(
    out: BinaryIO,
    draft: Header,
    tensors: Mapping[str, StoredTensor],
    labels: Mapping[str, Label],
    base: Base | None,
    coder: Coder,
    again: bool = False,
    threads: int = 1,
    durable: bool = True,
) -> None:
    """Write a checkpoint file: the streams of the tensors, then ``draft`` with its entries filled in.

    again: it is re-coded, and others may depend on its levels. threads: how many tensors are encoded at a time; with
    more than one, some streams wait in memory (``in_order.MOST_BYTES``). durable: wait until the file is on the disk.
    """
    writer = CheckpointWriter(out)
    entries = []

    def encoded(name: str) -> tuple[Entry, bytes]:
        return encode_entry(name, tensors, labels[name], base, coder, again)

    for entry, coded in in_order(encoded, tensors, threads, lambda found: len(found[1])):
        entries.append(entry)
        writer.add(coded)
    writer.finish(replace(draft, entries=tuple(entries)), durable)


def verify_written(
    file: CheckpointFile, tensors: Mapping[str, StoredTensor], base: Base | None, threads: int = 1
) -> None:
    """Decode a file that was just written and compare it with the tensors that were to be stored.

    threads: how many tensors are decoded at a time. Raises CheckpointError for the first wrong tensor.
    """
    parents = base.tensors if base else {}

    def is_right(entry: Entry) -> bool:
        # A reference has the hash of the base, which was verified when it was written or loaded.
        if entry.scheme.is_reference:
            return True
        wanted = tensors[entry.name]
        if entry.scheme.is_exact:
            wanted = values_of(wanted)
        return holds(file, entry, parents.get(entry.name), tensors, wanted)

    entries = file.header.entries
    for entry, right in zip(entries, in_order(is_right, entries, threads), strict=True):
        if not right:
            raise CheckpointError(f"{file.path}: tensor {entry.name} does not decode to the values that were stored")
