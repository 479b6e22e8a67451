"""The parts of a sharded checkpoint: the files that the ranks have written, and which boxes of tensors are in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from dynaquant.engine.tensors.box import Box, tile
from dynaquant.store.entry import Entry
from dynaquant.store.files import is_file_name

FOLDER = "parts-"
"""Prefix of the names of folders with parts."""
_IDENTITY = re.compile("[0-9a-f]{64}")
_LARGEST = 2**62


@dataclass(frozen=True)
class PartFile:
    """One part: its identity as a checkpoint file, and its size in bytes."""

    identity: str
    size: int


@dataclass(frozen=True)
class Place:
    """A box of a tensor, and the number of the part that it is in."""

    part: int
    box: Box


Layout = tuple[Place, ...]
"""Where all boxes of a tensor are. Tensors that are sharded alike have the same layout."""


@dataclass(frozen=True)
class Parts:
    """The parts of a checkpoint. folder: the name of their folder, beside the checkpoint's own file."""

    folder: str
    files: tuple[PartFile, ...]
    layouts: tuple[Layout, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the parts as a header keeps them."""
        return {
            "folder": self.folder,
            "files": [[file.identity, file.size] for file in self.files],
            "layouts": [
                [[place.part, list(place.box.offsets), list(place.box.sizes)] for place in layout]
                for layout in self.layouts
            ],
        }

    @classmethod
    def from_json(cls, data: Any) -> Parts:
        """Read the result of ``to_json``. Raises KeyError, TypeError or ValueError if it is not valid."""
        folder, files, layouts = data["folder"], data["files"], data["layouts"]
        if not is_file_name(folder) or not folder.startswith(FOLDER):
            raise ValueError(f"the folder of its parts is {folder!r}")
        found = cls(
            folder,
            tuple(PartFile(_identity(identity), _number(size)) for identity, size in files),
            tuple(
                tuple(
                    Place(_number(part), Box(tuple(map(_number, offsets)), tuple(map(_number, sizes))))
                    for part, offsets, sizes in layout
                )
                for layout in layouts
            ),
        )
        if any(place.part >= len(found.files) for layout in found.layouts for place in layout):
            raise ValueError("a box is in a part that it does not have")
        return found

    def check(self, entries: Iterable[Entry]) -> None:
        """Raise ValueError if the boxes of an entry do not cover its tensor, each element once."""
        checked = set()  # many tensors have the same layout and shape
        for entry in entries:
            number = entry.scheme.layout_number
            if number is not None and (number, entry.shape) not in checked:
                if number >= len(self.layouts):
                    raise ValueError(f"tensor {entry.name} has a layout that is not there")
                boxes = [place.box for place in self.layouts[number]]
                if not all(box.fits(entry.shape) for box in boxes) or not tile(entry.shape, boxes):
                    raise ValueError(f"the boxes of {entry.name} do not cover it once")
                checked.add((number, entry.shape))

    def file_name(self, part: int) -> str:
        """Return the path of a part from the folder of the run on."""
        return f"{self.folder}/{part_name(part)}"


def part_name(number: int) -> str:
    """Return the name of the file of a part."""
    return f"part-{number:05d}.dqc"


def box_name(name: str, box: Box) -> str:
    """Return the name of a box in its part, e.g. ``model.weight@64,0``."""
    return f"{name}@{','.join(map(str, box.offsets))}"


def sharded_hash(hashes: Iterable[tuple[Box, str]]) -> str:
    """Return the hash of a tensor that is stored as boxes, from the hashes of the boxes. 64 hexadecimal digits."""
    found = list(hashes)
    return HashOfBoxes([box for box, _ in found])([digest for _, digest in found])


class HashOfBoxes:
    """Computes hashes of tensors that are divided into the same boxes, from the hashes of the boxes in their order."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._order = sorted(range(len(boxes)), key=boxes.__getitem__)
        self._texts = [f"{list(boxes[i].offsets)}{list(boxes[i].sizes)}" for i in self._order]

    def __call__(self, digests: Sequence[str]) -> str:
        """Return the hash of a tensor. digests: of its boxes."""
        pieces = [text + digests[i] for text, i in zip(self._texts, self._order, strict=True)]
        return blake3("".join(["boxes", *pieces]).encode()).hexdigest()


def _identity(value: Any) -> str:
    if not isinstance(value, str) or not _IDENTITY.fullmatch(value):
        raise ValueError(f"the identity of a part is {value!r}")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"{value!r} is not a number of at least 0")
    return value
