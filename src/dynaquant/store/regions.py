"""Reads boxes of tensors, whether a checkpoint is one file or sharded, and however its parents are.

A rank of a sharded training reads what it holds, and no more: the parts that overlap its boxes, and of the parents what
these parts are conditioned on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.forms.patchwork import Patchwork
from dynaquant.engine.forms.stored import cut
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.dtypes import dtype_named
from dynaquant.errors import CheckpointError
from dynaquant.store.chain import detect_run_changes, name_step_in_errors, open_part
from dynaquant.store.container import CheckpointFile
from dynaquant.store.entry import Entry
from dynaquant.store.layout import Place
from dynaquant.store.parts import decode_box, entry_of_box, places_of
from dynaquant.store.reading import decode_entry, decoded_hash, load_tensor


def load_boxes(
    chain: list[CheckpointFile], wanted: Iterable[tuple[str, list[Box]]]
) -> Iterator[tuple[str, list[StoredTensor]]]:
    """Yield boxes of the tensors of a checkpoint, each checked against its hash. Holds one tensor at a time.

    chain: ``Run.chain`` of the checkpoint. wanted: names of tensors, with boxes of each. Raises CheckpointError, naming
    file and tensor, if a tensor is missing, damaged, or does not have such a box.
    """
    needed: NeededPlaces = {}
    with name_step_in_errors(chain[0]), detect_run_changes(chain):
        for name, boxes in wanted:
            reader = _TensorReader(chain, needed)
            yield name, [reader.read(0, name, box) for box in boxes]


NeededPlaces = dict[tuple[int, int, Box], list[Place]]
"""The places with elements of a box, by index in the chain, index of the layout, and box. Tensors share layouts."""


class _TensorReader:
    """Reads boxes of one tensor, and of the tensors that it depends on. Remembers what it has decoded."""

    def __init__(self, chain: list[CheckpointFile], needed: NeededPlaces) -> None:
        self._chain, self._needed = chain, needed
        self._whole: dict[tuple[int, str], StoredTensor] = {}
        self._places: dict[tuple[int, str, Place], StoredTensor] = {}

    def read(self, level: int, name: str, box: Box) -> StoredTensor:
        """Return a box of a tensor. level: index of the checkpoint in the chain."""
        file = self._chain[level]
        entry = file.header.by_name.get(name)
        if entry is None or not box.fits(entry.shape):
            raise CheckpointError(f"{file.path}: there is no tensor {name!r} with a box {box.offsets}, {box.sizes}")
        if entry.scheme.layout_number is None:
            if (level, name) not in self._whole:
                self._whole[level, name] = load_tensor(self._chain[level:], name)
            return cut(self._whole[level, name], box)
        key = level, entry.scheme.layout_number, box
        if (needed := self._needed.get(key)) is None:
            needed = [place for place in places_of(file, entry) if place.box == box or place.box.overlap(box)]
            self._needed[key] = needed
        boxes = tuple((place.box, self._at(level, entry, place)) for place in needed)
        return cut(Patchwork(dtype_named(entry.dtype), torch.Size(entry.shape), boxes), box)

    def _at(self, level: int, entry: Entry, place: Place) -> StoredTensor:
        """Return a stored box of a sharded tensor."""
        key = level, entry.name, place
        if key not in self._places:
            file = self._chain[level]
            own = entry_of_box(file, entry, place)
            parent = self.read(level + 1, entry.name, place.box) if own.needs_parent else None
            second = entry.scheme.depends_on
            other = None if second is None else self.read(level, second, place.box)
            stored = decode_box(file, entry, place, parent, other, decode_entry)
            part = open_part(file, place.part)
            if level == 0 and decoded_hash(part, own, stored) != own.hash:
                raise CheckpointError(f"{part.path}: tensor {own.name} does not decode to the values that were stored")
            self._places[key] = stored
        return self._places[key]
