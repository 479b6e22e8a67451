"""Weights in half precision, which mixed-precision trainings store, made of the float32 weights of the workloads."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded(weight: Tensor, dtype: str) -> Tensor:
    """Return a float32 or float64 weight in a narrower type, or as it is: if it is of another type, or too large."""
    narrow = weight.detach().to(getattr(torch, dtype))
    wide = weight.dtype in (torch.float32, torch.float64) and narrow.dtype.itemsize < weight.dtype.itemsize
    return narrow if wide and bool(narrow.isfinite().all()) else weight.detach()
