"""A half-precision weight whose float32 master weight is stored. Its values are the rounded master weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from dynaquant.engine.forms.form import Coded, Form, StoredTensor
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.forms.scheme import Coder, Scheme
from dynaquant.engine.forms.schemes import RoundedFromMaster
from dynaquant.engine.forms.stored import cut, form_of, stored_equal
from dynaquant.engine.tensors.box import Box

Master = QuantizedTensor | Tensor
"""The forms of a master weight."""


@dataclass(frozen=True)
class RoundedWeight(Form):
    """A weight that is its master weight, each value rounded to a dtype.

    master: the master weight as stored, under the name ``master_name``.
    """

    dtype: torch.dtype
    master: Master
    master_name: str

    @property
    def shape(self) -> torch.Size:
        """Shape of the values."""
        return self.master.shape

    @property
    def other(self) -> tuple[str, StoredTensor]:
        """The master weight."""
        return self.master_name, self.master

    def with_other(self, name: str, stored: StoredTensor) -> RoundedWeight:
        """Return the same weight with the master weight by another name."""
        return replace(self, master_name=name, master=cast(Master, stored))

    def pieces(self, size: int, device: torch.device) -> Iterator[Tensor]:
        """Yield the rounded values in order."""
        for piece in form_of(self.master).pieces(size, device):
            yield piece.to(self.dtype)

    def encode(self, parent: StoredTensor | None, coder: Coder) -> tuple[Scheme, bytes]:  # noqa: ARG002 - no stream
        """Return the name of the master weight, and no stream."""
        return RoundedFromMaster(self.master_name), b""

    def equals(self, other: StoredTensor) -> bool:
        """Whether the other is rounded to the same dtype from the same master weight by the same name."""
        return (
            isinstance(other, RoundedWeight)
            and (self.dtype, self.master_name) == (other.dtype, other.master_name)
            and stored_equal(self.master, other.master)
        )

    def cut(self, box: Box) -> RoundedWeight:
        """Return the master weight of a box."""
        return replace(self, master=cast(Master, cut(self.master, box)))

    def describe(self) -> str:
        """Return a sentence that says what the values are made of."""
        return "its values are stored exactly; it has no levels"


def decode(scheme: RoundedFromMaster, coded: Coded) -> RoundedWeight:
    """Return the weight. Raises ValueError if the other tensor cannot be its master weight."""
    if not isinstance(coded.other, Master) or coded.other.shape != coded.shape:
        raise ValueError(f"it is rounded from {scheme.of}, which is not a weight of the same shape")
    return RoundedWeight(coded.dtype, coded.other, scheme.of)
