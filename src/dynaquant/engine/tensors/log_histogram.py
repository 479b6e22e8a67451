"""Mergeable log histogram of floats, and quantiles from it (method 1.2).

The bucket of a value is the top 16 bits of its float32: sign, exponent, 7 mantissa bits. So buckets are logarithmic,
with a relative error of at most α = 2⁻⁸ < 0.4 %. There are 65,536 of them. So every decision about a value (which bin,
pruned or protected) fits into a table indexed by bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.engine import kernels

BUCKETS = 65_536
MAGNITUDES = 32_768
"""Number of buckets per sign: buckets ``b`` and ``b + MAGNITUDES`` hold the same magnitudes."""
FIRST_NONFINITE = 0x7F80
"""The first magnitude bucket of infinities and NaNs."""


@cache
def _half_buckets() -> NDArray[np.uint16]:
    codes = np.arange(BUCKETS, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return (codes.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def table_for(dtype: torch.dtype, by_bucket: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Rearrange a table indexed by bucket, so that the top 16 bits of a value of ``dtype`` are the index."""
    return by_bucket[_half_buckets()] if dtype == torch.float16 else by_bucket


@cache
def bucket_values(dtype: torch.dtype = torch.float32) -> NDArray[np.float32]:
    """Return the middle of the values of ``dtype`` in each bucket, float32[65536].

    It depends on the dtype, because a bucket holds only one bfloat16 and eight float16 values. For the two buckets
    around 0 it is exactly 0.
    """
    lower_bits = {torch.bfloat16: 0, torch.float16: 0x7000}.get(dtype, 0x8000)
    middles = (np.arange(BUCKETS, dtype=np.uint32) << 16 | lower_bits).view(np.float32)
    middles[[0, MAGNITUDES]] = 0.0
    return middles


@dataclass(frozen=True)
class LogHistogram:
    """Number of values in each bucket that is not empty. ``a + b`` is the histogram of both sets of values together."""

    buckets: NDArray[np.uint16]
    """The buckets that occur, ascending. Positive values come first, because the sign is the highest bit."""
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, tensor: Tensor) -> LogHistogram:
        """Return the histogram of a tensor of any shape, in ``QUANTIZABLE_DTYPES``. Takes one pass over its memory."""
        counts = kernels.for_device(tensor.device).log_histogram(tensor)
        if tensor.dtype == torch.float16:
            by_code, counts = counts, np.zeros(BUCKETS, dtype=np.int64)
            np.add.at(counts, _half_buckets(), by_code)
        return cls._from_dense(counts)

    @classmethod
    def empty(cls) -> LogHistogram:
        """Return the histogram of no values."""
        return cls._from_dense(np.zeros(BUCKETS, dtype=np.int64))

    @classmethod
    def _from_dense(cls, counts: NDArray[np.int64]) -> LogHistogram:
        buckets = np.flatnonzero(counts)
        return cls(buckets.astype(np.uint16), counts[buckets])

    def _dense(self) -> NDArray[np.int64]:
        counts = np.zeros(BUCKETS, dtype=np.int64)
        counts[self.buckets] = self.counts
        return counts

    def __add__(self, other: LogHistogram) -> LogHistogram:
        return self._from_dense(self._dense() + other._dense())

    @property
    def nonfinite(self) -> int:
        """Number of infinities and NaNs."""
        return int(self.counts[(self.buckets % MAGNITUDES) >= FIRST_NONFINITE].sum())

    def magnitudes(self) -> NDArray[np.int64]:
        """Return the counts by magnitude, both signs together, int64[32768]."""
        dense = self._dense()
        return dense[:MAGNITUDES] + dense[MAGNITUDES:]

    def quantile(self, q: float) -> float:
        """Return the ⌊q·(n-1)⌋-th smallest magnitude, with a relative error of at most α = 2⁻⁸.

        For subnormal float32 numbers the absolute error is at most 2⁻¹³⁴.

        Raises ValueError if the histogram is empty or q is not in [0, 1].
        """
        total = int(self.counts.sum())
        if total == 0 or not 0 <= q <= 1:
            raise ValueError("a quantile needs at least one value and q in [0, 1]")
        cumulative = np.cumsum(self.magnitudes())
        bucket = int(np.searchsorted(cumulative, int(q * (total - 1)), side="right"))
        return float(bucket_values()[bucket])
