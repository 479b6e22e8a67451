"""The user's quality metric on decoded weights, measured without leaving a trace on training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynaquant import rng

Evaluate = Callable[[nn.Module], float]


@dataclass(frozen=True)
class Quality:
    """A metric on the weights in training and on those a restore would return.

    degradation: by how much the second is worse, relative to the absolute value of the first; negative when it is
    better. NaN when either is NaN, infinite when only the first is zero.
    """

    original: float
    restored: float
    degradation: float


def measure(model: nn.Module, values: Mapping[str, Tensor], evaluate: Evaluate, higher_is_better: bool) -> Quality:
    """Scores the model as it is and with ``values`` for the parameters of those names.

    The model's parameters and buffers are never written to; training mode and the global random number generators
    are as before when it returns or raises. Both scores see the same random numbers.
    """
    original, restored = (_score(model, v, evaluate) for v in ({}, values))
    worse = original - restored if higher_is_better else restored - original
    return Quality(original, restored, 0.0 if worse == 0 else worse / abs(original) if original else worse * torch.inf)


def _score(model: nn.Module, values: Mapping[str, Tensor], evaluate: Evaluate) -> float:
    generators = rng.get_state()
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), _substituted(model, values):
            score = evaluate(model)
            try:
                return float(score)
            except (TypeError, ValueError, RuntimeError):
                raise ValueError(f"evaluate returned {score!r}; it must return one number") from None
    finally:
        for module, training in modes:
            module.training = training
        rng.set_state(generators)


@contextmanager
def _substituted(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other parameters and with copies of its buffers; its own are put back afterwards."""
    named = dict(model.named_parameters())
    replacements: dict[int, nn.Parameter] = {
        id(named[name]): nn.Parameter(value.to(named[name].device), requires_grad=False)
        for name, value in values.items()
    }
    modules = list(model.modules())
    originals = [(dict(module._parameters), dict(module._buffers)) for module in modules]
    copies: dict[int, Tensor] = {}
    try:
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = replacements.get(id(parameter), parameter)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
        yield
    finally:
        for module, (parameters, buffers) in zip(modules, originals, strict=True):
            module._parameters.update(parameters)
            module._buffers.update(buffers)
