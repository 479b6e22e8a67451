"""Delta-DNN as a peer: differences to the previous checkpoint on one grid for the whole network, then Zstd or LZMA.

Hu et al., "Delta-DNN: Efficiently Compressing Deep Neural Networks via Exploiting Floats Similarity", ICPP 2020,
https://doi.org/10.1145/3404397.3404408. We know of no code by the authors, and did not have the full text of the paper
to check the formula.

- A weight a with the reference b becomes the integer ``M = ⌊(a - b) / (2·log(1 + ε)) + 0.5⌋``, and decodes to
  ``b + 2·M·log(1 + ε)``. We assume the natural logarithm; another base would only change the meaning of ε. ε is the
  same for all tensors, so all share one grid; the error is at most log(1 + ε), up to the rounding of the result to its
  data type.
- The reference is the *reconstruction* of the previous checkpoint, as a decoder has nothing else; or else zero.
- ε is the largest that loses no more accuracy than is allowed. The space goes from 1e-1 to 1e-4, five steps to a
  decade.
- The integers of all tensors together go through a lossless compressor: Zstd or LZMA.

Deviations, all in the peer's favour: the smaller one of Zstd and LZMA is kept, each at its highest usual level. The
integers of each tensor have one, two or four bytes, as needed. A tensor that needs more than four is stored exactly; no
real one does.
"""

from __future__ import annotations

import lzma
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from peers.body import described, exact, from_exact, join, split
from peers.peer import Checkpoint, Encoded, Known, Peer
from torch import Tensor

ZSTD_LEVEL = 19
WIDTHS = ("i1", "i2", "i4")
"""Integer types by their names in NumPy, from the narrowest."""


@dataclass(frozen=True)
class Settings:
    """bound: the paper's ε."""

    bound: float


SPACE = tuple(Settings(round(10 ** (-k / 5), 6)) for k in range(5, 21))


def encode(checkpoint: Checkpoint, previous: Known | None, settings: Settings) -> Encoded:
    """Encode integer differences to the previous checkpoint, or to zero without one."""
    step = 2 * math.log1p(settings.bound)
    entries: dict[str, dict[str, Any]] = {}
    deltas, decoded, unbounded = [], {}, {}
    for name, weight in checkpoint.weights.items():
        delta = np.floor((_numbers(weight) - _reference(name, previous)) / step + 0.5)
        width = _width(delta)
        if width is None:
            decoded[name] = unbounded[name] = weight
            continue
        entries[name] = {**described(weight), "width": width}
        deltas.append(delta.astype(f"<{width}"))
        decoded[name] = _values(entries[name], deltas[-1], step, _reference(name, previous))

    def packed() -> bytes:
        data = b"".join(delta.tobytes() for delta in deltas)
        smallest = min(
            ("zstd", zstandard.compress(data, ZSTD_LEVEL)),
            ("lzma", lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)),
            key=lambda one: len(one[1]),
        )
        return join([step, smallest[0], entries], [smallest[1], exact(unbounded)])

    return Encoded(Known(Checkpoint({name: decoded[name] for name in checkpoint.weights})), packed)


def decode(data: bytes, previous: Known | None) -> Known:
    """Decode a checkpoint. previous: the same that it was encoded with."""
    (step, method, entries), (integers, unbounded) = split(data)
    raw = zstandard.decompress(integers) if method == "zstd" else lzma.decompress(integers)
    weights, start = from_exact(unbounded), 0
    for name, entry in entries.items():
        count = math.prod(entry["shape"])
        delta = np.frombuffer(raw, dtype=f"<{entry['width']}", count=count, offset=start)
        start += delta.nbytes
        weights[name] = _values(entry, delta, step, _reference(name, previous))
    return Known(Checkpoint(weights))


def _values(entry: dict[str, Any], delta: NDArray[Any], step: float, reference: NDArray[np.float64] | float) -> Tensor:
    found = torch.from_numpy(np.asarray(reference + step * delta))
    return found.to(getattr(torch, entry["dtype"])).reshape(entry["shape"])


def _reference(name: str, previous: Known | None) -> NDArray[np.float64] | float:
    return 0.0 if previous is None else _numbers(previous.checkpoint.weights[name])


def _numbers(tensor: Tensor) -> NDArray[np.float64]:
    numbers: NDArray[np.float64] = tensor.detach().reshape(-1).to(torch.float64).numpy()
    return numbers


def _width(delta: NDArray[np.float64]) -> str | None:
    """Return the narrowest type that holds the integers, or None."""
    largest = float(np.abs(delta).max(initial=0))
    return next((width for width in WIDTHS if largest <= np.iinfo(width).max), None)


DELTA_DNN = Peer("Delta-DNN", SPACE, encode, decode)
