"""Kernels for tensors on a device, by PyTorch operations. Most of them work in pieces, to need little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import _native
from dynaquant.engine.kernels import host
from dynaquant.engine.kernels.host import Sensitivity
from dynaquant.engine.kernels.seconds import OfLevels, Outer, Seconds

PIECE = 1 << 24
"""Number of values to process at once."""
SMALL = 32_768
"""Elements up to which a tensor is better computed on the host: here, an operation takes longer to begin."""
_BUCKETS = 65_536
_FAR = 200.0
"""Values beyond so many grid steps count as that far: they are protected, and nothing overflows."""
_PROTECTED_MULTIPLE = 128
"""From this multiple of the grid step on, values are protected."""
_WORD = 0xFFFF_FFFF


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous()


def _pieces(size: int) -> Iterator[slice]:
    return (slice(begin, min(begin + PIECE, size)) for begin in range(0, size, PIECE))


def _at_most_float32(tensor: Tensor) -> Tensor:
    """Return the values as the host takes them: float64 is rounded to float32."""
    return tensor.detach().to(torch.float32) if tensor.dtype == torch.float64 else tensor.detach()


def _top_bits(flat: Tensor) -> Tensor:
    """Return the top 16 bits of each value, int16. Of float32 and float64, they are not contiguous."""
    if flat.dtype in (torch.float32, torch.float64):
        return flat.to(torch.float32).view(torch.int16)[1::2]
    return flat.view(torch.int16)


def _buckets(flat: Tensor) -> Tensor:
    """Return the top 16 bits of each value as a number from 0 on, int32."""
    return _top_bits(flat).to(torch.int32) & 0xFFFF


def total(tensor: Tensor) -> Tensor:
    flat = _flat(tensor)
    # Sums in float64 make a copy of their input, so a large tensor is added up in pieces.
    sums = [_at_most_float32(flat[piece]).sum(dtype=torch.float64) for piece in _pieces(flat.numel())]
    return sums[0] if len(sums) == 1 else torch.stack([*sums, flat.new_zeros((), dtype=torch.float64)]).sum()


def errors(values: Tensor, exact: Tensor) -> tuple[float, float]:
    pairs = ((values[piece], exact[piece]) for piece in _pieces(exact.numel()))
    return _sums_of_squares([each for rounded, own in pairs for each in (_norm(own), _norm(rounded - own))])


def _norm(values: Tensor) -> Tensor:
    """Return the root of the sum of squares, computed in float64."""
    found: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return found


def _sums_of_squares(norms: list[Tensor]) -> tuple[float, float]:
    """Return the sums of the squares of every other norm, from the first and from the second one on."""
    if not norms:
        return 0.0, 0.0
    squares, all_errors = torch.stack(norms).square().view(-1, 2).sum(0).tolist()
    return squares, all_errors


def extremes(tensor: Tensor) -> tuple[float, float]:
    lowest, highest = torch.stack(torch.aminmax(tensor.detach())).tolist()
    return lowest, highest


def extremes_from(tensor: Tensor, limit: float) -> tuple[float, float, float]:
    found = torch.stack([*torch.aminmax(tensor.detach()), smallest_from(tensor, limit)]).tolist()
    lowest, highest, smallest = found
    return lowest, highest, smallest


def smallest_from(tensor: Tensor, limit: float) -> Tensor:
    """Return the last of ``extremes_from`` as a scalar on the device, in the dtype of the tensor."""
    flat, smallest = _flat(tensor), torch.full((), torch.inf, device=tensor.device)
    for piece in _pieces(flat.numel()):
        values = flat[piece].to(torch.float32)
        smallest = torch.minimum(smallest, torch.where(values >= limit, values, torch.inf).min())
    return smallest.to(tensor.dtype)


def row_and_column_sums(matrix: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    height, width = matrix.shape
    step = max(1, PIECE // max(width, 1))
    by_row, by_column = [], matrix.new_zeros(width, dtype=torch.float64)
    for begin in range(0, height, step):
        wide = _at_most_float32(matrix[begin : begin + step]).to(torch.float64)
        by_row.append(wide.sum(1))
        by_column += wide.sum(0)
    sums = torch.cat([*by_row, by_column]).cpu().numpy()
    return sums[:height], sums[height:]


def log_histogram(tensor: Tensor) -> NDArray[np.int64]:
    flat = _flat(tensor)
    counts = torch.zeros(_BUCKETS, dtype=torch.int64, device=tensor.device)
    for piece in _pieces(flat.numel()):
        # Sorted 16-bit keys are counted faster than all buckets at random: most values lie in few of them.
        buckets, found = torch.unique(_top_bits(flat[piece]), return_counts=True)
        counts.index_add_(0, buckets.to(torch.int32) & 0xFFFF, found)
    return counts.cpu().numpy()


def table_levels(tensor: Tensor, table: NDArray[np.uint8], sensitivity: Sensitivity | None = None) -> Tensor:
    flat = _flat(tensor)
    magnitude_table = torch.from_numpy(table).to(tensor.device)
    levels = torch.empty(flat.numel(), dtype=torch.uint8, device=tensor.device)
    other = None if sensitivity is None else (_flat(sensitivity[0]), torch.from_numpy(sensitivity[1]).to(tensor.device))
    for piece in _pieces(flat.numel()):
        level = magnitude_table.index_select(0, _buckets(flat[piece]))
        if other is not None:
            by_sensitivity = other[1].index_select(0, _buckets(other[0][piece].to(torch.float32)))
            undecided = by_sensitivity == _native.UNDECIDED
            level = torch.where(undecided | (level == _native.LEVEL_PROTECTED), level, by_sensitivity)
        levels[piece] = level
    return levels


def levels_in_turns(
    tensor: Tensor,
    low: NDArray[np.uint8],
    high: NDArray[np.uint8],
    goes_up: NDArray[np.bool_],
    turns: NDArray[np.uint8],
) -> Tensor:
    flat, width = _flat(tensor), tensor.numel() // len(turns)
    levels = torch.empty(flat.numel(), dtype=torch.uint8, device=tensor.device)
    tables = torch.from_numpy(np.concatenate([low, high, goes_up.view(np.uint8).reshape(-1), turns])).to(tensor.device)
    below, above, ups, of_rows = torch.split(tables, [len(low), len(high), goes_up.size, len(turns)])
    for piece in _pieces(flat.numel()):
        buckets = _buckets(flat[piece])
        level = below.index_select(0, buckets)
        rows = torch.arange(piece.start, piece.stop, device=tensor.device) // width
        index = of_rows.index_select(0, rows).to(torch.int32) * 256 + level
        levels[piece] = torch.where(ups.index_select(0, index).bool(), above.index_select(0, buckets), level)
    return levels


def grid_levels(tensor: Tensor, inverse: float, seed: int | None, first: int = 0) -> tuple[Tensor, Callable[[], int]]:
    flat = _flat(tensor)
    levels = torch.empty(flat.numel(), dtype=torch.uint8, device=tensor.device)
    extremes, table = [], _level_table(tensor.device)
    for piece in _pieces(flat.numel()):
        multiples = _multiples(flat[piece], inverse, seed, first + piece.start)
        extremes.append(torch.stack(torch.aminmax(multiples)))
        index = multiples.clamp_(-_PROTECTED_MULTIPLE, _PROTECTED_MULTIPLE).to(torch.int32) & 0xFF
        torch.index_select(table, 0, index, out=levels[piece])

    def highest() -> int:
        found = torch.stack(extremes).tolist() if extremes else []
        return round(max((max(2 * high, 1 - 2 * low if low < 0 else 0) for low, high in found), default=0))

    return levels, highest


@cache
def _level_table(device: torch.device) -> Tensor:
    """Return the level of each multiple of the grid step, by its lowest 8 bits."""
    multiples = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int32)
    levels = np.where(multiples < 0, 1 - 2 * multiples, 2 * multiples)
    levels[_PROTECTED_MULTIPLE] = _native.LEVEL_PROTECTED
    return torch.from_numpy(levels.astype(np.uint8)).to(device)


def grid_values(tensor: Tensor, inverse: float, step: float, seed: int | None, first: int, out: Tensor) -> None:
    flat, flat_out = _flat(tensor), out.view(-1)
    largest = torch.finfo(torch.bfloat16).max
    for piece in _pieces(flat.numel()):
        multiples = _multiples(flat[piece], inverse, seed, first + piece.start)
        is_protected = multiples.abs() >= _PROTECTED_MULTIPLE
        protected = flat[piece].clamp(-largest, largest).to(torch.bfloat16).to(torch.float32)
        on_grid = multiples.mul_(step).add_(0.0)  # a negative zero becomes zero
        torch.where(is_protected, protected, on_grid, out=flat_out[piece])


def grid_errors(tensor: Tensor, inverse: float, step: float, seed: int | None, first: int) -> tuple[float, float]:
    flat, norms = _flat(tensor), []
    for piece in _pieces(flat.numel()):
        exact = flat[piece]
        rounded = torch.empty_like(exact)
        grid_values(exact, inverse, step, seed, first + piece.start, rounded)
        norms += [_norm(exact), _norm(rounded.sub_(exact))]
    return _sums_of_squares(norms)


def _multiples(values: Tensor, inverse: float, seed: int | None, first: int) -> Tensor:
    """Return the multiple of the grid step that each value is rounded to, float32. first: index of the first one."""
    steps = (values.to(torch.float32) * inverse).clamp_(-_FAR, _FAR)
    if seed is None:
        return steps.round_()  # ties to even
    rounded = steps.round()
    below = torch.where(rounded > steps, rounded - 1, rounded)
    return below + (_uniform(slice(first, first + len(values)), seed, values.device) < steps - below)


def _uniform(piece: slice, seed: int, device: torch.device) -> Tensor:
    """Return a random number in [0, 1) for each index, by the finalizer of MurmurHash3."""
    # int64 holds unsigned 32-bit words.
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
    if levels.size <= SMALL:
        few = host.values(levels, table, protected, device).to(device)
        return few if out is None else out.copy_(few)
    moved_levels, moved_table = torch.from_numpy(levels).to(device), table.to(device)
    is_protected = moved_levels == _native.LEVEL_PROTECTED
    highest, found = torch.stack((moved_levels.amax().long(), is_protected.sum())).tolist()
    if highest >= len(table):
        raise ValueError("a level lies outside the codebook")
    if found != len(protected):
        raise ValueError("the number of protected values differs from the number of protected levels")
    out = torch.empty(levels.size, dtype=table.dtype, device=device) if out is None else out
    for piece in _pieces(levels.size):
        out[piece] = moved_table.index_select(0, moved_levels[piece].to(torch.int32))
    if len(protected):
        shift = 16 if table.dtype == torch.float32 else 0
        bits = torch.from_numpy((protected.astype(np.int32) << shift).astype(np.int32 if shift else np.uint16))
        out[is_protected] = bits.view(table.dtype).to(device)
    return out


def _square_root(values: Tensor) -> Tensor:
    # The square root in float64, rounded to float32, is the correctly rounded square root of a float32.
    return values.to(torch.float64).sqrt_().to(torch.float32)


def _values_of_seconds(seconds: Seconds, device: torch.device) -> Tensor:
    if isinstance(seconds, Outer):
        return outer(seconds.rows, seconds.columns)
    if isinstance(seconds, OfLevels):
        return values(seconds.levels, seconds.table, np.zeros(0, dtype=np.uint16), device)
    return seconds


def divide_by_roots(values: Tensor, seconds: Seconds, out: Tensor) -> None:
    flat = _values_of_seconds(seconds, out.device)
    for piece in _pieces(out.numel()):
        root = _square_root(flat[piece])
        torch.div(values[piece], root, out=out[piece])
        out[piece].masked_fill_(root == 0, 0)


def grid_levels_of_units(values: Tensor, seconds: Seconds, inverse: float, out: Tensor) -> Callable[[], int]:
    units = torch.empty(values.numel(), dtype=torch.float32, device=values.device)
    divide_by_roots(values.to(torch.float32), seconds, units)
    levels, highest = grid_levels(units, inverse, None)
    out.copy_(levels)
    return highest


def multiply_by_roots(values: Tensor, seconds: Seconds) -> None:
    flat = _values_of_seconds(seconds, values.device)
    for piece in _pieces(values.numel()):
        values[piece] *= _square_root(flat[piece])


def outer(rows: Tensor, columns: Tensor, out: Tensor | None = None) -> Tensor:
    product = torch.outer(rows, columns).view(-1)
    return product if out is None else out.copy_(product)
