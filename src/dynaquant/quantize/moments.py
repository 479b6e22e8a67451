"""Quantize all moments of a checkpoint (method 2.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from dynaquant.quantize.first_moment import quantize_first_moment, quantize_momentum
from dynaquant.quantize.second_moment import quantize_second_moment
from dynaquant.state.roles import Label
from dynaquant.tensors.stored import Quantized, QuantizedTensor, RankOne

_SECOND_OF_FIRST = {"exp_avg": ("max_exp_avg_sq", "exp_avg_sq")}
"""For a first moment's key, the keys of the second moments whose root divides it in an update. The first one found
counts.

``momentum_buffer`` is not here: it is the update itself.
"""


def quantize_moments(
    tensors: Mapping[str, Tensor],
    labels: Mapping[str, Label],
    first_tolerance: float,
    second_tolerance: float,
    first_tolerances: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Quantized]:
    """Return the moments that can be quantized within the tolerances, by name. Store the others exactly.

    tensors, labels: of a whole state. first_tolerances: those of single first moments, by name, in place of
    ``first_tolerance``. These moments stay exact:

    - moments that are empty or not finite;
    - a first moment whose second moment stays exact;
    - a first moment that lacks the second moment its key calls for, because its effect on an update is unknown (Adamax
      divides it by ``exp_inf``, Lion takes its sign). With an infinite tolerance it becomes zero instead.
    """
    quantized: dict[str, Quantized] = {}
    seconds: dict[str, QuantizedTensor | RankOne] = {}
    for name in tensors:
        if labels[name].role == "second_moment" and _usable(tensor := tensors[name], lowest=0.0):
            stored = quantize_second_moment(tensor, second_tolerance)
            if stored is not None:
                quantized[name] = seconds[name] = stored
    for name in tensors:
        if labels[name].role != "first_moment" or not _usable(tensor := tensors[name]):
            continue
        second, tolerance = _second_of(name, tensors), first_tolerance
        if second is not None or not _is_divided(name):  # others would be exact, and as large as the weights
            tolerance = first_tolerances.get(name, first_tolerance)
        first: Quantized | None = None
        if second in seconds and tensors[second].shape == tensor.shape:
            first = quantize_first_moment(tensor, seconds[second], second, tolerance)
        elif second is None and (tolerance == math.inf or not _is_divided(name)):
            first = quantize_momentum(tensor, tolerance)
        if first is not None:
            quantized[name] = first
    return quantized


def _usable(tensor: Tensor, lowest: float = -math.inf) -> bool:
    if tensor.numel() == 0:
        return False
    least, most = torch.aminmax(tensor.detach())  # NaN if any value is NaN
    return lowest <= float(least) and -math.inf < float(least) and float(most) < math.inf


def _is_divided(name: str) -> bool:
    """Whether an update divides this first moment by the root of a second moment."""
    return name.rpartition(".")[2] in _SECOND_OF_FIRST


def _second_of(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a first moment's second moment, or None if the state has none."""
    state, _, key = name.rpartition(".")
    names = (f"{state}.{second}" for second in _SECOND_OF_FIRST.get(key, ()))
    return next((second for second in names if second in tensors), None)
