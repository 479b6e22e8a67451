"""What the benchmarks expect of a peer: a checkpoint in, bytes and the decoded checkpoint out.

A peer may code a checkpoint against the one before it. Entropy coding is apart from quantizing, as a search quantizes
many times and codes once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

S = TypeVar("S")


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


@dataclass(frozen=True)
class Known:
    """What is known of the checkpoint before: all that the next one may be coded against.

    checkpoint: as it was decoded. levels: integers by name, for peers that code differences of levels. errors: what
    quantization took from each tensor; only the encoder knows them, so ``decode`` leaves them empty.
    """

    checkpoint: Checkpoint
    levels: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    errors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Encoded:
    """A quantized checkpoint. known: what ``decode`` will make of the bytes, and the errors. pack: codes the bytes."""

    known: Known
    pack: Callable[[], bytes]


@dataclass(frozen=True)
class Peer(Generic[S]):
    """A published way to store checkpoints.

    space: settings to search, from the smallest files to the best values. groups: those of a checkpoint that it
    stores; how the others are stored is left to the caller. encode: with a checkpoint, what is known of the one before
    (for the first one the initial weights, or None for a checkpoint that stands alone) and settings. decode: with the
    bytes and what ``encode`` knew, less the errors.
    """

    name: str
    space: tuple[S, ...]
    encode: Callable[[Checkpoint, Known | None, S], Encoded]
    decode: Callable[[bytes, Known | None], Known]
    groups: tuple[str, ...] = ("weights",)
