"""Half-precision weights whose float32 master copies are in the state as well (mixed precision): one is the other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dynaquant.roles import Label

HALVES = (torch.bfloat16, torch.float16)
_FIRST = 1024


def masters(tensors: Mapping[str, Tensor], labels: Mapping[str, Label]) -> dict[str, str]:
    """The name of the master copy of every half-precision weight that has one, by the weight's name.

    A master copy is a float32 tensor of another part of the state, of the same shape, that gives exactly the weight
    when it is rounded. tensors, labels: of a whole state.
    """
    halves = [n for n, t in tensors.items() if labels[n].role == "weight" and t.dtype in HALVES and t.numel() > 1]
    if not halves:
        return {}
    candidates: dict[torch.Size, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float32 and labels[name].role == "exact":
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
    if not torch.equal(
        master[:_FIRST].to(half.dtype).cpu(), half[:_FIRST].cpu()
    ):  # most can be told by their beginning
        return False
    return torch.equal(master.to(half.device, half.dtype), half)
