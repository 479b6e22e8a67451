"""Check-N-Run as a peer: uniform quantization of each row, in a range found by a greedy search.

Eisenman et al., "Check-N-Run: a Checkpointing System for Training Deep Learning Recommendation Models", NSDI 2022,
arXiv 2010.08679, section on checkpoint quantization; as "Check-N-Run+" in the Inshrinkerator paper (arXiv 2306.11800):

- Asymmetric uniform quantization of each row (an embedding vector; here a slice along dimension 0): level
  ``round((w - low) / scale)`` with ``scale = (high - low) / (bins - 1)``, packed in ceil(log2 bins) bits. Check-N-Run
  has 2, 3, 4 and 8 bits, Inshrinkerator 8 to 256 bins.
- Adaptive range: it begins at the row's minimum and maximum. Each move takes ``range / num_step_bins`` off the end that
  then has the lower squared error, until ``ratio`` of the range is gone. The best range on the way is kept. The same
  search is ``torch.choose_qparams_optimized``, from the same company. It settles what the text leaves open: both ends
  together lose ``ratio`` of the range.
- ``num_step_bins`` is one of 10, 25, 50, 100 and ``ratio`` one of 0.1 to 0.5 (Inshrinkerator's search space). The
  space below has the values that are worth their time: few levels gain from a much narrower range, many levels from a
  slightly narrower one, in small moves. (For Gaussian rows the best range of 8 levels is a quarter narrower than that
  of the data, of 32 not at all.)
- Differential checkpoints leave out rows that no batch has touched. Dense models have none, so each checkpoint is
  stored whole, and without entropy coding.

Deviations, all in the peer's favour: the best range counts wherever it occurs (PyTorch takes only local optima);
ranges are float32 (PyTorch rounds them to float16). Parameters with one dimension are stored exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from peers.body import bits_for, described, exact, from_exact, join, matrices, pack, split, unpack
from peers.peer import Checkpoint, Encoded, Known, Peer
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """bins: levels of a row, at most 256. steps, ratio: the search's ``num_step_bins`` and ``ratio``."""

    bins: int
    steps: int
    ratio: float


COARSE, MIDDLE = Settings(8, steps=50, ratio=0.5), Settings(16, steps=50, ratio=0.3)
FINE = tuple(Settings(bins, steps=100, ratio=0.1) for bins in (32, 64, 128, 256))
SPACE = (COARSE, MIDDLE, *FINE)
"""Numbers of bins that use all values of their bits: others are worse for the same bytes."""


def encode(checkpoint: Checkpoint, _previous: Known | None, settings: Settings) -> Encoded:
    """Encode a checkpoint without a parent."""
    weights, bins = checkpoint.weights, settings.bins
    quantized = {name: quantize(_rows(weights[name]), settings) for name in matrices(weights)}
    kept = {name: tensor for name, tensor in weights.items() if name not in quantized}
    entries = {name: described(weights[name]) for name in quantized}
    decoded = {
        name: _restored(levels, ranges, bins, entries[name]["shape"], weights[name].dtype)
        for name, (levels, ranges) in quantized.items()
    }

    def packed() -> bytes:
        parts = [exact(kept)]
        for levels, ranges in quantized.values():
            parts += [ranges.numpy().tobytes(), pack(levels.numpy().reshape(-1), bits_for(bins))]
        return join([bins, entries], parts)

    return Encoded(Known(Checkpoint(kept | decoded)), packed)


def decode(data: bytes, _previous: Known | None) -> Known:
    """Decode the weights."""
    (bins, entries), parts = split(data)
    weights = from_exact(parts[0])
    for (name, entry), ranges, packed in zip(entries.items(), parts[1::2], parts[2::2], strict=True):
        rows = torch.frombuffer(bytearray(ranges), dtype=torch.float32).reshape(-1, 2)
        levels = torch.from_numpy(unpack(packed, bits_for(bins), int(np.prod(entry["shape"], dtype=np.int64))))
        weights[name] = _restored(
            levels.reshape(len(rows), -1), rows, bins, entry["shape"], getattr(torch, entry["dtype"])
        )
    return Known(Checkpoint(weights))


def quantize(rows: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return levels, uint8, of rows, float32; and the range of each row, float32 (rows, 2)."""
    low, high = adapted_range(rows, settings)
    return _levels(rows, low, high, settings.bins).to(torch.uint8), torch.cat((low, high), dim=1)


def adapted_range(rows: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return the values of the lowest and highest level in each row, each (rows, 1)."""
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    step = (high - low) / settings.steps
    best_low, best_high, least = low, high, _error(rows, low, high, settings.bins)
    for _ in range(round(settings.steps * settings.ratio)):
        raised = _error(rows, low + step, high, settings.bins)
        lowered = _error(rows, low, high - step, settings.bins)
        low, high = torch.where(raised < lowered, low + step, low), torch.where(raised < lowered, high, high - step)
        error = torch.minimum(raised, lowered)
        best_low, best_high = torch.where(error < least, low, best_low), torch.where(error < least, high, best_high)
        least = torch.minimum(error, least)
    return best_low, best_high


def _error(rows: Tensor, low: Tensor, high: Tensor, bins: int) -> Tensor:
    difference = _values(_levels(rows, low, high, bins), low, high, bins).sub_(rows)
    return difference.square_().sum(1, keepdim=True)


def _levels(rows: Tensor, low: Tensor, high: Tensor, bins: int) -> Tensor:
    scale = _scale(low, high, bins)
    # A row of equal values has no scale; its level is 0.
    return (rows - low).div_(torch.where(scale > 0, scale, 1)).round_().clamp_(0, bins - 1)


def _values(levels: Tensor, low: Tensor, high: Tensor, bins: int) -> Tensor:
    return (levels * _scale(low, high, bins)).add_(low)


def _scale(low: Tensor, high: Tensor, bins: int) -> Tensor:
    return (high - low) / (bins - 1)


def _restored(levels: Tensor, ranges: Tensor, bins: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    return _values(levels.to(torch.float32), ranges[:, :1], ranges[:, 1:], bins).reshape(shape).to(dtype)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(tensor.shape[0], -1).to(torch.float32)


CHECK_N_RUN = Peer("Check-N-Run+", SPACE, encode, decode)
