"""Judges candidates: how much worse the model is with quantized weights, by the metric, or else by distortion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from dynaquant.engine.kernels.reused import ReusedMemory
from dynaquant.engine.quantize.candidate import CandidateWeights
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.ranks.group import Group
from dynaquant.ranks.lockstep import Lockstep
from dynaquant.search.distortion import distortion
from dynaquant.search.evaluation import (
    Evaluate,
    OnBatches,
    ParameterValues,
    Subject,
    degradation,
    losses_on,
    mean_of_batches,
)
from dynaquant.search.scores import MeasuredQuality
from dynaquant.search.sequential_test import looks, verdict

JudgedBy = Literal["evaluate", "fisher distortion", "distortion"]
"""``evaluate``: the user's metric. ``fisher distortion``: distortion weighted by F, the mean squared gradient.
``distortion``: unweighted, as no F is known."""

DISTORTION_SCALE = 3.0
"""Degradation per unit of distortion. Measured: docs/architecture.md, "Without evaluate"."""


@dataclass(frozen=True)
class MetricJudge:
    """Judges by the user's metric.

    original: the score of the weights in training, to which candidates are compared. decided: the values that other
    weights will have after a restore, by name. reused: memory for the values of one candidate after another.
    """

    subject: Subject
    evaluate: Evaluate
    higher_is_better: bool
    original: float
    decided: Mapping[str, ParameterValues]
    judged_by: JudgedBy = "evaluate"
    reused: ReusedMemory = field(default_factory=ReusedMemory, compare=False)

    def __call__(self, candidate: CandidateWeights) -> MeasuredQuality:
        """Score the model with the weights that a restore would return. Raises what ``evaluate`` raises."""
        values = self.subject.values(candidate, self.reused)
        restored = self.subject.score({**self.decided, **values}, self.evaluate)
        return _quality(self.original, restored, self.higher_is_better)


class Bounds(NamedTuple):
    """An evaluation may end early once the degradation is clearly below ``low`` or above ``high``.

    error_rate: how clearly, see ``verdict``.
    """

    low: float
    high: float
    error_rate: float


@dataclass(frozen=True)
class PairedJudge:
    """Judges by the user's metric, batch by batch, in differences to the weights in training on the same batches.

    evaluate: watched for communication. original: the numbers of the weights in training, one for each batch. order: in
    which batches are evaluated. group: the ranks. For the others, see ``MetricJudge``.
    """

    subject: Subject
    evaluate: OnBatches
    higher_is_better: bool
    original: Sequence[float]
    decided: Mapping[str, ParameterValues]
    order: Sequence[int]
    group: Group
    judged_by: JudgedBy = "evaluate"
    reused: ReusedMemory = field(default_factory=ReusedMemory, compare=False)

    def losses(
        self, candidate: CandidateWeights, known: Sequence[float], bounds: Bounds, lockstep: Lockstep
    ) -> list[float]:
        """Return the numbers of the first batches in ``order``, as many as it takes.

        known: those that were evaluated before. lockstep: all ranks that evaluate a candidate evaluate as many batches
        as the rank that needs most. Raises what ``evaluate`` raises.
        """
        found = list(known)
        watched = self.group.watch_communication(losses_on)

        def evaluate(model: Any) -> float:
            for upto in looks(len(self.order)):
                batches = self.order[len(found) : upto]
                if not batches:
                    continue
                found.extend(watched(self.evaluate, model, batches))
                if not lockstep.another(upto < len(self.order) and self._is_undecided(found, bounds)):
                    break
            return 0.0

        self.subject.score({**self.decided, **self.subject.values(candidate, self.reused)}, evaluate)
        return found

    def share(self, losses: Sequence[float]) -> float:
        """Return the share of the batches that were evaluated."""
        return len(losses) / len(self.order)

    def quality(self, losses: Sequence[float]) -> MeasuredQuality:
        """Return the quality, estimated if these are not the numbers of all batches."""
        original = mean_of_batches(self.original)
        restored = (
            mean_of_batches(losses)
            if len(losses) == len(self.order)
            else original + mean_of_batches(self._differences(losses))
        )
        return _quality(original, restored, self.higher_is_better)

    def _is_undecided(self, losses: Sequence[float], bounds: Bounds) -> bool:
        size = abs(mean_of_batches(self.original))
        sign = -1 if self.higher_is_better else 1
        worse = [sign * difference for difference in self._differences(losses)]
        return verdict(worse, len(self.order), bounds.low * size, bounds.high * size, bounds.error_rate) == "undecided"

    def _differences(self, losses: Sequence[float]) -> list[float]:
        """Return how much greater the numbers are than those of the weights in training."""
        return [loss - self.original[index] for loss, index in zip(losses, self.order, strict=False)]


def _quality(original: float, restored: float, higher_is_better: bool) -> MeasuredQuality:
    worse = degradation(original, restored, higher_is_better)
    # An infinitely good score is as suspicious as an infinitely bad one.
    return MeasuredQuality(original, restored, math.nan if math.isinf(restored) and worse < 0 else worse)


@dataclass(frozen=True)
class DistortionJudge:
    """Estimates the degradation from how far the weights move, by a factor measured in trainings with a metric.

    weights: in training, by name. mean_squares: F of each, or empty. judged_by: whether F was measured. shards: of the
    weights.
    """

    weights: Mapping[str, Tensor]
    mean_squares: Mapping[str, float]
    judged_by: JudgedBy
    shards: Shards = WHOLE

    def __call__(self, candidate: CandidateWeights) -> MeasuredQuality:
        """Return the estimated degradation. The scores are NaN. Collective if there are shards."""
        found = distortion(self.weights, candidate, self.mean_squares, self.shards)
        return MeasuredQuality(math.nan, math.nan, DISTORTION_SCALE * found)


Judge = MetricJudge | PairedJudge | DistortionJudge
"""Judges quantized weights of one checkpoint: how much worse the model is. ``judged_by`` says by what."""
