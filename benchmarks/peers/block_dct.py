"""A block-DCT compressor for HPC checkpoints as a peer: transform, adaptive quantization, Huffman codes, error bound.

Zhang et al., "Efficient Encoding and Reconstruction of HPC Datasets for Checkpoint/Restart", MSST 2019: DCTZ in its
error-controlled form (EC), with constants from the authors' code, https://github.com/swson/DCTZ.

- An array, in memory order, is cut into blocks of 64 values (``BLK_SZ``), each of which goes through an orthonormal
  DCT-II. DCTZ does not use earlier checkpoints.
- Coefficients are quantized to 255 bins of one width around zero (``NBINS``); a 256th index marks a coefficient outside
  of them, which is stored exactly, as float32. The range of the bins follows the bound, which DCTZ
  applies after scaling by the largest value's power of ten.

Deviations, in the peer's favour:

- The bound is relative to a tensor's standard deviation, which is finer than a power of ten.
- Bins are as wide as the bound. DCTZ makes them twice as wide (``BRSF`` = 1, here ½) and bounds the coefficients'
  errors only; one value in twelve would then be off by more than the bound. Values that still are get their exact value
  stored, so the bound holds for every value.
- DCTZ stores the first coefficient of every block exactly, which is half a bit for every value. The means of
  weights are not smooth enough to be worth it, so it is quantized like the others.
- Indices get Huffman codes of their own instead of zlib's; exact numbers are byte planes in Zstd.
- Zeros fill the last block, so no shorter transform is needed. One-dimensional parameters stay exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peers.body import described, exact, from_exact, from_huffman, huffman, join, matrices, split
from peers.peer import Checkpoint, Encoded, Known, Peer
from torch import Tensor

BLOCK = 64
BINS = 255
OUTSIDE = BINS
"""The index of a coefficient that is in no bin."""

Indices = NDArray[np.uint8]


@dataclass(frozen=True)
class Settings:
    """bound: the largest error of a value, in standard deviations of its tensor."""

    bound: float


SPACE = tuple(Settings(round(2 ** (k / 2), 3)) for k in range(4, -11, -1))


def encode(checkpoint: Checkpoint, _previous: Known | None, settings: Settings) -> Encoded:
    """Encode every matrix as indices of bins, coefficients outside of them, and corrections."""
    entries: dict[str, dict[str, Any]] = {}
    coded: list[tuple[Indices, dict[str, Tensor]]] = []
    decoded = dict(checkpoint.weights)
    for name in matrices(checkpoint.weights):
        weight = checkpoint.weights[name].detach()
        bound = settings.bound * float(weight.double().std(correction=0)) if weight.numel() else 0.0
        if bound > 0:
            entries[name] = {**described(weight), "bound": bound}
            coded.append(_coded(weight, entries[name]))
            decoded[name] = _values(entries[name], *coded[-1])

    def packed() -> bytes:
        rest = {name: weight for name, weight in checkpoint.weights.items() if name not in entries}
        parts = [part for indices, numbers in coded for part in (huffman(indices, BINS + 1), exact(numbers))]
        return join(entries, [*parts, exact(rest)])

    return Encoded(Known(Checkpoint(decoded)), packed)


def decode(data: bytes, _previous: Known | None) -> Known:
    """Decode a checkpoint."""
    entries, (*parts, rest) = split(data)
    weights = from_exact(rest)
    following = iter(parts)
    for name, entry in entries.items():
        size = -(-math.prod(entry["shape"]) // BLOCK) * BLOCK
        indices = from_huffman(next(following), BINS + 1, size)
        weights[name] = _values(entry, indices, from_exact(next(following)))
    return Known(Checkpoint(weights))


def _coded(weight: Tensor, entry: dict[str, Any]) -> tuple[Indices, dict[str, Tensor]]:
    """Return indices and exact numbers of a tensor, as ``_values`` takes them."""
    flat, bound = weight.reshape(-1), entry["bound"]
    blocks = np.zeros((-(-flat.numel() // BLOCK), BLOCK))
    blocks.reshape(-1)[: flat.numel()] = flat.to(torch.float64).numpy() / bound
    coefficients = (blocks @ _dct().T).reshape(-1)
    bins = np.rint(coefficients) + BINS // 2
    outside = (bins < 0) | (bins >= BINS)
    indices = np.where(outside, OUTSIDE, bins).astype(np.uint8)
    numbers = {
        "outside": torch.from_numpy(coefficients[outside].astype(np.float32)),
        "gaps": torch.empty(0, dtype=torch.int32),
        "corrections": flat[:0],
    }
    errors = (_values(entry, indices, numbers).reshape(-1).double() - flat.double()).abs()
    places = (~(errors <= bound)).nonzero().reshape(-1)
    numbers["gaps"] = places.diff(prepend=places.new_zeros(1)).to(torch.int32)
    numbers["corrections"] = flat[places]
    return indices, numbers


def _values(entry: dict[str, Any], indices: Indices, numbers: dict[str, Tensor]) -> Tensor:
    """Return a tensor. numbers: coefficients ``outside`` of the bins, ``corrections`` and the ``gaps`` between them."""
    coefficients = indices.astype(np.float64) - BINS // 2
    coefficients[indices == OUTSIDE] = numbers["outside"].numpy()
    flat = (coefficients.reshape(-1, BLOCK) @ _dct()).reshape(-1) * entry["bound"]
    found = torch.from_numpy(flat)[: math.prod(entry["shape"])].to(getattr(torch, entry["dtype"]))
    found[numbers["gaps"].cumsum(0)] = numbers["corrections"]
    return found.reshape(entry["shape"])


@cache
def _dct() -> NDArray[np.float64]:
    """Return the orthonormal DCT-II as a matrix. Row k holds the cosine of frequency k."""
    k, n = np.ogrid[:BLOCK, :BLOCK]
    rows: NDArray[np.float64] = np.sqrt(2 / BLOCK) * np.cos(np.pi * k * (n + 0.5) / BLOCK)
    rows[0] /= math.sqrt(2)
    return rows


BLOCK_DCT = Peer("block DCT", SPACE, encode, decode)
