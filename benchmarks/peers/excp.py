"""ExCP as a peer: pruned and clustered residuals of the weights together with both moments, then LZMA.

Li et al., "ExCP: Extreme LLM Checkpoint Compression via Weight-Momentum Joint Shrinking", ICML 2024, arXiv 2406.11257.
Details and constants are those of ``compress_pythia.py`` in the authors' repository, https://github.com/Gaffey/ExCP,
which calls the first moment ``opt_v`` and the second ``opt_m``:

- The residual of a weight is its difference to the *reconstruction* of the previous checkpoint: their scripts compress
  each checkpoint against a file that ``recon`` has overwritten. The first checkpoint that they compress, step 2000,
  refers to one that is stored whole.
- A residual is kept where ``|r| > min(2.5, α / sqrt(mean(v))) · median(|r|)``, with v the second moment and median and
  mean over one tensor. α = 5e-5 (``--prune_alpha``); 2.5 is written into ``prune``.
- Both moments are kept where ``|m| > β · mean(|m|)`` and the residual was kept. β = 2.0 (``--prune_beta``).
- The kept values are clustered by k-means into 2ⁿ - 1 clusters, separately for each tensor of residuals, first and
  second moments. Index 0 means pruned. n = 4 (``--quant_bits``, ``--quant_bits_opt``), 8 / n indices in a byte.
- One 7-Zip archive holds everything. 7-Zip's method is LZMA, here in an xz stream.

Deviations, all in the peer's favour: clusters come from all values and are the best of four seedings (their faiss
k-means looks at 256 values for each cluster and stops after 25 rounds); centres are float32 (their float16 turns second
moments below 3e-8 into zeros); LZMA has its highest preset. Optimizers without second moments are not in the paper: for
them mean(m²) stands in for mean(v), and without any moment no residual is pruned.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peers.body import bytes_of, described, join, pack, restored, split, unpack
from peers.peer import Checkpoint, Encoded, Known, Peer
from torch import Tensor

from dynaquant.engine.quantize.kmeans import kmeans
from dynaquant.engine.tensors.log_histogram import LogHistogram, bucket_values

LARGEST_FACTOR = 2.5
"""A residual above this many medians is always kept."""
SEEDINGS = 4
"""Seedings of k-means. The best one counts."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Settings:
    """The paper's α and β, and its n: bits of an index, of residuals and of moments. Defaults are the paper's."""

    alpha: float = 5e-5
    beta: float = 2.0
    bits: int = 4
    moment_bits: int = 4

    def bits_of(self, group: str) -> int:
        """Return the bits of an index of ``weights`` or of a moment."""
        return self.bits if group == "weights" else self.moment_bits


ALPHAS = (5e-3, 1e-3, 5e-4, 2e-4, 5e-5, 5e-6, 0.0)
SPACE = tuple(Settings(alpha, bits=bits) for bits, alpha in product((2, 4, 8), ALPHAS))
"""From coarse to fine. β and the bits of moments are always the paper's: they do not change the weights, so no metric
can choose them."""


def encode(checkpoint: Checkpoint, previous: Known | None, settings: Settings = Settings()) -> Encoded:
    """Encode residuals and moments as clusters.

    previous: a ``Known`` of the previous checkpoint. For the first one, the initial weights; they need no moments.
    None: store everything exactly. Raises ValueError if a moment has no weight.
    """
    if not checkpoint.first.keys() | checkpoint.second.keys() <= checkpoint.weights.keys():
        raise ValueError("every moment needs the weight that it belongs to")
    clustered = {} if previous is None else _clustered(checkpoint, previous.checkpoint, settings)
    decoded = Checkpoint({})
    entries: list[dict[str, Any]] = []
    for group, tensors in checkpoint.groups().items():
        for name, tensor in tensors.items():
            entry = {"group": group, "name": name, **described(tensor)}
            value = tensor
            if (group, name) in clustered:
                indices, centres = clustered[group, name]
                entry["centres"] = len(centres)
                value = _reconstruction(entry, indices, centres, previous)
            decoded.groups()[group][name] = value
            entries.append(entry)

    def packed() -> bytes:
        parts = []
        for entry in entries:
            if "centres" in entry:
                indices, centres = clustered[entry["group"], entry["name"]]
                parts += [centres.tobytes(), pack(indices, settings.bits_of(entry["group"]))]
            else:
                parts.append(bytes_of(checkpoint.groups()[entry["group"]][entry["name"]]))
        bits = {group: settings.bits_of(group) for group in ("weights", "first", "second")}
        return lzma.compress(join([bits, entries], parts), preset=9 | lzma.PRESET_EXTREME)

    return Encoded(Known(decoded), packed)


def decode(data: bytes, previous: Known | None) -> Known:
    """Decode a checkpoint. previous: the same that it was encoded with."""
    (bits, entries), parts = split(lzma.decompress(data))
    result = Checkpoint({})
    following = iter(parts)
    for entry in entries:
        part = next(following)
        if "centres" in entry:
            indices = unpack(next(following), bits[entry["group"]], int(np.prod(entry["shape"], dtype=np.int64)))
            tensor = _reconstruction(entry, indices, np.frombuffer(part, dtype=np.float32), previous)
        else:
            tensor = restored(part, entry)
        result.groups()[entry["group"]][entry["name"]] = tensor
    return Known(result)


def _reconstruction(
    entry: dict[str, Any], indices: NDArray[np.uint8], centres: NDArray[np.float32], previous: Known | None
) -> Tensor:
    flat = torch.from_numpy(np.concatenate(([np.float32(0)], centres))[indices])
    if entry["group"] == "weights":
        assert previous is not None
        flat = flat + _flat(previous.checkpoint.weights[entry["name"]])
    return flat.to(getattr(torch, entry["dtype"])).reshape(entry["shape"])


def _clustered(
    checkpoint: Checkpoint, previous: Checkpoint, settings: Settings
) -> dict[tuple[str, str], tuple[NDArray[np.uint8], NDArray[np.float32]]]:
    """Return indices and centres of every residual and moment, by group and name."""
    return {
        (group, name): cluster(tensor, 2 ** settings.bits_of(group) - 1)
        for name in checkpoint.weights
        for group, tensor in shrunk(checkpoint, previous, name, settings)
    }


def shrunk(
    checkpoint: Checkpoint, previous: Checkpoint, name: str, settings: Settings
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the residual and the moments of a weight, flat, each with its group. Pruned values are zero."""
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
    """Return the threshold of residuals, in medians."""
    squares = second if second is not None else None if first is None else first.square()
    if squares is None or not squares.numel():
        return 0.0
    deviation = float(squares.mean().sqrt())
    return min(LARGEST_FACTOR, alpha / deviation) if deviation > 0 else LARGEST_FACTOR


def _median(magnitudes: Tensor) -> float:
    return float(magnitudes.median()) if magnitudes.numel() else 0.0


def cluster(values: NDArray[np.float32], clusters: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return indices and centres of flat values. Index 0 is zero, index i + 1 is nearest to centre i.

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


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).to(torch.float32)


EXCP = Peer("ExCP", SPACE, encode, decode, groups=("weights", "first", "second", "others"))
