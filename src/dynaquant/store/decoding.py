"""Decodes one entry of a checkpoint file: a tensor, or boxes of it from parts. What it depends on is given.

An error says whether the tensor is damaged, or whether there is too little memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaquant.engine.forms.external import External, omitted
from dynaquant.engine.forms.form import Coded, StoredTensor, stored_equal
from dynaquant.engine.forms.patchwork import Patchwork, boxes_of, patchwork
from dynaquant.engine.forms.registry import decode, decodes_to
from dynaquant.engine.forms.stored import cut, in_one, known_by, stored_hash, values_of
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.dtypes import dtype_name, dtype_named
from dynaquant.engine.tensors.hashing import tensor_hash
from dynaquant.errors import CheckpointError
from dynaquant.formatting import in_bytes, plural
from dynaquant.store.chain import open_frozen, open_part
from dynaquant.store.container import CheckpointFile
from dynaquant.store.entry import Entry
from dynaquant.store.layout import HashOfBoxes, Layout, Place, box_name, layout_of


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor: the file that holds it, and its entry there."""

    file: CheckpointFile
    entry: Entry
    box: Box


class WrongValuesError(CheckpointError):
    """A tensor does not decode to the values that were stored: it, or a tensor of an ancestor, is damaged."""


@contextmanager
def explain_damage(file: CheckpointFile, entry: Entry) -> Iterator[None]:
    """Wrap a block that decodes a tensor. Raises CheckpointError for ValueErrors and if there is too little memory."""
    try:
        with explain_out_of_memory(file, entry):
            yield
    except ValueError as error:
        raise CheckpointError(f"{file.path}: tensor {entry.name} is damaged ({error})") from error


@contextmanager
def explain_out_of_memory(file: CheckpointFile, *entries: Entry) -> Iterator[None]:
    """Wrap a block that decodes these tensors of a file. A small file can claim that its tensors are large.

    Raises CheckpointError, with the memory they would take, if there is not enough.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):  # PyTorch's words
            raise
        what = f"tensor {entries[0].name}" if len(entries) == 1 else plural(len(entries), "tensor")
        raw, stored = (
            sum(sizes) for sizes in zip(*((entry.raw_size, entry.stored_size) for entry in entries), strict=True)
        )
        raise CheckpointError(
            f"{file.path}: there is not enough memory to decode {what}: the file claims {in_bytes(raw)} and stores "
            f"{in_bytes(stored)}; use a machine with more memory"
        ) from MemoryError(str(error))


def places_of(file: CheckpointFile, entry: Entry) -> Layout:
    """Return where the boxes of a tensor in parts are."""
    return file.header.layouts[layout_of(entry)]


def stored_boxes(file: CheckpointFile, entry: Entry, places: Iterable[Place] | None = None) -> list[StoredBox]:
    """Return the boxes of a tensor: itself if it is in the checkpoint's own file, else those in parts.

    places: of these boxes only. Raises CheckpointError if a part is missing, or does not hold such a box.
    """
    if entry.scheme.layout_number is None:
        return [StoredBox(file, entry, Box.whole(entry.shape))]
    found = []
    for place in places_of(file, entry) if places is None else places:
        part, name = open_part(file, place.part), box_name(entry.name, place.box)
        own = part.header.by_name.get(name)
        if own is None or own.dtype != entry.dtype or own.shape != place.box.sizes:
            raise CheckpointError(f"{part.path}: {name} is not there, or has another shape")
        if own.scheme.layout_number is not None or own.external:
            raise CheckpointError(f"{part.path}: the values of {name} are not in the part")
        found.append(StoredBox(part, own, place.box))
    return found


def check_reference(file: CheckpointFile, entry: Entry, parent: CheckpointFile) -> None:
    """Raise CheckpointError if the parent's tensor is not the one that an entry refers to."""
    if parent.header.by_name[entry.name].hash != entry.hash:
        raise CheckpointError(f"{file.path}: tensor {entry.name} is not the tensor of its parent that it refers to")


def decode_entry(
    file: CheckpointFile,
    entry: Entry,
    parent: StoredTensor | None,
    others: Mapping[str, StoredTensor],
    boxes: Sequence[StoredBox] | None = None,
    overwrite: bool = False,
) -> StoredTensor:
    """Decode one entry of a checkpoint, without a comparison of its values with their hash.

    parent: the tensor in the parent. others: tensors of the same checkpoint that are decoded already. boxes: the stored
    ones to decode, by default all. overwrite: as for ``Coded``. Raises CheckpointError if it is damaged.
    """
    if entry.scheme.is_reference:
        assert parent is not None
        return parent
    if entry.external:
        return external_tensor(file, entry)
    other = others.get(entry.scheme.depends_on or "")
    stored = stored_boxes(file, entry) if boxes is None else boxes
    if entry.scheme.layout_number is None:
        return _decode(stored[0], parent, other, overwrite)
    dtype, shape, pieces = dtype_named(entry.dtype), torch.Size(entry.shape), []
    with explain_damage(file, entry):
        for each in stored:
            before, beside = (None if tensor is None else cut(tensor, each.box) for tensor in (parent, other))
            pieces.append((each.box, _decode_in_part(entry, each, before, beside)))
        if len(pieces) < len(places_of(file, entry)):
            return Patchwork(dtype, shape, tuple(pieces))
        return patchwork(dtype, shape, pieces)


def _decode_in_part(
    entry: Entry, stored: StoredBox, parent: StoredTensor | None, other: StoredTensor | None
) -> StoredTensor:
    """Decode a box of a tensor. parent: the same box in the parent. other: that of the tensor it depends on."""
    path, own, second = stored.file.path, stored.entry, entry.scheme.depends_on
    if own.needs_parent and parent is None:
        raise CheckpointError(f"{path}: {own.name} needs a parent, but tensor {entry.name} has none")
    needed = own.scheme.depends_on
    if needed is not None and (other is None or second is None or needed != box_name(second, stored.box)):
        raise CheckpointError(f"{path}: {own.name} depends on {needed}, and its tensor on {second or 'no other'}")
    if own.scheme.is_reference:
        assert parent is not None
        return parent
    found = _decode(stored, parent, None if needed is None else other)
    return found if second is None else known_by(found, second)


def _decode(
    stored: StoredBox, parent: StoredTensor | None, other: StoredTensor | None, overwrite: bool = False
) -> StoredTensor:
    file, entry = stored.file, stored.entry
    with explain_damage(file, entry):
        return decode(entry.scheme, _coded(file, entry, parent, other, overwrite))


def _coded(
    file: CheckpointFile,
    entry: Entry,
    parent: StoredTensor | None,
    other: StoredTensor | None,
    overwrite: bool = False,
) -> Coded:
    return Coded(dtype_named(entry.dtype), torch.Size(entry.shape), file.read(entry), in_one(parent), other, overwrite)


def external_tensor(file: CheckpointFile, entry: Entry) -> External:
    """Return the tensor of an entry whose values are not in the checkpoint: frozen or omitted.

    Raises CheckpointError if the file of frozen parameters does not hold it.
    """
    if (identity := entry.scheme.frozen_file) is not None:
        holder = open_frozen(file, identity)
        found = holder.header.by_name.get(entry.name)
        fits = found is not None and (found.dtype, found.shape, found.hash) == (entry.dtype, entry.shape, entry.hash)
        if found is None or not fits or not found.scheme.is_exact or found.needs_parent:
            raise CheckpointError(f"{file.path}: {entry.name} is not in {holder.path.name}, where it should be")
        return tensor_in(holder, found)
    return omitted(entry.name, dtype_named(entry.dtype), torch.Size(entry.shape), entry.hash)


def tensor_in(holder: CheckpointFile, entry: Entry) -> External:
    """Return a tensor of a file of frozen parameters. Its values are decoded and checked when asked for."""
    dtype, shape = dtype_named(entry.dtype), torch.Size(entry.shape)

    def values() -> Tensor:
        with explain_damage(holder, entry):
            tensor = values_of(decode(entry.scheme, Coded(dtype, shape, holder.read(entry))))
        if tensor_hash(tensor) != entry.hash:
            raise CheckpointError(f"{holder.path}: tensor {entry.name} does not decode to the values that were stored")
        return tensor

    return External(dtype, shape, entry.hash, holder.header.identity, values)


def holds(
    file: CheckpointFile,
    entry: Entry,
    parent: StoredTensor | None,
    others: Mapping[str, StoredTensor],
    wanted: StoredTensor,
) -> bool:
    """Whether an entry of this file decodes to a stored tensor, bit for bit. Raises CheckpointError if it is damaged.

    parent, others: as for ``decode_entry``.
    """
    if not entry.scheme.has_stream:
        return stored_equal(decode_entry(file, entry, parent, others), wanted)
    if (entry.dtype, entry.shape) != (dtype_name(wanted.dtype), wanted.shape):
        return False
    with explain_damage(file, entry):
        other = others.get(entry.scheme.depends_on or "")
        return decodes_to(entry.scheme, _coded(file, entry, parent, other), wanted)


def check_values(
    file: CheckpointFile, entry: Entry, decoded: StoredTensor, boxes: Sequence[StoredBox] | None = None
) -> None:
    """Compare decoded boxes of a tensor with their hashes. boxes: as for ``decode_entry``.

    Raises CheckpointError for the first that has other values, or if the tensor's hash is not that of all boxes.
    """
    stored = stored_boxes(file, entry) if boxes is None else boxes
    pieces = boxes_of(decoded)
    for each in stored:
        piece = pieces[each.box] if each.box in pieces else cut(decoded, each.box)
        with explain_damage(each.file, each.entry):
            right = stored_hash(piece) == each.entry.hash
        if not right:
            raise wrong_values(each.file, each.entry)
    complete = entry.scheme.layout_number is not None and len(stored) == len(places_of(file, entry))
    if complete and HashOfBoxes([each.box for each in stored])([each.entry.hash for each in stored]) != entry.hash:
        raise wrong_values(file, entry)


def wrong_values(file: CheckpointFile, entry: Entry) -> WrongValuesError:
    """Return the error for a tensor with other values than were stored."""
    return WrongValuesError(f"{file.path}: tensor {entry.name} does not decode to the values that were stored")
