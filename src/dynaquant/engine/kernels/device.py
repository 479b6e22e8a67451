"""Kernels for tensors on a device, by PyTorch operations. Most of them work in pieces, to need little memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import _native
from dynaquant.engine.kernels.host import Sensitivity

PIECE = 1 << 24
"""Number of values to process at once."""
_BUCKETS = 65_536
_FAR = 200.0
"""Grid steps. Values farther from zero count as this far: they are protected, and nothing overflows."""
_HIGHEST_LEVEL, _HIGHEST_MULTIPLE = 255, 127
_WORD = 0xFFFF_FFFF


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous()


def _pieces(size: int) -> Iterator[slice]:
    return (slice(begin, min(begin + PIECE, size)) for begin in range(0, size, PIECE))


def _buckets(flat: Tensor) -> Tensor:
    """Return the top 16 bits of each value, int32."""
    if flat.dtype in (torch.float32, torch.float64):
        return flat.to(torch.float32).view(torch.int32) >> 16 & 0xFFFF
    return flat.view(torch.int16).to(torch.int32) & 0xFFFF


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index)


def sums(tensor: Tensor) -> tuple[float, float]:
    flat = _flat(tensor)
    found = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    for piece in _pieces(flat.numel()):
        values = flat[piece].to(torch.float32).to(torch.float64)
        found += torch.stack((values.sum(), values.square().sum()))
    total, squares = found.tolist()
    return total, squares


def errors(values: Tensor, exact: Tensor) -> tuple[float, float]:
    return sums(exact)[1], sums(values - exact)[1]


def extremes(tensor: Tensor) -> tuple[float, float]:
    lowest, highest = torch.stack(torch.aminmax(tensor.detach())).tolist()
    return lowest, highest


def smallest_from(tensor: Tensor, limit: float) -> float:
    flat, smallest = _flat(tensor), torch.full((), torch.inf, device=tensor.device)
    for piece in _pieces(flat.numel()):
        values = flat[piece].to(torch.float32)
        smallest = torch.minimum(smallest, torch.where(values >= limit, values, torch.inf).min())
    return float(smallest)


def row_and_column_sums(matrix: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rows, columns = matrix.shape
    by_row, by_column = matrix.new_empty(rows, dtype=torch.float64), matrix.new_zeros(columns, dtype=torch.float64)
    step = max(1, PIECE // max(columns, 1))
    for begin in range(0, rows, step):
        values = matrix.detach()[begin : begin + step].to(torch.float32).to(torch.float64)
        by_row[begin : begin + step] = values.sum(1)
        by_column += values.sum(0)
    return by_row.cpu().numpy(), by_column.cpu().numpy()


def log_histogram(tensor: Tensor) -> NDArray[np.int64]:
    flat = _flat(tensor)
    counts = torch.zeros(_BUCKETS, dtype=torch.int64, device=tensor.device)
    for piece in _pieces(flat.numel()):
        counts += torch.bincount(_buckets(flat[piece]), minlength=_BUCKETS)
    return counts.cpu().numpy()


def table_levels(tensor: Tensor, table: NDArray[np.uint8], sensitivity: Sensitivity | None = None) -> Tensor:
    flat = _flat(tensor)
    magnitude_table = torch.from_numpy(table).to(tensor.device)
    levels = torch.empty(flat.numel(), dtype=torch.uint8, device=tensor.device)
    other = None if sensitivity is None else (_flat(sensitivity[0]), torch.from_numpy(sensitivity[1]).to(tensor.device))
    for piece in _pieces(flat.numel()):
        level = _look_up(magnitude_table, _buckets(flat[piece]))
        if other is not None:
            by_sensitivity = _look_up(other[1], _buckets(other[0][piece].to(torch.float32)))
            undecided = by_sensitivity == _native.UNDECIDED
            level = torch.where(undecided | (level == _native.LEVEL_PROTECTED), level, by_sensitivity)
        levels[piece] = level
    return levels


def grid_levels(tensor: Tensor, inverse: float, seed: int | None, first: int = 0) -> tuple[Tensor, Tensor]:
    flat = _flat(tensor)
    levels = torch.empty(flat.numel(), dtype=torch.uint8, device=tensor.device)
    highest = torch.zeros((), dtype=torch.int32, device=tensor.device)
    for piece in _pieces(flat.numel()):
        multiples = _multiples(flat[piece], inverse, seed, first + piece.start)
        found = 2 * multiples.abs() + (multiples < 0)
        if found.numel():
            highest = torch.maximum(highest, found.max())
        levels[piece] = torch.where(found > _HIGHEST_LEVEL, _native.LEVEL_PROTECTED, found).to(torch.uint8)
    return levels, highest


def grid_values(tensor: Tensor, inverse: float, step: float, seed: int | None, first: int, out: Tensor) -> None:
    flat, flat_out = _flat(tensor), out.view(-1)
    largest = torch.finfo(torch.bfloat16).max
    for piece in _pieces(flat.numel()):
        multiples = _multiples(flat[piece], inverse, seed, first + piece.start)
        protected = flat[piece].clamp(-largest, largest).to(torch.bfloat16).to(torch.float32)
        flat_out[piece] = torch.where(
            multiples.abs() > _HIGHEST_MULTIPLE, protected, multiples.to(torch.float32) * step
        )


def grid_errors(tensor: Tensor, inverse: float, step: float, seed: int | None, first: int) -> tuple[float, float]:
    flat, squares, all_errors = _flat(tensor), 0.0, 0.0
    for piece in _pieces(flat.numel()):
        exact = flat[piece]
        rounded = torch.empty_like(exact)
        grid_values(exact, inverse, step, seed, first + piece.start, rounded)
        own_squares, own_errors = errors(rounded, exact)
        squares, all_errors = squares + own_squares, all_errors + own_errors
    return squares, all_errors


def _multiples(values: Tensor, inverse: float, seed: int | None, first: int) -> Tensor:
    """Return the multiple of the grid step that each value is rounded to, int32. first: the index of the first one."""
    steps = (values.to(torch.float32) * inverse).clamp_(-_FAR, _FAR)
    rounded = steps.round()  # ties to even
    if seed is not None:
        below = torch.where(rounded > steps, rounded - 1, rounded)
        rounded = below + (_uniform(slice(first, first + len(values)), seed, values.device) < steps - below)
    return rounded.to(torch.int32)


def _uniform(piece: slice, seed: int, device: torch.device) -> Tensor:
    """Return a random number in [0, 1) for each index, by the finalizer of MurmurHash3.

    Computes in int64, which holds unsigned 32-bit words.
    """
    h = torch.arange(piece.start, piece.stop, dtype=torch.int64, device=device)
    h = (h & _WORD) * 0x9E3779B1 & _WORD ^ seed
    h = (h ^ h >> 16) * 0x85EBCA6B & _WORD
    h = (h ^ h >> 13) * 0xC2B2AE35 & _WORD
    h ^= h >> 16
    return (h >> 8).to(torch.float32) * 2.0**-24


def values(
    levels: NDArray[np.uint8],
    table: Tensor,
    protected: NDArray[np.uint16],
    device: torch.device,
    out: Tensor | None = None,
) -> Tensor:
    moved_levels, moved_table = torch.from_numpy(levels).to(device), table.to(device)
    is_protected = moved_levels == _native.LEVEL_PROTECTED
    highest, found = torch.stack((moved_levels.amax().long(), is_protected.sum())).tolist() if levels.size else (0, 0)
    if highest >= len(table) and levels.size:
        raise ValueError("a level lies outside the codebook")
    if found != len(protected):
        raise ValueError("the number of protected values differs from the number of protected levels")
    out = torch.empty(levels.size, dtype=table.dtype, device=device) if out is None else out
    for piece in _pieces(levels.size):
        out[piece] = _look_up(moved_table, moved_levels[piece].to(torch.int32))
    if len(protected):
        shift = 16 if table.dtype == torch.float32 else 0
        bits = torch.from_numpy((protected.astype(np.int32) << shift).astype(np.int32 if shift else np.uint16))
        out[is_protected] = bits.view(table.dtype).to(device)
    return out


def _square_root(tensor: Tensor) -> Tensor:
    # The square root in float64, rounded to float32, is the correctly rounded square root of a float32.
    flat, out = _flat(tensor), torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
    for piece in _pieces(flat.numel()):
        out.view(-1)[piece] = flat[piece].to(torch.float64).sqrt().to(torch.float32)
    return out


def divide_by_roots(values: Tensor, seconds: Tensor, out: Tensor, columns: Tensor | None = None) -> None:
    seconds = seconds if columns is None else outer(seconds, columns)
    for piece in _pieces(out.numel()):
        root = _square_root(seconds[piece])
        out[piece] = (values[piece] / root).masked_fill_(root == 0, 0)


def multiply_by_roots(values: Tensor, seconds: Tensor, columns: Tensor | None = None) -> None:
    seconds = seconds if columns is None else outer(seconds, columns)
    for piece in _pieces(values.numel()):
        values[piece] *= _square_root(seconds[piece])


def outer(rows: Tensor, columns: Tensor, out: Tensor | None = None) -> Tensor:
    product = torch.outer(rows, columns).view(-1)
    return product if out is None else out.copy_(product)
