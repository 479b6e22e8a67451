"""Interface of a peer: it takes a checkpoint, and returns bytes and the decoded checkpoint.

A peer may condition a checkpoint on the previous one. Entropy coding is separate from quantizing, because a search
quantizes many times and codes once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

S = TypeVar("S")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the CPU, finite, by name. Moments have the names of their weights; any may be missing.

    others: tensors to store exactly: buffers, counters, weights that are not quantized.
    """

    weights: dict[str, Tensor]
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)

    def groups(self) -> dict[str, dict[str, Tensor]]:
        """Return the four dictionaries by the names of their fields."""
        return {"weights": self.weights, "first": self.first, "second": self.second, "others": self.others}


@dataclass(frozen=True)
class Known:
    """What the next checkpoint may be conditioned on: the decoder's knowledge of the previous one.

    checkpoint: as decoded. levels: integers by name, for peers that code differences of levels. errors: the
    quantization error of each tensor; only the encoder knows them, so ``decode`` leaves them empty.
    """

    checkpoint: Checkpoint
    levels: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    errors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Encoded:
    """A quantized checkpoint. known: what ``decode`` will return, and the errors. pack: codes the bytes."""

    known: Known
    pack: Callable[[], bytes]


@dataclass(frozen=True)
class Peer(Generic[S]):
    """A published method to store checkpoints.

    space: settings to search, from the smallest files to the best values. groups: groups of a checkpoint that it
    stores; the caller stores the others. encode: takes a checkpoint, a ``Known`` of the previous one (the initial
    weights for the first one, or None for a checkpoint that stands alone) and settings. decode: takes the bytes and
    what ``encode`` knew, without the errors.
    """

    name: str
    space: tuple[S, ...]
    encode: Callable[[Checkpoint, Known | None, S], Encoded]
    decode: Callable[[bytes, Known | None], Known]
    groups: tuple[str, ...] = ("weights",)


def smallest(space: Sequence[S], is_good: Callable[[S], bool]) -> tuple[S, bool]:
    """Return the first settings that are good enough, found by bisection, or the last; and whether they are.

    space: from small files to good values. All settings after good ones are good.
    """
    low, high = 0, len(space)
    while low < high:
        middle = (low + high) // 2
        if is_good(space[middle]):
            high = middle
        else:
            low = middle + 1
    return (space[low], True) if low < len(space) else (space[-1], False)
