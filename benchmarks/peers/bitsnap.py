"""BitSnap as a peer: half-precision weights as a bitmask and changed values, moments in clusters of eight bits.

Peng et al., "BitSnap: Checkpoint Sparsification and Quantization in LLM Training", arXiv 2511.12376. We know of no code
by the authors, and had the abstract, not the full text. What is marked *assumed* is ours.

- Weights in half precision: one bit for each weight says whether its 16 bits differ from those of a base checkpoint
  (*assumed*: the previous one, as decoded). The new values of the changed weights follow. Where nothing changes, the
  ratio is 16, the one that the paper states.
- Both moments: the values of a tensor are split into clusters, and each cluster is quantized by itself (*assumed*: 16
  clusters with the same number of values, and 256 levels from the least to the largest value of each). A value takes
  12 bits instead of 32, 2.7 times less; the paper states a ratio of 2.
- The method adapts to the stage of the training (*assumed*: a tensor whose mask does not pay is stored whole).

The trainings here have weights in float32, of which nearly all bits change. So the weights are rounded to half
precision, and no master weights are stored. The space has bfloat16, float16, and float32 for when rounding costs too
much.

Deviations, all in the peer's favour: no master weights; masks, values, cluster numbers and levels are byte planes under
zstd.
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

CLUSTERS, CLUSTER_BITS, LEVELS = 16, 4, 256

Values = NDArray[np.float32]


@dataclass(frozen=True)
class Settings:
    """dtype: the type that float32 and float64 weights are rounded to."""

    dtype: str


SPACE = tuple(Settings(dtype) for dtype in ("bfloat16", "float16", "float32"))


def encode(checkpoint: Checkpoint, previous: Known | None, settings: Settings) -> Encoded:
    """Encode weights as changes of the previous checkpoint, or whole without one; and moments as clusters."""
    base = {} if previous is None else previous.checkpoint.weights
    entries: dict[str, dict[str, Any]] = {"weights": {}, "first": {}, "second": {}}
    parts: list[dict[str, Tensor]] = []
    decoded = Checkpoint({}, others=checkpoint.others)
    for name, weight in checkpoint.weights.items():
        kept = rounded(weight, settings.dtype)
        entries["weights"][name] = {**described(weight), "kept": described(kept)["dtype"]}
        parts.append(_changes(kept, base.get(name)))
        decoded.weights[name] = kept.to(weight.dtype)
    for group in ("first", "second"):
        for name, moment in checkpoint.groups()[group].items():
            entries[group][name] = described(moment)
            parts.append(clustered(flat(moment)))
            decoded.groups()[group][name] = _moment(parts[-1], entries[group][name])

    def packed() -> bytes:
        return join(entries, [exact(checkpoint.others), *map(exact, parts)])

    return Encoded(Known(decoded), packed)


def decode(data: bytes, previous: Known | None) -> Known:
    """Decode a checkpoint. previous: the same that it was encoded with."""
    entries, parts = split(data)
    base = {} if previous is None else previous.checkpoint.weights
    decoded = Checkpoint({}, others=from_exact(parts[0]))
    following = map(from_exact, parts[1:])
    for name, entry in entries["weights"].items():
        kept = _changed(next(following), base.get(name), getattr(torch, entry["kept"]))
        decoded.weights[name] = kept.to(getattr(torch, entry["dtype"])).reshape(entry["shape"])
    for group in ("first", "second"):
        for name, entry in entries[group].items():
            decoded.groups()[group][name] = _moment(next(following), entry)
    return Known(decoded)


def _changes(kept: Tensor, base: Tensor | None) -> dict[str, Tensor]:
    """Return the mask of changed values, packed in bits, and these values; or all values, if that is smaller."""
    values = kept.detach().contiguous().reshape(-1)
    if base is not None:
        changed = _bits_of(values) != _bits_of(base.detach().to(kept.dtype).contiguous().reshape(-1))
        found = {"mask": torch.from_numpy(np.packbits(changed)), "values": values[torch.from_numpy(changed)]}
        if sum(part.nbytes for part in found.values()) < values.nbytes:
            return found
    return {"values": values}


def _bits_of(values: Tensor) -> NDArray[Any]:
    """Return the values of a contiguous flat tensor as integers, so that 0 and -0 differ, and NaN equals itself."""
    return values.view(_INTEGERS[values.dtype.itemsize]).numpy()


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""


def _changed(found: dict[str, Tensor], base: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the inverse of ``_changes``, flat."""
    if "mask" not in found:
        return found["values"]
    assert base is not None
    values = base.detach().to(dtype).reshape(-1).clone()
    changed = np.unpackbits(found["mask"].numpy(), count=values.numel()).astype(np.bool_)
    values[torch.from_numpy(changed)] = found["values"]
    return values


def clustered(values: Values) -> dict[str, Tensor]:
    """Return cluster numbers, packed in bits, and levels of flat values; and the least and largest of each cluster."""
    ascending = np.sort(values)
    firsts = np.linspace(0, values.size, CLUSTERS + 1).astype(np.int64)[1:-1]
    edges = ascending[firsts] if values.size else np.zeros(CLUSTERS - 1, dtype=np.float32)
    labels = np.searchsorted(edges, values, side="right").astype(np.uint8)
    bounds = np.concatenate(([0], np.searchsorted(ascending, edges), [values.size]))
    ranges = np.zeros((CLUSTERS, 2), dtype=np.float32)
    for i in np.flatnonzero(np.diff(bounds)):
        ranges[i] = ascending[bounds[i]], ascending[bounds[i + 1] - 1]
    low, steps = ranges[:, 0], _steps(ranges)
    # A cluster of equal values has no step; its level is 0.
    levels = np.rint((values - low[labels]) / np.where(steps > 0, steps, 1)[labels]).clip(0, LEVELS - 1)
    packed = np.frombuffer(pack(labels, CLUSTER_BITS), dtype=np.uint8).copy()
    found = {"labels": packed, "levels": levels.astype(np.uint8), "ranges": ranges}
    return {name: torch.from_numpy(part) for name, part in found.items()}


def _steps(ranges: Values) -> Values:
    steps: Values = (ranges[:, 1] - ranges[:, 0]) / np.float32(LEVELS - 1)
    return steps


def _moment(found: dict[str, Tensor], entry: dict[str, Any]) -> Tensor:
    """Return the moment of the parts that ``clustered`` returns."""
    levels, ranges = found["levels"].numpy(), found["ranges"].numpy()
    labels = unpack(found["labels"].numpy().tobytes(), CLUSTER_BITS, levels.size)
    values = ranges[:, 0][labels] + levels.astype(np.float32) * _steps(ranges)[labels]
    return torch.from_numpy(values).reshape(entry["shape"]).to(getattr(torch, entry["dtype"]))


BITSNAP = Peer("BitSnap", SPACE, encode, decode, groups=("weights", "first", "second", "others"))
