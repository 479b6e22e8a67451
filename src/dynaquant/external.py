"""Tensors whose values are not in the checkpoint: frozen parameters that checkpoints share, and omitted tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaquant.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class External:
    """A tensor of which a checkpoint holds only the hash.

    file: the identity of the file of frozen parameters that holds the values; None for an omitted tensor. values: reads
    the values and compares them with the hash; raises CheckpointError if that fails.
    """

    dtype: torch.dtype
    shape: torch.Size
    hash: str
    file: str | None
    values: Callable[[], Tensor]


def omitted(name: str, dtype: torch.dtype, shape: torch.Size, digest: str) -> External:
    """Returns an omitted tensor: one whose values are not stored. digest: their hash."""

    def values() -> Tensor:
        raise CheckpointError(f"{name} was omitted when the checkpoint was saved: only its hash is stored")

    return External(dtype, shape, digest, None, values)
