"""Memory for tensors that replace one another, such as the weights of one candidate after another."""

from __future__ import annotations

import sys

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.engine import kernels


class ReusedMemory:
    """Makes tensors by name. One gets the memory of the last one of its name, unless that is still in use.

    New memory from the system takes as long to fill the first time as computing the values of a candidate does: the
    system has to clear it first. PyTorch itself reuses memory on devices.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[np.uint8]] = {}

    def empty(self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device = kernels.HOST) -> Tensor:
        """Return a tensor on a device, not initialized."""
        size = shape.numel() * dtype.itemsize
        if device.type != "cpu" or not size:
            return kernels.empty(shape, dtype, device)
        array = self._arrays.get(name)
        # As long as any tensor uses the memory, PyTorch has a reference to the array. Without one, there are three: of
        # the dictionary, of the variable here and of the argument of getrefcount.
        if array is None or array.size != size or sys.getrefcount(array) > 3:
            array = self._arrays[name] = np.empty(size, dtype=np.uint8)
        return torch.from_numpy(array).view(dtype).view(shape)
