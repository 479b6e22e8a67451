"""Decides on the configuration for the weights of one checkpoint after another (method 1.4)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dynaquant.engine.quantize.knobs import Knobs
from dynaquant.ranks.group import Group
from dynaquant.search.decision import NOTHING_GOOD_ENOUGH, Decision, Found, Search
from dynaquant.search.displacement import Displacement
from dynaquant.search.evaluation import ParameterValues
from dynaquant.search.judge import DistortionJudge, Judge
from dynaquant.search.metric import OriginalScore, UserMetric
from dynaquant.search.search_log import bar_removed
from dynaquant.search.search_memory import SearchMemory
from dynaquant.search.sight import Sight, has_worsened, is_suspicious, note_on, sight_of
from dynaquant.search.stepped_search import Estimated, SteppedSearch, is_too_coarse
from dynaquant.search.stepped_search import note_on as note_on_resolution
from dynaquant.search.trials import MixedScoresError, Quantizer, Trials, why_none_is_good_enough

log = logging.getLogger("dynaquant")


@dataclass(frozen=True)
class Limits:
    """How much one checkpoint may lose by the metric, relative.

    allowed: of a configuration that is good enough. last_resort: if none is, the best one may lose so much. trust:
    returns what both are multiplied by if the estimate decides, at most 1. Collective.
    """

    allowed: float
    last_resort: float
    trust: Callable[[], float] = lambda: 1.0

    def of_estimate(self) -> Limits:
        """Return the limits if the estimate decides. Collective."""
        trust = self.trust()
        return Limits(self.allowed * trust, self.last_resort * trust)


class PreparedWeights(Protocol):
    """The weights of one checkpoint, and how their method searches for a configuration."""

    @property
    def quantizer(self) -> Quantizer:
        """The weights, ready for every configuration."""

    @property
    def estimate(self) -> DistortionJudge:
        """The judge that stands in for a metric."""

    @property
    def last_resort(self) -> Search:
        """How the best of configurations that all lose too much counts as found."""

    def find(self, trials: Trials, memory: SearchMemory) -> Found:
        """Return the most compact configuration that is good enough. Collective."""

    def bound(self, estimated: Knobs | None) -> Knobs | None:
        """Return the coarsest configuration that a metric in coarse steps may choose; None if searches know no bound.

        estimated: what is good enough by the estimate, if anything is.
        """

    def last(self, memory: SearchMemory, limit: float) -> tuple[Search, Knobs]:
        """Return the last configuration, and how it counts as found if no weight has changed since."""

    def after(self, memory: SearchMemory, limit: float, found: Knobs, trials: Trials) -> SearchMemory:
        """Return what the next search starts from. found: the configuration that is good enough for the limit."""


class ConfigurationManager:
    """Decides at every checkpoint. Each decision goes on from the memory of the last one, and has the next.

    metric: the user's; None if the distortion of the weights decides. fixed: the user's configuration. Then nothing is
    searched for, and the metric is only measured. group: the ranks that score candidates in parallel. All
    of them call ``decide``, with the same weights.
    """

    def __init__(self, metric: UserMetric | None, fixed: Knobs | None, group: Group) -> None:
        self._metric, self._fixed, self._group = metric, fixed, group

    @property
    def judges_by_distortion(self) -> bool:
        """Whether there is no metric, so that the distortion of the weights decides."""
        return self._metric is None and self._fixed is None

    def decide(
        self,
        prepared: PreparedWeights,
        decided: Mapping[str, ParameterValues],
        memory: SearchMemory,
        limits: Limits,
    ) -> Decision:
        """Return the most compact configuration that is good enough. Collective.

        prepared: the weights to quantize. decided: the values that other parameters will have in the checkpoint, by
        name. memory: of the last decision. limits: the same on all ranks.

        If ``evaluate`` fails on a candidate, that candidate is not good enough. If it fails on the weights in training,
        or is not finite there, the decision is lossless. Raises EvaluateError if it fails on a rank of several, or if
        it has never worked and fails on the weights in training.
        """
        search = _Search(self._group, self._fixed, prepared, limits)
        if self._metric is not None:
            with bar_removed():
                try:
                    return search.by_metric(self._metric, decided, memory)
                except MixedScoresError:  # from now on, all ranks score the same candidate
                    search.warn("evaluate communicates between ranks, but did not at first: all are scored again")
                    return search.by_metric(self._metric, decided, memory)
        if self._fixed is not None:
            return Decision("fixed", self._fixed, prepared.quantizer.quantize(self._fixed), memory=memory)
        return search.by_estimate(memory)


@dataclass(frozen=True)
class _Search:
    """The search of one save. fixed: the user's configuration. quiet: whether notes are for the record only."""

    group: Group
    fixed: Knobs | None
    prepared: PreparedWeights
    limits: Limits
    quiet: bool = False

    def by_metric(self, metric: UserMetric, decided: Mapping[str, ParameterValues], memory: SearchMemory) -> Decision:
        """Decide by the user's metric; by the estimate if the metric does not tell weights apart."""
        number = memory.saves + 1
        original = metric.original(memory.noise, number, memory.whole)
        memory = replace(memory, saves=number, noise=original.noise, whole=original.whole)
        if original.problem is not None:
            return replace(self._unjudged(original.problem, memory), equivalents=original.spent)
        judge = metric.judge(original, decided, number)
        at_once = 1 if original.together else len(self.group.replicas)
        notes = metric.notes(original, self.limits.allowed)
        if original.apart is not None and number == 1:
            self.warn(original.apart)
        limit = self.limits.allowed - original.noise_margin
        trials = self._trials(judge, limit, at_once, memory)
        if self.fixed is not None:
            decision = self._measured(self.fixed, trials, notes, memory)
        else:
            decision = self._searched(metric, original, trials, notes, memory)
        return replace(decision, equivalents=original.spent + trials.spent)

    def _searched(
        self,
        metric: UserMetric,
        original: OriginalScore,
        trials: Trials,
        notes: Sequence[str],
        memory: SearchMemory,
    ) -> Decision:
        """Decide by a search: by the metric, or by the estimate as far as the metric does not tell weights apart."""
        limit, margin = trials.limit, original.noise_margin
        size = abs(self.group.from_rank_0(original.score))
        known = self._known_resolution(memory, size)
        stepped = SteppedSearch(
            trials,
            lambda: self._found(trials, memory),
            lambda: self._estimated(memory),
            limit,
            self.limits.last_resort - margin,
            known,
        )
        found = stepped.run()
        sight, blind, reference = self._sight(metric, original.score, trials, memory)
        seen = replace(memory, sight=sight, reference=reference)
        if blind is not None:
            decision = self.by_estimate(seen, [*notes, blind])
            return replace(decision, quality=trials.quality_of(decision.configuration))
        if trials.has_weights and self._can_be_bounded:  # no candidate, no change
            found = stepped.run_again(found)
        seen = replace(seen, resolution=stepped.resolution and stepped.resolution * (size or math.inf))
        if not stepped.is_coarse:
            return self._decided(found, trials, margin, notes, seen)
        coarse = note_on_resolution(stepped.resolution, limit, trials.limit)
        if not is_too_coarse(known, limit):
            self.warn(coarse)
        decision = self._decided(found, trials, margin, [*notes, coarse], seen)
        beyond = decision.quality.degradation - trials.limit if decision.quality else 0.0  # the last resort
        memory = replace(decision.memory, history=stepped.estimated.history)
        return replace(decision, estimated=limit + max(beyond, 0.0), memory=memory)

    @property
    def _can_be_bounded(self) -> bool:
        """Whether the method's search knows a bound."""
        return self.prepared.bound(None) is not None

    def _known_resolution(self, memory: SearchMemory, size: float) -> float | None:
        """Return what earlier saves say of a metric's step, relative to a score of this size."""
        if memory.resolution is None or not self._can_be_bounded:
            return None
        return memory.resolution / size if size > 0 else math.inf

    def _estimated(self, memory: SearchMemory) -> Estimated:
        """Search by the estimate, whether it is trusted or not: a metric in coarse steps still forbids. Collective."""
        trials = self._with_estimate(memory)
        found = self._found(trials, memory).good_enough
        history = memory.history
        if found is not None and trials.has_weights:
            history = self.prepared.after(memory, self.limits.allowed, found, trials).history
        return Estimated(self.prepared.bound(found), history)

    def by_estimate(self, memory: SearchMemory, notes: Sequence[str] = ()) -> Decision:
        """Decide by how far the weights move."""
        # Where the estimate is trusted less, the weights often are exact. That is said once, not at every save.
        search = replace(self, limits=self.limits.of_estimate(), quiet=self.limits.trust() < 1)
        trials = search._with_estimate(memory)
        return search._decided(search._found(trials, memory), trials, 0.0, notes, memory)

    def _with_estimate(self, memory: SearchMemory) -> Trials:
        """Return trials that the estimate judges."""
        at_once = 1 if self.prepared.quantizer.shards.divided else self.group.size
        return self._trials(self.prepared.estimate, self.limits.allowed, at_once, memory)

    def _sight(
        self, metric: UserMetric, score: float, trials: Trials, memory: SearchMemory
    ) -> tuple[Sight, str | None, float | None]:
        """Return what the metric tells of weights, a note unless it sees, and the score to compare later ones with.

        Logs the note when that is new. score: of the weights in training. Costs an evaluation if the scores are
        suspicious. Collective.
        """
        degradations = [trial.degradation for trial in trials.done]
        known = memory.reference
        worsened = known is not None and has_worsened(known, score, metric.higher_is_better)
        suspicious = is_suspicious(degradations, trials.limit, memory.sight)
        if not self.prepared.quantizer.weights or not (suspicious or self.group.from_rank_0(worsened)):
            return "sees", None, score if known is None else known
        zeros = trials.score_zeros()
        sight = sight_of(zeros)
        if sight == "sees" or zeros[0] is None:
            return "sees", None, score
        note = note_on(sight, zeros[0].original, zeros[0].restored, metric.higher_is_better, early=known is None)
        if sight != memory.sight:
            self.warn(note)
        return sight, note, score

    def _unjudged(self, problem: str, memory: SearchMemory) -> Decision:
        """Decide if the metric of the weights in training is unusable."""
        if self.fixed is None:
            note = f"{problem}: candidates cannot be judged, so the weights are stored exactly"
            self.warn(note)
            return Decision("lossless", None, limit=self.limits.allowed, notes=[note], memory=memory)
        note = f"{problem}: the degradation of this checkpoint is unknown"
        return Decision("fixed", self.fixed, self.prepared.quantizer.quantize(self.fixed), notes=[note], memory=memory)

    def _trials(self, judge: Judge, limit: float, per_round: int, memory: SearchMemory) -> Trials:
        """Return the trials of one save. per_round: how many configurations are scored in one round."""
        quantizer = self.prepared.quantizer
        since_restore = Displacement(quantizer.weights, memory.restored, quantizer.shards)
        if self.fixed is not None:  # measured on all batches, whatever it is
            limit = math.inf
        return Trials(quantizer, judge, since_restore, limit, self.group, per_round)

    def _decided(
        self, found: Found, trials: Trials, noise_margin: float, notes: Sequence[str], memory: SearchMemory
    ) -> Decision:
        """Return the decision for what a search has found. notes: for the record."""
        limit = trials.limit  # without ``noise_margin``
        if trials.has_weights:
            memory = replace(memory, gave_up=found.good_enough is None)
        failures = dict.fromkeys(trial.error for trial in trials.done if trial.error)
        failed = [f"evaluate failed on a candidate ({error})" for error in failures]
        for failure in failed:
            self.warn(failure)
        notes = [*notes, *found.notes, *failed]
        chosen, search, largest = found.chosen, found.search, self.limits.last_resort - noise_margin
        if found.good_enough is not None and trials.has_weights:
            memory = self.prepared.after(memory, limit, found.good_enough, trials)
        elif chosen is None and limit < largest and (best := self._best_of(trials, limit, largest)) is not None:
            chosen, note = best
            notes, limit, search = [*notes, note], largest, self.prepared.last_resort
            self.warn(note)
        if chosen is None:
            reason = why_none_is_good_enough(trials.done, trials.judged_by, limit, noise_margin)
            warning = (
                f"no candidate is good enough: weights are stored exactly and the file is many times larger; {reason}"
            )
            self.warn(warning)
            notes.append(warning)
            return Decision("lossless", None, {}, None, limit, trials.judged_by, trials.done, notes, memory=memory)
        quantized, quality = trials.result(chosen)
        if trials.judged_by != "evaluate":
            quality = None
        return Decision(search, chosen, quantized, quality, limit, trials.judged_by, trials.done, notes, memory=memory)

    def _best_of(self, trials: Trials, limit: float, largest: float) -> tuple[Knobs, str] | None:
        """Return the best of what was tried, and a note, if it loses at most ``largest``. Collective."""
        best = trials.best()
        if best is None or not (lost := trials.finished(best)) <= largest:
            return None
        lowest = max(limit, 0)
        within = (
            f"no candidate stayed within {lowest:.3g}, all that the estimate is trusted with now"
            if self.quiet
            else f"no candidate stayed within {lowest:.3g}, all that the training's budget allows now"
        )
        taken = f"the best of {len(trials.done)} was taken, which loses {lost:.3g} of at most {largest:.3g}"
        return best, f"{within}: {taken}"

    def _found(self, trials: Trials, memory: SearchMemory) -> Found:
        """Search by the method. If no weight has changed, there is nothing to choose: the last configuration counts."""
        if self.prepared.quantizer.weights:
            return self.prepared.find(trials, memory)
        search, last = self.prepared.last(memory, trials.limit)
        return Found(search, last, last) if trials.is_good_enough(last) else NOTHING_GOOD_ENOUGH

    def _measured(self, fixed: Knobs, trials: Trials, notes: list[str], memory: SearchMemory) -> Decision:
        """Measure the degradation of the user's configuration."""
        trials.score([fixed])
        quantized, quality = trials.result(fixed)
        if quality is None or not math.isfinite(quality.degradation):
            error = trials.done[0].error
            problem = f"evaluate failed ({error})" if error else "the metric is not finite"
            notes = [*notes, f"{problem}: the degradation of this checkpoint is unknown"]
        return Decision("fixed", fixed, quantized, quality, None, trials.judged_by, trials.done, notes, memory=memory)

    def warn(self, note: str) -> None:
        """Log a note at once, on one rank; the record comes later."""
        if self.group.rank == 0 and not self.quiet:
            log.warning(note)
