"""Encode one stored tensor: return its scheme and its stream of bytes, conditioned on the parent's tensor."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.engine.coding import bounded, byte_planes, conditional, lossless, rearrange
from dynaquant.engine.coding.schemes import (
    MAX_EXPANSION,
    BytePlanes,
    Conditional,
    Lossless,
    RankOneFactors,
    Raw,
    Rearranged,
    RoundedFromMaster,
    Scheme,
    SecondMomentUnits,
)
from dynaquant.engine.tensors.bounded import BoundedTensor
from dynaquant.engine.tensors.codebook import Centres, Grid, LogGrid
from dynaquant.engine.tensors.dequantize import values_of
from dynaquant.engine.tensors.dtypes import bytes_of
from dynaquant.engine.tensors.stored import (
    Patchwork,
    Quantized,
    QuantizedTensor,
    RankOne,
    RoundedWeight,
    ScaledMoment,
    StoredTensor,
)

Coder = Literal["conditional", "rearranged"]
"""How levels become bytes: by conditional entropy coding (method 2.2) or as published (method 1.5)."""

_TRY_ALONE_BELOW = 65_536
"""Elements. In smaller tensors the larger tables of a delta can outweigh its gain, so both are tried: with and without
the parent."""
_RAW_BELOW = 16
"""Bytes. Smaller tensors, such as step counters, are never smaller coded."""
_TRY_ZSTD_BELOW = 65_536
"""Bytes. Smaller tensors, such as states of random generators and tables of integers, may hold repetitions that only
zstd finds, so zstd is tried too."""


def exact_parent(parent: StoredTensor | None, dtype: torch.dtype, shape: torch.Size) -> NDArray[np.uint8] | None:
    """Return the bytes of the parent's values; None if the parent has no exact values of this dtype and shape."""
    fits = isinstance(parent, Tensor) and (parent.dtype, parent.shape) == (dtype, shape)
    return bytes_of(parent) if fits and isinstance(parent, Tensor) else None


def encode(
    stored: Quantized | Tensor, parent: StoredTensor | None, coder: Coder = "conditional"
) -> tuple[Scheme, bytes]:
    """Return the scheme and the stream of a tensor. parent: the parent's tensor of the same name, if it has one."""
    if isinstance(stored, Patchwork):
        stored = values_of(stored)
    if isinstance(stored, Tensor):
        return _encode_lossless(stored, parent)
    if isinstance(stored, BoundedTensor):
        return bounded.encode(stored, parent)
    if isinstance(stored, RoundedWeight):
        return RoundedFromMaster(stored.master_name), b""
    if isinstance(stored, RankOne):
        factors = parent if isinstance(parent, RankOne) else None
        rows, coded_rows = _encode_quantized(stored.rows, factors.rows if factors else None)
        columns, coded_columns = _encode_quantized(stored.columns, factors.columns if factors else None)
        coded = coded_rows + coded_columns
        smallest = -(-stored.shape.numel() * stored.dtype.itemsize // MAX_EXPANSION)
        return RankOneFactors(rows, columns), coded.ljust(smallest, b"\0")
    if isinstance(stored, ScaledMoment):
        units, coded = _encode_quantized(stored.units, parent.units if isinstance(parent, ScaledMoment) else None)
        return SecondMomentUnits(units, stored.second_name), coded
    before = parent if isinstance(parent, QuantizedTensor) else None
    return _encode_rearranged(stored, before) if coder == "rearranged" else _encode_quantized(stored, before)


def _encode_lossless(stored: Tensor, parent: StoredTensor | None) -> tuple[Scheme, bytes]:
    data, itemsize = bytes_of(stored), stored.dtype.itemsize
    if data.size < _RAW_BELOW:
        return Raw(), data.tobytes()
    coded = lossless.encode(data, itemsize, exact_parent(parent, stored.dtype, stored.shape))
    best: tuple[Scheme, bytes] = Lossless(lossless.needs_parent(coded)), coded
    if data.size < _TRY_ZSTD_BELOW and len(frames := byte_planes.encode(data, itemsize)) < len(coded):
        best = BytePlanes(), frames
    return best if len(best[1]) < data.size else (Raw(), data.tobytes())


def _encode_rearranged(stored: QuantizedTensor, parent: QuantizedTensor | None) -> tuple[Rearranged, bytes]:
    levels = stored.parent_levels
    before = parent.parent_levels if parent and parent.levels.size == levels.values.size else None
    arrangement, coded = rearrange.encode(levels, before)
    protected = byte_planes.encode(stored.protected.view(np.uint8), 2)
    scheme = Rearranged(stored.codebook.bins, len(stored.protected), len(protected), arrangement)
    return scheme, stored.centres.astype("<f4").tobytes() + protected + coded


def _encode_quantized(stored: QuantizedTensor, parent: QuantizedTensor | None) -> tuple[Conditional, bytes]:
    codebook = stored.codebook
    if parent and (parent.levels.size != stored.levels.size or not conditional.comparable(codebook, parent.codebook)):
        parent = None
    coded = conditional.encode(stored, parent)
    # With the same codebook, conditioning on the parent helps all but small tensors, whose tables outweigh the gain.
    may_be_larger = parent and (parent.codebook != codebook or stored.levels.size < _TRY_ALONE_BELOW)
    if may_be_larger and len(alone := conditional.encode(stored, None)) <= len(coded):
        parent, coded = None, alone
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
