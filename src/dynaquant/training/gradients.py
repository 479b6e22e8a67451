"""Records gradients while training runs: a moving average of each (method 1.1), or sums of their squares (2.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dynaquant.ranks.dtensors import local_of

SMOOTHING = 0.9
"""β of the moving average ``EMA_t = β·g_t + (1-β)·EMA_{t-1}`` (method 1.1)."""


Accumulate = Callable[[Tensor, Tensor | None], Tensor | None]
"""Takes a parameter's gradient and what was recorded before, or None; returns what to record from now on."""


def moving_average(gradient: Tensor, before: Tensor | None) -> Tensor | None:
    """Return the moving average of method 1.1, float32 in host memory. Skips gradients that are not finite."""
    gradient = gradient.to("cpu", torch.float32)
    if not gradient.isfinite().all():
        return before
    if before is None or before.shape != gradient.shape:
        return gradient.clone()
    return before.lerp_(gradient, SMOOTHING)


def sum_of_squares(gradient: Tensor, before: Tensor | None) -> Tensor:
    """Return the sum over the steps of the gradient's mean square. It stays on the device, so nothing is blocked."""
    square = gradient.to(torch.float32).square().mean()
    square = torch.where(square.isfinite(), square, 0.0)
    return square if before is None else before + square


class GradientRecorder:
    """Records the gradients that an optimizer's steps use.

    A hook before each step sees the gradient as the step uses it: accumulated over micro-batches, clipped, and without
    the scale of a ``GradScaler``. With a closure, as in LBFGS, it is the gradient before the closure runs.

    parameters: the tensors to record, by the name under which ``collect`` returns them. window: number of steps before
    each ``collect`` that are recorded; other steps cost nothing. interval: steps until the first ``collect``, None if
    unknown. Each later ``collect`` is expected after as many steps as the last one. accumulate: ``moving_average`` or
    ``sum_of_squares``.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        window: int,
        interval: int | None = None,
        accumulate: Accumulate = moving_average,
    ) -> None:
        self._accumulate = accumulate
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._window, self._interval = window, interval
        self._steps = 0
        self._recorded: dict[str, Tensor] = {}
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # GradScaler passes scaled gradients to fused optimizers, which unscale them or skip the step themselves.
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if found_inf is not None and float(found_inf) != 0:
            return
        self._steps += 1
        if self._interval is not None and self._steps <= self._interval - self._window:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is None or parameter.grad is None or parameter.grad.layout != torch.strided:
                    continue
                gradient = local_of(parameter.grad)
                if scale is not None:
                    gradient = gradient.to(torch.float32) / float(scale)
                updated = self._accumulate(gradient, self._recorded.get(name))
                if updated is not None:
                    self._recorded[name] = updated

    @property
    def recorded(self) -> dict[str, Tensor]:
        """What was recorded since the last ``collect``, by name."""
        return self._recorded

    def collect(self) -> dict[str, Tensor]:
        """Return what was recorded since the last call, by name, and start again."""
        recorded = self._recorded
        self._recorded, self._interval, self._steps = {}, self._steps or self._interval, 0
        return recorded

    def expect(self, interval: int | None) -> None:
        """Announce the number of steps until the next ``collect``; None if unknown."""
        self._interval = interval or self._interval

    def forget(self) -> None:
        """Drop what was recorded and start again: after a restore, training continues from another step."""
        self._recorded, self._steps = {}, 0

    def close(self) -> None:
        """Remove the hook from the optimizer."""
        self._hook.remove()
