"""Decodes tensors of a checkpoint, or boxes of them, from its file, its parts and the files of its ancestors.

A tensor is stored as one or several boxes. One box, the whole tensor, lies in the checkpoint's own file; others lie in
parts. A process reads only the boxes that overlap what it asks for, and of the ancestors what these are conditioned on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dynaquant.engine.forms.form import Coded, StoredTensor, stored_equal
from dynaquant.engine.forms.patchwork import Patchwork, patchwork
from dynaquant.engine.forms.registry import decode, decodes_to
from dynaquant.engine.forms.stored import cut, in_one, known_by, stored_hash
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.dtypes import dtype_name, dtype_named
from dynaquant.errors import CheckpointError
from dynaquant.garbage import collection_paused
from dynaquant.store import frozen_tensors
from dynaquant.store.chain import detect_run_changes, name_step_in_errors, needed_entries, open_part
from dynaquant.store.container import CheckpointFile
from dynaquant.store.entry import Entry
from dynaquant.store.layout import Layout, Place, box_name, layout_of, sharded_hash
from dynaquant.store.out_of_memory import explain_out_of_memory

Tensors = dict[str, StoredTensor]


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor: the file that holds it, and its entry there."""

    file: CheckpointFile
    entry: Entry
    box: Box


def load_tensor(chain: list[CheckpointFile], name: str) -> StoredTensor:
    """Decode one tensor of a checkpoint, with the tensors that it depends on, and check it against its hash.

    chain: ``Run.chain`` of the checkpoint. Raises CheckpointError if the tensor is missing, or does not decode to the
    values that were stored.
    """
    if name not in chain[0].header.by_name:
        raise CheckpointError(f"{chain[0].path}: there is no tensor {name!r}")
    return load_tensors(chain, [name])[name]


def error_with_step(step: int, path: Path, text: str) -> CheckpointError:
    """Return a CheckpointError with ``text``, prefixed by the step unless the text names the checkpoint already."""
    itself = f"checkpoint step {step}: "
    return CheckpointError(text if text.startswith((itself, f"{path}: ")) else f"{itself}{text}")


def load_all(chain: list[CheckpointFile], names: Collection[str] | None = None) -> Tensors:
    """Decode the tensors of the first file of a chain and check each against its hash.

    names: of the tensors to decode, by default all.

    Raises CheckpointError, naming file and tensor, if a tensor cannot be decoded or has other values than were stored.
    """
    file = chain[0]
    with name_step_in_errors(file), detect_run_changes(chain):
        return load_tensors(chain, [entry.name for entry in file.header.entries] if names is None else names)


@collection_paused()
def load_tensors(
    chain: list[CheckpointFile], names: Collection[str], decoded: Mapping[str, StoredTensor] | None = None
) -> Tensors:
    """Decode tensors of the first file of a chain, and of its ancestors as far as needed.

    Returns them in the order of ``names``. decoded: tensors of the last file of the chain, decoded and checked before.
    That file is not read then.
    """
    tensors = _Reader(chain, decoded).read(dict.fromkeys(names))
    return {name: tensors[name] for name in names}


def load_boxes(
    chain: list[CheckpointFile], wanted: Iterable[tuple[str, list[Box]]]
) -> Iterator[tuple[str, list[StoredTensor]]]:
    """Yield boxes of the tensors of a checkpoint, each checked against its hash. Holds one tensor at a time.

    chain: ``Run.chain`` of the checkpoint. wanted: names of tensors, with boxes of each. Raises CheckpointError, naming
    file and tensor, if a tensor is missing, damaged, or does not have such a box.
    """
    file, reader = chain[0], _Reader(chain)
    with name_step_in_errors(file), detect_run_changes(chain):
        for name, boxes in wanted:
            entry = file.header.by_name.get(name)
            for box in boxes:
                if entry is None or not box.fits(entry.shape):
                    what = f"there is no tensor {name!r} with a box {box.offsets}, {box.sizes}"
                    raise CheckpointError(f"{file.path}: {what}")
            found = reader.read({name: boxes})[name] if boxes else None
            yield name, [] if found is None else [cut(found, box) for box in boxes]


_Wanted = Mapping[str, Sequence[Box] | None]
"""What is wanted of tensors, by name: boxes; None for the whole tensor."""


class _WrongValuesError(CheckpointError):
    """A tensor does not decode to the values that were stored: it, or a tensor of an ancestor, is damaged."""


class _Reader:
    """Reads tensors of the first file of a chain. decoded: as for ``load_tensors``."""

    def __init__(self, chain: list[CheckpointFile], decoded: Mapping[str, StoredTensor] | None = None) -> None:
        self._chain = chain if decoded is None else chain[:-1]
        self._files, self._decoded = chain, decoded or {}
        self._places: dict[tuple[int, int, tuple[Box, ...]], list[Place]] = {}  # tensors share layouts

    def read(self, wanted: _Wanted, all_: bool = False) -> Tensors:
        """Decode and check tensors. One of which boxes are wanted may have no others.

        all_: also check those of ancestors, to find the damaged file.
        """
        needed = self._needed(wanted)
        tensors: Tensors = dict(self._decoded)
        for depth, boxes in reversed(list(enumerate(needed))):
            parents, tensors = tensors, {}
            file = self._chain[depth]
            for name, stored in boxes.items():
                entry = file.header.by_name[name]
                parent = parents.get(name)
                # Nobody needs a parent that was decoded here, so its levels become those of the child.
                overwrite = parent is not None and parent is not self._decoded.get(name)
                tensors[name] = decode_entry(file, entry, parent, tensors, stored, overwrite)
                if entry.scheme.is_reference:
                    check_reference(file, entry, self._files[depth + 1])
            for name, stored in boxes.items() if depth == 0 or all_ else ():
                if tensors[name] is self._decoded.get(name):
                    continue  # unchanged since it was checked
                try:
                    check_values(file, file.header.by_name[name], tensors[name], stored)
                except _WrongValuesError:
                    if not all_:
                        self.read(wanted, all_=True)
                    raise
        return tensors

    def _needed(self, wanted: _Wanted) -> list[dict[str, list[StoredBox]]]:
        """Return, for each file that is needed, the boxes to decode there. A tensor comes after those it depends on."""
        found: list[dict[str, list[StoredBox]]] = []
        for depth, entries in enumerate(needed_entries(self._chain, wanted.keys())):
            asked, here = dict(wanted), dict[str, list[StoredBox]]()
            for entry in reversed(entries):
                if entry.name not in asked:
                    continue
                here[entry.name] = stored = self._stored(depth, entry, asked[entry.name])
                if (other := entry.scheme.depends_on) is not None:
                    before = asked.get(other, ())
                    in_parts = entry.scheme.layout_number is not None
                    own = [each.box for each in stored] if in_parts else None
                    asked[other] = None if before is None or own is None else [*before, *own]
            found.append({name: here[name] for name in reversed(here)})
            following: dict[str, Sequence[Box] | None] = {}
            for name, stored in here.items():
                needy = [each for each in stored if each.entry.needs_parent]
                if needy:
                    whole = needy[0].file is self._chain[depth]
                    following[name] = None if whole else [each.box for each in needy]
            wanted = following
        return found

    def _stored(self, depth: int, entry: Entry, boxes: Sequence[Box] | None) -> list[StoredBox]:
        """Return the stored boxes that overlap the wanted ones."""
        file = self._chain[depth]
        if (number := entry.scheme.layout_number) is None or boxes is None:
            return stored_boxes(file, entry)
        key = depth, number, tuple(boxes)
        if (places := self._places.get(key)) is None:
            whole = Box.whole(entry.shape)
            places = [
                place
                for place in places_of(file, entry)
                if any(box in (place.box, whole) or place.box.overlap(box) for box in boxes)
            ]
            self._places[key] = places
        return stored_boxes(file, entry, places)


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
        return frozen_tensors.external_tensor(file, entry)
    other = others.get(entry.scheme.depends_on or "")
    stored = stored_boxes(file, entry) if boxes is None else boxes
    if entry.scheme.layout_number is None:
        return _decode(stored[0], parent, other, overwrite)
    dtype, shape, pieces = dtype_named(entry.dtype), torch.Size(entry.shape), []
    try:
        for each in stored:
            before, beside = (None if tensor is None else cut(tensor, each.box) for tensor in (parent, other))
            pieces.append((each.box, _decode_in_part(entry, each, before, beside)))
        if len(pieces) < len(places_of(file, entry)):
            return Patchwork(dtype, shape, tuple(pieces))
        return patchwork(dtype, shape, pieces)
    except ValueError as error:
        raise CheckpointError(f"{file.path}: tensor {entry.name} is damaged ({error})") from error


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
    try:
        with explain_out_of_memory(file, entry):
            return decode(entry.scheme, replace(_coded(file, entry, parent, other), overwrite=overwrite))
    except ValueError as error:
        raise CheckpointError(f"{file.path}: tensor {entry.name} is damaged ({error})") from error


def _coded(file: CheckpointFile, entry: Entry, parent: StoredTensor | None, other: StoredTensor | None) -> Coded:
    return Coded(dtype_named(entry.dtype), torch.Size(entry.shape), file.read(entry), in_one(parent), other)


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
    try:
        with explain_out_of_memory(file, entry):
            other = others.get(entry.scheme.depends_on or "")
            return decodes_to(entry.scheme, _coded(file, entry, parent, other), wanted)
    except ValueError as error:
        raise CheckpointError(f"{file.path}: tensor {entry.name} is damaged ({error})") from error


def check_values(
    file: CheckpointFile, entry: Entry, decoded: StoredTensor, boxes: Sequence[StoredBox] | None = None
) -> None:
    """Compare decoded boxes of a tensor with their hashes. boxes: as for ``decode_entry``.

    Raises CheckpointError for the first that has other values, or if the tensor's hash is not that of all boxes.
    """
    stored = stored_boxes(file, entry) if boxes is None else boxes
    pieces = dict(decoded.boxes) if isinstance(decoded, Patchwork) else {}
    for each in stored:
        piece = pieces[each.box] if each.box in pieces else cut(decoded, each.box)
        try:
            with explain_out_of_memory(each.file, each.entry):
                right = stored_hash(piece) == each.entry.hash
        except ValueError as error:
            raise CheckpointError(f"{each.file.path}: tensor {each.entry.name} is damaged ({error})") from error
        if not right:
            raise _wrong_values(each.file, each.entry)
    complete = entry.scheme.layout_number is not None and len(stored) == len(places_of(file, entry))
    if complete and sharded_hash((each.box, each.entry.hash) for each in stored) != entry.hash:
        raise _wrong_values(file, entry)


def _wrong_values(file: CheckpointFile, entry: Entry) -> _WrongValuesError:
    return _WrongValuesError(f"{file.path}: tensor {entry.name} does not decode to the values that were stored")
