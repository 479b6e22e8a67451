"""Decides which optimizers' moments may be quantized: those whose steps use them in a way that is known.

A class that is not known makes a few steps on tiny parameters, with a copy of its settings.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from dynaquant.training import rng
from dynaquant.training.first_moments import RULES
from dynaquant.training.objects import optimizers_of

_KNOWN = (*RULES, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop)
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
_SHAPES = {1: (24,), 2: (8, 6), 3: (5, 4, 3), 4: (4, 3, 3, 2)}
"""The shape of the tiny parameter that stands for parameters of so many dimensions. 0 and more than 4 count as 1."""
_STEPS, _CHECKED_FROM = 10, 6
"""Steps that are made, and the first one that is checked: a second moment of one gradient says little."""
_LEARNING_RATE = 1e-3
_EXACT = 1e-3
"""The largest relative residual of an equation that holds. In float32, about 1e-5 are left."""
_SECOND = ("max_exp_avg_sq", "exp_avg_sq")
"""Keys of the second moment that divides the first one. The first one found counts."""


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
    return None if _is_known(type(optimizer)) else _update_problem(optimizer)


def _is_known(kind: type[Optimizer]) -> bool:
    """Whether the step of a class is that of a known one."""
    if f"{kind.__module__}.{kind.__qualname__}" in _KNOWN_NAMES:
        return True
    known = next((each for each in kind.__mro__ if each in _KNOWN), None)
    return known is not None and all(_own(kind, method) is _own(known, method) for method in ("step", "_init_group"))


def _own(kind: type[Optimizer], method: str) -> Any:
    """Return a method of a class, without what PyTorch puts around it."""
    return inspect.unwrap(getattr(kind, method, None))  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Moments:
    """Copies of a parameter and its moments, as float64 vectors."""

    parameter: Tensor
    first: Tensor
    square: Tensor
    divisor: Tensor
    """What divides ``first`` by its root."""


def _update_problem(optimizer: Optimizer) -> str | None:
    """Return why quantized moments may harm an optimizer; None if its steps use them as those of Adam do.

    The steps must hold to three equations, each up to numbers that are the same for all values of a parameter p:

        m ← β·m + a·(g + b·p)        v ← c·v + d·(g + b·p)²        p ← p - (e·m + f·(g + b·p)) / (√v + ε) - h·p

    with ``exp_avg`` as m, ``exp_avg_sq`` as v (or its maximum, ``max_exp_avg_sq``), ``betas[0]`` as β. Before each step
    that is checked, m and v are changed by as much as a coarse checkpoint changes them.

    The steps are made by a stand-in: an object of the same class without a constructor's call, which has copies of the
    optimizer's plain attributes and hyperparameters and tiny parameters of its own on the CPU. So the answer depends on
    class and settings only. The optimizer, its hooks and all random number generators stay as they are.
    """
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return "hooks of all optimizers are registered, which its step on a small parameter would call"
    before = rng.get_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problems = (_problem(optimizer, settings, shapes) for settings, shapes in _groups(optimizer))
            return next((problem for problem in problems if problem), None)
    except Exception as error:
        return f"its step cannot be tried on a small parameter ({type(error).__name__}: {error})"
    finally:
        rng.set_state(before)


def _groups(optimizer: Optimizer) -> list[tuple[dict[str, Any], list[tuple[int, ...]]]]:
    """Return the different settings of the parameter groups, and the shapes of tiny parameters for each."""
    found = [
        (_settings(group, optimizer.defaults), sorted({_SHAPES.get(p.ndim, _SHAPES[1]) for p in group["params"]}))
        for group in optimizer.param_groups
    ]
    return [each for i, each in enumerate(found) if each not in found[:i]]


def _settings(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a group that the user has set. Other numbers in it are what steps have counted."""
    chosen = {k: v for k, v in group.items() if k != "params" and (k in defaults or isinstance(v, bool | str))}
    # A schedule may have set the present learning rate to zero.
    here = {"lr": _LEARNING_RATE, "foreach": False, "fused": False, "capturable": False}
    settings: dict[str, Any] = _copy(chosen)
    return {**settings, **{key: value for key, value in here.items() if key in chosen}}


def _copy(value: Any) -> Any:
    """Return a copy of a plain value, whose tensors have one element each. Raises TypeError for any other value."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, bool | int | float | str | torch.dtype | None):
        return value
    if type(value) in (list, tuple):
        return type(value)([_copy(each) for each in value])
    if type(value) is dict:
        return {key: _copy(each) for key, each in value.items()}
    raise TypeError(f"a {type(value).__name__} cannot be copied safely")


def _problem(optimizer: Optimizer, settings: dict[str, Any], shapes: Iterable[tuple[int, ...]]) -> str | None:
    if "betas" not in settings:
        return "it has no hyperparameter 'betas'"
    beta, epsilon = settings["betas"][0], float(settings.get("eps", 1e-8))
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    stand_in = _stand_in(optimizer, {**settings, "params": parameters})
    for number in range(_STEPS):
        checked = parameters if number >= _CHECKED_FROM else []
        if problem := next((found for p in checked if (found := _unlike_state_of_adam(p, stand_in.state[p]))), None):
            return problem
        before = [_changed(p, stand_in.state[p], generator) for p in checked]
        gradients = [torch.randn(p.shape, generator=generator) for p in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        stand_in.step()
        for i, earlier in enumerate(before):
            later = _moments(parameters[i], stand_in.state[parameters[i]])
            if problem := _unlike_adam(earlier, later, _flat(gradients[i]), beta, epsilon):
                return problem
    return None


def _stand_in(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """Return an optimizer like the given one with one parameter group and without hooks."""
    made: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        try:
            vars(made)[name] = _copy(value)
        except TypeError:  # what is needed is missing in the first step then
            continue
    made.state, made.param_groups = defaultdict(dict), [group]
    made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return made


def _unlike_state_of_adam(parameter: Tensor, state: Mapping[str, Any]) -> str | None:
    """Return what a parameter's state lacks, or has beside what Adam has."""
    large = {key for key, value in state.items() if not isinstance(value, bool | int | float | str | None)}
    large = {key for key in large if not (isinstance(state[key], Tensor) and state[key].numel() == 1)}
    if missing := {"exp_avg", "exp_avg_sq"} - large:
        return f"its state has no {min(missing)}"
    others = large - {"exp_avg", *_SECOND}
    others = {key for key in others if not (isinstance(state[key], Tensor) and torch.equal(state[key], parameter))}
    if others:  # a copy of the parameter is its master weights
        return f"its state has {min(others)}, which Adam does not have"
    if any(state[key].shape != parameter.shape for key in large):
        return "its moments do not have the shape of the parameter"
    return None


def _changed(parameter: Tensor, state: Mapping[str, Any], generator: torch.Generator) -> _Moments:
    """Change the moments of a parameter by noise. Returns copies of them."""
    first = state["exp_avg"]
    first += 0.5 * first.square().mean().sqrt() * torch.randn(first.shape, generator=generator)
    for key in _SECOND:
        if key in state:
            state[key].mul_(torch.exp(0.5 * torch.randn(first.shape, generator=generator)))
    return _moments(parameter, state)


def _moments(parameter: Tensor, state: Mapping[str, Any]) -> _Moments:
    divisor = next(state[key] for key in _SECOND if key in state)
    return _Moments(_flat(parameter), _flat(state["exp_avg"]), _flat(state["exp_avg_sq"]), _flat(divisor))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().double().flatten().clone()


def _unlike_adam(before: _Moments, after: _Moments, gradient: Tensor, beta: float, epsilon: float) -> str | None:
    """Return which of the three equations a step does not hold to."""
    added = after.first - beta * before.first
    root = after.divisor.sqrt() + epsilon
    moved = after.parameter - before.parameter
    if not _spanned(added, [gradient, before.parameter], after.first):
        return "exp_avg is not an average of gradients"
    if not _spanned(after.square, [before.square, added.square()], after.square):
        return "exp_avg_sq is not an average of squared gradients"
    if not _spanned(moved, [after.first / root, added / root, before.parameter], moved):
        return "an update is not exp_avg by the root of exp_avg_sq"
    return None


def _spanned(target: Tensor, columns: list[Tensor], scale: Tensor) -> bool:
    """Whether a vector is a sum of multiples of columns, up to a small part of ``scale``."""
    matrix = torch.stack(columns, dim=1)
    left = target - matrix @ torch.linalg.lstsq(matrix, target[:, None]).solution[:, 0]
    allowed = _EXACT * float(scale.norm())
    return math.isfinite(allowed) and allowed > 0 and float(left.norm()) <= allowed
