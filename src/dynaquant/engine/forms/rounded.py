"""A half-precision weight whose float32 master weight is stored. Its values are the rounded master weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dynaquant.engine.forms.form import Coded, Form, StoredTensor
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.forms.scheme import Coder, Scheme
from dynaquant.engine.forms.schemes import RoundedFromMaster
from dynaquant.engine.forms.stored import cut, form_of
from dynaquant.engine.tensors.box import Box


@dataclass(frozen=True)
class RoundedWeight(Form):
    """A weight that is its master weight, each value rounded to a dtype.

    master: the master weight as stored, in levels or exactly, under the name ``master_name``.
    """

    dtype: torch.dtype
    master: StoredTensor
    master_name: str

    @property
    def shape(self) -> torch.Size:
        return self.master.shape

    @property
    def other(self) -> tuple[str, StoredTensor]:
        return self.master_name, self.master

    def with_other(self, name: str, stored: StoredTensor) -> RoundedWeight:
        return replace(self, master_name=name, master=stored)

    def pieces(self, size: int, device: torch.device, out: Tensor | None = None) -> Iterator[Tensor]:  # noqa: ARG002 - copied
        for piece in form_of(self.master).pieces(size, device):
            yield piece.to(self.dtype)

    def encode(self, parent: StoredTensor | None, coder: Coder) -> tuple[Scheme, bytes]:  # noqa: ARG002 - no stream
        return RoundedFromMaster(self.master_name), b""

    def cut(self, box: Box) -> RoundedWeight:
        return replace(self, master=cut(self.master, box))

    def describe(self) -> str:
        return "its values are stored exactly; it has no levels"


def decode(scheme: RoundedFromMaster, coded: Coded) -> RoundedWeight:
    """Return the weight. Raises ValueError if the other tensor cannot be its master weight."""
    master = coded.other
    if not isinstance(master, QuantizedTensor | Tensor) or master.shape != coded.shape:
        raise ValueError(f"it is rounded from {scheme.of}, which is not a weight of the same shape")
    return RoundedWeight(coded.dtype, master, scheme.of)
