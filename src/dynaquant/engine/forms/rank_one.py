"""A matrix as the product of one value per row and one value per column (method 2.3, as in Adafactor)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from dynaquant.cached import cached_property
from dynaquant.engine import kernels
from dynaquant.engine.forms.form import Coded, Form, StoredTensor, in_pieces
from dynaquant.engine.forms.levels import QuantizedTensor, decode_conditional, encode_conditional
from dynaquant.engine.forms.scheme import MAX_EXPANSION, Coder, Scheme
from dynaquant.engine.forms.schemes import RankOneFactors
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.dtypes import saturating_cast


@dataclass(frozen=True)
class RankOne(Form):
    """A tensor as rows times columns.

    A tensor of more dimensions counts as the matrix of its first dimension and all others together. rows, columns:
    float32, one-dimensional.
    """

    dtype: torch.dtype
    shape: torch.Size
    rows: QuantizedTensor
    columns: QuantizedTensor

    @cached_property
    def _factor_values(self) -> tuple[Tensor, Tensor]:
        """The values of rows and columns, on the host."""
        return self.rows.values(), self.columns.values()

    @property
    def is_positive(self) -> bool:
        """Whether all values are above zero: the smallest row times the smallest column is."""
        rows, columns = self._factor_values
        if not rows.numel() or not columns.numel():
            return True
        return bool(saturating_cast(rows.min() * columns.min(), self.dtype) > 0)

    def pieces(self, size: int, device: torch.device, out: Tensor | None = None) -> Iterator[Tensor]:
        begin = 0
        for rows, columns in self.factors(size, device):
            end = begin + len(rows) * len(columns)
            place = None if out is None or out.dtype != torch.float32 else out[begin:end]
            yield saturating_cast(kernels.for_device(device).outer(rows, columns, place), self.dtype)
            begin = end

    def factors(self, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield some rows and all columns, whose outer product is a piece of the values in float32.

        Raises ValueError as ``pieces`` does.
        """
        rows, columns = self._factor_values
        if device != kernels.HOST:
            rows, columns = rows.to(device), columns.to(device)
        if rows.numel() * columns.numel() != self.shape.numel():
            raise ValueError("the rows and columns are those of a tensor of another shape")
        if self.shape.numel():
            for some_rows in in_pieces(rows, max(size // len(columns), 1)):
                yield some_rows, columns

    def values_at(self, indices: Tensor) -> Tensor:
        of_rows, of_columns = places(indices, max(self.shape[1:].numel(), 1))
        rows, columns = self._factor_values
        return saturating_cast(rows.index_select(0, of_rows) * columns.index_select(0, of_columns), self.dtype)

    def encode(self, parent: StoredTensor | None, coder: Coder) -> tuple[Scheme, bytes]:  # noqa: ARG002 - conditional
        before = parent if isinstance(parent, RankOne) else None
        rows, coded_rows = encode_conditional(self.rows, before.rows if before else None)
        columns, coded_columns = encode_conditional(self.columns, before.columns if before else None)
        smallest = -(-self.shape.numel() * self.dtype.itemsize // MAX_EXPANSION)
        return RankOneFactors(rows, columns), (coded_rows + coded_columns).ljust(smallest, b"\0")

    def cut(self, box: Box) -> RankOne:
        rows, columns = _factors(box)
        return RankOne(self.dtype, torch.Size(box.sizes), self.rows.cut(rows), self._cut_columns(columns))

    @classmethod
    def join(cls, dtype: torch.dtype, shape: torch.Size, parts: Sequence[tuple[Box, RankOne]]) -> RankOne | None:
        boxes = [_factors(box) for box, _ in parts]
        pairs = list(zip(boxes, (stored for _, stored in parts), strict=True))
        rows = QuantizedTensor.join(torch.float32, shape[:1], [(box, stored.rows) for (box, _), stored in pairs])
        columns = QuantizedTensor.join(torch.float32, shape[1:], [(box, stored.columns) for (_, box), stored in pairs])
        if rows is None or columns is None:
            return None
        joined = cls(dtype, shape, rows, replace(columns, shape=torch.Size([math.prod(shape[1:])])))
        # Boxes of the same rows could have been quantized apart. Then there are no rows for both.
        fits = all(
            torch.equal(joined.rows.cut(box).values(), stored.rows.values())
            and torch.equal(joined._cut_columns(other).values(), stored.columns.values())
            for (box, other), stored in pairs
        )
        return joined if fits else None

    def _cut_columns(self, columns: Box) -> QuantizedTensor:
        """Return the columns of a region. They are flat: a matrix has one dimension of columns."""
        found = replace(self.columns, shape=self.shape[1:]).cut(columns)
        return replace(found, shape=torch.Size([columns.elements]))

    def describe(self) -> str:
        return "its values are row means times column means; it has no levels of its own"


@lru_cache(maxsize=8)
def places(indices: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of elements. Tensors of one shape have the same sample, and division takes long."""
    return indices // width, indices % width


def _factors(box: Box) -> tuple[Box, Box]:
    """Return the rows of a box, and its columns as a region of all dimensions but the first."""
    return Box(box.offsets[:1], box.sizes[:1]), Box(box.offsets[1:], box.sizes[1:])


def decode(scheme: RankOneFactors, coded: Coded) -> RankOne:
    """Return the tensor of a stream. Raises ValueError if it is damaged, or the parent does not fit."""
    before = coded.parent if isinstance(coded.parent, RankOne) else None
    middle, end = scheme.rows.size, scheme.rows.size + scheme.columns.size
    if any(coded.stream[end:]):
        raise ValueError("its stream continues after the rows and columns")
    rows, columns = torch.Size([coded.shape[0]]), torch.Size([math.prod(coded.shape[1:])])
    return RankOne(
        coded.dtype,
        coded.shape,
        decode_conditional(
            scheme.rows, Coded(torch.float32, rows, coded.stream[:middle], before.rows if before else None)
        ),
        decode_conditional(
            scheme.columns, Coded(torch.float32, columns, coded.stream[middle:end], before.columns if before else None)
        ),
    )
