"""Quantize one second moment as coarsely as the next update allows (method 2.3)."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant import kernels
from dynaquant.quantize.log_grid import quantize_to_log_grid, round_to_log_grid
from dynaquant.quantize.moment_sample import sample, sample_rank_one
from dynaquant.tensors.stored import QuantizedTensor, RankOne

FACTOR_PACE = 1
"""Rungs between the values of a rank-one tensor's rows and columns."""
SECOND_PACES = (8, 4, 2)
"""Rungs between the values of a second moment, coarsest first: 2, 1 and 1/2 octaves."""


def quantize_second_moment(second: Tensor, tolerance: float) -> QuantizedTensor | RankOne | None:
    """Return the cheapest form that changes ``1 / sqrt(v)`` by at most ``tolerance``; None: store it exactly.

    The change is the root mean square of ``sqrt(v / v̂) - 1`` over the elements of a sample that are not zero. v̂ is
    the stored value of v.
    """
    sampled = sample(second)
    nonzero = (sampled > 0).nonzero().view(-1)
    values = sampled.index_select(0, nonzero)

    def is_good(decoded: Tensor) -> bool:
        if not bool(((decoded > 0) & (decoded < math.inf)).all()):
            return False
        change = (values / decoded).sqrt() - 1
        return not change.numel() or float(change.square().mean().sqrt()) <= tolerance

    factors = quantize_rank_one(second)
    if factors is not None and is_good(sample_rank_one(factors).index_select(0, nonzero)):
        return factors
    good = (pace for pace in SECOND_PACES if is_good(round_to_log_grid(values, pace, second.dtype)))
    return next((stored for pace in good if (stored := quantize_to_log_grid(second, pace)) is not None), None)


def quantize_rank_one(tensor: Tensor) -> RankOne | None:
    """Return a second moment as row mean × column mean / mean.

    Returns None if the tensor has fewer than two dimensions, is all zero, or does not fit the levels.
    """
    if tensor.ndim < 2:
        return None
    matrix = tensor.detach().reshape(tensor.shape[0], -1)
    row_sums, column_sums = kernels.for_device(tensor.device).row_and_column_sums(matrix)
    row_means, column_means = row_sums / len(column_sums), column_sums / len(row_sums)
    root = math.sqrt(row_means.mean())
    if not 0 < root < math.inf:
        return None

    def factor(means: NDArray[np.float64]) -> QuantizedTensor | None:
        return quantize_to_log_grid(torch.from_numpy((means / root).astype(np.float32)), FACTOR_PACE)

    rows, columns = factor(row_means), factor(column_means)
    if rows is None or columns is None:
        return None
    return RankOne(tensor.dtype, tensor.shape, rows, columns)
