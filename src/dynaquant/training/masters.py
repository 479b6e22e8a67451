"""Half-precision weights whose float32 master copies are in the state as well (mixed precision): one is the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dynaquant.state.roles import HALVES, Label, matches

_FIRST = 1024


def masters(
    tensors: Mapping[str, Tensor], labels: Mapping[str, Label], sources: Mapping[str, Any], patterns: Iterable[str]
) -> dict[str, str]:
    """The name of the master copy of every half-precision weight that has one, by the weight's name.

    A master copy is a float32 tensor of the same shape that an optimizer works on, as one of its parameters or in its
    state, and that gives exactly the weight when it is rounded. (Averages of weights may do so as well, of those that
    rest.) tensors, labels: of a whole state. sources: the objects whose state it is. patterns: over names of tensors
    of which the user has decided what they are.
    """
    halves = [n for n, t in tensors.items() if labels[n].role == "weight" and t.dtype in HALVES and t.numel() > 1]
    if not halves:
        return {}
    optimizers = {n: source for n, source in sources.items() if isinstance(source, torch.optim.Optimizer)}
    states = tuple(f"{name}." for name in {*optimizers, "optimizer"})
    trained = {
        parameter.data_ptr()
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    decided = list(patterns)
    candidates: dict[torch.Size, list[str]] = {}
    for name, tensor in tensors.items():
        if (
            tensor.dtype == torch.float32
            and labels[name].role == "exact"
            and (name.startswith(states) or tensor.data_ptr() in trained)
            and not any(matches(name, pattern, sources) for pattern in decided)
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
    beginnings = master[:_FIRST].to(half.dtype).cpu(), half[:_FIRST].cpu()  # most can be told by them
    return _same_bits(*beginnings) and _same_bits(master.to(half.device, half.dtype), half)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))  # as values, -0 is the same as 0
