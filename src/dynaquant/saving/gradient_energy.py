"""How strong gradients are now, beside earlier in the training: how far the estimate of the loss can be trusted.

The estimate that stands in for a metric knows how much quantization changes the loss only relative to the loss of a
model that has learned nothing (method 2.1). A loss that has become a million times smaller needs weights that are a
thousand times more exact. It is not known without a metric, but gradients become weaker with it: near a minimum, their
squares are proportional to the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any, TypeGuard

import torch
from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.shards import Shards
from dynaquant.ranks.dtensors import local_of

NOTE = (
    "gradients are far weaker than earlier in this training, so its loss probably is, too; as there is no metric, the "
    "weights are stored more finely: give evaluate to know what checkpoints lose"
)
_TENSORS, _SAMPLE = 64, 4096
"""Only so many tensors are looked at, the largest ones, and so many elements of each."""
_OF_NOISE = 19.0
"""The mean square of noise over that of its moving average, (1 + β) / (1 - β), with β = 0.9."""
_LEAST_OF_NOISE, _MOST_OF_NOISE = 0.03, 12.0
"""In training on batches, ``now`` is 0.2 to 6 times the energy of the gradients of one step. Without noise it is 19
times that. It also is about that of the second moment; less means that gradients have just become weaker."""
_ALIGNED = 0.25
"""The share of the energy of SGD's gradients from which on that of their moving average shows that they are aligned, so
no noise. That of noise has (1 - β) / (1 + β), 0.05 with β = 0.9."""
_MOMENTUM = "momentum_buffer"
_RISE = 10.0
"""By how much one save may raise the strongest energy."""
_SCALED = 100.0
"""A gradient of which the energy is so many times that of the average was not the one that the step used."""
_WEAK, _WEAK_IN_NOISE, _WEAK_IF_UNKNOWN = 1 / 32, 1e-6, 1e-4
"""The share of the strongest energy below which gradients count as far weaker. In training on batches, gradients of the
first steps can be a thousand times stronger than all later ones, and that says nothing of the loss."""


@dataclass(frozen=True)
class GradientEnergy:
    """The sum of the squares of the gradients of the largest tensors.

    average: of the last steps that the optimizer averages. now: an upper bound for the present ones, which they have if
    they are noise. noisy: whether most of them is noise, as in training on batches; None if that is not known.
    """

    average: float = 0.0
    now: float = 0.0
    noisy: bool | None = None

    @property
    def is_known(self) -> bool:
        """Whether both are numbers above zero."""
        return 0 < self.average < math.inf and 0 < self.now < math.inf

    def strongest(self, before: float) -> float:
        """Return the strongest energy of the training from now on. One strange gradient does not count in full."""
        if not self.is_known:
            return before
        return max(before, min(self.average, _RISE * before) if before else self.average)

    def trust(self, strongest: float) -> float:
        """Return by how much the limit of the estimate is multiplied, at most 1. strongest: energy of the training."""
        if not self.is_known:
            return 1.0
        strongest = self.strongest(strongest)
        share = min(self.now, self.average) / strongest
        weak = {True: _WEAK_IN_NOISE, False: _WEAK, None: _WEAK_IF_UNKNOWN}[self.noisy]
        # Gradients without noise are weaker by ``_OF_NOISE`` than the upper bound. The square leads from one to the
        # other.
        return 1.0 if share >= weak else min(1.0, max((share / weak) ** 2, share / _OF_NOISE))


def gradient_energy(
    parameters: Mapping[str, Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    recorded: Mapping[str, float],
    shards: Shards,
) -> GradientEnergy:
    """Return the energy of the gradients of parameters, by moments of Adam if there are any, or as recorded.

    recorded: the mean square of one step for each parameter, as far as known. shards: of the parameters. Collective if
    there are any.
    """
    largest = nlargest(_TENSORS, parameters, key=lambda name: parameters[name].numel())
    ids = {id(parameters[name]) for name in largest}
    groups = {
        id(p): (o, group) for o in optimizers for group in o.param_groups for p in group["params"] if id(p) in ids
    }
    found: dict[str, Tensor] = {}
    decays: dict[str, tuple[float, float]] = {}
    windows: dict[str, float] = {}
    for name in largest:
        parameter = parameters[name]
        if parameter.grad is not None and parameter.grad.layout == torch.strided:
            found[f"{name} gradient"] = _mean(parameter.grad, squared=True)
        optimizer, group = groups.get(id(parameter), (None, {}))
        state: Mapping[str, Any] = {} if optimizer is None else optimizer.state.get(parameter, {})
        first, second, step = (state.get(key) for key in ("exp_avg", "exp_avg_sq", "step"))
        if (
            (betas := _betas(group))
            and _is_moment(first, parameter)
            and _is_moment(second, parameter)
            and _is_one(step)
        ):
            decays[name] = betas
            found[f"{name} first"], found[f"{name} second"] = _mean(first, squared=True), _mean(second)
            found[f"{name} step"] = torch.as_tensor(step, dtype=torch.float32).reshape(())
        elif (of_steps := _window_of_sgd(optimizer, group)) and _is_moment(momentum := state.get(_MOMENTUM), parameter):
            windows[name] = of_steps
            found[f"{name} momentum"] = _mean(momentum, squared=True)
    here = kernels.small_on_host(found)  # what is on a device crosses together
    energies: dict[str, list[float]] = {}
    known = list(decays) or [name for name in largest if name in recorded]  # not both: they differ in scale
    has_all = all(f"{name} gradient" in here for name in known)  # otherwise it says too little
    for name in known:
        size, of_step = local_of(parameters[name]).numel(), float(here[f"{name} gradient"]) if has_all else 0.0
        if name in decays:
            step = float(here[f"{name} step"])
            of_first, of_second = (1 - beta ** max(step, 1.0) for beta in decays[name])  # the bias of the first steps
            if_noise = (1 + decays[name][0]) / (1 - decays[name][0]) * float(here[f"{name} first"]) / of_first**2
            means = [float(here[f"{name} second"]) / of_second, if_noise, of_step]
        else:
            means = [recorded[name], of_step or recorded[name], of_step]
        of_mean = float(here[f"{name} momentum"]) / windows[name] ** 2 if name in windows else 0.0
        energies[name] = [size * mean for mean in [*means, of_mean]]
    sums = shards.sums(energies).values()
    average, now, of_step, of_mean = (sum(each[i] for each in sums) for i in range(4))
    if of_step > _SCALED * average:  # by a GradScaler
        of_step = 0.0
    noisy: bool | None = None
    if decays:
        noisy = _LEAST_OF_NOISE * average <= now <= _MOST_OF_NOISE * (of_step or average)
    elif of_mean > _ALIGNED * average:
        noisy, now = False, _OF_NOISE * of_mean
    return GradientEnergy(average, now, noisy)


def _window_of_sgd(optimizer: Any, group: Mapping[str, Any]) -> float:
    """Return how many steps a momentum of SGD adds up, 1 / (1 - β); 0 if it is another sum than that of gradients."""
    if type(optimizer) is not torch.optim.SGD or group["dampening"] or float(group["weight_decay"]):
        return 0.0
    momentum = float(group["momentum"])
    return 1 / (1 - momentum) if 0 < momentum < 1 else 0.0


def _betas(group: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return β of the first and of the second moment; None if a group does not say, or says something else."""
    betas = group.get("betas")
    if not isinstance(betas, list | tuple) or len(betas) < 2 or not all(map(_is_one, betas[:2])):
        return None
    first, second = float(betas[0]), float(betas[1])
    return (first, second) if 0 <= first < 1 and 0 <= second < 1 else None


def _is_one(number: Any) -> bool:
    return number.numel() == 1 if isinstance(number, Tensor) else isinstance(number, int | float)


def _is_moment(moment: Any, parameter: Tensor) -> TypeGuard[Tensor]:
    return isinstance(moment, Tensor) and moment.shape == parameter.shape and moment.is_floating_point()


def _mean(moment: Tensor, squared: bool = False) -> Tensor:
    """Return the mean of a sample of this rank's part of a moment, or of its squares; on its device, float32."""
    flat = local_of(moment).reshape(-1)
    sample = flat[:: max(1, flat.numel() // _SAMPLE) | 1].to(torch.float32)
    return (sample.square() if squared else sample).sum() / max(sample.numel(), 1)
