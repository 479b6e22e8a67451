"""ExCP as a peer: pruned and clustered residuals of the weights together with both moments, then LZMA.

Li et al., "ExCP: Extreme LLM Checkpoint Compression via Weight-Momentum Joint Shrinking", ICML 2024, arXiv 2406.11257.
Details and constants are those of ``compress_pythia.py`` in the authors' repository, https://github.com/Gaffey/ExCP,
which calls the first moment ``opt_v`` and the second ``opt_m``:

- The residual of a weight is its difference to the *reconstruction* of the checkpoint before: their scripts compress
  each checkpoint against a file that ``recon`` has overwritten. The first one that they compress, of step 2000, refers
  to one that stays whole.
- A residual is kept where ``|r| > min(2.5, α / sqrt(mean(v))) · median(|r|)``, with v the second moment and median and
  mean over one tensor. α = 5e-5 (``--prune_alpha``); 2.5 is written into ``prune``.
- Both moments are kept where ``|m| > β · mean(|m|)`` and the residual was kept. β = 2.0 (``--prune_beta``).
- What was kept is clustered by k-means, each tensor of residuals, first and second moments on its own, into
  2ⁿ - 1 clusters; index 0 means pruned. n = 4 (``--quant_bits``, ``--quant_bits_opt``), 8 / n indices in a byte.
- One 7-Zip archive holds everything. 7-Zip's method is LZMA, here in an xz stream.

Deviations, all in the peer's favour: clusters come from all values and are the best of four seedings (their faiss
k-means looks at 256 values for each cluster and stops after 25 rounds); centres are float32 (their float16 turns second
moments below 3e-8 into zeros); LZMA has its highest preset. Optimizers without second moments are not in the paper: for
them mean(m²) stands in for mean(v), and without any moment no residual is pruned.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.quantize.kmeans import kmeans
from dynaquant.sketch import LogHistogram, bucket_values
from dynaquant.state import dtype_name

LARGEST_FACTOR = 2.5
"""A residual above so many medians is always kept."""
SEEDINGS = 4
"""Seedings of k-means, of which the best counts."""
_LENGTH = 8
"""Bytes of the header's length."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Settings:
    """What the paper calls α and β, and the bits n of an index, which divide 8. The defaults are the paper's."""

    alpha: float = 5e-5
    beta: float = 2.0
    bits: int = 4


SPACE: dict[str, tuple[float, ...]] = {
    "bits": (8, 4, 2),
    "alpha": (0.0, 5e-6, 5e-5, 2e-4, 5e-4, 1e-3, 5e-3),
    "beta": (0.0, 0.5, 1.0, 2.0, 4.0),
}
"""Values of each of the ``Settings``, from fine to coarse, to search for the smallest within a limit on
degradation. Only bits and α change the weights."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the CPU, finite, by name. Moments bear the names of their weights; any of them may be missing.

    others: what is stored exactly: buffers, counters, weights that are not to be quantized.
    """

    weights: dict[str, Tensor]
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)

    def groups(self) -> dict[str, dict[str, Tensor]]:
        """The four dictionaries by the names of their fields."""
        return {"weights": self.weights, "first": self.first, "second": self.second, "others": self.others}


def encode(checkpoint: Checkpoint, previous: Checkpoint | None, settings: Settings = Settings()) -> bytes:
    """A checkpoint as bytes.

    previous: what ``decode`` made of the checkpoint before; for the first one the initial weights, which need no
    moments; None to store everything exactly. Raises ValueError for moments of no weight.
    """
    if not checkpoint.first.keys() | checkpoint.second.keys() <= checkpoint.weights.keys():
        raise ValueError("every moment needs the weight that it belongs to")
    entries: list[dict[str, Any]] = []
    parts: list[bytes] = []
    clustered = {} if previous is None else _clustered(checkpoint, previous, settings)
    for group, tensors in checkpoint.groups().items():
        for name, tensor in tensors.items():
            entry: dict[str, Any] = {
                "group": group,
                "name": name,
                "dtype": dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
            }
            found = clustered.get((group, name))
            if found is None:
                parts.append(_bytes_of(tensor))
            else:
                indices, centres = found
                entry["centres"] = len(centres)
                parts += [centres.tobytes(), pack(indices, settings.bits).tobytes()]
            entries.append(entry)
    header = json.dumps({"bits": settings.bits, "entries": entries}, separators=(",", ":")).encode()
    body = b"".join([len(header).to_bytes(_LENGTH, "little"), header, *parts])
    return lzma.compress(body, preset=9 | lzma.PRESET_EXTREME)


def decode(data: bytes, previous: Checkpoint | None) -> Checkpoint:
    """The reconstruction of a checkpoint, from the same ``previous`` that it was encoded with."""
    body = memoryview(lzma.decompress(data))
    start = _LENGTH + int.from_bytes(body[:_LENGTH], "little")
    header = json.loads(bytes(body[_LENGTH:start]))
    result = Checkpoint({})
    for entry in header["entries"]:
        group, name, dtype, shape = entry["group"], entry["name"], getattr(torch, entry["dtype"]), entry["shape"]
        count = int(np.prod(shape, dtype=np.int64))
        if "centres" not in entry:
            end = start + count * dtype.itemsize
            tensor = _tensor_of(body[start:end], dtype)
        else:
            middle = start + 4 * entry["centres"]
            end = middle + -(-count * header["bits"] // 8)
            centres = np.frombuffer(body[start:middle], dtype=np.float32)
            indices = unpack(np.frombuffer(body[middle:end], dtype=np.uint8), header["bits"], count)
            tensor = torch.from_numpy(np.concatenate(([np.float32(0)], centres))[indices])
            if group == "weights":
                assert previous is not None
                tensor = tensor + previous.weights[name].reshape(-1).to(torch.float32)
            tensor = tensor.to(dtype)
        result.groups()[group][name] = tensor.reshape(shape)
        start = end
    return result


def _clustered(
    checkpoint: Checkpoint, previous: Checkpoint, settings: Settings
) -> dict[tuple[str, str], tuple[NDArray[np.uint8], NDArray[np.float32]]]:
    """Indices and centres of every residual and moment, by group and name."""
    return {
        (group, name): cluster(tensor, 2**settings.bits - 1)
        for name in checkpoint.weights
        for group, tensor in shrunk(checkpoint, previous, name, settings)
    }


def shrunk(
    checkpoint: Checkpoint, previous: Checkpoint, name: str, settings: Settings
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Residual and moments of a weight, flat, with zeros where they are pruned, each with the name of its group."""
    now, before = _flat(checkpoint.weights[name]), _flat(previous.weights[name])
    first, second = (_flat(group[name]) if name in group else None for group in (checkpoint.first, checkpoint.second))
    residual = now - before
    kept = residual.abs() > _factor(first, second, settings.alpha) * _median(residual.abs())
    yield "weights", torch.where(kept, residual, 0).numpy()
    if first is not None:
        kept = kept & (first.abs() > settings.beta * first.abs().mean())
    for group, moment in (("first", first), ("second", second)):
        if moment is not None:
            yield group, torch.where(kept, moment, 0).numpy()


def _factor(first: Tensor | None, second: Tensor | None, alpha: float) -> float:
    """The threshold of residuals in medians."""
    squares = second if second is not None else None if first is None else first.square()
    if squares is None or not squares.numel():
        return 0.0
    deviation = float(squares.mean().sqrt())
    return min(LARGEST_FACTOR, alpha / deviation) if deviation > 0 else LARGEST_FACTOR


def _median(magnitudes: Tensor) -> float:
    return float(magnitudes.median()) if magnitudes.numel() else 0.0


def cluster(values: NDArray[np.float32], clusters: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Indices and centres of flat values: 0 for a zero, i + 1 for what is nearest to centre i.

    k-means runs on a histogram whose buckets are 0.8 % wide; a last round on the values makes the centres exact means.
    """
    indices = np.zeros(values.size, dtype=np.uint8)
    places = np.flatnonzero(values)
    kept = values[places]
    if not kept.size:
        return indices, np.zeros(0, dtype=np.float32)
    histogram = LogHistogram.of(torch.from_numpy(kept))
    buckets = bucket_values()[histogram.buckets].astype(np.float64)
    order = np.argsort(buckets, kind="stable")
    centres = _best_centres(buckets[order], histogram.counts[order].astype(np.float64), clusters)
    nearest = np.searchsorted(((centres[1:] + centres[:-1]) / 2).astype(np.float32), kept)
    sizes = np.bincount(nearest, minlength=len(centres))
    sums = np.bincount(nearest, kept, minlength=len(centres))
    indices[places] = nearest + 1
    return indices, np.divide(sums, sizes, out=centres, where=sizes > 0).astype(np.float32)


def _best_centres(values: Array, counts: Array, clusters: int) -> Array:
    def squared_error(centres: Array) -> float:
        nearest = centres[np.searchsorted((centres[1:] + centres[:-1]) / 2, values)]
        return float(np.sum(counts * (values - nearest) ** 2))

    return min((kmeans(values, counts, clusters, seed) for seed in range(SEEDINGS)), key=squared_error)


def pack(indices: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """8 / ``bits`` indices in a byte, the first one in its highest bits; zeros fill the last byte."""
    per_byte = 8 // bits
    padded = np.pad(indices, (0, -indices.size % per_byte)).reshape(-1, per_byte)
    packed = np.zeros(len(padded), dtype=np.uint8)
    for column in padded.T:
        packed = packed << np.uint8(bits % 8) | column
    return packed


def unpack(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """The inverse of ``pack`` for ``count`` indices."""
    shifts = np.arange(8 - bits, -1, -bits, dtype=np.uint8)
    indices: NDArray[np.uint8] = packed[:, None] >> shifts & np.uint8(2**bits - 1)
    return indices.reshape(-1)[:count]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).to(torch.float32)


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensor_of(data: memoryview, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
