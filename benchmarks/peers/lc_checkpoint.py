"""LC-Checkpoint as a peer: differences in buckets by sign and exponent, the largest of them kept, Huffman.

Chen, Liu, Ren, Jin, "On Efficient Constructions of Checkpoints", ICML 2020, arXiv 2009.13003. If
the text was not available, this follows the adaptation https://github.com/nus-vv-streams/lc-checkpoint
(``compress_data``):

- The difference of all weights, as one vector, to the *reconstruction* of the previous checkpoint, so that the next
  difference contains what one checkpoint leaves out.
- Exponent-based quantization: differences with the same sign and the same exponent to base 2 are one bucket and become
  one value.
- Priority promotion: for x bits the 2ˣ - 1 buckets with the largest exponents are kept; all others become zero, the
  remaining index. Of two with the same exponent the one with the larger mean goes first.
- Indices in Huffman codes.

Deviations, all in the peer's favour: a bucket's value is its mean, as in the adaptation (whose comment has the middle
of the least and the largest value, which is no better in the squared error); the file holds Huffman codes of the
indices (the adaptation's is zlib of floats). For fractions of x, 2ˣ - 1 is rounded, since one more bit can be
most of a file: on a GPT, 3 bits are 24 times smaller than the weights and 4 bits 9 times. One bucket for an
exponent leaves an error of a fifth of each difference, however many are kept. So the finest settings split each
exponent by the first bits of the mantissa. They are for limits that 4 bits do not meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peers.body import described, exact, from_exact, from_huffman, huffman, join, split
from peers.peer import Checkpoint, Encoded, Known, Peer
from torch import Tensor

MANTISSA = 23
"""Bits of a float32 after its sign and exponent."""
SIGN_AND_EXPONENT = 9
"""Bits of a float32 before its mantissa."""

Values = NDArray[np.float32]


@dataclass(frozen=True)
class Settings:
    """bits: the paper's x, 1 to 8: bits of an index before coding. mantissa: bits of it that split an exponent."""

    bits: float
    mantissa: int = 0

    @property
    def kept(self) -> int:
        """Buckets other than zero."""
        return round(2**self.bits) - 1


PUBLISHED = tuple(Settings(bits) for bits in (2, 2.5, 3, 3.125, 3.25, 3.5, 3.75, 4))
SPLIT = (Settings(5, mantissa=1), Settings(6, mantissa=2), Settings(7, mantissa=3), Settings(8, mantissa=4))
SPACE = PUBLISHED + SPLIT


def encode(checkpoint: Checkpoint, previous: Known | None, settings: Settings) -> Encoded:
    """Encode differences to the previous checkpoint. previous: None stores everything exactly."""
    weights = checkpoint.weights
    if previous is None:
        return Encoded(Known(Checkpoint(dict(weights))), lambda: join({}, [exact(weights)]))
    entries = {name: described(tensor) for name, tensor in weights.items()}
    before = _vector(previous.checkpoint.weights, entries)
    indices, centres = quantize(_vector(weights, entries) - before, settings)

    def packed() -> bytes:
        return join(entries, [centres.tobytes(), huffman(indices, centres.size + 1)])

    return Encoded(Known(Checkpoint(_restored(indices, centres, before, entries))), packed)


def decode(data: bytes, previous: Known | None) -> Known:
    """Decode a checkpoint. previous: the same that it was encoded with."""
    entries, parts = split(data)
    if previous is None:
        return Known(Checkpoint(from_exact(parts[0])))
    before = _vector(previous.checkpoint.weights, entries)
    centres = np.frombuffer(parts[0], dtype=np.float32)
    indices = from_huffman(parts[1], centres.size + 1, before.size)
    return Known(Checkpoint(_restored(indices, centres, before, entries)))


def quantize(differences: Values, settings: Settings) -> tuple[NDArray[np.uint8], Values]:
    """Return indices and the values of the buckets that are kept. Index 0 is zero, index i + 1 is bucket i."""
    buckets = differences.view(np.uint32) >> (MANTISSA - settings.mantissa)
    count = 1 << (SIGN_AND_EXPONENT + settings.mantissa)
    sizes = np.bincount(buckets, minlength=count)
    means = np.bincount(buckets, differences, minlength=count) / np.maximum(sizes, 1)
    promoted = np.argsort(-np.abs(means), kind="stable")[: min(settings.kept, np.count_nonzero(means))]
    index = np.zeros(count, dtype=np.uint8)
    index[promoted] = np.arange(1, promoted.size + 1)
    return index[buckets], means[promoted].astype(np.float32)


def _vector(weights: dict[str, Tensor], entries: dict[str, Any]) -> Values:
    flat = [weights[name].detach().reshape(-1).to(torch.float32) for name in entries]
    vector: Values = torch.cat([torch.empty(0), *flat]).numpy()
    return vector


def _restored(
    indices: NDArray[np.uint8], centres: Values, before: Values, entries: dict[str, Any]
) -> dict[str, Tensor]:
    values = torch.from_numpy(before + np.concatenate((np.zeros(1, dtype=np.float32), centres))[indices])
    sizes = [int(np.prod(entry["shape"], dtype=np.int64)) for entry in entries.values()]
    return {
        name: part.reshape(entry["shape"]).to(getattr(torch, entry["dtype"]))
        for (name, entry), part in zip(entries.items(), torch.split(values, sizes), strict=True)
    }


LC_CHECKPOINT = Peer("LC-Checkpoint", SPACE, encode, decode)
