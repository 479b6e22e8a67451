"""Decode one tensor from its scheme and its stream of bytes. The inverse of ``encoder``."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.engine.coding import bounded, byte_planes, conditional, lossless, rearrange
from dynaquant.engine.coding.encoder import exact_parent
from dynaquant.engine.coding.schemes import (
    Bounded,
    BytePlanes,
    Conditional,
    Frozen,
    Lossless,
    Omitted,
    RankOneFactors,
    Raw,
    Rearranged,
    Reference,
    RoundedFromMaster,
    Scheme,
    SecondMomentUnits,
    Sharded,
)
from dynaquant.engine.tensors.codebook import FIRST_BIN, Centres, Codebook, Grid, LogGrid
from dynaquant.engine.tensors.dtypes import bytes_of
from dynaquant.engine.tensors.stored import QuantizedTensor, RankOne, RoundedWeight, ScaledMoment, StoredTensor


def decode(
    scheme: Scheme,
    dtype: torch.dtype,
    shape: torch.Size,
    stream: bytes,
    parent: StoredTensor | None,
    other: StoredTensor | None = None,
) -> StoredTensor:
    """Return the tensor of a stream that ``encode`` made.

    parent: as given to ``encode``; needed only if ``scheme.needs_parent``. other: the stored tensor whose name
    ``schemes.depends_on`` returns. Raises ValueError if the stream is damaged or parent or other do not fit.
    """
    if isinstance(scheme, Rearranged):
        return _decode_rearranged(scheme, dtype, shape, stream, parent)
    if isinstance(scheme, Conditional):
        return _decode_conditional(scheme, dtype, shape, stream, parent)
    if isinstance(scheme, Bounded):
        return bounded.decode(scheme, dtype, shape, stream, parent)
    if isinstance(scheme, SecondMomentUnits):
        if not isinstance(other, QuantizedTensor | RankOne):
            raise ValueError(f"it is in units of {scheme.second}, which is not a second moment")
        before = parent.units if isinstance(parent, ScaledMoment) else None
        units = _decode_conditional(scheme.units, torch.float32, shape, stream, before)
        return ScaledMoment(dtype, units, other, scheme.second)
    if isinstance(scheme, RoundedFromMaster):
        if not isinstance(other, QuantizedTensor | Tensor) or other.shape != shape:
            raise ValueError(f"it is rounded from {scheme.of}, which is not a weight of the same shape")
        return RoundedWeight(dtype, other, scheme.of)
    if isinstance(scheme, RankOneFactors):
        return _decode_rank_one(scheme, dtype, shape, stream, parent)
    if isinstance(scheme, Reference):
        raise ValueError("a reference has no stream")
    if isinstance(scheme, Frozen | Omitted | Sharded):
        raise ValueError("its values are not in this file")
    return _decode_lossless(scheme, dtype, shape, stream, parent)


def decodes_to(scheme: Lossless, wanted: Tensor, stream: bytes, parent: StoredTensor | None) -> bool:
    """Whether ``decode`` would return a tensor with these bits. Raises ValueError as ``decode`` does.

    wanted: of the dtype and shape of the stream. Needs no memory for the values, and takes less time than decoding.
    """
    data, itemsize = bytes_of(wanted), wanted.dtype.itemsize
    return lossless.decodes_to(stream, data, itemsize, _before(scheme, wanted.dtype, wanted.shape, parent))


def _before(
    scheme: Lossless, dtype: torch.dtype, shape: torch.Size, parent: StoredTensor | None
) -> NDArray[np.uint8] | None:
    """Return the bytes of the parent's values, None if they are not needed. Raises ValueError if they are missing."""
    before = exact_parent(parent, dtype, shape) if scheme.needs_parent else None
    if scheme.needs_parent and before is None:
        raise ValueError("the parent has no exact values of the same dtype and shape")
    return before


def _decode_lossless(
    scheme: Raw | BytePlanes | Lossless,
    dtype: torch.dtype,
    shape: torch.Size,
    stream: bytes,
    parent: StoredTensor | None,
) -> Tensor:
    if isinstance(scheme, Lossless):
        before = _before(scheme, dtype, shape, parent)
        data = lossless.decode(stream, shape.numel() * dtype.itemsize, dtype.itemsize, before)
    elif isinstance(scheme, BytePlanes):
        data = byte_planes.decode(stream, shape.numel() * dtype.itemsize, dtype.itemsize)
    else:
        data = np.frombuffer(stream, dtype=np.uint8).copy()
    if dtype == torch.bool and data.size and int(data.max()) > 1:
        raise ValueError("a bool is neither 0 nor 1")
    if shape.numel() == 0:
        return torch.empty(shape, dtype=dtype)  # the strides of an empty array do not allow the view below
    return torch.from_numpy(data).view(dtype).reshape(shape)


def _decode_rank_one(
    scheme: RankOneFactors, dtype: torch.dtype, shape: torch.Size, stream: bytes, parent: StoredTensor | None
) -> RankOne:
    before = parent if isinstance(parent, RankOne) else None
    middle, end = scheme.rows.size, scheme.rows.size + scheme.columns.size
    if any(stream[end:]):
        raise ValueError("its stream continues after the rows and columns")
    rows, columns = torch.Size([shape[0]]), torch.Size([math.prod(shape[1:])])
    return RankOne(
        dtype,
        shape,
        _decode_conditional(scheme.rows, torch.float32, rows, stream[:middle], before.rows if before else None),
        _decode_conditional(
            scheme.columns, torch.float32, columns, stream[middle:end], before.columns if before else None
        ),
    )


def _decode_conditional(
    scheme: Conditional, dtype: torch.dtype, shape: torch.Size, stream: bytes, parent: StoredTensor | None
) -> QuantizedTensor:
    codebook: Codebook
    head = 0
    if scheme.codebook == "grid":
        codebook = Grid(scheme.first, scheme.bins)
    elif scheme.codebook == "log_grid":
        codebook = LogGrid(scheme.pace, scheme.first, scheme.bins)
    else:
        head = 4 * scheme.bins
        codebook = Centres(np.frombuffer(stream[:head], dtype="<f4").astype(np.float32))
    before = _quantized_parent(parent, shape.numel()) if scheme.needs_parent else None
    if before and not conditional.comparable(codebook, before.codebook):
        raise ValueError("the parent's levels are of another kind")
    middle = head + scheme.protected_size
    levels = conditional.decode(stream[middle:], shape.numel(), codebook, before)
    return QuantizedTensor(dtype, shape, levels, codebook, _decode_protected(stream[head:middle], scheme.protected))


def _decode_rearranged(
    scheme: Rearranged, dtype: torch.dtype, shape: torch.Size, stream: bytes, parent: StoredTensor | None
) -> QuantizedTensor:
    before = _quantized_parent(parent, shape.numel()).parent_levels if scheme.needs_parent else None
    head = 4 * scheme.bins
    middle = head + scheme.protected_size
    count = FIRST_BIN + scheme.bins
    return QuantizedTensor(
        dtype=dtype,
        shape=shape,
        levels=rearrange.decode(stream[middle:], shape.numel(), count, scheme.arrangement, before).values,
        codebook=Centres(np.frombuffer(stream[:head], dtype="<f4").astype(np.float32)),
        protected=byte_planes.decode(stream[head:middle], 2 * scheme.protected, 2).view("<u2"),
    )


def _quantized_parent(parent: StoredTensor | None, elements: int) -> QuantizedTensor:
    if not isinstance(parent, QuantizedTensor) or parent.levels.size != elements:
        raise ValueError(f"the parent has no levels of {elements} values")
    return parent


def _decode_protected(stream: bytes, count: int) -> NDArray[np.uint16]:
    if count == 0 and not stream:
        return np.zeros(0, dtype=np.uint16)
    return byte_planes.decode(stream, 2 * count, 2).view("<u2")
