"""Decides on the configuration for the weights of one checkpoint after another (method 1.4)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from dynaquant.engine.quantize.grid_weights import GridWeights
from dynaquant.engine.quantize.kmeans_weights import KMeansWeights
from dynaquant.engine.quantize.knobs import Configuration, GridConfiguration, Knobs
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.engine.tensors.stored import QuantizedTensor
from dynaquant.ranks.group import Group
from dynaquant.search import displacement, published_method
from dynaquant.search.decision import NOTHING_GOOD_ENOUGH, Decision, Found
from dynaquant.search.displacement import Displacement
from dynaquant.search.evaluation import Evaluate, ParameterValues
from dynaquant.search.grid_method import search_grid
from dynaquant.search.history import History
from dynaquant.search.judge import DistortionJudge, Judge, JudgedBy, PairedJudge
from dynaquant.search.metric import UserMetric
from dynaquant.search.noise import Noise
from dynaquant.search.progress import bar_removed
from dynaquant.search.published_method import PublishedQuantizer, search_published
from dynaquant.search.sight import Sight, has_worsened, is_suspicious, note_on, sight_of
from dynaquant.search.size import SizeModel
from dynaquant.search.trials import MixedScoresError, Quantizer, Trials, why_none_is_good_enough

log = logging.getLogger("dynaquant")


class ConfigurationManager:
    """Decides at every checkpoint. Each search starts from the result of the last one.

    max_degradation: ε, the largest relative loss of quality of one checkpoint. It may be changed at any time.
    fixed: the user's configuration. Then nothing is searched for, and the metric is only measured.
    group: the ranks that score candidates in parallel. All of them call ``decide``, with the same weights.
    noise: the noise of ``evaluate``, if another manager has measured it.
    """

    def __init__(
        self,
        model: nn.Module,
        evaluate: Evaluate | None,
        higher_is_better: bool,
        max_degradation: float,
        fixed: Knobs | None,
        group: Group,
        noise: Noise | None = None,
    ) -> None:
        self.max_degradation = max_degradation
        self.last_resort = max_degradation
        """If no candidate is good enough, the best one may lose so much. Not used unless it is larger."""
        self._agreed_last_resort = max_degradation
        self._noise = noise or Noise()
        self._metric = None if evaluate is None else UserMetric(model, evaluate, higher_is_better, self._noise, group)
        self._fixed, self._group = fixed, group
        self.history = History()
        """Where the next search starts. ``resume`` needs it in the record."""
        self._restored: Mapping[str, QuantizedTensor] = {}  # weights of the last restore, while it still matters
        self._size_factor = 1.0  # bytes that deltas take, relative to their predicted size
        self._gave_up = False  # whether the last search found nothing good enough
        self._sight: Sight = "sees"  # what the metric told of weights at the last save
        self._reference: float | None = None  # score in training when destroyed weights were scored, or first

    @property
    def judges_by_distortion(self) -> bool:
        """Whether there is no metric, so that the distortion of the weights decides."""
        return self._metric is None and self._fixed is None

    @property
    def restored(self) -> Mapping[str, QuantizedTensor]:
        """The quantized weights of the last restore by name, while checkpoints have to keep what has changed since."""
        return self._restored

    @restored.setter
    def restored(self, weights: Mapping[str, QuantizedTensor]) -> None:
        self._restored = weights

    def resume(self, record: Mapping[str, Any], restored: Mapping[str, QuantizedTensor]) -> None:
        """Continue from a restored checkpoint.

        record: its record; invalid content is ignored. restored: its quantized weights by name.
        """
        search = record.get("search")
        search = search if isinstance(search, Mapping) else {}
        self.history = History.from_json(search.get("history"))
        self._restored = restored
        self._gave_up = False
        self._noise.resume(search.get("noise"))
        self._noise.look_again()

    def saved(self, decision: Decision) -> None:
        """Continue from a decision. Call this once it is certain that its checkpoint is written."""
        self.history = decision.history or self.history
        self._sight = decision.sight
        self._reference = self._reference if decision.reference is None else decision.reference

    def learn_size(self, predicted: float | None, stored: int) -> None:
        """Correct later predictions: the weights of a delta took ``stored`` bytes instead of ``predicted``."""
        if predicted and stored:
            self._size_factor *= stored / predicted

    def decide(
        self,
        weights: KMeansWeights | GridWeights,
        decided: Mapping[str, ParameterValues],
        fisher: Mapping[str, float],
    ) -> Decision:
        """Return the most compact configuration that is good enough. Collective.

        weights: to quantize, as the quantizer needs them. decided: the values that other parameters will have in the
        checkpoint, by their name in the model. fisher: the mean squared gradient of each tensor as far as known, the
        same on all ranks; used if there is no metric.

        If ``evaluate`` fails on a candidate, that candidate is not good enough. If it fails on the weights in training,
        or is not finite there, the decision is lossless. Raises EvaluateError if it fails on a rank of several, or if
        it has never worked and fails on the weights in training.
        """
        allowed = self._agree()
        if isinstance(weights, GridWeights):
            quantizer: Quantizer = weights
        else:
            quantizer = PublishedQuantizer(weights, SizeModel(weights), self._size_factor)
        estimate = _distortion_judge(weights, fisher)
        if self._metric is not None:
            with bar_removed():
                try:
                    return self._decide_by_metric(self._metric, quantizer, decided, allowed, estimate)
                except MixedScoresError:  # from now on, all ranks score the same candidate
                    self._warn("evaluate communicates between ranks, but did not at first: all are scored again")
                    return self._decide_by_metric(self._metric, quantizer, decided, allowed, estimate)
        if self._fixed is not None:
            return Decision("fixed", self._fixed, quantizer.quantize(self._fixed))
        return self._decide_by_estimate(quantizer, estimate, allowed)

    def _agree(self) -> float:
        """Make all ranks use the same numbers, and return the degradation that is allowed: the smallest of all ranks.

        Rank 0 alone writes checkpoints and learns their sizes. Collective.
        """
        by_rank = self._group.all_gather((self.max_degradation, self.last_resort, self._size_factor))
        self._size_factor = by_rank[0][2]
        self._agreed_last_resort = min(last_resort for _, last_resort, _ in by_rank)
        return min(max_degradation for max_degradation, _, _ in by_rank)

    def _decide_by_metric(
        self,
        metric: UserMetric,
        quantizer: Quantizer,
        decided: Mapping[str, ParameterValues],
        allowed: float,
        estimate: DistortionJudge,
    ) -> Decision:
        """Decide by the user's metric; by the estimate if the metric does not tell weights apart."""
        original = metric.original()
        if original.problem is not None:
            decision = self._decide_unjudged(quantizer, allowed, original.problem)
            return replace(decision, equivalents=original.spent, noise=self._noise.to_json())
        judge = metric.judge(original, decided)
        at_once = 1 if original.communicates else len(self._group.replicas)
        notes = metric.notes(original, allowed)
        limit = allowed - original.noise_margin
        trials = self._trials(quantizer, judge, limit, at_once)
        if self._fixed is not None:
            decision = self._measure(self._fixed, trials, judge, notes)
        else:
            found = self._search(quantizer, trials)
            sight, note, reference = self._sight_of(metric, original.score, quantizer, trials)
            if note is not None:
                decision = self._decide_by_estimate(quantizer, estimate, allowed, [*notes, note])
                decision = replace(decision, sight=sight, quality=trials.quality_of(decision.configuration))
            else:
                decision = self._decide(found, trials, judge, limit, original.noise_margin, notes)
            decision = replace(decision, reference=reference)
        return replace(decision, equivalents=original.spent + trials.spent, noise=self._noise.to_json())

    def _decide_by_estimate(
        self, quantizer: Quantizer, estimate: DistortionJudge, allowed: float, notes: Sequence[str] = ()
    ) -> Decision:
        """Decide by how far the weights move."""
        at_once = 1 if _shards_of(quantizer).divided else self._group.size
        trials = self._trials(quantizer, estimate, allowed, at_once)
        return self._decide(self._search(quantizer, trials), trials, estimate, allowed, 0.0, notes)

    def _sight_of(
        self, metric: UserMetric, score: float, quantizer: Quantizer, trials: Trials
    ) -> tuple[Sight, str | None, float]:
        """Return what the metric tells of weights, a note unless it sees, and the score to compare later ones with.

        Logs the note when that is new. score: of the weights in training. Costs an evaluation if the scores are
        suspicious. Collective.
        """
        degradations = [trial.degradation for trial in trials.done]
        known = self._reference
        worsened = known is not None and has_worsened(known, score, metric.higher_is_better)
        suspicious = is_suspicious(degradations, trials.limit, self._sight)
        if not quantizer.weights or not (suspicious or self._group.from_rank_0(worsened)):
            return "sees", None, score if known is None else known
        found = trials.score_zeros()
        sight = sight_of(found)
        if sight == "sees" or found[0] is None:
            return "sees", None, score
        note = note_on(sight, found[0].original, found[0].restored, metric.higher_is_better, early=known is None)
        if sight != self._sight:
            self._warn(note)
        return sight, note, score

    def _decide_unjudged(self, quantizer: Quantizer, allowed: float, problem: str) -> Decision:
        """Decide if the metric of the weights in training is unusable."""
        if self._fixed is None:
            note = f"{problem}: candidates cannot be judged, so the weights are stored exactly"
            self._warn(note)
            return Decision("lossless", None, limit=allowed, notes=[note])
        note = f"{problem}: the degradation of this checkpoint is unknown"
        return Decision("fixed", self._fixed, quantizer.quantize(self._fixed), notes=[note])

    def _trials(self, quantizer: Quantizer, judge: Judge | PairedJudge, limit: float, per_round: int) -> Trials:
        """Return the trials of one save. per_round: how many configurations are scored in one round."""
        since_restore = Displacement(quantizer.weights, self._restored, _shards_of(quantizer))
        if self._fixed is not None:  # measured on all batches, whatever it is
            limit = math.inf
        return Trials(quantizer, judge, since_restore, limit, self._group, per_round)

    def _decide(
        self,
        found: Found,
        trials: Trials,
        judge: Judge | PairedJudge,
        limit: float,
        noise_margin: float,
        notes: Sequence[str],
    ) -> Decision:
        """Return the decision for what a search has found. limit: without ``noise_margin``. notes: for the record."""
        self._remember(found, trials)
        failures = dict.fromkeys(trial.error for trial in trials.done if trial.error)
        failed = [f"evaluate failed on a candidate ({error})" for error in failures]
        for failure in failed:
            self._warn(failure)
        notes = [*notes, *found.notes, *failed]
        chosen, search, history = found.chosen, found.search, None
        if found.good_enough is not None and trials.has_weights:
            history = self.history.after(limit, found.good_enough, _degradations_by_scale(trials))
        elif chosen is None and limit < (largest := self._agreed_last_resort - noise_margin):
            chosen, note = self._best_of(trials, limit, largest)
            if chosen is not None and note is not None:
                notes, limit = [*notes, note], largest
                search = "scale" if isinstance(chosen, GridConfiguration) else "more bins"
                self._warn(note)
        if chosen is None:
            reason = why_none_is_good_enough(trials.done, judge.judged_by, limit, noise_margin)
            warning = (
                "no candidate is good enough: weights are stored exactly and the file is many times larger; " + reason
            )
            self._warn(warning)
            notes.append(warning)
            return Decision("lossless", None, {}, None, limit, judge.judged_by, trials.done, notes)
        quantized, quality = trials.result(chosen)
        if judge.judged_by != "evaluate":
            quality = None
        return Decision(search, chosen, quantized, quality, limit, judge.judged_by, trials.done, notes, history=history)

    def _best_of(self, trials: Trials, limit: float, largest: float) -> tuple[Knobs | None, str | None]:
        """Return the best of what was tried, and a note, if it loses at most ``largest``. Collective."""
        best = trials.best()
        if best is None or not (lost := trials.finished(best)) <= largest:
            return None, None
        return best, (
            f"no candidate stayed within {max(limit, 0):.3g}, all that the training's budget allows now: the best of "
            f"{len(trials.done)} was taken, which loses {lost:.3g} of at most {largest:.3g}"
        )

    def _search(self, quantizer: Quantizer, trials: Trials) -> Found:
        """Search by the method of the quantizer."""
        if not quantizer.weights:
            return self._repeat_last(quantizer, trials)
        if isinstance(quantizer, GridWeights):
            return search_grid(quantizer, trials, self.history.scale, self._gave_up)
        assert isinstance(quantizer, PublishedQuantizer)
        return search_published(quantizer, trials, self.history.last_configuration(trials.limit), self._gave_up)

    def _remember(self, found: Found, trials: Trials) -> None:
        """Remember whether something was good enough, and whether the last restore still matters."""
        if not trials.has_weights:
            return
        self._gave_up = found.good_enough is None
        if found.good_enough is not None:
            kept = trials.trial(found.good_enough).progress
            on_grid = isinstance(found.good_enough, GridConfiguration)
            least_kept = displacement.LEAST_KEPT if on_grid else published_method.LEAST_KEPT
            stochastic = isinstance(found.good_enough, GridConfiguration) and found.good_enough.dithered
            if kept is not None and kept >= least_kept and not stochastic:
                self._restored = {}  # weights are far enough from the restored ones

    def _repeat_last(self, quantizer: Quantizer, trials: Trials) -> Found:
        """Score the last configuration again: no weight has changed, so there is nothing to choose or to remember."""
        on_grid = isinstance(quantizer, GridWeights)
        if on_grid:
            last = self.history.scale
            configuration: Knobs = GridConfiguration(0 if last is None else last.exponent)
        else:
            configuration = self.history.last_configuration(trials.limit) or Configuration()
        if not trials.is_good_enough(configuration):
            return NOTHING_GOOD_ENOUGH
        return Found("scale" if on_grid else "neighbourhood", configuration, configuration)

    def _measure(self, fixed: Knobs, trials: Trials, judge: Judge | PairedJudge, notes: list[str]) -> Decision:
        """Measure the degradation of the user's configuration."""
        trials.score([fixed])
        quantized, quality = trials.result(fixed)
        if quality is None or not math.isfinite(quality.degradation):
            error = trials.done[0].error
            problem = f"evaluate failed ({error})" if error else "the metric is not finite"
            notes = [*notes, f"{problem}: the degradation of this checkpoint is unknown"]
        return Decision("fixed", fixed, quantized, quality, None, judge.judged_by, trials.done, notes)

    def _warn(self, note: str) -> None:
        """Log a note at once, on one rank; the record comes later."""
        if self._group.rank == 0:
            log.warning(note)


def _distortion_judge(weights: KMeansWeights | GridWeights, fisher: Mapping[str, float]) -> DistortionJudge:
    if isinstance(weights, GridWeights):
        weighting = weights.fisher
    else:
        weighting = fisher if fisher.keys() >= weights.weights.keys() else {}
    judged_by: JudgedBy = "fisher distortion" if fisher and weighting else "distortion"
    return DistortionJudge(weights.weights, weighting, judged_by, _shards_of(weights))


def _degradations_by_scale(trials: Trials) -> dict[int, float]:
    """Return the degradations of grids by scale exponent, as far as they were judged."""
    return {
        trial.configuration.scale: trial.degradation
        for trial in trials.done
        if isinstance(trial.configuration, GridConfiguration) and trial.degradation is not None
    }


def _shards_of(weights: object) -> Shards:
    """Return the shards that the weights are. Only the grid quantizer supports any."""
    return weights.shards if isinstance(weights, GridWeights) else WHOLE
