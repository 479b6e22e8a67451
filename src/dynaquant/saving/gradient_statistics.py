"""Decides which gradients are recorded between two saves, and computes the statistics that the search needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dynaquant.engine import kernels
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.methods.method import Method
from dynaquant.ranks.dtensors import memory_of
from dynaquant.saving.gradient_energy import GradientEnergy, gradient_energy
from dynaquant.search.distortion import mean_squared_gradients
from dynaquant.state.roles import quantizable
from dynaquant.state.wrappers import named_parameters
from dynaquant.training.gradients import GradientRecorder

WINDOW = 50
"""Optimizer steps before a checkpoint whose gradients are recorded (method 1.1)."""


class GradientStatistics:
    """Statistics of the gradients of a model's quantized parameters, by their names in the state.

    method: decides what is recorded. needed: whether to record gradients at all. interval: steps to the first save, if
    known.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        method: Method,
        needed: bool,
        interval: int | None,
    ) -> None:
        self._model, self._optimizers, self._method = model, optimizers, method
        self._recorders: list[GradientRecorder] = []
        if needed:
            parameters = {n: p for n, p in self._parameters().items() if quantizable(p, method.quantizes_vectors)}
            for optimizer in optimizers:
                self._recorders.append(GradientRecorder(parameters, optimizer, WINDOW, interval, method.accumulate))

    @property
    def needed(self) -> bool:
        """Whether gradients are recorded."""
        return bool(self._recorders)

    def recorded(self) -> dict[str, Tensor]:
        """Return what was recorded since the last save."""
        return {name: statistic for recorder in self._recorders for name, statistic in recorder.recorded.items()}

    def trained(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that optimizers train in the place of weights: themselves, or their master weights.

        weights: tensors of the state, by name. Left out are those that are no parameters of the model.
        """
        trained = {memory_of(p): p for o in self._optimizers for group in o.param_groups for p in group["params"]}
        own = self._parameters()
        return {name: trained.get(memory_of(t), own[name]) for name, t in weights.items() if name in own}

    def mean_squares(self, trained: Mapping[str, Tensor], shards: Shards = WHOLE) -> dict[str, float]:
        """Return the mean squared gradient of each weight, as far as known, from the optimizer or as recorded.

        trained: as ``trained`` returns them. shards: of the weights. Collective if there are any.
        """
        return mean_squared_gradients(trained, self._optimizers, self._recorded(), shards)

    def energy(self, trained: Mapping[str, Tensor], shards: Shards = WHOLE) -> GradientEnergy:
        """Return how strong the gradients of the weights are. All as for ``mean_squares``."""
        steps = max([recorder.recorded_steps for recorder in self._recorders], default=0)
        divisor = max(steps, 1) if self._method.adds_up_steps else 1
        recorded = {name: square / divisor for name, square in self._recorded().items()}
        return gradient_energy(trained, self._optimizers, recorded, shards)

    def _recorded(self) -> dict[str, float]:
        statistics = kernels.small_on_host(self.recorded())
        return {name: self._method.mean_square(statistic) for name, statistic in statistics.items()}

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {f"model.{name}": parameter for name, parameter in named_parameters(self._model)}

    def expect(self, interval: int | None) -> None:
        """Tell the recorders how many steps are left to the next save; None if unknown."""
        for recorder in self._recorders:
            recorder.expect(interval)

    def start_anew(self) -> None:
        """Drop what was recorded, after a save. The next interval is expected to be as long as the last."""
        for recorder in self._recorders:
            recorder.collect()

    def forget(self) -> None:
        """Drop what was recorded, after a restore: training continues from another step."""
        for recorder in self._recorders:
            recorder.forget()

    def close(self) -> None:
        """Remove the hooks from the optimizers. May be called again, also after an interrupt."""
        for recorder in self._recorders:
            recorder.close()
