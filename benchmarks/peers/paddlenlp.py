"""PaddleNLP's compressed checkpoints as peers: O1 has moments of eight bits, O2 of four. Weights are not quantized.

``--ckpt_quant_stage O1`` and ``O2`` of PaddleNLP's trainer, as in release 3.0.0b4 (in ``paddlenlp/quantization``:
``unified_checkpoint_quantization.py`` and ``checkpoint_quantization_utils.py``). This is a new implementation: their
code needs Paddle.

- First moments are symmetric: ``round(m / largest · (2ⁿ⁻¹ - 1))``, with the largest magnitude of a channel or group.
- In place of a second moment v, the ratio ``r = 1 / (sqrt(v) + 1e-8)`` is stored, by which Adam multiplies the first
  one: ``round((r - low) / (high - low) · (2ⁿ - 1))``, with the least and largest ratio of a channel or group. v decodes
  as ``(1 / r - 1e-8)²``.
- O1 has n = 8 and a range for each channel. O2 has n = 4 and a range for each 32 values along the inputs of a channel;
  O2 leaves tensors with one dimension as they are. A channel is an output. Paddle's matrices have outputs in columns,
  those of PyTorch in rows. So here a channel is a slice along dimension 0.
- A first moment without a second one is not quantized.
- The trainer can leave out master weights (``remove_master_weight``). Then a checkpoint has only the weights of mixed
  precision, and a resume rebuilds the master weights from them. So the space has bfloat16, and exact weights for when
  rounding costs too much.

Deviations, all in the peer's favour: weights, levels and ranges are byte planes under zstd (theirs are not compressed);
the last group of a channel may be short, and tensors with three or more dimensions are quantized (theirs have to be
divisible by 32, and O2 takes only matrices); a channel or group of equal ratios, or of zeros, decodes to itself (theirs
divides by zero).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peers.body import described, exact, flat, from_exact, join, pack, split, unpack
from peers.half_precision import rounded
from peers.peer import Checkpoint, Encoded, Known, Peer
from torch import Tensor

EPSILON = np.float32(1e-8)
GROUP = 32
"""Values of a group of O2."""

Rows = NDArray[np.float32]


@dataclass(frozen=True)
class Settings:
    """weights: bfloat16 without master weights, or float32 with them. Other types of weights stay as they are."""

    weights: str


SPACE = (Settings("bfloat16"), Settings("float32"))


def encode(checkpoint: Checkpoint, _previous: Known | None, settings: Settings, bits: int) -> Encoded:
    """Encode a checkpoint without a parent. bits: of moments, 8 for O1 and 4 for O2."""
    kept = {name: rounded(weight, settings.weights) for name, weight in checkpoint.weights.items()}
    weights = {name: tensor.to(checkpoint.weights[name].dtype) for name, tensor in kept.items()}
    dtypes = {name: described(weight)["dtype"] for name, weight in checkpoint.weights.items()}
    decoded = Checkpoint(weights, others=checkpoint.others)
    entries: dict[str, dict[str, Any]] = {}
    pairs: list[dict[str, Tensor]] = []
    rest: dict[str, dict[str, Tensor]] = {"first": {}, "second": {}}
    for name in checkpoint.first | checkpoint.second:
        pair = {group: checkpoint.groups()[group][name] for group in rest if name in checkpoint.groups()[group]}
        if not is_quantized(pair, bits):
            for group, moment in pair.items():
                rest[group][name] = moment
            continue
        entries[name] = {group: described(moment) for group, moment in pair.items()}
        pairs.append(quantize(_rows(pair["first"]), _rows(pair["second"]), bits))
        for group, moment in _moments(pairs[-1], entries[name], bits).items():
            decoded.groups()[group][name] = moment
    for group, moments in rest.items():
        decoded.groups()[group].update(moments)

    def packed() -> bytes:
        as_they_are = [kept, checkpoint.others, rest["first"], rest["second"]]
        return join([bits, dtypes, entries], [*map(exact, as_they_are), *map(exact, pairs)])

    return Encoded(Known(decoded), packed)


def decode(data: bytes, _previous: Known | None) -> Known:
    """Decode a checkpoint."""
    (bits, dtypes, entries), parts = split(data)
    kept, others, first, second, *pairs = map(from_exact, parts)
    weights = {name: tensor.to(getattr(torch, dtypes[name])) for name, tensor in kept.items()}
    decoded = Checkpoint(weights, first, second, others)
    for (name, entry), pair in zip(entries.items(), pairs, strict=True):
        for group, moment in _moments(pair, entry, bits).items():
            decoded.groups()[group][name] = moment
    return Known(decoded)


def is_quantized(pair: dict[str, Tensor], bits: int) -> bool:
    """Return whether the moments of a weight are quantized. pair: those that there are, by group."""
    return len(pair) == 2 and all(moment.numel() for moment in pair.values()) and (bits == 8 or pair["first"].ndim > 1)


def quantize(first: Rows, second: Rows, bits: int) -> dict[str, Tensor]:
    """Return levels of rows of both moments, packed in bits, and their ranges, each (rows, groups of a row)."""
    starts = _starts(first.shape[1], bits)
    largest = np.maximum.reduceat(np.abs(first), starts, axis=1)
    levels = _divided(first * np.float32(_top(bits)), _spread(largest, first.shape[1], bits))
    ratio: Rows = np.reciprocal(np.sqrt(second) + EPSILON)
    low, high = np.minimum.reduceat(ratio, starts, axis=1), np.maximum.reduceat(ratio, starts, axis=1)
    above = ratio - _spread(low, ratio.shape[1], bits)
    ratios = _divided(above * np.float32(2**bits - 1), _spread(high - low, ratio.shape[1], bits))
    packed = {"first": _packed(levels + _top(bits), bits), "second": _packed(ratios, bits)}
    return packed | {name: torch.from_numpy(part) for name, part in zip(_RANGES, (largest, low, high), strict=True)}


_RANGES = ("largest", "low", "high")


def _moments(found: dict[str, Tensor], entry: dict[str, Any], bits: int) -> dict[str, Tensor]:
    """Return both moments of the parts that ``quantize`` returns."""
    largest, low, high = (found[name].numpy() for name in _RANGES)
    size = int(np.prod(entry["first"]["shape"], dtype=np.int64))
    levels, ratios = (
        unpack(found[group].numpy().tobytes(), bits, size).reshape(len(largest), -1).astype(np.float32)
        for group in entry
    )
    columns = levels.shape[1]
    first = (levels - _top(bits)) / np.float32(_top(bits)) * _spread(largest, columns, bits)
    ratio = ratios / np.float32(2**bits - 1) * _spread(high - low, columns, bits) + _spread(low, columns, bits)
    second = np.square(1 / ratio - EPSILON)
    return {
        group: torch.from_numpy(values).reshape(entry[group]["shape"]).to(getattr(torch, entry[group]["dtype"]))
        for group, values in (("first", first), ("second", second))
    }


def _top(bits: int) -> int:
    """Return the largest level of a first moment."""
    return (1 << (bits - 1)) - 1


def _rows(moment: Tensor) -> Rows:
    """Return a tensor as one row for each channel. A vector is one row."""
    return flat(moment).reshape(len(moment) if moment.ndim > 1 else 1, -1)


def _starts(columns: int, bits: int) -> NDArray[np.int64]:
    """Return the first column of each group. With eight bits, a row is one group."""
    return np.arange(0, columns, columns if bits == 8 else GROUP)


def _spread(ranges: Rows, columns: int, bits: int) -> Rows:
    """Return values of groups as values of columns."""
    sizes = np.diff(_starts(columns, bits), append=columns)
    return np.repeat(ranges, sizes, axis=1)


def _divided(values: Rows, by: Rows) -> Rows:
    """Return rounded quotients, 0 where the divisor is 0."""
    return np.rint(np.divide(values, by, out=np.zeros_like(values), where=by > 0))


def _packed(levels: Rows, bits: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(pack(levels.astype(np.uint8).reshape(-1), bits), dtype=np.uint8).copy())


def _stage(name: str, bits: int) -> Peer[Settings]:
    def encode_stage(checkpoint: Checkpoint, previous: Known | None, settings: Settings) -> Encoded:
        return encode(checkpoint, previous, settings, bits)

    return Peer(f"PaddleNLP {name}", SPACE, encode_stage, decode, ("weights", "first", "second", "others"))


O1, O2 = _stage("O1", 8), _stage("O2", 4)
