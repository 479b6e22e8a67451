"""What decides whether a configuration is good enough: the user's metric, or the distortion where there is none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from torch import Tensor, nn

from dynaquant.search.distortion import distortion
from dynaquant.search.quality import Evaluate, Quality, Value, degradation, score
from dynaquant.state.wrappers import named_parameters
from dynaquant.tensors.dequantize import dequantize
from dynaquant.tensors.stored import QuantizedTensor

JudgedBy = Literal["evaluate", "fisher distortion", "distortion"]

DISTORTION_SCALE = 3.0
"""Degradation per unit of distortion. Measured, see docs/architecture.md, "Without evaluate"."""


class Judge(Protocol):
    """Judges quantized weights of one checkpoint."""

    @property
    def judged_by(self) -> JudgedBy:
        """By what."""
        ...

    def __call__(self, quantized: Mapping[str, QuantizedTensor]) -> Quality:
        """The quality of the model with these weights. May raise whatever a user's function raises."""
        ...


@dataclass(frozen=True)
class MetricJudge:
    """By the user's metric. original: the score of the weights in training, to which others are compared.

    known: weights that are decided already, by name without ``"model."``, as they would be restored.
    """

    model: nn.Module
    evaluate: Evaluate
    higher_is_better: bool
    original: float
    known: Mapping[str, Value]
    judged_by: JudgedBy = "evaluate"

    def __call__(self, quantized: Mapping[str, QuantizedTensor]) -> Quality:
        """Scores the model with the weights as they would be restored."""
        parameters = dict(named_parameters(self.model))
        names = {f"model.{name}": name for name in parameters}
        values = {
            names[name]: partial(dequantize, stored, parameters[names[name]].device)
            for name, stored in quantized.items()
            if name in names
        }
        restored = score(self.model, {**self.known, **values}, self.evaluate)
        worse = degradation(self.original, restored, self.higher_is_better)
        # Infinitely good is as suspicious as infinitely bad.
        return Quality(self.original, restored, math.nan if math.isinf(restored) and worse < 0 else worse)


@dataclass(frozen=True)
class DistortionJudge:
    """By how far the weights move, scaled to what that cost in trainings where a metric was known.

    judged_by: whether the tensors' Fisher information was measured.
    """

    weights: Mapping[str, Tensor]
    fisher: Mapping[str, float]
    judged_by: JudgedBy

    def __call__(self, quantized: Mapping[str, QuantizedTensor]) -> Quality:
        """The estimated degradation; there are no scores."""
        return Quality(math.nan, math.nan, DISTORTION_SCALE * distortion(self.weights, quantized, self.fisher))
