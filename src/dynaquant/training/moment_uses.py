"""Decides which optimizers' moments may be quantized: those whose steps use them in a way that is known."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from dynaquant.training.objects import optimizers_of
from dynaquant.training.update_check import update_problem

_KNOWN: tuple[type[Optimizer], ...] = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
    *((torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()),  # since PyTorch 2.9
)
"""Classes whose moments were measured (docs/results/optimizers.md)."""
_KNOWN_NAMES = frozenset(
    {
        "apex.optimizers.fused_adam.FusedAdam",
        "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
        "deepspeed.ops.adam.fused_adam.FusedAdam",
        "transformers.optimization.AdamW",
    }
)
"""Adam elsewhere, some of which cannot be tried on a CPU."""


def exact_optimizers(objects: Mapping[str, Any]) -> dict[str, str]:
    """Return the optimizers whose moments must be stored exactly, by name, each with the reason."""
    reasons = {name: why_exact(optimizer) for name, optimizer in optimizers_of(objects).items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def why_exact(optimizer: Optimizer) -> str | None:
    """Return why an optimizer's moments must be stored exactly; None if they may be quantized.

    The form of a quantized moment holds for the update ``m / (√v + ε)``; in another class it does unknown harm
    (docs/decisions.md, "Whose moments are quantized?"). A subclass of a known class is known if it inherits its step.
    Any other class must show in a few steps that its update is that of Adam.
    """
    return None if _is_known(type(optimizer)) else update_problem(optimizer)


def _is_known(kind: type[Optimizer]) -> bool:
    """Whether the step of a class is that of a known one."""
    if any(f"{each.__module__}.{each.__qualname__}" in _KNOWN_NAMES for each in kind.__mro__[:1]):
        return True
    known = next((each for each in kind.__mro__ if each in _KNOWN), None)
    return known is not None and all(_own(kind, method) is _own(known, method) for method in ("step", "_init_group"))


def _own(kind: type[Optimizer], method: str) -> Any:
    """Return a method of a class, without what PyTorch puts around it."""
    return inspect.unwrap(getattr(kind, method, None))  # type: ignore[arg-type]
