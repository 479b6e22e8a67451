"""Passes over all values of a tensor, where it is: ``host`` by the native core, ``device`` by tensor operations.

Levels and values are the same bit for bit wherever they are computed; sums agree to the precision of float64. Only
levels and what is small cross from a device to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.kernels import device, host
from dynaquant.kernels.host import Sensitivity

HOST = torch.device("cpu")


class Kernels(Protocol):
    """What ``host`` and ``device`` both have. Tensors are dense, of any shape; levels are uint8, flat in C order."""

    def sums(self, tensor: Tensor) -> tuple[float, float]:
        """The sum of the values and that of their squares, in float64."""
        ...

    def row_and_column_sums(self, matrix: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The sums of the rows and those of the columns of a matrix."""
        ...

    def log_histogram(self, tensor: Tensor) -> NDArray[np.int64]:
        """How many values have each top 16 bits, int64[65536]. float64 is rounded to float32 first."""
        ...

    def table_levels(self, tensor: Tensor, table: NDArray[np.uint8], sensitivity: Sensitivity | None = None) -> Tensor:
        """Levels by the top 16 bits of each value, unless those of its sensitivity prune or protect it. Protection by
        either beats pruning by either.
        """
        ...

    def grid_levels(self, tensor: Tensor, inverse: float, seed: int | None) -> tuple[Tensor, Tensor | int]:
        """Levels of the grid with step ``1 / inverse``, and the highest, 256 or more where a value is protected.

        seed: rounds up or down at random, right in the mean; None: to the nearest.
        """
        ...

    def values(
        self, levels: NDArray[np.uint8], table: Tensor, protected: NDArray[np.uint16], where: torch.device
    ) -> Tensor:
        """``table[levels]``, flat, on a device; for a protected level the next of the protected values.

        table: on the host, of the dtype of the result, 16 or 32 bits. protected: the top 16 bits of the values. Raises
        ValueError when either does not fit the levels.
        """
        ...

    def square_root(self, tensor: Tensor) -> Tensor:
        """Of a float32 tensor, correctly rounded."""
        ...


def for_device(where: torch.device) -> Kernels:
    """The kernels for tensors on a device. Other devices than CUDA's need not have what it takes (float64)."""
    return cast(Kernels, device if where.type == "cuda" else host)


def to_host(tensor: Tensor) -> Callable[[], NDArray[Any]]:
    """Begins to copy a tensor to host memory, from CUDA without waiting for it; what is returned waits and has it.

    What is in host memory is not copied.
    """
    if tensor.device.type != "cuda":
        return tensor.cpu().numpy
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)

    def finish() -> NDArray[Any]:
        torch.cuda.current_stream(tensor.device).synchronize()
        return pinned.numpy().copy()  # pinned memory is scarce

    return finish


def empty(shape: torch.Size, dtype: torch.dtype, where: torch.device = HOST) -> Tensor:
    """A new tensor on a device."""
    return host.empty(shape, dtype) if where.type == "cpu" else torch.empty(shape, dtype=dtype, device=where)


def piece_size(where: torch.device) -> int:
    """How many values are best worked on at once."""
    return device.PIECE if where.type == "cuda" else host.PIECE
