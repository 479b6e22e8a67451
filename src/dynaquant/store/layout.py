"""The parts of a checkpoint: the files that its writers have written, and which boxes of tensors are in them.

A checkpoint that one process writes has one part, in its own file, which holds whole tensors. So it names no others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from dynaquant.cached import cached_property
from dynaquant.engine.tensors.box import Box, tile
from dynaquant.store.entry import Entry

FOLDER = "parts"
"""The folder in a run with the parts of its checkpoints."""
_ADDRESS = re.compile("[0-9a-f]{32}")
_PART_NAME = re.compile(r"[0-9a-f]{32}\.dqc")
_LARGEST = 2**62


@dataclass(frozen=True)
class PartFile:
    """One part in a file of its own: the checksum of its header, which is its name, and its size in bytes."""

    address: str
    size: int


@dataclass(frozen=True)
class Place:
    """A box of a tensor, and the number of the part that it is in."""

    part: int
    box: Box


Layout = tuple[Place, ...]
"""Where all boxes of a tensor are. Tensors that are divided alike have the same layout."""


@dataclass(frozen=True)
class Plan:
    """Which part holds which boxes of which tensors. All processes have the same plan.

    entries: of the tensors that are in parts. Before they are written, without hashes and sizes.
    """

    entries: tuple[Entry, ...]
    layouts: tuple[Layout, ...]
    parts: int

    def boxes_of(self, part: int) -> list[tuple[Entry, Box]]:
        """Return the boxes of a part, in the order in which it holds them."""
        own = self._by_part.get(part, {})
        return [(entry, box) for entry in self.entries for box in own.get(layout_of(entry), ())]

    @cached_property
    def _by_part(self) -> dict[int, dict[int, list[Box]]]:
        found: dict[int, dict[int, list[Box]]] = {}
        for number, layout in enumerate(self.layouts):
            for place in layout:
                found.setdefault(place.part, {}).setdefault(number, []).append(place.box)
        return found


def layout_of(entry: Entry) -> int:
    """Return the number of the layout of a tensor in parts."""
    assert entry.scheme.layout_number is not None
    return entry.scheme.layout_number


def parts_to_json(parts: Sequence[PartFile], layouts: Sequence[Layout]) -> dict[str, Any]:
    """Return parts and layouts as a header keeps them."""
    return {
        "parts": [[part.address, part.size] for part in parts],
        "layouts": [
            [[place.part, list(place.box.offsets), list(place.box.sizes)] for place in layout] for layout in layouts
        ],
    }


def parts_from_json(data: Any) -> tuple[tuple[PartFile, ...], tuple[Layout, ...]]:
    """Read the result of ``parts_to_json``. Raises KeyError, TypeError or ValueError if it is not valid."""
    parts = tuple(PartFile(_address(address), _number(size)) for address, size in data["parts"])
    layouts = tuple(
        tuple(
            Place(_number(part), Box(tuple(map(_number, offsets)), tuple(map(_number, sizes))))
            for part, offsets, sizes in layout
        )
        for layout in data["layouts"]
    )
    if any(place.part >= len(parts) for layout in layouts for place in layout):
        raise ValueError("a box is in a part that it does not have")
    return parts, layouts


def check_layouts(layouts: Sequence[Layout], entries: Iterable[Entry]) -> None:
    """Raise ValueError if the boxes of an entry do not cover its tensor, each element once."""
    checked = set()  # many tensors have the same layout and shape
    for entry in entries:
        number = entry.scheme.layout_number
        if number is not None and (number, entry.shape) not in checked:
            if number >= len(layouts):
                raise ValueError(f"tensor {entry.name} has a layout that is not there")
            boxes = [place.box for place in layouts[number]]
            if not all(box.fits(entry.shape) for box in boxes) or not tile(entry.shape, boxes):
                raise ValueError(f"the boxes of {entry.name} do not cover it once")
            checked.add((number, entry.shape))


def part_name(address: str) -> str:
    """Return the name of the file of a part."""
    return f"{address}.dqc"


def is_part_name(name: str) -> bool:
    """Whether this is the name of a part's file. Users may have put other files into the folder."""
    return _PART_NAME.fullmatch(name) is not None


def box_name(name: str, box: Box) -> str:
    """Return the name of a box in its part, e.g. ``model.weight@64,0``."""
    return f"{name}@{','.join(map(str, box.offsets))}"


class HashOfBoxes:
    """Computes hashes of tensors that are divided into the same boxes, from the hashes of the boxes in their order."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._order = sorted(range(len(boxes)), key=boxes.__getitem__)
        self._texts = [f"{list(boxes[i].offsets)}{list(boxes[i].sizes)}" for i in self._order]

    def __call__(self, digests: Sequence[str]) -> str:
        """Return the hash of a tensor, 64 hexadecimal digits. digests: of its boxes."""
        pieces = [text + digests[i] for text, i in zip(self._texts, self._order, strict=True)]
        return blake3("".join(["boxes", *pieces]).encode()).hexdigest()


def _address(value: Any) -> str:
    if not isinstance(value, str) or not _ADDRESS.fullmatch(value):
        raise ValueError(f"the address of a part is {value!r}")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"{value!r} is not a number of at least 0")
    return value
