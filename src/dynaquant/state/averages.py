"""Finds averages of a model's weights (EMA, SWA) among the objects of a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dynaquant.state.wrappers import named_parameters

_MODULES = {
    ("torch", "AveragedModel"): "module.",
    ("timm", "ModelEmaV2"): "module.",
    ("timm", "ModelEmaV3"): "module.",
    ("ema_pytorch", "EMA"): "ema_model.",
}
"""Modules that average the weights of a model, by package and class, and what their names of averages begin with."""
_OTHERS = {("torch_ema", "ExponentialMovingAverage"): "shadow_params."}
"""The same for objects with a ``state_dict``."""


def averages_in(object_name: str, thing: Any, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors of a state that are averages of weights which the object holds.

    Subclasses count, and no package is imported. tensors: of the state; those of the object begin with its name.
    """
    of_module, of_other = _prefix(thing, _MODULES), _prefix(thing, _OTHERS)
    if isinstance(thing, nn.Module) and of_module is not None:
        named = (f"{object_name}.{path}" for path, _ in named_parameters(thing) if path.startswith(of_module))
        return [name for name in named if name in tensors]
    if of_other is not None:
        return [name for name in tensors if name.startswith(f"{object_name}.{of_other}")]
    return []


def _prefix(thing: Any, kinds: Mapping[tuple[str, str], str]) -> str | None:
    known = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(thing).__mro__)
    return next((kinds[kind] for kind in known if kind in kinds), None)
