"""Records gradients while training runs: a moving average of each (method 1.1), or sums of their squares (2.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynaquant.ranks.dtensors import local_of
from dynaquant.training.hooks import not_compiled

SMOOTHING = 0.9
"""β of the moving average ``EMA_t = β·g_t + (1-β)·EMA_{t-1}`` (method 1.1)."""


@dataclass(frozen=True)
class Scaling:
    """What GradScaler leaves to a fused optimizer, which unscales gradients and skips steps itself; otherwise None.

    scale: of the gradients. found_inf: not 0 if the step is skipped. Both are on a device.
    """

    scale: Tensor | None = None
    found_inf: Tensor | None = None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Scaling:
        """Return the scaling of the step that begins."""
        return cls(getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None))


Recorded = dict[str, Tensor]
"""Tensors by the names of parameters."""
Accumulate = Callable[[Recorded, Recorded, Scaling], Recorded]
"""Takes the gradients of a step and what was recorded before. Returns what to record of these parameters."""
_TOGETHER = 1 << 18
"""Gradients of at most so many elements are reduced together. In float32, sums over many more would be inexact."""


def moving_averages(gradients: Recorded, before: Recorded, scaling: Scaling) -> Recorded:
    """Return moving averages (method 1.1), float32 in host memory. Skips gradients that are not finite."""
    if scaling.found_inf is not None and float(scaling.found_inf) != 0:
        return {}
    found = {}
    for name, on_device in gradients.items():
        gradient = on_device.to("cpu", torch.float32)
        if scaling.scale is not None:
            gradient = gradient / float(scaling.scale)
        if not gradient.isfinite().all():
            continue
        average = before.get(name)
        if average is None or average.shape != gradient.shape:
            found[name] = gradient.clone()
        else:
            found[name] = average.lerp_(gradient, SMOOTHING)
    return found


def sums_of_squares(gradients: Recorded, before: Recorded, scaling: Scaling) -> Recorded:
    """Return sums over the steps of the gradients' mean squares. They stay on the device, so nothing waits for it.

    A gradient that is not finite counts as zero.
    """
    groups: dict[tuple[torch.device, bool], list[str]] = {}
    for name, gradient in gradients.items():
        small = gradient.numel() <= _TOGETHER and gradient.dtype != torch.float64  # whose norms are float64
        groups.setdefault((gradient.device, small), []).append(name)
    found: Recorded = {}
    for (device, small), names in groups.items():
        squares = _mean_squares([gradients[name] for name in names], small)
        if scaling.scale is not None:
            squares = squares / scaling.scale.to(device).square()
        counts = squares.isfinite()
        if scaling.found_inf is not None:
            counts = counts & (scaling.found_inf.to(device) == 0)
        squares = torch.where(counts, squares, 0.0)
        if any(name in before for name in names):
            zero = torch.zeros((), device=device)
            squares = squares + torch.stack([before.get(name, zero).to(device) for name in names])
        found |= zip(names, squares.unbind(), strict=True)
    return found


def _mean_squares(gradients: list[Tensor], small: bool) -> Tensor:
    """Return the mean square of each gradient, float32. Small ones are reduced together, in few operations."""
    if not small:
        return torch.stack([gradient.to(torch.float32).square().mean() for gradient in gradients])
    norms = torch._foreach_norm(gradients, 2, torch.float32)
    roots = torch._foreach_div(norms, [max(1, gradient.numel()) ** 0.5 for gradient in gradients])
    return torch.stack(roots).square()


class GradientRecorder:
    """Records the gradients that an optimizer's steps use.

    A hook before each step sees the gradient as the step uses it: accumulated over micro-batches, clipped, and without
    the scale of a ``GradScaler``. With a closure, as in LBFGS, it is the gradient before the closure runs.

    parameters: the tensors to record, by the name under which ``collect`` returns them. window: number of steps before
    each ``collect`` that are recorded; other steps cost nothing. interval: steps until the first ``collect``, None if
    unknown. Each later ``collect`` is expected after as many steps as the last one. accumulate: ``moving_averages`` or
    ``sums_of_squares``.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        window: int,
        interval: int | None = None,
        accumulate: Accumulate = moving_averages,
    ) -> None:
        self._accumulate = accumulate
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._window, self._interval = window, interval
        self._steps = 0
        self.recorded_steps = 0
        """Of how many steps gradients were recorded since the last ``collect``."""
        self.recorded: Recorded = {}
        """What was recorded since the last ``collect``, by name."""
        self._hook = optimizer.register_step_pre_hook(not_compiled(self._before_step))

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._steps += 1
        if self._interval is not None and self._steps <= self._interval - self._window:
            return
        self.recorded_steps += 1
        gradients = {
            name: local_of(parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (name := self._names.get(id(parameter))) is not None
            and parameter.grad is not None
            and parameter.grad.layout == torch.strided
        }
        self.recorded |= self._accumulate(gradients, self.recorded, Scaling.of(optimizer))

    def collect(self) -> Recorded:
        """Return what was recorded since the last call, by name, and start again."""
        recorded, self._interval = self.recorded, self._steps or self._interval
        self.forget()
        return recorded

    def expect(self, interval: int | None) -> None:
        """Announce the number of steps until the next ``collect``; None if unknown."""
        self._interval = interval or self._interval

    def forget(self) -> None:
        """Drop what was recorded and start again: after a restore, training continues from another step."""
        self.recorded, self._steps, self.recorded_steps = {}, 0, 0

    def close(self) -> None:
        """Remove the hook from the optimizer."""
        self._hook.remove()
