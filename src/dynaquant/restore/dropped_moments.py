"""Finds the first moments that a checkpoint does not keep, so that a restore has set them to zero."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynaquant.state.roles import SECOND_MOMENTS
from dynaquant.tensors.stored import Patchwork, QuantizedTensor, ScaledMoment, StoredTensor
from dynaquant.training.collect import parameter_names
from dynaquant.training.first_moments import corrected_keys
from dynaquant.training.optimizers import keys_of
from dynaquant.training.ranks import Group
from dynaquant.training.reduction import Numbers


def dropped_moments(
    objects: Mapping[str, Any], tensors: Mapping[str, StoredTensor], restored: Collection[str], group: Group
) -> dict[str, set[Tensor]]:
    """Return for every optimizer, by name, the parameters whose first moments were dropped. Collective.

    tensors: as the checkpoint stores them, what this rank holds of them. restored: names of the tensors that models and
    optimizers got.
    """
    optimizers = {name: thing for name, thing in objects.items() if isinstance(thing, torch.optim.Optimizer)}
    names = parameter_names(objects)
    moments = [
        (name, parameter, full)
        for name, optimizer in optimizers.items()
        for group_, keys in zip(optimizer.param_groups, keys_of(names[name]), strict=True)
        for parameter, key in zip(group_["params"], keys, strict=True)
        for moment in corrected_keys()
        if (full := f"{name}.state.{key}.{moment}") in restored and full in tensors and parameter.numel()
    ]
    found: dict[str, set[Tensor]] = {name: set() for name in optimizers}
    kept = group.reduce(Numbers(highest=np.array([float(_has_values(tensors[full])) for _, _, full in moments])))
    for (name, parameter, _), is_kept in zip(moments, kept.highest, strict=True):
        if not is_kept:
            found[name].add(parameter)
    return found


def dropped_in(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    """Return the parameters whose first moments are zero, although their second moments are not.

    For an optimizer that has loaded a state of which nothing else is known. Training does not lead to such moments. Of
    an optimizer without second moments, such as Lion, nothing is found.
    """

    def has_values(state: Mapping[str, Any], keys: Collection[str]) -> bool:
        return any(isinstance(state.get(key), Tensor) and bool(state[key].any()) for key in keys)

    first = corrected_keys()
    return {
        parameter
        for parameter, state in optimizer.state.items()
        if not has_values(state, first) and has_values(state, SECOND_MOMENTS)
    }


def _has_values(stored: StoredTensor) -> bool:
    """Whether the stored form of a first moment holds anything but the zeros of a dropped one."""
    if isinstance(stored, Patchwork):
        return any(_has_values(piece) for _, piece in stored.boxes)
    units = stored.units if isinstance(stored, ScaledMoment) else stored
    if isinstance(units, QuantizedTensor):
        return bool(units.levels.any())
    return stored.shape.numel() > 0
