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

    file: the identity of the run's file of frozen parameters that holds the values; None where nothing does, as the
    tensor was omitted. values: reads them from there and compares them with the hash; raises CheckpointError where they
    cannot be had.
    """

    dtype: torch.dtype
    shape: torch.Size
    hash: str
    file: str | None
    values: Callable[[], Tensor]


def omitted(name: str, dtype: torch.dtype, shape: torch.Size, digest: str) -> External:
    """A tensor that is not stored. digest: the hash of its values."""

    def values() -> Tensor:
        raise CheckpointError(f"{name} was omitted when the checkpoint was saved: only its hash is stored")

    return External(dtype, shape, digest, None, values)
