"""Tensors whose values are outside the checkpoint: frozen in a file of their own, or omitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaquant.engine.forms.form import Form, StoredTensor, in_pieces
from dynaquant.engine.forms.scheme import Coder, Scheme
from dynaquant.engine.forms.schemes import Frozen, Omitted
from dynaquant.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class External(Form):
    """A tensor of which the checkpoint holds only the hash.

    file: the identity of the file of frozen parameters that holds the values; None for an omitted tensor. read: a
    function that reads the values and compares them with the hash; raises CheckpointError if that fails.
    """

    external = True
    dtype: torch.dtype
    shape: torch.Size
    hash: str
    file: str | None
    read: Callable[[], Tensor]

    def pieces(self, size: int, device: torch.device) -> Iterator[Tensor]:
        """Yield the values in order. Raises CheckpointError if they cannot be read."""
        return in_pieces(self.read().to(device), size)

    def values(self) -> Tensor:
        """Return the values. Raises CheckpointError if they cannot be read."""
        return self.read()

    def digest(self) -> str:
        """Return the hash."""
        return self.hash

    def encode(self, parent: StoredTensor | None, coder: Coder) -> tuple[Scheme, bytes]:  # noqa: ARG002 - no stream
        """Return where the values are, and no stream."""
        return Omitted() if self.file is None else Frozen(self.file), b""

    def equals(self, other: StoredTensor) -> bool:
        """Whether the other has the same hash, in the same file."""
        return isinstance(other, External) and (
            (self.dtype, self.shape, self.hash, self.file) == (other.dtype, other.shape, other.hash, other.file)
        )

    def can_refer_to(self, parent: StoredTensor | None, again: bool) -> bool:  # noqa: ARG002 - it has no stream
        """Return False: it takes no bytes anyway."""
        return False

    def describe(self) -> str:
        """Return a sentence that says what the values are made of."""
        return "its values are not in this file; it has no levels"


def omitted(name: str, dtype: torch.dtype, shape: torch.Size, digest: str) -> External:
    """Return an omitted tensor: one whose values are not stored anywhere. digest: the hash of the values."""

    def read() -> Tensor:
        raise CheckpointError(f"{name} was omitted when the checkpoint was saved: only its hash is stored")

    return External(dtype, shape, digest, None, read)
