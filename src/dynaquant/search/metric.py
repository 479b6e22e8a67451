"""The user's metric over a training: its score for the weights in training, and the margin for its noise.

``Subject.score`` is one evaluation; this module decides how many, and what their results mean.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from dynaquant.errors import EvaluateError
from dynaquant.ranks.group import Group
from dynaquant.search.evaluation import (
    Evaluate,
    LossOn,
    OnBatches,
    ParameterValues,
    Subject,
    losses_on,
    mean_of_batches,
    on_batches,
    uses_batch_statistics_of,
)
from dynaquant.search.failures import attempt, one_line, raise_on_every_rank
from dynaquant.search.judge import MetricJudge, PairedJudge
from dynaquant.search.noise import DEVIATIONS, Noise, mean_of_scores
from dynaquant.search.search_log import foretell
from dynaquant.search.sequential_test import FIRST_LOOK, order_of
from dynaquant.training import rng

T = TypeVar("T")

_NEEDS_GRADIENTS = (
    ". It runs under torch.no_grad(): what needs gradients, such as derivatives by the inputs, must run in a block "
    "torch.enable_grad()"
)


SAME_NUMBER = 1e-3
"""The relative difference up to which replicas agree on the metric of the same weights. Theirs differ by rounding."""


@dataclass(frozen=True)
class OriginalScore:
    """The metric of the weights in training, at one checkpoint.

    score: this rank's. noise_margin: how far noise can make a measured degradation too low. communicates: whether
    ``evaluate`` communicates between ranks. problem: why candidates cannot be judged; None if they can. losses: the
    number of each batch; empty if candidates can be evaluated only as a whole. spent: evaluations on all batches, of
    the weights in training. noise: what is known of the metric's noise now. whole: whether numbers of batches do not
    repeat. apart: says that replicas do not agree on the number, and what follows; None if they do.
    """

    score: float
    noise_margin: float
    communicates: bool
    problem: str | None = None
    losses: tuple[float, ...] = ()
    spent: float = 0.0
    noise: Noise = field(default_factory=Noise)
    whole: bool = False
    apart: str | None = None

    @property
    def together(self) -> bool:
        """Whether all ranks must score the same candidate, and rank 0's number counts."""
        return self.communicates or self.apart is not None


class _BatchNumbers(NamedTuple):
    """The number of each batch; none if they do not repeat. spent: evaluations on all batches."""

    losses: tuple[float, ...]
    spent: float


class UserMetric:
    """The ``evaluate`` of one training. What saves learn of it is in their ``SearchMemory``. group: the ranks."""

    def __init__(self, subject: Subject, evaluate: Evaluate, higher_is_better: bool, group: Group) -> None:
        self._subject, self._evaluate, self.higher_is_better = subject, evaluate, higher_is_better
        self._group, self._batched = group, on_batches(evaluate)
        self._is_loss = isinstance(evaluate, LossOn)
        self._worked = False  # whether it has ever returned a number

    def original(self, noise: Noise, number: int, whole: bool) -> OriginalScore:
        """Evaluate the weights in training, as often as the noise requires. Collective.

        A metric on batches whose numbers repeat is evaluated once, and on a few of its batches a second time. Any other
        is evaluated as a whole. noise: as known so far. number: of the save, from 1. whole: whether numbers of batches
        are known not to repeat.

        Raises EvaluateError if ``evaluate`` fails on any rank of several, or in a single process if it has never
        worked. Errors that are not about the weights (``failures.ends_save``) are raised as they are.
        """
        wasted = 0.0
        if self._batched is not None and not whole:
            found = self._original_on_batches(self._batched, noise, number)
            if isinstance(found, OriginalScore):
                return found
            wasted = found
        own: list[float] = []
        counting: list[list[float]] = []
        times = noise.evaluations
        while times:
            scores, error, by_rank, communicates = self._on_all_ranks(partial(self._scores, times, noise, number))
            unusable = partial(OriginalScore, math.nan, 0.0, communicates, noise=noise, whole=True)
            if scores is None:
                return unusable(f"evaluate failed ({one_line(error)})", spent=wasted + len(own) + times)
            own += scores
            of_each = by_rank[:1] if communicates else self._group.of_replicas(by_rank)
            counting = [[*before, *now] for before, now in zip(counting or [[]] * len(of_each), of_each, strict=False)]
            times = noise.evaluations_left(counting)
        spent = wasted + len(own)
        if not all(math.isfinite(number) for scores in counting for number in scores):
            return unusable(_not_finite(number for scores in counting for number in scores), spent=spent)
        if (known := noise.after(counting)) is None:
            return unusable("the metric is noisy around 0, so no relative degradation can be measured", spent=spent)
        apart = _apart([mean_of_scores(scores) for scores in counting], known.margin)
        value = mean_of_scores(own)
        return OriginalScore(value, known.margin, communicates, spent=spent, noise=known, whole=True, apart=apart)

    def _scores(self, times: int, noise: Noise, number: int) -> list[float]:
        """Evaluate the weights in training so many times, as a whole."""
        watched = self._group.watch_communication(self._evaluate)
        with self._foretold(noise, number):
            first = self._subject.score({}, watched)
        return [first, *(self._subject.score({}, watched) for _ in range(times - 1))]

    @contextmanager
    def _foretold(self, noise: Noise, number: int) -> Iterator[None]:
        """Say how long the first save will take, by the time of one evaluation."""
        began = time.monotonic()
        yield
        if number == 1 and self._group.rank == 0 and not noise.is_known:
            foretell(time.monotonic() - began)

    def _original_on_batches(self, metric: OnBatches, noise: Noise, number: int) -> OriginalScore | float:
        """Evaluate the weights in training batch by batch. Collective.

        Returns what was spent if candidates cannot be evaluated on single batches: there are too few of them, their
        numbers are noisy or depend on random numbers, or ranks have different numbers of batches.
        """
        if not all(count > FIRST_LOOK for count in self._group.all_gather(len(metric))):
            return 0.0
        evaluated = partial(self._evaluated_on_batches, metric, noise, number)
        own, error, by_rank, communicates = self._on_all_ranks(evaluated)
        unusable = partial(OriginalScore, math.nan, 0.0, communicates, noise=noise)
        if own is None:
            return unusable(f"evaluate failed ({one_line(error)})", spent=1.0)
        if not own.losses or len({len(found.losses) for found in by_rank}) > 1:
            return own.spent
        counting = by_rank[:1] if communicates else self._group.of_replicas(by_rank)
        scores = [mean_of_batches(found.losses) for found in counting]
        if not all(map(math.isfinite, scores)):
            return unusable(_not_finite(scores), spent=own.spent)
        known = noise.after([[each] * noise.evaluations for each in scores]) or noise
        value, apart = mean_of_batches(own.losses), _apart(scores, 0.0)
        return OriginalScore(value, 0.0, communicates, None, own.losses, own.spent, known, apart=apart)

    def _evaluated_on_batches(self, metric: OnBatches, noise: Noise, number: int) -> _BatchNumbers:
        """Evaluate all batches once, and some again if the noise must be checked."""
        watched = self._group.watch_communication(losses_on)
        losses: list[float] = []
        again: list[tuple[float, float]] = []
        drew: list[bool] = []

        def evaluate(model: Any) -> float:
            for found in (losses, again, drew):  # of a device that had too little memory
                found.clear()
            before = rng.get_state()
            with self._foretold(noise, number):
                losses.extend(watched(metric, model, range(len(metric))))
            drew.append(not rng.same(before, rng.get_state()))
            repeated = noise.batches_again(losses, number)
            again.extend(zip([losses[index] for index in repeated], watched(metric, model, repeated), strict=True))
            return 0.0

        self._subject.score({}, evaluate)
        # Numbers do not repeat if the global random number generators were used, whatever they are this time.
        repeats = not any(drew) and all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in again)
        return _BatchNumbers(tuple(losses) if repeats else (), 1 + len(again) / len(losses))

    def _on_all_ranks(self, evaluate: Callable[[], T]) -> tuple[T | None, Exception | None, list[T], bool]:
        """Return this rank's result or its error, the results of all ranks, and whether ``evaluate`` communicates."""
        own, error = self._group.run_on_all_ranks(lambda: attempt(evaluate, self._group.will_tell))
        outcomes = self._group.all_gather((own, one_line(error)))
        communicates = self._group.saw_communication()
        if self._group.size > 1:
            raise_on_every_rank([text for _, text in outcomes], error)
        if error is not None and not self._worked:
            advice = _NEEDS_GRADIENTS if "does not require grad" in str(error) else ""
            takes = (
                "The loss_fn of LossOn must take the model and a batch" if self._is_loss else "It must take the model"
            )
            raise EvaluateError(
                f"evaluate failed on the weights in training, and has never worked ({one_line(error)}); nothing was "
                f"saved. {takes} and return one number{advice}"
            ) from error
        self._worked = self._worked or own is not None
        return own, error, [found for found, _ in outcomes if found is not None], communicates

    def notes(self, original: OriginalScore, allowed: float) -> list[str]:
        """Return the notes on the metric for a record. allowed: the degradation."""
        notes = []
        if uses_batch_statistics_of(self._evaluate, self._subject.module):
            notes.append(
                "batch norms were evaluated by the statistics of the batches, as in training; before you use this "
                "checkpoint without training, re-estimate its running statistics (torch.optim.swa_utils.update_bn)"
            )
        if original.communicates:
            notes.append("evaluate communicates between ranks: all of them score the same candidate together")
        if original.apart is not None:
            notes.append(original.apart)
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

    def judge(
        self, original: OriginalScore, decided: Mapping[str, ParameterValues], number: int
    ) -> MetricJudge | PairedJudge:
        """Return a judge of candidates by this metric. decided: see ``MetricJudge``. number: of the save."""
        if self._batched is not None and original.losses:
            order = order_of(len(original.losses), number)
            return PairedJudge(
                self._subject, self._batched, self.higher_is_better, original.losses, decided, order, self._group
            )
        watched = self._group.watch_communication(self._evaluate)
        return MetricJudge(self._subject, watched, self.higher_is_better, original.score, decided)


def _not_finite(scores: Iterable[float]) -> str:
    found = next(score for score in scores if not math.isfinite(score))
    return f"the metric of the weights in training is not finite ({found})"


def _apart(scores: list[float], noise_margin: float) -> str | None:
    """Return a note if replicas do not agree on the score of the same weights. scores: of the replicas."""
    furthest = max(scores, key=lambda score: abs(score - scores[0]))
    allowed = max(SAME_NUMBER, DEVIATIONS * noise_margin) * max(abs(scores[0]), abs(furthest))
    if abs(furthest - scores[0]) <= allowed:
        return None
    return (
        f"evaluate returns other numbers on other ranks for the same weights: {scores[0]:.4g} on rank 0, "
        f"{furthest:.4g} on another. So the number of rank 0 counts, and all ranks score the same candidate; give all "
        "ranks the same held-out data"
    )
