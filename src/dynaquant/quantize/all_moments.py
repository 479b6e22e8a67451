"""All moments of an optimizer's state, quantized (method 2.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dynaquant.quantize.moments import first_moment, momentum, second_moment
from dynaquant.state.roles import Label
from dynaquant.tensors.stored import Quantized, QuantizedTensor, RankOne

_SECOND_OF_FIRST = {"exp_avg": ("max_exp_avg_sq", "exp_avg_sq")}
"""Keys of the second moments by whose root an update divides a first moment, that which counts first.

A ``momentum_buffer`` is not among the keys: it is the update itself.
"""


def quantize_moments(
    tensors: Mapping[str, Tensor], labels: Mapping[str, Label], first_tolerance: float, second_tolerance: float
) -> dict[str, Quantized]:
    """The moments that can be quantized within the tolerances, by name; the others are to be stored exactly.

    tensors, labels: of a whole state. Moments that are empty or not finite stay exact, as does a first moment whose
    second one does. One without the second one that its key calls for does so too, unless it may be forgotten: what it
    does to an update is not known (Adamax divides it by ``exp_inf``, Lion takes its sign).
    """
    quantized: dict[str, Quantized] = {}
    seconds: dict[str, QuantizedTensor | RankOne] = {}
    for name in tensors:
        if labels[name].role == "second_moment" and _usable(tensor := tensors[name], lowest=0.0):
            stored = second_moment(tensor, second_tolerance)
            if stored is not None:
                quantized[name] = seconds[name] = stored
    for name in tensors:
        if labels[name].role != "first_moment" or not _usable(tensor := tensors[name]):
            continue
        second = _second_of(name, tensors)
        first: Quantized | None = None
        if second in seconds and tensors[second].shape == tensor.shape:
            first = first_moment(tensor, tensors[second], seconds[second], second, first_tolerance)
        elif second is None and (first_tolerance >= 1 or not _is_divided(name)):
            first = momentum(tensor, first_tolerance)
        if first is not None:
            quantized[name] = first
    return quantized


def _usable(tensor: Tensor, lowest: float = -math.inf) -> bool:
    if tensor.numel() == 0:
        return False
    least, most = torch.aminmax(tensor.detach())  # NaN where one value is
    return lowest <= float(least) and -math.inf < float(least) and float(most) < math.inf


def _is_divided(name: str) -> bool:
    return name.rpartition(".")[2] in _SECOND_OF_FIRST


def _second_of(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    state, _, key = name.rpartition(".")
    names = (f"{state}.{second}" for second in _SECOND_OF_FIRST.get(key, ()))
    return next((second for second in names if second in tensors), None)
