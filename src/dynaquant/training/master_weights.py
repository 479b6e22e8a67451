"""Finds half-precision weights whose float32 master weights are in the state, too (mixed precision).

Such a weight is not stored: it is its master weight, rounded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.label import Label
from dynaquant.engine.tensors.dtypes import bytes_of
from dynaquant.state.roles import HALVES, matches
from dynaquant.training.objects import optimizers_of

_FIRST = 1024
"""Number of values that are compared first. They distinguish most tensors."""


def master_weights_of(
    tensors: Mapping[str, Tensor],
    small_on_host: Mapping[str, Tensor],
    labels: Mapping[str, Label],
    objects: Mapping[str, Any],
    patterns: Collection[str],
) -> dict[str, str]:
    """Map the name of every half-precision weight that has master weights to their name.

    Master weights are a float32 tensor of the same shape that rounds exactly to the weight. An optimizer must update it
    or have it in its state. Otherwise it may be an average of a constant weight, which also rounds to that weight.

    tensors, labels: of a whole state. small_on_host: the same tensors, from which values are read. objects: the objects
    whose state it is. patterns: the user's patterns for roles; a tensor that matches one never counts as master
    weights.
    """
    halves = [n for n, t in tensors.items() if labels[n].role == "weight" and t.dtype in HALVES and t.numel() > 1]
    if not halves:
        return {}
    optimizers = optimizers_of(objects)
    states = tuple(f"{name}." for name in {*optimizers, "optimizer"})
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    trained = {parameter.data_ptr() for group in groups for parameter in group["params"]}
    shapes = {tensors[name].shape for name in halves}
    masters = [
        name
        for name, tensor in tensors.items()
        if tensor.dtype == torch.float32
        and tensor.shape in shapes
        and labels[name].role == "exact"
        and (name.startswith(states) or tensor.data_ptr() in trained)
        and not any(matches(name, pattern, objects) for pattern in patterns)
    ]
    return _pairs(halves, masters, small_on_host)


def _pairs(halves: Sequence[str], masters: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map half-precision weights to master weights that round to them; each of these belongs to one of them."""
    first = kernels.small_on_host({name: _beginning(tensors[name]) for name in (*halves, *masters)})
    alike: dict[tuple[torch.Size, torch.dtype, bytes], list[str]] = {}  # master weights, by what they may round to
    for dtype in {tensors[name].dtype for name in halves}:
        for name in masters:
            alike.setdefault((tensors[name].shape, dtype, bytes_of(first[name].to(dtype)).tobytes()), []).append(name)
    fitting = {n: alike.get((tensors[n].shape, tensors[n].dtype, bytes_of(first[n]).tobytes()), []) for n in halves}
    # On a device, most comparisons are made together, and one transfer brings their results.
    left = {id(names): iter(names) for names in fitting.values()}
    guessed = {half: master for half, names in fitting.items() if (master := next(left[id(names)], None))}
    right = kernels.small_on_host(
        {half: _rounds_to(tensors[master], tensors[half]) for half, master in guessed.items()}
    )
    found = {half: master for half, master in guessed.items() if right[half]}
    taken = set(found.values())
    for half in (half for half in halves if half not in found):
        others = (name for name in fitting[half] if name not in taken and name != guessed.get(half))
        if (master := next((name for name in others if _rounds_to(tensors[name], tensors[half])), None)) is not None:
            found[half] = master
            taken.add(master)
    return found


def _beginning(tensor: Tensor) -> Tensor:
    """Return the first values, without memory for the others."""
    flat = tensor.detach().reshape(-1)[:_FIRST]
    return flat if tensor.is_contiguous() else flat.clone()


def _rounds_to(master: Tensor, half: Tensor) -> Tensor:
    """Whether one tensor, rounded, has the bits of another: a scalar on its device. As values, -0 would equal 0."""
    rounded, half = master.detach().to(half.device, half.dtype).reshape(-1), half.detach().reshape(-1)
    return (rounded.view(torch.int16) == half.view(torch.int16)).all()
