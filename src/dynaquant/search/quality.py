"""The user's quality metric on decoded weights, measured without leaving a trace on training."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynaquant.errors import EvaluateError
from dynaquant.state.wrappers import named_parameters
from dynaquant.training.changes import sample_of
from dynaquant.training.snapshot import Snapshot

Evaluate = Callable[[Any], float]
"""A metric of a bare model, or of a dictionary of several by name."""


def of_several(evaluate: Evaluate) -> Evaluate:
    """A metric of an ``nn.ModuleDict``, from one of a dictionary of its modules."""
    return lambda modules: evaluate(dict(modules.items()))


class LossOn:
    """``evaluate`` made of held-out batches and a loss function: the mean loss, in evaluation mode, lower is better.

    batches: kept and gone through at every evaluation, so a list rather than an iterator, on the model's device.
    loss_fn: ``loss_fn(model, batch)`` returns the mean loss of a batch, a number or a tensor of one element. Batches
    count alike. Raises ValueError when there are no batches, TypeError for an iterator, which could be used only once.
    """

    def __init__(self, batches: Sequence[Any], loss_fn: Callable[[Any, Any], Tensor | float]) -> None:
        if not hasattr(batches, "__getitem__") or not hasattr(batches, "__len__"):
            raise TypeError("batches are gone through again and again: give a list, e.g. list(islice(loader, 20))")
        if len(batches) == 0:
            raise ValueError("LossOn needs at least one batch")
        self._batches, self._loss_fn = batches, loss_fn

    def __call__(self, model: Any) -> float:
        """The mean loss of the model on the batches."""
        for each in model.values() if isinstance(model, Mapping) else (model,):
            each.eval()
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

    Names are those of the bare model. ``evaluate`` sees copies of its parameters and buffers; training mode and the
    global random number generators are as before when it returns or raises. All scores from one state of the generators
    see the same random numbers. Raises ValueError when the result is no number, and whatever ``evaluate`` raises.
    """
    before, frozen = Snapshot(model), _frozen(model)
    try:
        with torch.no_grad():
            _substitute(model, values)
            result = evaluate(model)
            try:
                number = float(result)
            except (TypeError, ValueError, RuntimeError):
                raise ValueError(f"evaluate returned {reprlib.repr(result)}; it must return one number") from None
    except Exception as error:
        before.put_back()
        _check_untouched(model, frozen, error)
        raise
    finally:
        before.put_back()
    _check_untouched(model, frozen)
    return number


def _check_untouched(model: nn.Module, frozen: Mapping[str, Any], cause: Exception | None = None) -> None:
    """Raises EvaluateError where a frozen parameter is not what it was."""
    if changed := [name for name, found in _frozen(model).items() if found != frozen[name]]:
        raise EvaluateError(
            f"evaluate has written to {changed[0]}, a frozen parameter, which therefore is not what it was in "
            "training any more; let evaluate work on a copy of what it writes to"
        ) from cause


def _substitute(model: nn.Module, values: Mapping[str, Value]) -> None:
    """Gives the model other parameters and copies of its buffers. Frozen parameters are large, and not copied."""
    named = dict(named_parameters(model))
    # By memory, as a state has one tensor for parameters that are tied by their data only.
    given = {_memory(named[name]): value for name, value in values.items()}

    def replacement(parameter: nn.Parameter) -> nn.Parameter:
        value = given.get(_memory(parameter))
        # Copies of the others too: a backward pass must not reach their ``.grad``, and some layers write to weights
        # when they are called (``nn.Embedding(max_norm=…)``).
        if value is None:
            copied = parameter.detach() if id(parameter) in shared else parameter.detach().clone()
        elif isinstance(value, Tensor):
            copied = value.to(parameter.device, parameter.dtype, copy=True)
        else:
            copied = value().to(parameter.device, parameter.dtype)
        return nn.Parameter(copied, requires_grad=False)

    shared = {id(named[name]) for name in _frozen(model)}
    replacements = {id(parameter): replacement(parameter) for parameter in named.values()}
    copies: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = replacements[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = copies.setdefault(id(buffer), buffer.clone())


def _frozen(model: nn.Module) -> dict[str, tuple[int, bytes]]:
    """How often PyTorch has written to each frozen parameter, and a sample of its values, as writes through ``.data``
    do not count. By name; without those to which their layer writes."""
    writing = [m for m in model.modules() if getattr(m, "max_norm", None) is not None]
    written = {id(parameter) for module in writing for parameter in module._parameters.values()}
    return {
        name: (parameter._version, sample_of(parameter))
        for name, parameter in named_parameters(model)
        if not parameter.requires_grad and not parameter.is_inference() and id(parameter) not in written
    }


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device
