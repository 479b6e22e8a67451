"""Kernels for tensors in host memory, by the native core. Tensors on a device are copied to the host first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import _native
from dynaquant.engine.kernels.seconds import OfLevels, Outer, Seconds

Sensitivity = tuple[Tensor, NDArray[np.uint8]]
"""The sensitivity of each value, float32, and a table of levels by the top 16 bits of a sensitivity, uint8[65536].

The table holds pruned, protected or ``UNDECIDED``."""
PIECE = (1 << 17) * _native.threads()
"""Number of values that fit into the caches of the processors, for several passes over them."""
_LARGE = 1 << 22
"""Bytes of memory for which NumPy asks for large pages."""
_BUCKETS = 65_536
_NOTHING = np.zeros(0, dtype=np.uint32)
_NO_LEVELS = np.zeros(0, dtype=np.uint8)
_NO_OUTLIERS = np.zeros(0, dtype=np.uint16)
_UNDECIDED = np.full(_BUCKETS, _native.UNDECIDED, dtype=np.uint8)


def empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a new tensor. NumPy asks for large pages, which are several times faster to fill."""
    if shape.numel() * dtype.itemsize < _LARGE:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(np.empty(shape.numel() * dtype.itemsize, dtype=np.uint8)).view(dtype).reshape(shape)


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().cpu().reshape(-1).contiguous()
    # A tensor in a memory-mapped file may begin at any byte.
    return flat if flat.data_ptr() % flat.element_size() == 0 else flat.clone()


def plain_values(tensor: Tensor) -> NDArray[np.float32] | None:
    """Return the values of a float32 tensor, flat, without a copy; None if its memory is not what native code reads."""
    if tensor.dtype == torch.float32 and tensor.is_cpu and tensor.is_contiguous():
        values: NDArray[np.float32] = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        flat = values if values.ndim == 1 else values.reshape(-1)
        return flat if flat.flags.aligned else None
    return None


def _float32(tensor: Tensor) -> NDArray[np.float32]:
    flat = plain_values(tensor)  # the usual case, in a third of the time
    return _flat(tensor).to(torch.float32).numpy() if flat is None else flat


def bits_of(tensor: Tensor) -> NDArray[np.uint32] | NDArray[np.uint16]:
    """Return the bit patterns, flat. Copies only if necessary. float64 is rounded to float32 first."""
    flat = _flat(tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor)
    return flat.view(_unsigned(flat.dtype)).numpy()


def _unsigned(dtype: torch.dtype) -> torch.dtype:
    return torch.uint32 if dtype == torch.float32 else torch.uint16


def total(tensor: Tensor) -> float:
    return _native.sums(_float32(tensor))[0]


def errors(values: Tensor, exact: Tensor) -> tuple[float, float]:
    return _native.errors(_float32(values), _float32(exact))


def extremes(tensor: Tensor) -> tuple[float, float]:
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):  # float32 would not hold the others
        lowest, highest = torch.aminmax(tensor.detach().cpu())
        return float(lowest), float(highest)
    return _native.extremes(_float32(tensor))


def extremes_from(tensor: Tensor, limit: float) -> tuple[float, float, float]:
    lowest, highest, smallest = _native.extremes_from(_float32(tensor), limit)
    return (*extremes(tensor), smallest) if tensor.dtype == torch.float64 else (lowest, highest, smallest)


def row_and_column_sums(matrix: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rows, columns = np.empty(matrix.shape[0]), np.empty(matrix.shape[1])
    _native.row_and_column_sums(_float32(matrix), rows, columns)
    return rows, columns


def log_histogram(tensor: Tensor) -> NDArray[np.int64]:
    counts = np.zeros(_BUCKETS, dtype=np.int64)
    _native.log_histogram(bits_of(tensor), counts)
    return counts


def table_levels(tensor: Tensor, table: NDArray[np.uint8], sensitivity: Sensitivity | None = None) -> Tensor:
    levels = empty(torch.Size([tensor.numel()]), torch.uint8)
    bits, by_sensitivity = (
        (_NOTHING, _UNDECIDED) if sensitivity is None else (_float32(sensitivity[0]).view(np.uint32), sensitivity[1])
    )
    _native.assign_levels(bits_of(tensor), table, bits, by_sensitivity, levels.numpy())
    return levels


def levels_in_turns(
    tensor: Tensor,
    low: NDArray[np.uint8],
    high: NDArray[np.uint8],
    goes_up: NDArray[np.bool_],
    turns: NDArray[np.uint8],
) -> Tensor:
    levels = empty(torch.Size([tensor.numel()]), torch.uint8)
    _native.levels_in_turns(bits_of(tensor), low, high, goes_up.view(np.uint8).reshape(-1), turns, levels.numpy())
    return levels


def grid_levels(tensor: Tensor, inverse: float, seed: int | None, first: int = 0) -> tuple[Tensor, Callable[[], int]]:
    levels = empty(torch.Size([tensor.numel()]), torch.uint8)
    highest = _native.grid_levels(_float32(tensor), inverse, seed, first, levels.numpy())
    return levels, lambda: highest


def grid_values(tensor: Tensor, inverse: float, step: float, seed: int | None, first: int, out: Tensor) -> None:
    if out.numel():
        _native.grid_values(_float32(tensor), inverse, step, seed, first, out.reshape(-1).numpy())


def grid_errors(tensor: Tensor, inverse: float, step: float, seed: int | None, first: int) -> tuple[float, float]:
    return _native.grid_errors(_float32(tensor), inverse, step, seed, first, _NO_LEVELS)[:2]


def grid_levels_and_errors(
    tensor: Tensor, inverse: float, step: float, seed: int | None
) -> tuple[Tensor, int, tuple[float, float]]:
    """Return the levels of ``grid_levels``, the highest of them, and what ``grid_errors`` returns, in one pass."""
    levels = empty(torch.Size([tensor.numel()]), torch.uint8)
    squares, errors, highest = _native.grid_errors(_float32(tensor), inverse, step, seed, 0, levels.numpy())
    return levels, highest, (squares, errors)


def values(
    levels: NDArray[np.uint8],
    table: Tensor,
    protected: NDArray[np.uint16],
    device: torch.device,  # noqa: ARG001 - always the host
    out: Tensor | None = None,
) -> Tensor:
    if not levels.size and not len(protected):
        return empty(torch.Size([0]), table.dtype)
    unsigned = _unsigned(table.dtype)
    filled = empty(torch.Size([levels.size]), table.dtype) if out is None else out
    _native.values_of_levels(levels, table.view(unsigned).numpy(), protected, filled.view(unsigned).numpy())
    return filled


def divide_by_roots(values: Tensor, seconds: Seconds, out: Tensor) -> None:
    if isinstance(seconds, Outer):
        rows, columns = _float32(seconds.rows), _float32(seconds.columns)
        _native.divide_by_outer_roots(_float32(values), rows, columns, out.numpy())
    else:
        _native.divide_by_roots(_float32(values), _float32(_flat_seconds(seconds)), out.numpy())


def _flat_seconds(seconds: Tensor | OfLevels) -> Tensor:
    if isinstance(seconds, Tensor):
        return seconds
    # Rare: only where a moment has outliers.
    return values(seconds.levels, seconds.table, _NO_OUTLIERS, torch.device("cpu"))


def grid_levels_of_units(values: Tensor, seconds: Seconds, inverse: float, out: Tensor) -> Callable[[], int]:
    flat, levels = _float32(values), out.numpy()
    if isinstance(seconds, OfLevels):
        highest = _native.grid_levels_of_level_units(flat, seconds.levels, seconds.table.numpy(), inverse, levels)
    elif isinstance(seconds, Outer):
        rows, columns = _float32(seconds.rows), _float32(seconds.columns)
        highest = _native.grid_levels_of_units(flat, rows, columns, inverse, levels)
    else:
        highest = _native.grid_levels_of_units(flat, _float32(seconds), None, inverse, levels)
    return lambda: highest


def multiply_by_roots(values: Tensor, seconds: Seconds) -> None:
    if isinstance(seconds, OfLevels):
        _native.multiply_by_level_roots(values.numpy(), seconds.levels, seconds.table.numpy())
    elif isinstance(seconds, Outer):
        _native.multiply_by_outer_roots(values.numpy(), _float32(seconds.rows), _float32(seconds.columns))
    else:
        _native.multiply_by_roots(values.numpy(), _float32(seconds))


def outer(rows: Tensor, columns: Tensor, out: Tensor | None = None) -> Tensor:
    filled = empty(torch.Size([len(rows) * len(columns)]), torch.float32) if out is None else out
    # Not torch.outer: on a piece, PyTorch's threads wait for one another longer than NumPy takes.
    np.multiply.outer(rows.numpy(), columns.numpy(), out=filled.numpy().reshape(len(rows), len(columns)))
    return filled
