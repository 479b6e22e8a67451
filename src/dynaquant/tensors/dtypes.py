"""Element types that can be stored or quantized, and the bytes of a tensor's values."""

from __future__ import annotations

import re

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and f"torch.{name}" == str(dtype) and not re.match(r"q|bits|u?int[1-7]$", name)
}
"""Every element type that can be stored, by the name it has in files.

Left out: PyTorch's old quantized types, and types of less than a byte, which PyTorch cannot copy.
"""
QUANTIZABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Element types that can be quantized. float64 values are rounded to float32 first."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in files and messages, e.g. ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of the values in C order, on the host. Copies only if necessary."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.stride() != (1,):  # one element: counts as contiguous, but cannot be viewed as bytes
        flat = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)
    data: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return data
