"""Judges candidates: how much worse the model is with quantized weights, by the metric, or else by distortion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from torch import Tensor, nn

from dynaquant.kernels.reused import ReusedMemory
from dynaquant.quantize import candidate as candidates
from dynaquant.quantize.candidate import CandidateWeights
from dynaquant.search.distortion import distortion
from dynaquant.search.evaluation import Evaluate, ParameterValues, Quality, degradation, score
from dynaquant.state.wrappers import named_parameters

JudgedBy = Literal["evaluate", "fisher distortion", "distortion"]
"""``evaluate``: the user's metric. ``fisher distortion``: distortion weighted by Fisher information. ``distortion``:
unweighted, as no Fisher information is known."""

DISTORTION_SCALE = 3.0
"""Degradation per unit of distortion. Measured: docs/architecture.md, "Without evaluate"."""


class Judge(Protocol):
    """Judges quantized weights of one checkpoint."""

    @property
    def judged_by(self) -> JudgedBy:
        """What the judge measures."""
        ...

    def __call__(self, candidate: CandidateWeights) -> Quality:
        """Return the quality of the model with these weights. Raises what ``evaluate`` raises."""
        ...


@dataclass(frozen=True)
class MetricJudge:
    """Judges by the user's metric.

    original: the score of the weights in training, to which candidates are compared. decided: the values that other
    parameters will have after a restore, by name without ``"model."``. memory: for the values of one candidate after
    another.
    """

    model: nn.Module
    evaluate: Evaluate
    higher_is_better: bool
    original: float
    decided: Mapping[str, ParameterValues]
    judged_by: JudgedBy = "evaluate"
    memory: ReusedMemory = field(default_factory=ReusedMemory, compare=False)

    def __call__(self, candidate: CandidateWeights) -> Quality:
        """Score the model with the weights that a restore would return."""
        parameters = dict(named_parameters(self.model))
        names = {f"model.{name}": name for name in parameters}
        values = {
            names[name]: partial(
                candidates.values, tensor, parameters[names[name]].device, partial(self.memory.empty, name)
            )
            for name, tensor in candidate.items()
            if name in names
        }
        restored = score(self.model, {**self.decided, **values}, self.evaluate)
        worse = degradation(self.original, restored, self.higher_is_better)
        # An infinitely good score is as suspicious as an infinitely bad one.
        return Quality(self.original, restored, math.nan if math.isinf(restored) and worse < 0 else worse)


@dataclass(frozen=True)
class DistortionJudge:
    """Estimates the degradation from how far the weights move, by a factor measured in trainings with a metric.

    weights: in training, by name. fisher: the mean squared gradient of each, or empty. judged_by: whether ``fisher``
    was measured.
    """

    weights: Mapping[str, Tensor]
    fisher: Mapping[str, float]
    judged_by: JudgedBy

    def __call__(self, candidate: CandidateWeights) -> Quality:
        """Return the estimated degradation. The scores are NaN."""
        return Quality(math.nan, math.nan, DISTORTION_SCALE * distortion(self.weights, candidate, self.fisher))
