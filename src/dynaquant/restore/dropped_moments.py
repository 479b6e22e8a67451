"""Finds the first moments that a checkpoint does not keep, so that a restore has set them to zero."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from dynaquant.tensors.stored import QuantizedTensor, ScaledMoment, StoredTensor
from dynaquant.training.collect import parameter_names
from dynaquant.training.first_moments import corrected_keys
from dynaquant.training.optimizers import keys_of


def dropped_moments(
    objects: Mapping[str, Any], tensors: Mapping[str, StoredTensor], restored: Collection[str]
) -> dict[str, set[Tensor]]:
    """Return for every optimizer, by name, the parameters whose first moments were dropped.

    tensors: as the checkpoint stores them. restored: names of the tensors that models and optimizers got.
    """
    optimizers = {name: thing for name, thing in objects.items() if isinstance(thing, torch.optim.Optimizer)}
    names = parameter_names(objects)
    return {
        name: {
            parameter
            for group, keys in zip(optimizer.param_groups, keys_of(names[name]), strict=True)
            for parameter, key in zip(group["params"], keys, strict=True)
            for moment in corrected_keys()
            if (full := f"{name}.state.{key}.{moment}") in restored and full in tensors and is_dropped(tensors[full])
        }
        for name, optimizer in optimizers.items()
    }


def is_dropped(stored: StoredTensor) -> bool:
    """Return whether the stored form of a first moment holds zeros only."""
    units = stored.units if isinstance(stored, ScaledMoment) else stored
    return isinstance(units, QuantizedTensor) and units.levels.size > 0 and not units.levels.any()
