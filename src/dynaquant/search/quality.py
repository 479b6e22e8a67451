"""The user's quality metric on decoded weights, measured without leaving a trace on training."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynaquant import rng
from dynaquant.errors import EvaluateError

Evaluate = Callable[[nn.Module], float]


class LossOn:
    """``evaluate`` made of held-out batches and a loss function: the mean loss, in evaluation mode, lower is better.

    batches: kept and gone through at every evaluation, so a list rather than an iterator, on the model's device.
    loss_fn: ``loss_fn(model, batch)`` returns the mean loss of a batch, a number or a tensor of one element. Batches
    count alike. Raises ValueError when there are no batches, TypeError for an iterator, which could be used only once.
    """

    def __init__(self, batches: Sequence[Any], loss_fn: Callable[[nn.Module, Any], Tensor | float]) -> None:
        if not hasattr(batches, "__getitem__") or not hasattr(batches, "__len__"):
            raise TypeError("batches are gone through again and again: give a list, e.g. list(islice(loader, 20))")
        if len(batches) == 0:
            raise ValueError("LossOn needs at least one batch")
        self._batches, self._loss_fn = batches, loss_fn

    def __call__(self, model: nn.Module) -> float:
        """The mean loss of the model on the batches."""
        model.eval()
        with torch.no_grad():
            return math.fsum(float(self._loss_fn(model, batch)) for batch in self._batches) / len(self._batches)


@dataclass(frozen=True)
class Quality:
    """A metric on the weights in training and on those a restore would return, and how much worse the second is."""

    original: float
    restored: float
    degradation: float


def degradation(original: float, restored: float, higher_is_better: bool) -> float:
    """By how much ``restored`` is worse, relative to the absolute value of ``original``; negative when it is better.

    So it is defined for negative metrics. From an ``original`` of exactly zero, any difference counts as infinite.
    NaN when either is NaN.
    """
    worse = original - restored if higher_is_better else restored - original
    if worse == 0:
        return 0.0
    return worse / abs(original) if original else worse * math.inf


Value = Tensor | Callable[[], Tensor]
"""Values of a parameter, or what makes them anew, one parameter at a time."""


def score(model: nn.Module, values: Mapping[str, Value], evaluate: Evaluate) -> float:
    """``evaluate`` of the model with ``values`` for the parameters of those names.

    ``evaluate`` sees copies of the model's parameters and buffers; training mode and the global random number
    generators are as before when it returns or raises. All scores from one state of the generators see the same random
    numbers. Raises ValueError when the result is no number, and whatever ``evaluate`` raises.
    """
    generators = rng.get_state()
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), _substituted(model, values):
            result = evaluate(model)
            try:
                return float(result)
            except (TypeError, ValueError, RuntimeError):
                raise ValueError(f"evaluate returned {reprlib.repr(result)}; it must return one number") from None
    finally:
        for module, training in modes:
            module.training = training
        rng.set_state(generators)


@contextmanager
def _substituted(model: nn.Module, values: Mapping[str, Value]) -> Iterator[None]:
    """The model with other parameters and with copies of its buffers; its own are put back afterwards.

    Frozen parameters are as large as the rest, and not copied. Raises EvaluateError when one was written to.
    """
    named = dict(model.named_parameters())
    # By memory, as a state has one tensor for parameters that are tied by their data only.
    given = {_memory(named[name]): value for name, value in values.items()}

    def replacement(parameter: nn.Parameter) -> nn.Parameter:
        value = given.get(_memory(parameter))
        # Copies of the others too: a backward pass must not reach their ``.grad``, and some layers write to weights
        # when they are called (``nn.Embedding(max_norm=…)``).
        if value is None:
            copied = parameter.detach() if id(parameter) in versions else parameter.detach().clone()
        elif isinstance(value, Tensor):
            copied = value.to(parameter.device, parameter.dtype, copy=True)
        else:
            copied = value().to(parameter.device, parameter.dtype)
        return nn.Parameter(copied, requires_grad=False)

    versions = _versions_of_frozen(model)
    replacements = {id(parameter): replacement(parameter) for parameter in named.values()}
    modules = list(model.modules())
    originals = [(dict(module._parameters), dict(module._buffers)) for module in modules]
    copies: dict[int, Tensor] = {}
    try:
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = replacements[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
        yield
    finally:
        for module, (parameters, buffers) in zip(modules, originals, strict=True):
            for own, before in ((module._parameters, parameters), (module._buffers, buffers)):
                own.clear()  # and with it what ``evaluate`` has registered
                own.update(before)  # type: ignore[arg-type]
    if written := [name for name, own in named.items() if id(own) in versions and own._version != versions[id(own)]]:
        raise EvaluateError(
            f"evaluate has written to {written[0]}, a frozen parameter, which therefore is not what it was in training "
            "any more; let evaluate work on a copy of what it writes to"
        )


def _versions_of_frozen(model: nn.Module) -> dict[int, int]:
    """How often PyTorch has written to each frozen parameter, by its ``id``; not of those whose layer writes to it."""
    read_only: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.requires_grad and not parameter.is_inference():
                read_only[id(parameter)] = parameter._version
    for module in model.modules():
        if getattr(module, "max_norm", None) is not None:
            for parameter in module._parameters.values():
                read_only.pop(id(parameter), None)
    return read_only


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device
