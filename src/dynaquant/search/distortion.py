"""Distortion: how far quantization moves the weights. An estimate of the degradation if there is no metric."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.quantize.candidate import CandidateTensor, CandidateWeights, pieces
from dynaquant.engine.quantize.grid import RoundedToGrid
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.ranks.dtensors import local_of


def distortion(
    weights: Mapping[str, Tensor],
    candidate: CandidateWeights,
    mean_squares: Mapping[str, float],
    shards: Shards = WHOLE,
) -> float:
    """Return ``Σ F·δ² / Σ F·w²``: the squared errors of the weights, relative to their squares.

    weights, candidate: by name. mean_squares: F, the mean squared gradient of each tensor. With it, the result is the
    second-order model of the loss up to a factor (method 2.1). The squares are then those of the matrices: they stand
    for what has been learned, and where a bias or a norm has a large F, its square can be many times that. Empty: all
    tensors count alike, also in the squares. 0 if nothing is quantized. shards: of the weights. Collective if there are
    any.
    """
    sums = shards.sums({name: _squares(weights[name], tensor) for name, tensor in candidate.items()})
    factors = {name: mean_squares.get(name, 0.0) if mean_squares else 1.0 for name in candidate}
    shapes = {name: shards.of(name, weights[name]).shape for name in sums}
    squares = {name: factors[name] * square for name, (square, _) in sums.items()}
    weight_sum = sum(squares[name] for name in _matrices(shapes)) if mean_squares else 0.0
    weight_sum = weight_sum or sum(squares.values())
    error_sum = sum(factors[name] * error for name, (_, error) in sums.items())
    return error_sum / weight_sum if weight_sum else 0.0


def _matrices(shapes: Mapping[str, torch.Size]) -> Collection[str]:
    """Return the names of tensors that have more than one row and more than one column; all names if there are none."""
    return [name for name, shape in shapes.items() if shape.numel() > max(shape, default=0)] or list(shapes)


def _squares(weight: Tensor, candidate: CandidateTensor) -> list[float]:
    """Return the sum of squares of a weight, and that of its errors."""
    if isinstance(candidate, RoundedToGrid) and (found := candidate.errors(weight)) is not None:
        return list(found)
    flat, begin = weight.detach().reshape(-1), 0
    weight_sum = error_sum = 0.0
    kernel = kernels.for_device(flat.device)
    for values in pieces(candidate, flat.device):
        part = flat[begin : begin + len(values)].to(torch.float32)
        begin += len(values)
        squares, errors = kernel.errors(values.to(torch.float32), part)
        weight_sum += squares
        error_sum += errors
    return [weight_sum, error_sum]


def mean_squared_gradients(
    parameters: Mapping[str, Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    recorded: Mapping[str, float],
    shards: Shards = WHOLE,
) -> dict[str, float]:
    """Return ``F``, the mean squared gradient of each parameter, by name.

    It comes from the optimizers' second moments or from recorded gradients. The two differ in scale, so they are never
    mixed: the source that knows more parameters is used, the second moments if both know as many. Unknown are values
    that are not finite, and second moments that the optimizer stores as codes of another type.

    recorded: the mean squares on this rank. shards: of the parameters. Collective if there are any.
    """
    found = second_moments(parameters, optimizers)
    totals = kernels.totals({name: local_of(moment) for name, moment in found.items()})
    sums = shards.sums({name: [total] for name, total in totals.items()})
    moments = {name: sums[name][0] / max(moment.numel(), 1) for name, moment in found.items()}
    gradients = {name: recorded[name] for name in parameters if name in recorded}
    if shards.divided:
        squares = {name: [mean * local_of(parameters[name]).numel()] for name, mean in gradients.items()}
        gradients = {n: total / max(parameters[n].numel(), 1) for n, (total,) in shards.sums(squares).items()}
    sources = [{name: f for name, f in source.items() if math.isfinite(f)} for source in (moments, gradients)]
    best = max(sources, key=len)
    return best if sum(best.values()) > 0 else {}


def second_moments(parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Return the optimizers' second moments of parameters, by name, as far as they have any of the same shape."""
    found: dict[str, Tensor] = {}
    of_optimizers = [optimizer.state for optimizer in optimizers]
    for name, parameter in parameters.items():
        state: Mapping[str, Any] = next(filter(None, (states.get(parameter) for states in of_optimizers)), {})
        moment = state.get("exp_avg_sq", state.get("square_avg"))
        if isinstance(moment, Tensor) and moment.shape == parameter.shape and moment.is_floating_point():
            found[name] = moment
    return found
