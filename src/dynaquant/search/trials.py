"""Trials: configurations that are tried for one checkpoint. The ranks score different ones at the same time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.quantize.candidate import CandidateWeights, all_zero, with_levels
from dynaquant.engine.quantize.knobs import Knobs
from dynaquant.engine.shards import Shards
from dynaquant.ranks.group import Group
from dynaquant.ranks.lockstep import Lockstep
from dynaquant.search.displacement import Displacement, keeps_enough
from dynaquant.search.failures import attempt, one_line, raise_on_every_rank
from dynaquant.search.judge import Bounds, Judge, JudgedBy, PairedJudge
from dynaquant.search.scores import MeasuredQuality, Trial
from dynaquant.search.search_log import SearchLog
from dynaquant.search.sequential_test import ERROR_RATE, ERROR_RATE_OF_MORE

T = TypeVar("T")


class Quantizer(Protocol):
    """The weights of one checkpoint, ready to be quantized with any configuration."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The weights by name."""

    @property
    def shards(self) -> Shards:
        """Which part of each weight this rank holds."""

    def candidate(self, configuration: Any) -> CandidateWeights:
        """Return the weights as ``quantize`` would store them, to be scored. A pure function."""

    def quantize(self, configuration: Any) -> Mapping[str, QuantizedTensor]:
        """Return the quantized weights by name. A pure function."""

    def predict(self, configuration: Any) -> float | None:
        """Return the bytes that they would take, or None if that cannot be predicted without quantizing."""


class MixedScoresError(Exception):
    """Ranks communicated while they scored different configurations, so their scores are mixed up."""


class Trials:
    """Quantizes with configurations and scores the results. Scores each configuration once.

    limit: the largest degradation that is good enough. per_round: how many configurations are scored in one round: one
    by each replica, whose first rank's number counts, or one in all if the metric communicates between replicas. Then
    rank 0's number counts. coarsest: the coarsest configuration to try; None if only the method bounds them.
    """

    def __init__(
        self,
        quantizer: Quantizer,
        judge: Judge,
        displacement: Displacement,
        limit: float,
        group: Group,
        per_round: int,
    ) -> None:
        self.limit, self.per_round = limit, per_round
        self.coarsest: Knobs | None = None
        self._quantizer, self._judge, self._displacement, self._group = quantizer, judge, displacement, group
        self._scored: dict[Knobs, tuple[Trial, MeasuredQuality | None]] = {}
        self._shares_kept: dict[Knobs, float | None] = {}
        self._losses: dict[Knobs, list[float]] = {}  # of candidates that were evaluated on some batches
        self._last_quantized: tuple[Knobs, Mapping[str, QuantizedTensor]] | None = None
        self._log = SearchLog()
        self._spent_on_zeros = 0.0

    @property
    def done(self) -> list[Trial]:
        """All trials so far, in order."""
        return [trial for trial, _ in self._scored.values()]

    @property
    def judged_by(self) -> JudgedBy:
        """What judges the candidates."""
        return self._judge.judged_by

    @property
    def has_weights(self) -> bool:
        """Whether there are weights to quantize. If none has changed, there are not."""
        return bool(self._quantizer.weights)

    @property
    def spent(self) -> float:
        """What has been evaluated, in evaluations on all batches."""
        return self._spent_on_zeros + sum(trial.share for trial in self.done)

    def go_on(self, limit: float, coarsest: Knobs | None) -> None:
        """Search again with another limit and bound. What has been scored stays known."""
        self.limit, self.coarsest = limit, coarsest

    def score(self, configurations: Sequence[Knobs], least_kept: float = 0.0, low: float = -math.inf) -> list[float]:
        """Return the degradations of configurations; at most ``per_round`` of them may be new. Collective.

        A configuration that keeps less than ``least_kept`` of the displacement is infinitely bad, and not evaluated.
        Degradations above the limit or below ``low`` may be estimates from some of the metric's batches.

        Raises EvaluateError on every rank of several if ``evaluate`` failed on one. Raises MixedScoresError if the
        metric communicated while ranks scored different configurations.
        """
        new = [c for c in dict.fromkeys(configurations) if not self._is_known(c, least_kept, low)]
        if new:
            found = any(trial.degradation is not None and trial.degradation <= self.limit for trial in self.done)
            rate = ERROR_RATE_OF_MORE if found else ERROR_RATE
            self._score_round(new, least_kept, Bounds(low, self.limit, rate))
        return [
            trial.degradation if trial.degradation is not None and trial.keeps(least_kept) else math.inf
            for trial in map(self.trial, configurations)
        ]

    def is_good_enough(self, configuration: Knobs) -> bool:
        """Return whether a configuration stays within the limit; score it if that is not known. Collective.

        If it does, its degradation is no estimate.
        """
        return self.score([configuration])[0] <= self.limit

    def best(self) -> Knobs | None:
        """Return the configuration with the lowest degradation of those tried; of equal ones, the one tried last.

        After a restore, one that keeps too little displacement is taken only if all do. None if none could be judged.
        """
        known = [t for t in reversed(self.done) if t.degradation is not None and not math.isnan(t.degradation)]
        keeping = [trial for trial in known if keeps_enough(trial.progress)]
        best = min(keeping or known, key=lambda trial: trial.degradation or 0.0, default=None)
        return None if best is None else best.configuration

    def finished(self, configuration: Knobs) -> float:
        """Return the degradation of a configuration that was tried, evaluated on all batches. Collective."""
        if self.trial(configuration).share < 1:
            self._score_round([configuration], 0.0, Bounds(-math.inf, math.inf, ERROR_RATE))
        degradation = self.trial(configuration).degradation
        return math.nan if degradation is None else degradation

    def quality_of(self, configuration: Knobs | None) -> MeasuredQuality | None:
        """Return the quality of a configuration, on all batches; None for exact weights, or if it fails. Collective."""
        if configuration is None:
            return None
        self.score([configuration])
        self.finished(configuration)
        return self._scored[configuration][1]

    def score_zeros(self) -> list[MeasuredQuality | None]:
        """Score the model with all weights zero, once by each replica. Collective.

        Returns the quality that each replica has found, or rank 0's if the metric communicates between replicas; None
        where ``evaluate`` failed. Batches are evaluated until it is clearly worse than the limit.
        """
        zeros, lockstep = all_zero(self._quantizer.weights), Lockstep(self._group)
        bounds = Bounds(-math.inf, max(self.limit, 0.0), ERROR_RATE)

        def judge() -> tuple[MeasuredQuality | None, float]:
            found, raised = attempt(lambda: self._judged(None, zeros, bounds, lockstep))
            if raised is not None:
                lockstep.fail()
            return found or (None, 1.0)

        outcomes = self._on_all_ranks(lockstep, judge)
        self._spent_on_zeros += max(share for _, share in outcomes)
        return [quality for quality, _ in self._group.of_replicas(outcomes)[: self.per_round]]

    def share_kept(self, configuration: Knobs) -> float | None:
        """Return the share of the displacement that a configuration keeps, without evaluating it.

        None if nothing was restored.
        """
        if not self._displacement.matters:
            return None
        if configuration in self._scored:
            return self.trial(configuration).progress
        if configuration not in self._shares_kept:
            candidate = self._quantizer.candidate(configuration)
            self._shares_kept[configuration] = self._displacement.share_kept(candidate)
        return self._shares_kept[configuration]

    def keeps_enough(self, configuration: Knobs) -> bool:
        """Return whether a configuration keeps enough of the displacement since the restore, without evaluating it."""
        return keeps_enough(self.share_kept(configuration))

    def keeping_most(self) -> Knobs:
        """Return the configuration that keeps most of the displacement, of those that are good enough. Collective.

        At least one must be good enough.
        """
        by_share_kept = sorted(self.done, key=lambda trial: trial.progress or 0.0, reverse=True)
        return next(trial.configuration for trial in by_share_kept if self.is_good_enough(trial.configuration))

    def trial(self, configuration: Knobs) -> Trial:
        """Return the trial of a configuration that was scored."""
        return self._scored[configuration][0]

    def result(self, configuration: Knobs) -> tuple[Mapping[str, QuantizedTensor], MeasuredQuality | None]:
        """Return the weights quantized with a configuration that was scored, and their quality."""
        if self._last_quantized is None or self._last_quantized[0] != configuration:
            self._last_quantized = configuration, self._quantizer.quantize(configuration)
        return self._last_quantized[1], self._scored[configuration][1]

    def _is_known(self, configuration: Knobs, least_kept: float, low: float) -> bool:
        """Return whether a configuration needs no further trial: it was evaluated, or keeps too little."""
        if configuration not in self._scored:
            return False
        trial = self.trial(configuration)
        if trial.degradation is None:
            return not trial.keeps(least_kept)
        return trial.share == 1 or not low <= trial.degradation <= self.limit

    def _score_round(self, configurations: Sequence[Knobs], least_kept: float, bounds: Bounds) -> None:
        """Score one configuration by each replica, and share the results. Collective.

        With more replicas than configurations, several of them score the same one. So every rank evaluates in every
        round, and if the metric unexpectedly communicates, no rank waits for one that does not evaluate. Only a rank
        whose configuration keeps too little evaluates nothing; earlier rounds have shown whether the metric
        communicates.
        """
        assert len(configurations) <= self.per_round
        if self._displacement.divided:  # all ranks add up what each configuration keeps
            self._group.run_reducing(lambda: [self.share_kept(each) for each in configurations])
        own = configurations[self._group.replica % len(configurations)]
        lockstep = Lockstep(self._group)
        outcomes = self._on_all_ranks(lockstep, lambda: self._try(own, least_kept, bounds, lockstep))
        if self._group.size > 1:
            raise_on_every_rank([trial.error for trial, _ in outcomes], None)
        for trial, quality in self._group.of_replicas(outcomes)[: len(configurations)]:
            self._scored[trial.configuration] = trial, quality
        if self._group.rank == 0:
            self._log.scored(len(self._scored))

    def _on_all_ranks(self, lockstep: Lockstep, evaluate: Callable[[], T]) -> list[T]:
        """Evaluate, and return what each rank has found. Collective."""
        outcome = self._group.run_on_all_ranks(lambda: lockstep.run(evaluate))
        if self.per_round > 1 and self.judged_by == "evaluate" and self._group.saw_communication():
            raise MixedScoresError
        return self._group.all_gather(outcome)

    def _try(
        self, configuration: Knobs, least_kept: float, bounds: Bounds, lockstep: Lockstep
    ) -> tuple[Trial, MeasuredQuality | None]:
        """Make the candidate and, if enough of the displacement is kept, evaluate. lockstep: if that is on batches."""
        start = time.perf_counter()
        candidate = self._quantizer.candidate(configuration)
        share_kept = self.share_kept(configuration)
        degradation, quality, error, share = None, None, None, 0.0
        if share_kept is None or share_kept >= least_kept:
            judged, raised = attempt(
                lambda: self._judged(configuration, candidate, bounds, lockstep), self._group.will_tell
            )
            if raised is not None:
                lockstep.fail()
            quality, share = judged or (None, 1.0)
            error = one_line(raised)
            degradation = math.nan if quality is None else quality.degradation
            if degradation <= self.limit and (quantized := with_levels(candidate)) is not None:
                self._last_quantized = configuration, quantized  # the last good one is usually chosen
        before = self._scored.get(configuration)  # if only some of the batches were evaluated
        seconds = time.perf_counter() - start + (before[0].seconds if before else 0.0)
        predicted = self._quantizer.predict(configuration)
        return Trial(configuration, predicted, degradation, share_kept, seconds, error, share), quality

    def _judged(
        self, configuration: Knobs | None, candidate: CandidateWeights, bounds: Bounds, lockstep: Lockstep
    ) -> tuple[MeasuredQuality, float]:
        """Return the quality, and the share of the batches from which it is known."""
        judge = self._judge
        if not isinstance(judge, PairedJudge):
            return judge(candidate), 1.0
        # If ranks evaluate different configurations, another one may have evaluated this configuration before.
        known = self._losses.get(configuration, []) if configuration and self.per_round == 1 else []
        losses = judge.losses(candidate, known, bounds, lockstep)
        if configuration is not None:
            self._losses[configuration] = losses
        return judge.quality(losses), judge.share(losses)


def why_none_is_good_enough(trials: Sequence[Trial], judged_by: JudgedBy, limit: float, noise_margin: float) -> str:
    """Return the reason and what would help, for the user.

    limit: the allowed degradation minus ``noise_margin``.
    """
    known = [t.degradation for t in trials if t.degradation is not None and not math.isnan(t.degradation)]
    if limit <= 0 < noise_margin:
        return f"the noise of the metric uses up the allowed {limit + noise_margin:.3g}; evaluate on more batches"
    if not known:
        return "evaluate fails, or is not finite, on every candidate"
    if math.isinf(best := min(known)):
        return (
            "every candidate counts as infinitely worse: the metric is exactly 0 in training, or infinite for every "
            "candidate; use another metric, such as a loss"
        )
    left = f"{limit:.3g} that its noise leaves" if noise_margin > 0 else f"{limit:.3g} allowed"
    if judged_by != "evaluate":
        return (
            f"the best of {len(known)} candidates is estimated to be worse by {best:.3g}, more than the {left}; "
            "raise max_degradation, or give evaluate"
        )
    return (
        f"the best of {len(known)} candidates makes the metric worse by {best:.3g}, more than the {left}; raise "
        "max_degradation, or use a metric that resolves smaller changes, such as a loss on more data"
    )
