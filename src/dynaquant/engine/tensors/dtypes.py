"""PyTorch's element types by their names in files, casts to them, and the bytes of a tensor's values."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.engine.tensors.element_types import ITEM_SIZES, QUANTIZABLE
from dynaquant.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZES if hasattr(torch, name)}
"""Every element type that can be stored and that this PyTorch has, by the name it has in files."""
QUANTIZABLE_DTYPES = tuple(DTYPES[name] for name in QUANTIZABLE)
"""Element types that can be quantized. float64 values are rounded to float32 first."""


def dtype_named(name: str) -> torch.dtype:
    """Return an element type by its name in files. Raises CheckpointError if this PyTorch does not have it."""
    if name not in DTYPES:
        raise CheckpointError(f"PyTorch {torch.__version__} has no element type {name}; install a newer one")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in files and messages, e.g. ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of the values in C order, on the host. Copies only if necessary."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.stride() != (1,):  # one element: counts as contiguous, but cannot be viewed as bytes
        flat = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)
    return flat.view(torch.uint8).numpy()


def saturating_cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values in ``dtype``. Values beyond its range become its largest number, not infinity."""
    if dtype in (torch.float16, torch.bfloat16):
        values = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return values.to(dtype)
