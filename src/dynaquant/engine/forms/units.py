"""A first moment in units of the root of its stored second moment (method 2.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.forms.form import Coded, Form, StoredTensor, piece_length, stored_equal
from dynaquant.engine.forms.levels import QuantizedTensor, decode_conditional, encode_conditional
from dynaquant.engine.forms.rank_one import RankOne
from dynaquant.engine.forms.scheme import Coder, Scheme
from dynaquant.engine.forms.schemes import SecondMomentUnits
from dynaquant.engine.forms.stored import cut
from dynaquant.engine.kernels.seconds import OfLevels, Outer, Seconds
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.dtypes import saturating_cast

SecondMoment = QuantizedTensor | RankOne
"""The forms of a second moment in whose units a first moment can be."""


@dataclass(frozen=True)
class ScaledMoment(Form):
    """A first moment as multiples of the root of its second moment.

    units: float32. second: has the same shape and is stored under the name ``second_name``.
    """

    dtype: torch.dtype
    units: QuantizedTensor
    second: SecondMoment
    second_name: str

    @property
    def shape(self) -> torch.Size:
        return self.units.shape

    @property
    def is_zero(self) -> bool:
        return self.second.shape == self.shape and self.units.is_zero

    @property
    def other(self) -> tuple[str, StoredTensor]:
        return self.second_name, self.second

    def with_other(self, name: str, stored: StoredTensor) -> ScaledMoment:
        return replace(self, second_name=name, second=cast(SecondMoment, stored))

    def pieces(self, size: int, device: torch.device, out: Tensor | None = None) -> Iterator[Tensor]:
        if self.second.shape != self.shape:
            raise ValueError("its second moment has another shape")
        all_units = self.units.pieces(size, device, out if self.dtype == self.units.dtype else None)
        if self.is_zero:
            yield from (units.to(self.dtype) for units in all_units)
            return
        kernel = kernels.for_device(device)
        for units, seconds in zip(all_units, _in_pieces(self.second, size, device), strict=True):
            kernel.multiply_by_roots(units, seconds)
            yield saturating_cast(units, self.dtype)

    def encode(self, parent: StoredTensor | None, coder: Coder) -> tuple[Scheme, bytes]:  # noqa: ARG002 - conditional
        units, coded = encode_conditional(self.units, parent.units if isinstance(parent, ScaledMoment) else None)
        return SecondMomentUnits(units, self.second_name), coded

    def can_refer_to(self, parent: StoredTensor | None, again: bool) -> bool:
        """Whether the parent can stand for it: only if its second moment is the same.

        Re-coded without the parent, it would lose its levels if they were in units of another second moment.
        """
        if not isinstance(parent, ScaledMoment):
            return not again
        return (not again or stored_equal(self.units, parent.units)) and stored_equal(parent.second, self.second)

    def cut(self, box: Box) -> ScaledMoment:
        return replace(self, units=self.units.cut(box), second=cast(SecondMoment, cut(self.second, box)))

    @classmethod
    def join(
        cls, dtype: torch.dtype, shape: torch.Size, parts: Sequence[tuple[Box, ScaledMoment]]
    ) -> ScaledMoment | None:
        _, first = parts[0]
        kind = type(first.second)
        if not all(type(each.second) is kind and each.second_name == first.second_name for _, each in parts):
            return None
        units = QuantizedTensor.join(torch.float32, shape, [(box, each.units) for box, each in parts])
        second = kind.join(first.second.dtype, shape, [(box, cast(Any, each.second)) for box, each in parts])
        return cls(dtype, units, second, first.second_name) if units and second else None

    def has_values(self) -> bool:
        return self.units.has_values()

    def describe(self) -> str:
        return "its values are levels times the root of its second moment"


def in_units(first: Tensor, second: SecondMoment) -> Tensor:
    """Return a first moment in units of the root of its second moment, float32. second: zero only where it is.

    Works piece by piece: second moments, roots and units of a large tensor would be three times its memory.
    """
    units = kernels.empty(torch.Size([first.numel()]), torch.float32, first.device)
    kernel = kernels.for_device(first.device)
    for part, seconds in _parts(first, second, piece_length(second.shape, first.device)):
        kernel.divide_by_roots(first.detach().reshape(-1)[part].to(torch.float32), seconds, units[part])
    return units.view(first.shape)


def levels_in_units(first: Tensor, second: SecondMoment, inverse: float) -> tuple[Tensor, Callable[[], int]]:
    """Return ``Kernels.grid_levels`` of ``in_units``. Works piece by piece and makes no units of a whole tensor."""
    flat, kernel = first.detach().reshape(-1), kernels.for_device(first.device)
    # On the host, units of float32 never leave the caches, so they need no pieces.
    in_one = first.is_cpu and first.dtype == torch.float32
    size = flat.numel() if in_one else piece_length(second.shape, first.device)
    levels = kernels.empty(flat.shape, torch.uint8, first.device)
    waits = [
        kernel.grid_levels_of_units(flat[part], seconds, inverse, levels[part])
        for part, seconds in _parts(first, second, size)
    ]
    return levels, lambda: max(highest() for highest in waits)


def _parts(first: Tensor, second: SecondMoment, size: int) -> Iterator[tuple[slice, Seconds]]:
    """Yield which values a piece has, and their second moments."""
    begin = 0
    for seconds in _in_pieces(second, size, first.device):
        part = slice(begin, begin + seconds.numel())
        yield part, seconds
        begin = part.stop


def _in_pieces(second: SecondMoment, size: int, device: torch.device) -> Iterator[Seconds]:
    """Yield second moments piece by piece, as kernels take them."""
    if isinstance(second, RankOne) and second.dtype in (torch.float32, torch.float64):
        yield from (Outer(*factors) for factors in second.factors(size, device))
    elif isinstance(second, QuantizedTensor) and not len(second.protected):
        table = second.table.to(torch.float32)
        levels = second.levels
        yield from (OfLevels(levels[begin : begin + size], table) for begin in range(0, len(levels), size))
    else:
        yield from (piece.to(torch.float32) for piece in second.pieces(size, device))


def decode(scheme: SecondMomentUnits, coded: Coded) -> ScaledMoment:
    """Return the tensor of a stream. Raises ValueError if it is damaged, or parent or second moment do not fit."""
    if not isinstance(coded.other, SecondMoment):
        raise ValueError(f"it is in units of {scheme.second}, which is not a second moment")
    before = coded.parent.units if isinstance(coded.parent, ScaledMoment) else None
    units = decode_conditional(
        scheme.units, Coded(torch.float32, coded.shape, coded.stream, before, overwrite=coded.overwrite)
    )
    return ScaledMoment(coded.dtype, units, coded.other, scheme.second)
