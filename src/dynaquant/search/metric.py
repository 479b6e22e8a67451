"""Evaluates the user's metric with the weights in training, and notes in the record what a user must know of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from dynaquant.errors import EvaluateError
from dynaquant.search.failures import attempt, raise_on_every_rank, said
from dynaquant.search.judge import MetricJudge
from dynaquant.search.noise import MARGIN, Noise, mean
from dynaquant.search.quality import Evaluate, Value, score
from dynaquant.training.ranks import Group


@dataclass(frozen=True)
class Original:
    """The metric of the weights in training.

    score: this rank's. margin: how far noise can make a measured degradation too low. problem: why candidates cannot be
    judged; None if they can.
    """

    score: float
    margin: float
    problem: str | None = None


class UserMetric:
    """``evaluate`` of one training, from save to save.

    noise: what is known of its noise; saves add to it. group: the ranks; every method but ``judge`` is collective.
    """

    def __init__(
        self, model: nn.Module, evaluate: Evaluate, higher_is_better: bool, noise: Noise, group: Group
    ) -> None:
        self._model, self._evaluate, self._higher_is_better = model, evaluate, higher_is_better
        self._noise, self._group = noise, group
        self._worked = False  # whether it has ever returned a number

    def original(self) -> Original:
        """Evaluates the weights in training, as often as ``noise`` says.

        Raises EvaluateError if ``evaluate`` fails on any rank of several, or in a single process before it has ever
        worked. Errors that end a save (``failures.ended_by``) are raised as they are.
        """

        def scores() -> list[float]:
            watched = self._group.watch_communication(self._evaluate)
            return [score(self._model, {}, watched) for _ in range(self._noise.evaluations)]

        found, error = self._group.run_on_all_ranks(lambda: attempt(scores))
        everywhere = self._group.all_gather((found, said(error)))
        communicates = self._group.saw_communication()
        if self._group.size > 1:
            raise_on_every_rank([text for _, text in everywhere], error)
        if error is not None and not self._worked:
            raise EvaluateError(
                f"evaluate failed on the weights in training, and has never worked ({said(error)}); nothing was saved. "
                "It must take the model and return one number"
            ) from error
        if found is None:
            return Original(math.nan, 0.0, f"evaluate failed ({said(error)})")
        self._worked = True
        # If the ranks evaluate together, the number of rank 0 counts.
        counted = [own for own, _ in everywhere if own is not None][: 1 if communicates else None]
        if not all(math.isfinite(number) for own in counted for number in own):
            return Original(math.nan, 0.0, "the metric of the weights in training is not finite")
        if not self._noise.learn(counted):
            return Original(math.nan, 0.0, "the metric is noisy around 0, so no relative degradation can be measured")
        return Original(mean(found), self._noise.margin)

    def notes(self, original: Original, allowed: float) -> list[str]:
        """Returns the notes on the metric for a record. allowed: the degradation."""
        notes = []
        if self._group.saw_communication():
            notes.append("evaluate communicates between ranks: all of them score the same candidate together")
        if original.margin > 0:
            left = (
                f"that takes all of the {allowed:.2g} allowed; evaluate on more batches"
                if original.margin >= allowed
                else f"{allowed - original.margin:.2g} of the {allowed:.2g} allowed are left"
            )
            notes.append(
                f"the metric is noisy: two evaluations of the same weights differ by {original.margin / MARGIN:.2g} "
                f"(relative, root mean square); {left}"
            )
        return notes

    def judge(self, original: float, known: Mapping[str, Value]) -> MetricJudge:
        """Returns a judge of candidates by this metric."""
        watched = self._group.watch_communication(self._evaluate)
        return MetricJudge(self._model, watched, self._higher_is_better, original, known)
