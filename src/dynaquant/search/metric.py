"""The user's metric over a training: its score for the weights in training, and the margin for its noise.

``quality.score`` is one evaluation; this module decides how many, and what their results mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from dynaquant.errors import EvaluateError
from dynaquant.search.evaluation import Evaluate, ParameterValues, score
from dynaquant.search.failures import attempt, one_line, raise_on_every_rank
from dynaquant.search.judge import MetricJudge
from dynaquant.search.noise import DEVIATIONS, Noise, mean
from dynaquant.training.ranks import Group


@dataclass(frozen=True)
class OriginalScore:
    """The metric of the weights in training, at one checkpoint.

    score: this rank's. noise_margin: how far noise can make a measured degradation too low. communicates: whether
    ``evaluate`` communicates between ranks. problem: why candidates cannot be judged; None if they can.
    """

    score: float
    noise_margin: float
    communicates: bool
    problem: str | None = None


class UserMetric:
    """The ``evaluate`` of one training, for all its saves.

    noise: its noise as measured so far; every save adds to it. group: the ranks.
    """

    def __init__(
        self, model: nn.Module, evaluate: Evaluate, higher_is_better: bool, noise: Noise, group: Group
    ) -> None:
        self._model, self._evaluate, self._higher_is_better = model, evaluate, higher_is_better
        self._noise, self._group = noise, group
        self._worked = False  # whether it has ever returned a number

    def original(self) -> OriginalScore:
        """Evaluate the weights in training, as often as the noise requires. Collective.

        Raises EvaluateError if ``evaluate`` fails on any rank of several, or in a single process if it has never
        worked. Errors that are not about the weights (``failures.ends_save``) are raised as they are.
        """
        own, error, by_rank, communicates = self._score_on_all_ranks()
        if error is not None and not self._worked:
            raise EvaluateError(
                f"evaluate failed on the weights in training, and has never worked ({one_line(error)}); nothing was "
                "saved. It must take the model and return one number"
            ) from error

        def unusable(problem: str) -> OriginalScore:
            return OriginalScore(math.nan, 0.0, communicates, problem)

        if own is None:
            return unusable(f"evaluate failed ({one_line(error)})")
        self._worked = True
        if communicates:  # then all ranks evaluate together, and the number of rank 0 counts
            by_rank = by_rank[:1]
        if not all(math.isfinite(number) for scores in by_rank for number in scores):
            return unusable("the metric of the weights in training is not finite")
        if not self._noise.learn(by_rank):
            return unusable("the metric is noisy around 0, so no relative degradation can be measured")
        return OriginalScore(mean(own), self._noise.margin, communicates)

    def _score_on_all_ranks(self) -> tuple[list[float] | None, Exception | None, list[list[float]], bool]:
        """Evaluate the weights in training on every rank. Collective.

        Returns this rank's scores or its error, the scores of all ranks, and whether ``evaluate`` communicates.
        """

        def scores() -> list[float]:
            watched = self._group.watch_communication(self._evaluate)
            return [score(self._model, {}, watched) for _ in range(self._noise.evaluations)]

        own, error = self._group.run_on_all_ranks(lambda: attempt(scores))
        outcomes = self._group.all_gather((own, one_line(error)))
        communicates = self._group.saw_communication()
        if self._group.size > 1:
            raise_on_every_rank([text for _, text in outcomes], error)
        return own, error, [found for found, _ in outcomes if found is not None], communicates

    def notes(self, original: OriginalScore, allowed: float) -> list[str]:
        """Return the notes on the metric for a record. allowed: the degradation."""
        notes = []
        if original.communicates:
            notes.append("evaluate communicates between ranks: all of them score the same candidate together")
        if original.noise_margin > 0:
            left = (
                f"this uses up the allowed degradation of {allowed:.2g}; evaluate on more batches"
                if original.noise_margin >= allowed
                else f"{allowed - original.noise_margin:.2g} of the allowed degradation of {allowed:.2g} is left"
            )
            notes.append(
                "the metric is noisy: two evaluations of the same weights differ by "
                f"{original.noise_margin / DEVIATIONS:.2g} (relative, root mean square); {left}"
            )
        return notes

    def judge(self, original: OriginalScore, decided: Mapping[str, ParameterValues]) -> MetricJudge:
        """Return a judge of candidates by this metric. decided: see ``MetricJudge``."""
        watched = self._group.watch_communication(self._evaluate)
        return MetricJudge(self._model, watched, self._higher_is_better, original.score, decided)
