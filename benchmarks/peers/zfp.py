"""ZFP as a peer: an error-bounded compressor of scientific arrays, on the weights of one checkpoint.

Lindstrom, "Fixed-Rate Compressed Floating-Point Arrays", IEEE TVCG 2014, as it is in the author's library, through its
Python package ``zfpy`` (https://zfp.readthedocs.io). The *fixed-accuracy* mode takes a tolerance, a bound on the error
of every value, and cuts each block's bit planes below it. ZFP does not use earlier checkpoints.

- The tolerance is a fraction of a tensor's standard deviation, not of its range: noise in the weights matters in
  proportion to their spread, and a few outliers, which all trained layers have, would coarsen the rest.
- ZFP rounds the tolerance down to a power of two, and real errors are several times smaller than it (both by its
  documentation). So the space begins at many standard deviations.
- Arrays are matrices, all dimensions after the first together. ZFP takes up to four dimensions, but pads each of them
  to blocks of four: kernels of 3 × 3 would cost nearly twice as much. One-dimensional parameters stay exact.

If ZFP misses the bound, the tensor is stored exactly: blocks of values below 1e-30 overflow in it
(https://github.com/LLNL/zfp/issues/209), and values that are far smaller than others in their block keep few bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peers.body import described, exact, from_exact, join, matrices, split
from peers.peer import Checkpoint, Encoded, Known, Peer
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """tolerance: the largest error of a value, in standard deviations of its tensor."""

    tolerance: float


SPACE = tuple(Settings(round(2 ** (k / 2), 3)) for k in range(10, -6, -1))


def encode(checkpoint: Checkpoint, _previous: Known | None, settings: Settings) -> Encoded:
    """Encode every matrix by ZFP, which quantizes and codes in one step."""
    entries, streams, decoded = {}, [], dict(checkpoint.weights)
    for name in matrices(checkpoint.weights):
        weight = checkpoint.weights[name].detach()
        tolerance = settings.tolerance * float(weight.double().std(correction=0)) if weight.numel() else 0.0
        if tolerance == 0:  # ZFP takes no empty arrays, and a constant is smaller when stored exactly
            continue
        stream, entry = _compressed(weight, tolerance), described(weight)
        found = _values(stream, entry)
        if bool(((found.double() - weight.double()).abs() <= tolerance).all()):
            entries[name], decoded[name] = entry, found
            streams.append(stream)

    def packed() -> bytes:
        rest = {name: weight for name, weight in checkpoint.weights.items() if name not in entries}
        return join(entries, [*streams, exact(rest)])

    return Encoded(Known(Checkpoint(decoded)), packed)


def decode(data: bytes, _previous: Known | None) -> Known:
    """Decode a checkpoint."""
    entries, (*streams, rest) = split(data)
    weights = from_exact(rest)
    for (name, entry), stream in zip(entries.items(), streams, strict=True):
        weights[name] = _values(stream, entry)
    return Known(Checkpoint(weights))


def _compressed(weight: Tensor, tolerance: float) -> bytes:
    import zfpy  # noqa: PLC0415

    matrix = weight.to(torch.float32).reshape(weight.shape[0], -1).contiguous().numpy()
    stream: bytes = zfpy.compress_numpy(matrix, tolerance=tolerance)
    return stream


def _values(stream: bytes, entry: dict[str, Any]) -> Tensor:
    import zfpy  # noqa: PLC0415

    found = torch.from_numpy(zfpy.decompress_numpy(stream))
    return found.to(getattr(torch, entry["dtype"])).reshape(entry["shape"])


ZFP = Peer("ZFP", SPACE, encode, decode)
