"""A tensor of a sharded checkpoint: the boxes that are stored, each with its own form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.forms.exact import Exact
from dynaquant.engine.forms.form import Form, StoredTensor, in_pieces
from dynaquant.engine.forms.scheme import Coder, Scheme
from dynaquant.engine.forms.stored import cut, form_of, values_of
from dynaquant.engine.tensors.box import Box, tile


@dataclass(frozen=True)
class Patchwork(Form):
    """A tensor of boxes, which cover it once.

    ``cut`` takes boxes out of it, and puts those together that lie in a larger one.
    """

    dtype: torch.dtype
    shape: torch.Size
    boxes: tuple[tuple[Box, StoredTensor], ...]

    def pieces(self, size: int, device: torch.device, out: Tensor | None = None) -> Iterator[Tensor]:  # noqa: ARG002 - copied
        values = kernels.empty(self.shape, self.dtype)
        for box, stored in self.boxes:
            values[box.slices] = values_of(stored)
        yield from in_pieces(values.to(device), size)

    def encode(self, parent: StoredTensor | None, coder: Coder) -> tuple[Scheme, bytes]:
        return Exact(self.values()).encode(parent, coder)

    def cut(self, box: Box) -> StoredTensor:
        """Return a box: with levels if the boxes that overlap it fit together, else with values only.

        Only these boxes count, so the result is the same whether the others were read or not.
        """
        parts: list[tuple[Box, StoredTensor]] = []
        for other, piece in self.boxes:
            if other == box:
                return piece
            if (common := other.overlap(box)) is not None:
                parts.append((common.relative_to(box), cut(piece, common.relative_to(other))))
        shape = torch.Size(box.sizes)
        kinds = {type(form_of(piece)) for _, piece in parts}
        joined = next(iter(kinds)).join(self.dtype, shape, parts) if len(kinds) == 1 else None
        if joined is not None:
            return joined
        values = torch.empty(shape, dtype=self.dtype)
        for inside, piece in parts:
            values[inside.slices] = values_of(piece)
        return values

    def in_one(self) -> StoredTensor:
        return self.cut(Box.whole(self.shape))

    def has_values(self) -> bool:
        return any(form_of(piece).has_values() for _, piece in self.boxes)

    def describe(self) -> str:
        one = form_of(self.in_one())
        if isinstance(one, Exact) and len(self.boxes) > 1 and not all(isinstance(b, Tensor) for _, b in self.boxes):
            return f"its values are in {len(self.boxes)} boxes, each with a codebook of its own; it has no levels"
        return one.describe()


def patchwork(dtype: torch.dtype, shape: torch.Size, pieces: Sequence[tuple[Box, StoredTensor]]) -> StoredTensor:
    """Return a tensor of boxes that cover it once. A single box that is the whole tensor stays as it is.

    Raises ValueError if they do not cover it, overlap, or if a piece has another dtype or shape than its box.
    """
    for box, stored in pieces:
        if stored.dtype != dtype or tuple(stored.shape) != box.sizes or not box.fits(shape):
            raise ValueError("a piece does not fit its box")
    if not tile(shape, [box for box, _ in pieces]):
        raise ValueError("its boxes do not cover it once")
    if len(pieces) == 1 and pieces[0][0] == Box.whole(shape):
        return pieces[0][1]
    return Patchwork(dtype, shape, tuple(pieces))


def boxes_of(stored: StoredTensor) -> dict[Box, StoredTensor]:
    """Return the boxes of a tensor that is made of some; none for any other form."""
    return dict(stored.boxes) if isinstance(stored, Patchwork) else {}
