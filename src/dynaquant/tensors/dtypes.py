"""Element types that can be stored, and the bytes of a tensor's values."""

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

Not among them: PyTorch's old quantized types, and types of less than a byte, which it cannot copy.
"""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in files and messages, e.g. ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of the values in C order, on the host; a copy only where one is needed."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.stride() != (1,):  # counts as contiguous when it has one element, but cannot be viewed as bytes
        flat = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)
    data: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return data
