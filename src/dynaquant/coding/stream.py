"""One tensor <-> one stream of bytes, given the parent's tensor, for every coding of ``codings`` that has a stream."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.codebook import Centres, Codebook, Grid, LogGrid
from dynaquant.coding import conditional, exact, planes, rearrange
from dynaquant.codings import (
    Coding,
    Conditional,
    Exact,
    Frozen,
    Omitted,
    Planes,
    Product,
    Raw,
    Rearranged,
    Reference,
    Rounding,
    Units,
)
from dynaquant.entry import MAX_EXPANSION, Entry
from dynaquant.external import External
from dynaquant.hashing import hash_of
from dynaquant.quantized import (
    FIRST_BIN,
    Quantized,
    QuantizedTensor,
    RankOne,
    Rounded,
    Scaled,
    dequantize,
    is_zero,
    pieces,
)
from dynaquant.state import dtype_name

StoredTensor = Quantized | Tensor | External
"""A tensor as a checkpoint holds it: quantized, its exact values, or where these are."""
Coder = Literal["conditional", "rearranged"]
"""How levels become bytes: by their conditional entropy (method 2.2), or as published (method 1.5)."""


_TRY_ALONE_BELOW = 65_536
_TRY_ZSTD_BELOW = 65_536
"""Bytes of small tensors, such as generators and tables of integers, in which zstd may find what repeats itself."""


def values_of(stored: StoredTensor) -> Tensor:
    """The values a restore returns, bit for bit. Raises CheckpointError for external ones that cannot be had."""
    if isinstance(stored, External):
        return stored.values()
    return stored if isinstance(stored, Tensor) else dequantize(stored)


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of the values in C order, on the host; a copy only where one is needed."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.stride() != (1,):  # counts as contiguous when it has one element, but cannot be viewed as bytes
        flat = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)
    data: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return data


def tensor_hash(tensor: Tensor) -> str:
    """The hash of dtype, shape and values (docs/format.md, "Identity"), 64 hexadecimal digits."""
    return _hash_of(tensor.dtype, tensor.shape, [tensor])


def stored_hash(stored: StoredTensor) -> str:
    """The hash of the values of a tensor as stored; they are hashed as they are decoded, and need no memory.

    Raises ValueError as ``dequantize`` does.
    """
    if isinstance(stored, External):
        return stored.hash
    if isinstance(stored, Tensor):
        return tensor_hash(stored)
    if is_zero(stored):
        return _hash_of_zeros(stored.dtype, stored.shape)
    return _hash_of(stored.dtype, stored.shape, pieces(stored))


def _hash_of(dtype: torch.dtype, shape: torch.Size, parts: Iterable[Tensor]) -> str:
    described = f"{dtype_name(dtype)}{list(shape)}".encode()
    return hash_of(chain([described], (bytes_of(part).data for part in parts)), shape.numel() * dtype.itemsize)


@lru_cache(maxsize=4096)
def _hash_of_zeros(dtype: torch.dtype, shape: torch.Size) -> str:
    return tensor_hash(torch.from_numpy(np.zeros(shape, dtype=np.float32)).to(dtype))


def encode(
    stored: Quantized | Tensor, parent: StoredTensor | None, coder: Coder = "conditional"
) -> tuple[Coding, bytes]:
    """Coding and stream of a tensor. parent: the tensor of the same name in the parent, if there is one."""
    if isinstance(stored, Tensor):
        return _encode_exact(stored, parent)
    if isinstance(stored, Rounded):
        return Rounding(stored.of_name), b""
    if isinstance(stored, RankOne):
        factors = parent if isinstance(parent, RankOne) else None
        rows, coded_rows = _encode_part(stored.rows, factors.rows if factors else None)
        columns, coded_columns = _encode_part(stored.columns, factors.columns if factors else None)
        coded = coded_rows + coded_columns
        smallest = -(-stored.shape.numel() * stored.dtype.itemsize // MAX_EXPANSION)
        return Product(rows, columns), coded.ljust(smallest, b"\0")
    if isinstance(stored, Scaled):
        units, coded = _encode_part(stored.units, parent.units if isinstance(parent, Scaled) else None)
        return Units(units, stored.second_name), coded
    before = parent if isinstance(parent, QuantizedTensor) else None
    return _encode_rearranged(stored, before) if coder == "rearranged" else _encode_part(stored, before)


def _encode_exact(stored: Tensor, parent: StoredTensor | None) -> tuple[Coding, bytes]:
    data, itemsize = bytes_of(stored), stored.dtype.itemsize
    coded = exact.encode(data, itemsize, _exact_parent(parent, stored.dtype, stored.shape))
    best: tuple[Coding, bytes] = Exact(exact.needs_parent(coded)), coded
    if data.size < _TRY_ZSTD_BELOW and len(frames := planes.encode(data, itemsize)) < len(coded):
        best = Planes(), frames
    return best if len(best[1]) < data.size else (Raw(), data.tobytes())


def _exact_parent(parent: StoredTensor | None, dtype: torch.dtype, shape: torch.Size) -> NDArray[np.uint8] | None:
    fits = isinstance(parent, Tensor) and (parent.dtype, parent.shape) == (dtype, shape)
    return bytes_of(parent) if fits and isinstance(parent, Tensor) else None


def _encode_rearranged(stored: QuantizedTensor, parent: QuantizedTensor | None) -> tuple[Rearranged, bytes]:
    levels = stored.parent_levels
    before = parent.parent_levels if parent and parent.levels.size == levels.values.size else None
    arrangement, coded = rearrange.encode(levels, before)
    protected = planes.encode(stored.protected.view(np.uint8), 2)
    coding = Rearranged(stored.codebook.bins, len(stored.protected), len(protected), arrangement)
    return coding, stored.centres.astype("<f4").tobytes() + protected + coded


def _encode_part(stored: QuantizedTensor, parent: QuantizedTensor | None) -> tuple[Conditional, bytes]:
    codebook = stored.codebook
    if parent and (parent.levels.size != stored.levels.size or not conditional.comparable(codebook, parent.codebook)):
        parent = None
    coded = conditional.encode(stored, parent)
    # With the same codebook the parent is hardly ever worse than nothing, but for the tables that a small tensor needs.
    doubtful = parent and (parent.codebook != codebook or stored.levels.size < _TRY_ALONE_BELOW)
    if doubtful and len(alone := conditional.encode(stored, None)) <= len(coded):
        parent, coded = None, alone
    head = codebook.values.astype("<f4").tobytes() if isinstance(codebook, Centres) else b""
    protected = planes.encode(stored.protected.view(np.uint8), 2) if len(stored.protected) else b""
    coding = Conditional(
        codebook="grid" if isinstance(codebook, Grid) else "log_grid" if isinstance(codebook, LogGrid) else "centres",
        bins=codebook.bins,
        first=codebook.rung if isinstance(codebook, Grid) else codebook.first if isinstance(codebook, LogGrid) else 0,
        pace=codebook.pace if isinstance(codebook, LogGrid) else 0,
        protected=len(stored.protected),
        protected_size=len(protected),
        needs_parent=parent is not None,
        size=len(head) + len(protected) + len(coded),
    )
    return coding, head + protected + coded


def decode(entry: Entry, stream: bytes, parent: StoredTensor | None, other: StoredTensor | None = None) -> StoredTensor:
    """The tensor that ``encode`` made a stream of.

    parent: the same tensor that ``encode`` was given, where needed. other: the tensor of ``codings.other_of``.
    Raises ValueError when the stream is not that, or parent or other do not fit.
    """
    coding = entry.coding
    if isinstance(coding, Rearranged):
        return _decode_rearranged(entry, coding, stream, parent)
    if isinstance(coding, Conditional):
        return _decode_part(coding, entry.dtype, entry.shape, stream, parent)
    if isinstance(coding, Units):
        if not isinstance(other, QuantizedTensor | RankOne):
            raise ValueError(f"it is in units of {coding.second}, which is no such tensor")
        before = parent.units if isinstance(parent, Scaled) else None
        units = _decode_part(coding.units, torch.float32, entry.shape, stream, before)
        return Scaled(entry.dtype, units, other, coding.second)
    if isinstance(coding, Rounding):
        if not isinstance(other, QuantizedTensor | Tensor) or other.shape != entry.shape:
            raise ValueError(f"it is rounded from {coding.of}, which is no such tensor")
        return Rounded(entry.dtype, other, coding.of)
    if isinstance(coding, Product):
        return _decode_product(entry, coding, stream, parent)
    if isinstance(coding, Reference):
        raise ValueError("a reference has no stream")
    if isinstance(coding, Frozen | Omitted):
        raise ValueError("its values are not in this file")
    return _decode_exact(entry, coding, stream, parent)


def _decode_exact(entry: Entry, coding: Raw | Planes | Exact, stream: bytes, parent: StoredTensor | None) -> Tensor:
    if isinstance(coding, Exact):
        before = _exact_parent(parent, entry.dtype, entry.shape) if coding.needs_parent else None
        if coding.needs_parent and before is None:
            raise ValueError("the parent has no exact values of its dtype and shape")
        data = exact.decode(stream, entry.raw_size, entry.dtype.itemsize, before)
    elif isinstance(coding, Planes):
        data = planes.decode(stream, entry.raw_size, entry.dtype.itemsize)
    else:
        data = np.frombuffer(stream, dtype=np.uint8).copy()
    if entry.dtype == torch.bool and data.size and int(data.max()) > 1:
        raise ValueError("a bool is neither 0 nor 1")
    if entry.elements == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)  # the strides of an empty array do not allow the view below
    return torch.from_numpy(data).view(entry.dtype).reshape(entry.shape)


def _decode_product(entry: Entry, coding: Product, stream: bytes, parent: StoredTensor | None) -> RankOne:
    before = parent if isinstance(parent, RankOne) else None
    middle, end = coding.rows.size, coding.rows.size + coding.columns.size
    if any(stream[end:]):
        raise ValueError("something follows its rows and columns")
    rows, columns = torch.Size([entry.shape[0]]), torch.Size([math.prod(entry.shape[1:])])
    return RankOne(
        entry.dtype,
        entry.shape,
        _decode_part(coding.rows, torch.float32, rows, stream[:middle], before.rows if before else None),
        _decode_part(coding.columns, torch.float32, columns, stream[middle:end], before.columns if before else None),
    )


def _decode_part(
    coding: Conditional, dtype: torch.dtype, shape: torch.Size, stream: bytes, parent: StoredTensor | None
) -> QuantizedTensor:
    codebook: Codebook
    head = 0
    if coding.codebook == "grid":
        codebook = Grid(coding.first, coding.bins)
    elif coding.codebook == "log_grid":
        codebook = LogGrid(coding.pace, coding.first, coding.bins)
    else:
        head = 4 * coding.bins
        codebook = Centres(np.frombuffer(stream[:head], dtype="<f4").astype(np.float32))
    before = _parent_of(parent, shape.numel()) if coding.needs_parent else None
    if before and not conditional.comparable(codebook, before.codebook):
        raise ValueError("the parent has another kind of levels")
    middle = head + coding.protected_size
    levels = conditional.decode(stream[middle:], shape.numel(), codebook, before)
    return QuantizedTensor(dtype, shape, levels, codebook, _decode_protected(stream[head:middle], coding.protected))


def _decode_rearranged(entry: Entry, coding: Rearranged, stream: bytes, parent: StoredTensor | None) -> QuantizedTensor:
    before = _parent_of(parent, entry.elements).parent_levels if coding.needs_parent else None
    head = 4 * coding.bins
    middle = head + coding.protected_size
    count = FIRST_BIN + coding.bins
    return QuantizedTensor(
        dtype=entry.dtype,
        shape=entry.shape,
        levels=rearrange.decode(stream[middle:], entry.elements, count, coding.arrangement, before).values,
        codebook=Centres(np.frombuffer(stream[:head], dtype="<f4").astype(np.float32)),
        protected=planes.decode(stream[head:middle], 2 * coding.protected, 2).view("<u2"),
    )


def _parent_of(parent: StoredTensor | None, elements: int) -> QuantizedTensor:
    if not isinstance(parent, QuantizedTensor) or parent.levels.size != elements:
        raise ValueError("the parent has no levels of so many values for it")
    return parent


def _decode_protected(stream: bytes, count: int) -> NDArray[np.uint16]:
    if count == 0 and not stream:
        return np.zeros(0, dtype=np.uint16)
    return planes.decode(stream, 2 * count, 2).view("<u2")


def same(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors are stored as the same, so that their values are the same bit for bit."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        fits = (a.dtype, a.shape) == (b.dtype, b.shape)
        return fits and np.array_equal(bytes_of(a), bytes_of(b))
    if isinstance(a, External) and isinstance(b, External):
        return (a.dtype, a.shape, a.hash, a.file) == (b.dtype, b.shape, b.hash, b.file)
    if isinstance(a, RankOne) and isinstance(b, RankOne):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and same(a.rows, b.rows) and same(a.columns, b.columns)
    if isinstance(a, Rounded) and isinstance(b, Rounded):
        return (a.dtype, a.of_name) == (b.dtype, b.of_name) and same(a.of, b.of)
    if isinstance(a, Scaled) and isinstance(b, Scaled):
        return (
            (a.dtype, a.second_name) == (b.dtype, b.second_name) and same(a.units, b.units) and same(a.second, b.second)
        )
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)):
        return False
    return (
        (a.dtype, a.shape) == (b.dtype, b.shape)
        and np.array_equal(a.levels, b.levels)
        and np.array_equal(a.centres.view(np.uint32), b.centres.view(np.uint32))
        and np.array_equal(a.protected, b.protected)
    )
