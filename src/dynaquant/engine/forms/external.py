"""Tensors whose values are outside the checkpoint: frozen in a file of their own, or omitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

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
    read: Callable[[], Tensor] = field(compare=False)

    def pieces(self, size: int, device: torch.device, out: Tensor | None = None) -> Iterator[Tensor]:  # noqa: ARG002 - copied
        return in_pieces(self.read().to(device), size)

    def values(self) -> Tensor:
        return self.read()

    def digest(self) -> str:
        return self.hash

    def values_with_digest(self) -> tuple[Tensor, str]:
        return self.read(), self.hash

    def encode(self, parent: StoredTensor | None, coder: Coder) -> tuple[Scheme, bytes]:  # noqa: ARG002 - no stream
        return Omitted() if self.file is None else Frozen(self.file), b""

    def describe(self) -> str:
        return "its values are not in this file; it has no levels"


def externals(tensors: Mapping[str, StoredTensor]) -> dict[str, External]:
    """Return those of the tensors whose values are outside the checkpoint."""
    return {name: stored for name, stored in tensors.items() if isinstance(stored, External)}


def omitted(name: str, dtype: torch.dtype, shape: torch.Size, digest: str) -> External:
    """Return an omitted tensor: one whose values are not stored anywhere. digest: the hash of the values."""

    def read() -> Tensor:
        raise CheckpointError(f"{name} was omitted when the checkpoint was saved: only its hash is stored")

    return External(dtype, shape, digest, None, read)
