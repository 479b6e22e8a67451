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
_WEAK, _WEAK_IN_NOISE, _WEAK_IF_UNKNOWN = 1 / 32, 1e-6, 1e-4
"""The share of the strongest energy below which gradients count as far weaker: without noise, with it, and if that is
not known. Measured: docs/decisions.md, "How far can the estimate be trusted?". In training on batches, gradients of the
first steps can be a thousand times stronger than all later ones, and that says nothing of the loss."""
_RISE = 10.0
"""By how much one save may raise the strongest energy."""
_OF_NOISE = 19.0
"""The mean square of noise over that of its moving average, (1 + β) / (1 - β), with β = 0.9."""
_LEAST_OF_NOISE, _MOST_OF_NOISE = 0.03, 12.0
"""Adam's gradients are noise if ``now`` is at least so many times ``average``, and at most so many times the energy of
one step. In training on batches, it is about ``average``, and 0.2 to 6 times the energy of one step. Without noise it
is 19 times that of one step. Less than ``average`` means that gradients have just become weaker."""
_ALIGNED = 0.25
"""The share of the energy of SGD's gradients from which on that of their moving average shows that they are aligned, so
no noise. That of noise has (1 - β) / (1 + β), 0.05 with β = 0.9."""
_SCALED = 100.0
"""A gradient with so many times the average energy was not the one that the step used: a GradScaler had scaled it."""


@dataclass(frozen=True)
class GradientEnergy:
    """The sum of the squares of the gradients of the largest matrices, or tensors if there are none.

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


@dataclass(frozen=True)
class _Sample:
    """What one tensor and its optimizer hold of its gradients, from a sample of the elements.

    means: of the squares of the ``gradient``, of Adam's ``first`` moment and of SGD's ``momentum``; of the ``second``
    moment; and the ``step``. As scalars, where the tensor is. betas: of Adam. window: steps that the momentum adds up.
    """

    means: Mapping[str, Tensor]
    betas: tuple[float, float] | None = None
    window: float = 0.0


@dataclass(frozen=True)
class _Squares:
    """Mean squares of the gradients of one tensor, or the sums of squares of all tensors.

    average, now: as in ``GradientEnergy``. of_step: of the last step. of_mean: of the moving average that SGD has. The
    last two are 0 if they are not known.
    """

    average: float
    now: float
    of_step: float
    of_mean: float


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
    # The first gradients of a bias can be a thousand times stronger than all later ones, as of a mean that is learned.
    matrices = [name for name, each in parameters.items() if each.ndim > 1]
    largest = nlargest(_TENSORS, matrices or parameters, key=lambda name: parameters[name].numel())
    samples = _samples({name: parameters[name] for name in largest}, optimizers)
    means = _on_host({name: sample.means for name, sample in samples.items()})
    betas = {name: sample.betas for name, sample in samples.items() if sample.betas is not None}
    known = list(betas) or [name for name in largest if name in recorded]  # not both: they differ in scale
    has_all = all("gradient" in means[name] for name in known)  # otherwise it says too little
    squares: dict[str, _Squares] = {}
    for name in known:
        of_step = means[name]["gradient"] if has_all else 0.0
        if betas:
            squares[name] = _of_adam(means[name], betas[name], of_step)
        else:
            squares[name] = _as_recorded(recorded[name], means[name], samples[name].window, of_step)
    total = _total(squares, parameters, shards)
    if betas:
        most = _MOST_OF_NOISE * (total.of_step or total.average)
        return GradientEnergy(total.average, total.now, noisy=_LEAST_OF_NOISE * total.average <= total.now <= most)
    if total.of_mean > _ALIGNED * total.average:
        return GradientEnergy(total.average, _OF_NOISE * total.of_mean, noisy=False)
    return GradientEnergy(total.average, total.now)


def _of_adam(means: Mapping[str, float], betas: tuple[float, float], of_step: float) -> _Squares:
    """Return the squares by Adam's moments. They began at zero, so at step t they lack the share β^t of their size."""
    first, second = (1 - beta ** max(means["step"], 1.0) for beta in betas)
    of_noise = (1 + betas[0]) / (1 - betas[0])
    return _Squares(means["second"] / second, of_noise * means["first"] / first**2, of_step, of_mean=0.0)


def _as_recorded(recorded: float, means: Mapping[str, float], window: float, of_step: float) -> _Squares:
    """Return the squares as they were recorded in single steps, with those of SGD's momentum. window: 0 if none."""
    return _Squares(recorded, of_step or recorded, of_step, means["momentum"] / window**2 if window else 0.0)


def _total(squares: Mapping[str, _Squares], parameters: Mapping[str, Tensor], shards: Shards) -> _Squares:
    """Return the sums of squares of all tensors. squares: means over what this rank holds of each."""
    energies: dict[str, list[float]] = {}
    for name, of in squares.items():
        size = local_of(parameters[name]).numel()
        energies[name] = [size * mean for mean in (of.average, of.now, of.of_step, of.of_mean)]
    sums = shards.sums(energies).values()
    average, now, of_step, of_mean = (sum(each[i] for each in sums) for i in range(4))
    return _Squares(average, now, 0.0 if of_step > _SCALED * average else of_step, of_mean)


def _samples(parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, _Sample]:
    """Return what parameters and optimizers hold, by the name of the parameter."""
    ids = {id(parameter) for parameter in parameters.values()}
    groups = {
        id(p): (o, group) for o in optimizers for group in o.param_groups for p in group["params"] if id(p) in ids
    }
    return {name: _sample(each, *groups.get(id(each), (None, {}))) for name, each in parameters.items()}


def _sample(parameter: Tensor, optimizer: torch.optim.Optimizer | None, group: Mapping[str, Any]) -> _Sample:
    means: dict[str, Tensor] = {}
    if parameter.grad is not None and parameter.grad.layout == torch.strided:
        means["gradient"] = _mean(parameter.grad, squared=True)
    state: Mapping[str, Any] = {} if optimizer is None else optimizer.state.get(parameter, {})
    first, second, step = (state.get(key) for key in ("exp_avg", "exp_avg_sq", "step"))
    betas = _betas(group)
    if betas and _is_moment(first, parameter) and _is_moment(second, parameter) and _is_one(step):
        means |= {"first": _mean(first, squared=True), "second": _mean(second)}
        means["step"] = torch.as_tensor(step, dtype=torch.float32).reshape(())
        return _Sample(means, betas=betas)
    momentum, window = state.get("momentum_buffer"), _window_of_sgd(optimizer, group)
    if window and _is_moment(momentum, parameter):
        return _Sample({**means, "momentum": _mean(momentum, squared=True)}, window=window)
    return _Sample(means)


def _on_host(means: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, float]]:
    """Return scalars as numbers. What is on a device crosses together."""
    flat = {f"{name} {key}": mean for name, of in means.items() for key, mean in of.items()}
    here = kernels.small_on_host(flat)
    return {name: {key: float(here[f"{name} {key}"]) for key in of} for name, of in means.items()}


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
