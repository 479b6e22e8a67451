"""Levels with a codebook: the form of weights and second moments on grids, and of clusters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import _native
from dynaquant.engine import kernels
from dynaquant.engine.coding import byte_planes, conditional, rearrange
from dynaquant.engine.coding.rearrange import Levels
from dynaquant.engine.forms.form import Coded, Form, LevelCount, StoredTensor
from dynaquant.engine.forms.scheme import Coder, Scheme
from dynaquant.engine.forms.schemes import Conditional, Rearranged
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.codebook import (
    FIRST_BIN,
    PROTECTED,
    PRUNED,
    Centres,
    Codebook,
    Grid,
    LogGrid,
    in_common,
    same_levels,
)
from dynaquant.engine.tensors.dtypes import saturating_cast

NO_OUTLIERS = np.zeros(0, dtype=np.uint16)
_LEAST_GAIN = 0.03
"""Levels are conditioned on the parent's if that saves this share of their bits. Otherwise a restore does not need the
parent's (docs/decisions.md, "Which tensors are conditioned on the parent?")."""


@dataclass(frozen=True)
class QuantizedTensor(Form):
    """A tensor as levels and a codebook.

    dtype: float32, float64, bfloat16 or float16. levels: flat in C order. protected: the outliers as 16
    bits each, in C order: float16 for a float16 tensor, bfloat16 otherwise.
    """

    dtype: torch.dtype
    shape: torch.Size
    levels: NDArray[np.uint8]
    codebook: Codebook
    protected: NDArray[np.uint16]

    @property
    def centres(self) -> NDArray[np.float32]:
        """The value of each bin."""
        return self.codebook.values

    @property
    def parent_levels(self) -> Levels:
        """The levels on which the next checkpoint's delta is conditioned."""
        return Levels(self.levels, FIRST_BIN + self.codebook.bins)

    @property
    def is_zero(self) -> bool:
        if self.codebook.bins or len(self.protected):
            return False
        return self.levels.size > 0 and int(self.levels.max()) == PRUNED

    @property
    def is_positive(self) -> bool:
        """Whether it is plain that all values are above zero: none is pruned or an outlier, and all bins are."""
        if not self.levels.size:
            return True
        if len(self.protected) or int(self.levels.min()) == PRUNED:
            return False
        return bool(saturating_cast(torch.from_numpy(self.codebook.values).min(), self.dtype) > 0)

    @property
    def table(self) -> Tensor:
        """The value of each level but *protected*; for float64 in float32, which holds them all."""
        return _value_table(self.codebook, torch.float32 if self.dtype == torch.float64 else self.dtype)

    def pieces(self, size: int, device: torch.device, out: Tensor | None = None) -> Iterator[Tensor]:
        table, protected = self.table, self.protected
        for begin in range(0, self.levels.size, size):
            levels = self.levels[begin : begin + size]
            count = np.count_nonzero(levels == PROTECTED) if len(protected) else 0
            place = None if out is None or out.dtype != table.dtype else out[begin : begin + size]
            values = kernels.for_device(device).values(levels, table, protected[:count], device, place)
            yield values.to(self.dtype)
            protected = protected[count:]
        if len(protected):
            raise ValueError("the number of protected values differs from the number of protected levels")

    def values_at(self, indices: Tensor) -> Tensor:
        if len(self.protected):  # where a value's outlier lies is known only once those before it are counted
            return super().values_at(indices)
        levels = self.levels[indices.numpy()]
        return replace(self, shape=torch.Size([len(levels)]), levels=levels).values()

    def encode(self, parent: StoredTensor | None, coder: Coder) -> tuple[Scheme, bytes]:
        before = parent if isinstance(parent, QuantizedTensor) else None
        return _encode_rearranged(self, before) if coder == "rearranged" else encode_conditional(self, before)

    def cut(self, box: Box) -> QuantizedTensor:
        levels = self.levels.reshape(tuple(self.shape))[box.slices]
        protected = self.protected
        if len(protected):
            protected = self._dense_outliers()[box.slices][levels == PROTECTED]
        flat = np.ascontiguousarray(levels).reshape(-1)
        return replace(self, shape=torch.Size(box.sizes), levels=flat, protected=protected)

    @classmethod
    def join(
        cls, dtype: torch.dtype, shape: torch.Size, parts: Sequence[tuple[Box, QuantizedTensor]]
    ) -> QuantizedTensor | None:
        common = in_common([stored.codebook for _, stored in parts])
        if common is None:
            return None
        codebook, shifts = common
        levels = np.zeros(tuple(shape), dtype=np.uint8)
        any_outliers = any(len(stored.protected) for _, stored in parts)
        outliers = np.zeros(tuple(shape), dtype=np.uint16) if any_outliers else None
        for (box, stored), shift in zip(parts, shifts, strict=True):
            own = stored.levels.reshape(box.sizes)
            levels[box.slices] = np.where(own >= FIRST_BIN, own + np.uint8(shift), own) if shift else own
            if outliers is not None:
                outliers[box.slices] = stored._dense_outliers()
        protected = NO_OUTLIERS if outliers is None else outliers[levels == PROTECTED]
        return cls(dtype, shape, levels.reshape(-1), codebook, protected)

    def _dense_outliers(self) -> NDArray[np.uint16]:
        """Return the outliers in an array of the tensor's shape; zeros elsewhere."""
        found = np.zeros(self.levels.size, dtype=np.uint16)
        found[self.levels == PROTECTED] = self.protected
        return found.reshape(tuple(self.shape))

    def has_values(self) -> bool:
        return bool(self.levels.any())

    def describe(self) -> str:
        return "its values are those of its levels"

    def level_counts(self) -> list[LevelCount]:
        counts = np.bincount(self.levels, minlength=FIRST_BIN + len(self.centres))
        bins = [
            LevelCount(name, float(value), int(count))
            for name, value, count in zip(self.codebook.names, self.centres, counts[FIRST_BIN:], strict=True)
        ]
        clusters = isinstance(self.codebook, Centres)
        zero = LevelCount("pruned" if clusters else "0", 0.0, int(counts[PRUNED]))
        outliers = LevelCount("protected" if clusters else "outlier", None, int(counts[PROTECTED]))
        first, others = ([zero], bins) if clusters else ([], [zero, *bins])
        found = [*first, outliers, *sorted(others, key=lambda each: each.value or 0.0)]
        return [each for each in found if each.count]

    def migrated(self, other: StoredTensor) -> float | None:
        if not isinstance(other, QuantizedTensor) or not same_levels(self.codebook, other.codebook):
            return None
        return float(np.mean(self.levels != other.levels))


def levels_of(stored: StoredTensor) -> QuantizedTensor | None:
    """Return a tensor that is stored as levels; None for any other form."""
    return stored if isinstance(stored, QuantizedTensor) else None


@lru_cache(maxsize=256)
def _value_table(codebook: Codebook, dtype: torch.dtype) -> Tensor:
    """Return the value of every level."""
    centres = torch.from_numpy(codebook.values)
    return torch.cat((torch.zeros(FIRST_BIN, dtype=dtype, device="cpu"), saturating_cast(centres, dtype)))


def protected_values(tensor: Tensor, levels: Tensor) -> NDArray[np.uint16]:
    """Return the 16 bits of a tensor's protected elements, in C order. levels: flat, on the tensor's device."""
    half = torch.float16 if tensor.dtype == torch.float16 else torch.bfloat16
    flat = tensor.detach().to(levels.device).reshape(-1)
    if levels.device == kernels.HOST:  # not by PyTorch, whose threads would wait for one another
        places = np.frombuffer(_native.protected_places(levels.numpy()), dtype=np.int64)
        values = flat.index_select(0, torch.from_numpy(places.copy()))
    else:
        values = flat[levels == PROTECTED]
    largest = torch.finfo(half).max  # the clamp keeps the largest floats from rounding up to infinity
    return values.clamp(-largest, largest).to(half).cpu().view(torch.uint16).numpy()


def _encode_rearranged(stored: QuantizedTensor, parent: QuantizedTensor | None) -> tuple[Rearranged, bytes]:
    levels = stored.parent_levels
    before = parent.parent_levels if parent and parent.levels.size == levels.values.size else None
    arrangement, coded = rearrange.encode(levels, before)
    protected = byte_planes.encode(stored.protected.view(np.uint8), 2)
    scheme = Rearranged(stored.codebook.bins, len(stored.protected), len(protected), arrangement)
    return scheme, stored.centres.astype("<f4").tobytes() + protected + coded


def encode_conditional(stored: QuantizedTensor, parent: QuantizedTensor | None) -> tuple[Conditional, bytes]:
    """Return the scheme and the stream of a part (docs/format.md), conditioned on that of the parent if that pays."""
    codebook = stored.codebook
    if parent and (parent.levels.size != stored.levels.size or not conditional.comparable(codebook, parent.codebook)):
        parent = None
    coded = None if parent is None else conditional.encode_if_shorter(stored, parent, _LEAST_GAIN)
    if coded is None:
        parent, coded = None, conditional.encode(stored, None)
    head = codebook.values.astype("<f4").tobytes() if isinstance(codebook, Centres) else b""
    protected = byte_planes.encode(stored.protected.view(np.uint8), 2) if len(stored.protected) else b""
    scheme = Conditional(
        codebook="grid" if isinstance(codebook, Grid) else "log_grid" if isinstance(codebook, LogGrid) else "centres",
        bins=codebook.bins,
        first=codebook.rung if isinstance(codebook, Grid) else codebook.first if isinstance(codebook, LogGrid) else 0,
        pace=codebook.pace if isinstance(codebook, LogGrid) else 0,
        protected=len(stored.protected),
        protected_size=len(protected),
        needs_parent=parent is not None,
        size=len(head) + len(protected) + len(coded),
    )
    return scheme, head + protected + coded


def decode_conditional(scheme: Conditional, coded: Coded) -> QuantizedTensor:
    """Return the tensor of a part. Raises ValueError if it is damaged, or the parent does not fit."""
    stream, elements = coded.stream, coded.shape.numel()
    codebook: Codebook
    head = 0
    if scheme.codebook == "grid":
        codebook = Grid(scheme.first, scheme.bins)
    elif scheme.codebook == "log_grid":
        codebook = LogGrid(scheme.pace, scheme.first, scheme.bins)
    else:
        head = 4 * scheme.bins
        codebook = Centres(np.frombuffer(stream[:head], dtype="<f4").astype(np.float32))
    before = _quantized_parent(coded.parent, elements) if scheme.needs_parent else None
    if before and not conditional.comparable(codebook, before.codebook):
        raise ValueError("the parent's levels are of another kind")
    middle = head + scheme.protected_size
    out = before.levels if coded.overwrite and before and before.levels.flags.writeable else None
    levels = conditional.decode(stream[middle:], elements, codebook, before, out)
    protected = _decode_protected(stream[head:middle], scheme.protected)
    return QuantizedTensor(coded.dtype, coded.shape, levels, codebook, protected)


def decode_rearranged(scheme: Rearranged, coded: Coded) -> QuantizedTensor:
    """Return the tensor of a stream. Raises ValueError if it is damaged, or the parent does not fit."""
    stream, elements = coded.stream, coded.shape.numel()
    before = _quantized_parent(coded.parent, elements).parent_levels if scheme.needs_parent else None
    head = 4 * scheme.bins
    middle = head + scheme.protected_size
    return QuantizedTensor(
        dtype=coded.dtype,
        shape=coded.shape,
        levels=rearrange.decode(stream[middle:], elements, FIRST_BIN + scheme.bins, scheme.arrangement, before).values,
        codebook=Centres(np.frombuffer(stream[:head], dtype="<f4").astype(np.float32)),
        protected=byte_planes.decode(stream[head:middle], 2 * scheme.protected, 2).view("<u2"),
    )


def _quantized_parent(parent: StoredTensor | None, elements: int) -> QuantizedTensor:
    if not isinstance(parent, QuantizedTensor) or parent.levels.size != elements:
        raise ValueError(f"the parent has no levels of {elements} values")
    return parent


def _decode_protected(stream: bytes, count: int) -> NDArray[np.uint16]:
    if count == 0 and not stream:
        return NO_OUTLIERS
    return byte_planes.decode(stream, 2 * count, 2).view("<u2")
