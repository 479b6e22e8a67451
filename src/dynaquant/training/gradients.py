"""Importance of weights: gradients recorded while training runs, each one (method 1.1) or by their squares (2.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

SMOOTHING = 0.9
"""β of the moving average ``EMA_t = β·g_t + (1-β)·EMA_{t-1}`` (method 1.1)."""


Record = Callable[[Tensor, Tensor | None], Tensor | None]
"""What is kept of a parameter's gradient and of what was kept before, if anything."""


def moving_average(gradient: Tensor, before: Tensor | None) -> Tensor | None:
    """The average of method 1.1, float32 in host memory. A gradient that is not finite does not count."""
    gradient = gradient.to("cpu", torch.float32)
    if not gradient.isfinite().all():
        return before
    if before is None or before.shape != gradient.shape:
        return gradient.clone()
    return before.lerp_(gradient, SMOOTHING)


def sum_of_squares(gradient: Tensor, before: Tensor | None) -> Tensor:
    """The mean square of a tensor's gradient, summed over the steps. It stays on the device: nothing waits for it."""
    square = gradient.to(torch.float32).square().mean()
    square = torch.where(square.isfinite(), square, 0.0)
    return square if before is None else before + square


class GradientRecorder:
    """Keeps something of the gradients that an optimizer's steps consume.

    It hangs on the optimizer as a step hook, so it sees the gradient that the step uses: accumulated over
    micro-batches, clipped, and with a ``GradScaler``'s scale taken out. (With a closure, as in LBFGS, it is the
    gradient from before the closure.)

    record: ``moving_average`` or ``sum_of_squares``. parameters: the tensors to record, by the name under which
    ``collect`` returns them. window: how many steps before
    the next ``collect`` are recorded; at other times a step costs nothing. The next ``collect`` is expected after as
    many steps as came before the last one, at first after ``interval``; None: it may come any time.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        window: int,
        interval: int | None = None,
        record: Record = moving_average,
    ) -> None:
        self._record = record
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._window, self._interval = window, interval
        self._steps = 0
        self._average: dict[str, Tensor] = {}
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Fused optimizers are given scaled gradients by GradScaler; they unscale them, or skip the step, by themselves.
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
                gradient = parameter.grad.detach()
                if scale is not None:
                    gradient = gradient.to(torch.float32) / float(scale)
                kept = self._record(gradient, self._average.get(name))
                if kept is not None:
                    self._average[name] = kept

    @property
    def average(self) -> dict[str, Tensor]:
        """What was recorded since the last ``collect``, by name."""
        return self._average

    def collect(self) -> dict[str, Tensor]:
        """What was recorded since the last call, by name, and a fresh start."""
        average = self._average
        self._average, self._interval, self._steps = {}, self._steps or self._interval, 0
        return average

    def expect(self, interval: int | None) -> None:
        """The next ``collect`` comes after so many steps, as far as is known; None: it is not."""
        self._interval = interval or self._interval

    def forget(self) -> None:
        """A fresh start without a result: training has been put back to another step."""
        self._average, self._steps = {}, 0

    def close(self) -> None:
        """Takes the hook off the optimizer."""
        self._hook.remove()
