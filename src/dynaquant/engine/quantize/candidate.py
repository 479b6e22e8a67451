"""Candidates: the weights as one configuration would store them, to be scored before one of them is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.forms import form
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.quantize.grid import Empty, RoundedToGrid

CandidateTensor = QuantizedTensor | RoundedToGrid
"""One tensor of a candidate. On a grid it has no levels yet, because scoring needs only its values."""
CandidateWeights = Mapping[str, CandidateTensor]
"""The weights of a candidate by name."""


def values(tensor: CandidateTensor, device: torch.device, empty: Empty = kernels.empty) -> Tensor:
    """Return the values that a restore would return, on a device. empty: makes the memory for them, where it can."""
    if isinstance(tensor, RoundedToGrid):
        return tensor.values(empty).to(device)
    return form.dequantize(tensor, device)


def pieces(tensor: CandidateTensor, device: torch.device) -> Iterator[Tensor]:
    """Yield the values in order, as flat pieces that stay in the processor's cache while the caller works on them."""
    if isinstance(tensor, RoundedToGrid):
        return (piece.to(device) for piece in tensor.pieces())
    return form.pieces(tensor, device)


def with_levels(candidate: CandidateWeights) -> dict[str, QuantizedTensor] | None:
    """Return the weights by name if all of them have levels, else None."""
    if not all(tensor.has_levels for tensor in candidate.values() if isinstance(tensor, RoundedToGrid)):
        return None
    return {n: t.begin_quantize()() if isinstance(t, RoundedToGrid) else t for n, t in candidate.items()}


def all_zero(weights: Mapping[str, Tensor]) -> CandidateWeights:
    """Return a candidate whose weights are all zero: destroyed, whatever the model is."""

    def zeros(name: str) -> Tensor:
        return torch.zeros_like(weights[name])

    return {name: RoundedToGrid(partial(zeros, name), 0, None) for name in weights}
