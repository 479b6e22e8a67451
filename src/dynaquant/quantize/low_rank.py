"""Quantize a matrix as a product of two thin ones: few singular vectors, rounded to integers.

A first moment is a sum of a few recent gradients, and gradients of matrices have few large singular values (PowerSGD,
arXiv 1905.13727; GaLore, arXiv 2403.03507). So a few singular vectors keep most of it, for far fewer bits than one
level per value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dynaquant.quantize.grid import quantize
from dynaquant.tensors.codebook import HIGHEST_STEP_RUNG, LOWEST_RUNG, RUNGS_PER_OCTAVE
from dynaquant.tensors.dequantize import dequantize
from dynaquant.tensors.stored import LowRank

RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Ranks to try, smallest first."""
FACTOR_STEP = 0.75
"""The grid step of a factor, relative to the root mean square of its weakest vector. Measured: docs/decisions.md, "Is a
first moment of low rank?"."""
OVERSAMPLING, POWER_ITERATIONS = 8, 1
"""Of the randomized range finder (Halko, Martinsson and Tropp, arXiv 0909.4061, algorithm 4.4)."""
SMALLEST = 1e-30
"""A matrix with a smaller norm has no form of low rank: divided by its peak, float32 might overflow."""
PIECE = 2**18
"""Values that are converted to float64 at a time."""
MOST_LEVELS = 126
"""The largest multiple of the grid step in a factor. A coarser step keeps larger values within it."""


def quantize_low_rank(matrix: Tensor, dtype: torch.dtype, shape: torch.Size, tolerance: float) -> LowRank | None:
    """Return the smallest rank whose relative error ``‖Â - A‖ / ‖A‖`` is at most ``tolerance``.

    matrix: float32, (n, m), finite, on any device. dtype, shape: of the tensor that is stored. Returns None if no rank
    of ``RANKS`` is good enough, or if none is smaller than half of n or m.
    """
    power = sum(float(rows.square().sum()) for _, rows in _in_float64(matrix))
    if not SMALLEST**2 < power < math.inf:
        return None
    ranks = [rank for rank in RANKS if 2 * rank <= min(matrix.shape)]
    at = 0
    for most in (8, RANKS[-1]):  # most moments need few vectors
        if at == len(ranks):
            return None
        try:
            with torch.autocast(matrix.device.type, enabled=False):
                left, right = _singular_vectors(matrix, min(most, ranks[-1]))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # LAPACK does not converge on some finite matrices
            return None
        shares = (left.double().square().sum(0) * right.double().square().sum(0)) / power
        while at < len(ranks) and ranks[at] <= left.shape[1]:
            rank = ranks[at]
            # Rounding only adds to the error, so ranks that are too small are skipped without it.
            if 1 - float(shares[:rank].sum()) <= tolerance**2:
                found = _rounded(left[:, :rank], right[:, :rank], dtype, shape)
                if found is not None and _squared_error(matrix, found, power) <= tolerance**2 * power:
                    return found
            at += 1
    return None


def _singular_vectors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return (n, rank) and (m, rank): singular vectors, each times the root of its singular value, largest first."""
    least, most = torch.aminmax(matrix)
    peak = torch.maximum(-least, most)  # other factors are divided by it, so that no product overflows
    width = min(rank + OVERSAMPLING, *matrix.shape)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(matrix.shape[1], width, generator=generator, dtype=torch.float32, device="cpu")
    basis = torch.linalg.qr(matrix @ (start.to(matrix.device) / peak)).Q
    for _ in range(POWER_ITERATIONS):
        other = torch.linalg.qr(matrix.T @ (basis / peak)).Q
        basis = torch.linalg.qr(matrix @ (other / peak)).Q
    inner, values, right = torch.linalg.svd((basis / peak).T @ matrix, full_matrices=False)
    roots = values[:rank].sqrt() * peak.sqrt()
    return (basis @ inner[:, :rank]) * roots, right[:rank].T * roots


def _rounded(left: Tensor, right: Tensor, dtype: torch.dtype, shape: torch.Size) -> LowRank | None:
    factors = []
    for vectors in (left, right):
        weakest = FACTOR_STEP * float(vectors[:, -1].square().mean().sqrt())
        step = max(weakest, float(vectors.abs().max()) / MOST_LEVELS)
        rung = math.ceil(RUNGS_PER_OCTAVE * math.log2(step)) if step > 0 else LOWEST_RUNG
        if not LOWEST_RUNG <= rung <= HIGHEST_STEP_RUNG:
            return None
        factors.append(quantize(vectors.T.contiguous(), rung))
    rows, columns = factors
    # A vector of zeros would make levels of the other factor meaningless. A smaller rank does as well then.
    empty = any(not factor.levels.reshape(factor.shape).any(axis=1).all() for factor in factors)
    if empty or len(rows.protected) or len(columns.protected):
        return None
    return LowRank(dtype, shape, rows, columns)


def _squared_error(matrix: Tensor, found: LowRank, power: float) -> float:
    """Return ``‖Â - A‖²`` as ``‖A‖² - 2⟨A, Â⟩ + ‖Â‖²``, without computing the matrix Â."""
    rows, columns = (dequantize(factor, matrix.device).to(torch.float64) for factor in (found.rows, found.columns))
    product = sum(
        float(((piece @ columns.T) * rows.T[begin : begin + len(piece)]).sum()) for begin, piece in _in_float64(matrix)
    )
    norm = ((rows @ rows.T) * (columns @ columns.T)).sum()
    return power - 2 * product + float(norm)


def _in_float64(matrix: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield some rows at a time as float64, each with the number of its first row, to save memory."""
    some_rows = max(PIECE // max(matrix.shape[1], 1), 1)
    for begin in range(0, len(matrix), some_rows):
        yield begin, matrix[begin : begin + some_rows].to(torch.float64)
