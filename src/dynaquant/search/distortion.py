"""Distortion: how far quantization moves the weights. An estimate of the degradation if there is no metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dynaquant import kernels
from dynaquant.quantize.candidate import CandidateWeights, pieces


def distortion(weights: Mapping[str, Tensor], candidate: CandidateWeights, fisher: Mapping[str, float]) -> float:
    """Return ``Σ F·δ² / Σ F·w²``: the squared errors of the weights, relative to their squares.

    weights, candidate: by name. fisher: ``F``, the mean squared gradient of each tensor. With it, the result is the
    second-order model of the loss up to a factor (method 2.1). Empty: all tensors count alike. 0 if nothing is
    quantized.
    """
    error_sum = weight_sum = 0.0
    for name, tensor in candidate.items():
        factor = fisher.get(name, 0.0) if fisher else 1.0
        weight, begin = weights[name].detach().reshape(-1), 0
        kernel = kernels.for_device(weight.device)
        for values in pieces(tensor, weight.device):
            part = weight[begin : begin + len(values)].to(torch.float32)
            begin += len(values)
            weight_sum += factor * kernel.sums(part)[1]
            error_sum += factor * kernel.sums(values.to(torch.float32).sub_(part))[1]
    return error_sum / weight_sum if weight_sum else 0.0


def mean_squared_gradients(
    parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer], recorded: Mapping[str, float]
) -> dict[str, float]:
    """Return ``F``, the mean squared gradient of each parameter, by name.

    It comes from the optimizers' second moments or from recorded gradients. The two differ in scale, so they are never
    mixed: the source that knows more parameters is used, the second moments if both know as many. Unknown are values
    that are not finite, and second moments that the optimizer stores as codes of another type.
    """
    moments = {}
    for name, parameter in parameters.items():
        state: Mapping[str, Any] = next(
            (optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state), {}
        )
        moment = state.get("exp_avg_sq", state.get("square_avg"))
        if isinstance(moment, Tensor) and moment.shape == parameter.shape and moment.is_floating_point():
            moments[name] = kernels.for_device(moment.device).sums(moment)[0] / max(moment.numel(), 1)
    gradients = {name: recorded[name] for name in parameters if name in recorded}
    sources = [{name: f for name, f in source.items() if math.isfinite(f)} for source in (moments, gradients)]
    best = max(sources, key=len)
    return best if sum(best.values()) > 0 else {}
