"""Finds half-precision weights whose float32 master weights are in the state, too (mixed precision).

Such a weight is not stored: it is its master weight, rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dynaquant.engine.label import Label
from dynaquant.state.roles import HALVES, matches

_FIRST = 1024
"""Number of values that are compared first. They distinguish most tensors."""


def master_weights_of(
    tensors: Mapping[str, Tensor], labels: Mapping[str, Label], objects: Mapping[str, Any], patterns: Iterable[str]
) -> dict[str, str]:
    """Map the name of every half-precision weight that has master weights to their name.

    Master weights are a float32 tensor of the same shape that rounds exactly to the weight. An optimizer must update it
    or have it in its state. Otherwise it may be an average of a constant weight, which also rounds to that weight.

    tensors, labels: of a whole state. objects: the objects whose state it is. patterns: the user's patterns for roles;
    a tensor that matches one never counts as master weights.
    """
    halves = [n for n, t in tensors.items() if labels[n].role == "weight" and t.dtype in HALVES and t.numel() > 1]
    if not halves:
        return {}
    optimizers = {n: thing for n, thing in objects.items() if isinstance(thing, torch.optim.Optimizer)}
    states = tuple(f"{name}." for name in {*optimizers, "optimizer"})
    trained = {
        parameter.data_ptr()
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    patterns = list(patterns)
    candidates: dict[torch.Size, list[str]] = {}
    for name, tensor in tensors.items():
        if (
            tensor.dtype == torch.float32
            and labels[name].role == "exact"
            and (name.startswith(states) or tensor.data_ptr() in trained)
            and not any(matches(name, pattern, objects) for pattern in patterns)
        ):
            candidates.setdefault(tensor.shape, []).append(name)
    found: dict[str, str] = {}
    for name in halves:
        fitting = candidates.get(tensors[name].shape, [])
        master = next((other for other in fitting if _rounds_to(tensors[other], tensors[name])), None)
        if master is not None:
            found[name] = master
            fitting.remove(master)
    return found


def _rounds_to(master: Tensor, half: Tensor) -> bool:
    master, half = master.detach().reshape(-1), half.detach().reshape(-1)
    first = master[:_FIRST].to(half.dtype).cpu(), half[:_FIRST].cpu()
    return _same_bits(*first) and _same_bits(master.to(half.device, half.dtype), half)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))  # compared as values, -0 would equal 0
