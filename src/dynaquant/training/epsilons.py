"""What optimizers add to the roots of second moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynaquant.training.optimizers import keys_of


def epsilons_of(objects: Mapping[str, Any], parameters: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, float]:
    """Return the ε of each parameter's updates by the name of its optimizer state, as far as its group has one.

    objects: of the training, by name. parameters: the names of every optimizer's parameters, by group.
    """
    found: dict[str, float] = {}
    for name, names in parameters.items():
        for group, keys in zip(objects[name].param_groups, keys_of(names), strict=True):
            if epsilon := epsilon_in(group):
                found |= {f"{name}.state.{key}": epsilon for key in keys}
    return found


def epsilon_in(group: Mapping[str, Any]) -> float:
    """Return the ε of a parameter group; 0 if it has none, or something else than one number."""
    epsilon = group.get("eps")
    return float(epsilon) if isinstance(epsilon, int | float) and epsilon > 0 else 0.0
