"""Kernels: passes over all values of a tensor, on the device where the tensor is.

In reading order:

- this file: the functions that every kernel set has, and which set a device uses
- ``host``: kernels for tensors in host memory, by the native core
- ``device``: kernels for tensors on a device, by PyTorch operations
- ``seconds``: how second moments are given to kernels
- ``reused``: memory for tensors that replace one another

Levels and values are the same, bit for bit, on every device. Sums agree to the precision of float64. Only levels and
small arrays move from a device to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.engine.kernels import device as device_kernels
from dynaquant.engine.kernels import host as host_kernels
from dynaquant.engine.kernels.host import Sensitivity
from dynaquant.engine.kernels.seconds import OfLevels, Outer, Seconds

HOST = torch.device("cpu")


ExtremesFrom = tuple[float, float, float]
"""The lowest and the highest value of a tensor, and the smallest one from a limit on."""


class Kernels(Protocol):
    """The functions of ``host`` and ``device``. Tensors are dense, of any shape. Levels are uint8, flat in C order."""

    def total(self, tensor: Tensor) -> float | Tensor:
        """Return the sum of the values, computed in float64. Of a device, as a scalar on it."""

    def errors(self, values: Tensor, exact: Tensor) -> tuple[float, float]:
        """Return the sum of the squares of exact values and that of the differences of other values from them.

        Both: float32, flat, on the same device. Differences are computed in float32, sums in float64.
        """

    def extremes(self, tensor: Tensor) -> tuple[float, float]:
        """Return the lowest and the highest value; NaN if any value is NaN. tensor: not empty."""

    def extremes_from(self, tensor: Tensor, limit: float) -> ExtremesFrom:
        """Return what ``extremes`` does, and the smallest value that is at least a limit.

        The last one is a float32; infinity if there is none. limit: above zero, a float32.
        """

    def row_and_column_sums(self, matrix: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the sum of each row and the sum of each column of a matrix."""

    def log_histogram(self, tensor: Tensor) -> NDArray[np.int64]:
        """Count the values by their top 16 bits, int64[65536]. float64 is rounded to float32 first."""

    def table_levels(self, tensor: Tensor, table: NDArray[np.uint8], sensitivity: Sensitivity | None = None) -> Tensor:
        """Return the level that the table has for the top 16 bits of each value.

        If the table of the sensitivity prunes or protects a value, that decides instead. Protection, by either table,
        has precedence over pruning.
        """

    def levels_in_turns(
        self,
        tensor: Tensor,
        low: NDArray[np.uint8],
        high: NDArray[np.uint8],
        goes_up: NDArray[np.bool_],
        turns: NDArray[np.uint8],
    ) -> Tensor:
        """Return ``low[bucket]`` of each value, or ``high[bucket]`` where ``goes_up[turn, low level]``.

        low, high: tables of levels by the top 16 bits of a value. goes_up: bool[turns, 256]. turns: of each row; not
        falling. tensor: with as many rows, not empty.
        """

    def grid_levels(
        self, tensor: Tensor, inverse: float, seed: int | None, first: int = 0
    ) -> tuple[Tensor, Callable[[], int]]:
        """Return levels of the grid with step ``1 / inverse``, and a function that waits for the highest level.

        That is 256 or more if a value is protected. seed: a number selects stochastic rounding;
        None rounds to the nearest. first: the index of the first value in its tensor, for stochastic rounding.
        """

    def grid_values(
        self, tensor: Tensor, inverse: float, step: float, seed: int | None, first: int, out: Tensor
    ) -> None:
        """Fill ``out`` with the values that the levels of ``grid_levels`` are restored to, without making the levels.

        tensor, out: float32, on the same device, of the same size; ``out`` is contiguous. inverse: ``1 / step``. first:
        the index of the first value in its tensor, for stochastic rounding.
        """

    def grid_errors(
        self, tensor: Tensor, inverse: float, step: float, seed: int | None, first: int
    ) -> tuple[float, float]:
        """Return the sum of the squares of the values, and that of the errors of what ``grid_values`` fills."""

    def values(
        self,
        levels: NDArray[np.uint8],
        table: Tensor,
        protected: NDArray[np.uint16],
        device: torch.device,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``table[levels]``, flat, on a device. Each protected level takes the next of the protected values.

        table: on the host, of the dtype of the result, 16 or 32 bits. protected: the top 16 bits of the values. out:
        what to return, filled; contiguous, of this dtype and on the device. Raises ValueError if table or protected
        values do not fit the levels.
        """

    def divide_by_roots(self, values: Tensor, seconds: Seconds, out: Tensor) -> None:
        """Fill ``out`` with ``values / sqrt(seconds)``, and with zero where the second is zero.

        All: of the same size, on the same device. values, out: float32, flat; ``out`` is contiguous. The root and the
        quotient are correctly rounded. Raises ValueError if a level of ``seconds`` is outside its table.
        """

    def grid_levels_of_units(self, values: Tensor, seconds: Seconds, inverse: float, out: Tensor) -> Callable[[], int]:
        """Fill ``out`` with ``grid_levels`` of what ``divide_by_roots`` fills, rounded to the nearest.

        Return a function that waits for the highest level. values: of any dtype. out: uint8, contiguous.
        """

    def multiply_by_roots(self, values: Tensor, seconds: Seconds) -> None:
        """Multiply values by ``sqrt(seconds)``, in place. All as for ``divide_by_roots``; ``values`` is contiguous."""

    def outer(self, rows: Tensor, columns: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the outer product of two float32 vectors, flat. out: as for ``values``."""


def for_device(device: torch.device) -> Kernels:
    """Return the kernels for tensors on a device. Those of the host copy a tensor of any other device to the host."""
    return cast(Kernels, host_kernels if device == HOST or not runs_on(device) else device_kernels)


def runs_on(device: torch.device) -> bool:
    """Whether the kernels for devices run on a device: on CUDA, and on accelerators on which they are exact.

    Others may lack what is necessary, such as float64.
    """
    return device.type == "cuda" or (device.type not in ("cpu", "meta") and _agrees(device.type))


def fills(device: torch.device) -> bool:
    """Whether kernels compute values in the memory of a device: on the host, and where those for devices run."""
    return device.type == "cpu" or runs_on(device)


@cache
def _agrees(kind: str) -> bool:
    """Whether the kernels for devices give the results of the host on a kind of device."""
    sample = torch.linspace(-1, 1, 1001, device="cpu")
    try:
        _copied_in_background(sample.to(kind))()
        return all(map(torch.equal, _results(device_kernels, sample, kind), _results(host_kernels, sample, "cpu")))
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, RuntimeError, TypeError):  # an operation, a dtype, pinned memory or streams are missing
        return False


def _results(kernel: Kernels, sample: Tensor, kind: str) -> list[Tensor]:
    """Return what kernels find for a sample: levels, values, and sums that are exact."""
    tensor = sample.to(kind)
    levels = np.tile(np.arange(200, dtype=np.uint8), device_kernels.SMALL // 200 + 1)
    on_grid, in_units = torch.empty_like(tensor), torch.empty_like(tensor)
    kernel.grid_values(tensor, 100.0, 0.01, 7, 0, on_grid)
    rows, columns = tensor[:7].abs(), tensor[7:150].abs()
    tables = (np.arange(65_536) >> 4).astype(np.uint8), (np.arange(65_536) >> 3).astype(np.uint8)
    ups = np.arange(4 * 256).reshape(4, 256) % 3 == 0
    kernel.divide_by_roots(tensor, Outer(rows, columns), in_units)
    scaled = in_units.clone()
    kernel.multiply_by_roots(scaled, tensor.abs())
    kernel.multiply_by_roots(scaled, OfLevels(levels[: len(scaled)] // 2 + np.uint8(2), sample[:256].abs()))
    found = [
        scaled,
        kernel.outer(rows, columns),
        kernel.grid_levels(tensor.to(torch.bfloat16), 100.0, None)[0],
        kernel.table_levels(tensor, np.arange(65_536).astype(np.uint8)),
        kernel.levels_in_turns(tensor.view(7, 143), *tables, ups, np.arange(7, dtype=np.uint8) // 2),
        kernel.grid_levels(tensor, 100.0, 7)[0],
        kernel.values(levels, sample[:256].contiguous(), np.full(len(levels) // 200, 0x3F80, np.uint16), tensor.device),
    ]
    ones = torch.ones_like(tensor)
    numbers = np.array(
        [
            *kernel.extremes(tensor),
            *kernel.extremes_from(tensor, 0.1),
            float(kernel.total(ones)),
            *kernel.errors(ones[:256], -ones[:256]),
        ]
    )
    arrays = numbers, kernel.log_histogram(tensor), *kernel.row_and_column_sums(ones.view(7, 143))
    return [*(each.cpu() for each in (on_grid, in_units, *found)), *map(torch.from_numpy, arrays)]


def to_host(tensor: Tensor) -> Callable[[], NDArray[Any]]:
    """Start to copy a tensor to host memory. Return a function that waits for the copy and returns it.

    Only a copy from an accelerator runs in the background. A tensor in host memory is not copied.
    """
    if tensor.is_cpu:
        return tensor.numpy
    return _copied_in_background(tensor) if runs_on(tensor.device) else tensor.cpu().numpy


def _copied_in_background(tensor: Tensor) -> Callable[[], NDArray[Any]]:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)

    def finish() -> NDArray[Any]:
        getattr(torch, tensor.device.type).current_stream(tensor.device).synchronize()
        return empty(tensor.shape, tensor.dtype).copy_(pinned).numpy()  # frees the pinned memory, which is scarce

    return finish


def small_on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors; small ones of devices as copies in host memory.

    All of one device and dtype cross together. So a model of many small tensors does not wait for each of them.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" and 0 < tensor.numel() <= device_kernels.SMALL and runs_on(tensor.device):
            groups.setdefault((tensor.device, tensor.dtype), []).append(name)
    found = dict(tensors)
    for names in groups.values():
        together = torch.cat([tensors[name].detach().reshape(-1) for name in names]).cpu()
        parts = torch.split(together, [tensors[name].numel() for name in names])
        found.update({name: part.view(tensors[name].shape) for name, part in zip(names, parts, strict=True)})
    return found


def totals(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the sum of the values of each tensor, computed in float64. The sums of a device cross together."""
    found = {name: for_device(tensor.device).total(tensor) for name, tensor in small_on_host(tensors).items()}
    crossed = small_on_host({name: total for name, total in found.items() if isinstance(total, Tensor)})
    return {name: float(crossed.get(name, total)) for name, total in found.items()}


def all_extremes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Return the lowest and the highest value of each tensor that has values; NaN if any is.

    Those of a device cross together. Looks each tensor up once, and keeps none.
    """
    found: dict[str, tuple[float, float]] = {}
    on_devices: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.device.type == "cpu":
            found[name] = host_kernels.extremes(tensor)
        elif tensor.numel():
            on_devices[name] = torch.stack(torch.aminmax(tensor.detach()))
    for name, both in small_on_host(on_devices).items():
        lowest, highest = both.tolist()
        found[name] = lowest, highest
    return found


def all_extremes_from(tensors: Mapping[str, Tensor], limit: float) -> dict[str, ExtremesFrom]:
    """Return ``Kernels.extremes_from`` of each tensor on a device that has values. They cross together."""
    on_devices = {
        name: torch.stack([*torch.aminmax(tensor.detach()), device_kernels.smallest_from(tensor, limit)])
        for name, tensor in tensors.items()
        if tensor.numel()
    }
    found: dict[str, ExtremesFrom] = {}
    for name, numbers in small_on_host(on_devices).items():
        lowest, highest, smallest = numbers.tolist()
        found[name] = lowest, highest, smallest
    return found


def empty(shape: torch.Size, dtype: torch.dtype, device: torch.device = HOST) -> Tensor:
    """Return a new tensor on a device, not initialized."""
    if device.type == "cpu":
        return host_kernels.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def piece_size(device: torch.device) -> int:
    """Return the number of values to process at once, for the best speed."""
    return device_kernels.PIECE if runs_on(device) else host_kernels.PIECE
