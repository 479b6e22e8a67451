"""A stand-in for the quality metric where there is none: how far quantization moves the weights (method 2.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dynaquant import kernels
from dynaquant.tensors.dequantize import pieces
from dynaquant.tensors.stored import QuantizedTensor


def distortion(
    weights: Mapping[str, Tensor], quantized: Mapping[str, QuantizedTensor], fisher: Mapping[str, float]
) -> float:
    """``Σ F·δ² / Σ F·w²``: the squared movement of the weights, relative to their squares.

    weights, quantized: by name. fisher: the mean squared gradient ``F`` of each tensor, so that it is the second-order
    model of the loss of method 2.1, up to a factor; empty: all tensors count alike. 0 when nothing is quantized.
    """
    moved = total = 0.0
    for name, stored in quantized.items():
        factor = fisher.get(name, 0.0) if fisher else 1.0
        weight, begin = weights[name].detach().reshape(-1), 0
        here = kernels.for_device(weight.device)
        for values in pieces(stored, weight.device):
            part = weight[begin : begin + len(values)].to(torch.float32)
            begin += len(values)
            total += factor * here.sums(part)[1]
            moved += factor * here.sums(values.to(torch.float32).sub_(part))[1]
    return moved / total if total else 0.0


def mean_squared_gradients(
    parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer], recorded: Mapping[str, float]
) -> dict[str, float]:
    """``F`` of each parameter by name: from the second moments of its optimizer, else as recorded.

    Only where one source has all of them, since the two differ in scale; else from that which has more. What is not
    finite, and codes of another number than a float, are not known.
    """
    moments = {}
    for name, parameter in parameters.items():
        state: Mapping[str, Any] = next(
            (optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state), {}
        )
        moment = state.get("exp_avg_sq", state.get("square_avg"))
        if isinstance(moment, Tensor) and moment.shape == parameter.shape and moment.is_floating_point():
            moments[name] = kernels.for_device(moment.device).sums(moment)[0] / max(moment.numel(), 1)
    known = {name: recorded[name] for name in parameters if name in recorded}
    sources = [{name: f for name, f in source.items() if math.isfinite(f)} for source in (moments, known)]
    best = max(sources, key=len)  # moments, where both have as many
    return best if sum(best.values()) > 0 else {}
