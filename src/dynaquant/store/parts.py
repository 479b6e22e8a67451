"""Reads tensors from the parts of a sharded checkpoint. Each part is a checkpoint file whose tensors are boxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.forms.patchwork import patchwork
from dynaquant.engine.forms.stored import cut, known_by, stored_hash
from dynaquant.engine.tensors.dtypes import dtype_named
from dynaquant.errors import CheckpointError
from dynaquant.store.chain import open_part
from dynaquant.store.container import CheckpointFile
from dynaquant.store.entry import Entry
from dynaquant.store.layout import Layout, Place, box_name, sharded_hash

DecodeEntry = Callable[[CheckpointFile, Entry, StoredTensor | None, Mapping[str, StoredTensor]], StoredTensor]
"""``reading.decode_entry``, for entries that are not sharded themselves."""


def decode_sharded(
    file: CheckpointFile,
    entry: Entry,
    parent: StoredTensor | None,
    others: Mapping[str, StoredTensor],
    decode_entry: DecodeEntry,
) -> StoredTensor:
    """Return a whole tensor from its boxes. parent, others: whole tensors.

    Raises CheckpointError if a box is missing or damaged. Values are not compared with their hash.
    """
    boxes = []
    other = others.get(entry.scheme.depends_on or "")
    try:
        for place in places_of(file, entry):
            before, beside = (None if tensor is None else cut(tensor, place.box) for tensor in (parent, other))
            boxes.append((place.box, decode_box(file, entry, place, before, beside, decode_entry)))
        return patchwork(dtype_named(entry.dtype), torch.Size(entry.shape), boxes)
    except ValueError as error:
        raise CheckpointError(f"{file.path}: tensor {entry.name} is damaged ({error})") from error


def decode_box(
    file: CheckpointFile,
    entry: Entry,
    place: Place,
    parent: StoredTensor | None,
    other: StoredTensor | None,
    decode_entry: DecodeEntry,
) -> StoredTensor:
    """Return one box of a tensor.

    parent: the same box of the parent's tensor. other: the same box of the tensor that this one depends on. Raises
    CheckpointError if it is damaged.
    """
    part, own = open_part(file, place.part), entry_of_box(file, entry, place)
    if own.needs_parent and parent is None:
        raise CheckpointError(f"{part.path}: {own.name} needs a parent, but tensor {entry.name} has none")
    needed, second = own.scheme.depends_on, entry.scheme.depends_on
    if needed is not None and (other is None or second is None or needed != box_name(second, place.box)):
        raise CheckpointError(f"{part.path}: {own.name} depends on {needed}, and its tensor on {second or 'no other'}")
    others = {} if needed is None or other is None else {needed: other}
    stored = decode_entry(part, own, parent, others)
    return stored if second is None else known_by(stored, second)


def hash_of_boxes(file: CheckpointFile, entry: Entry, stored: StoredTensor) -> str:
    """Return the hash of a whole tensor as its entry has it. Raises ValueError if its parts do not fit together."""
    return sharded_hash((place.box, stored_hash(cut(stored, place.box))) for place in places_of(file, entry))


def entry_of_box(file: CheckpointFile, entry: Entry, place: Place) -> Entry:
    """Return the entry of a box in its part. Raises CheckpointError if it is not there, or is not of that tensor."""
    part = open_part(file, place.part)
    own = part.header.by_name.get(box_name(entry.name, place.box))
    if own is None or own.dtype != entry.dtype or own.shape != place.box.sizes:
        raise CheckpointError(f"{part.path}: {box_name(entry.name, place.box)} is not there, or has another shape")
    if own.scheme.layout_number is not None or own.external:
        raise CheckpointError(f"{part.path}: the values of {own.name} are not in the part")
    return own


def places_of(file: CheckpointFile, entry: Entry) -> Layout:
    """Return where the boxes of a tensor are."""
    assert file.header.parts is not None
    assert entry.scheme.layout_number is not None
    return file.header.parts.layouts[entry.scheme.layout_number]
