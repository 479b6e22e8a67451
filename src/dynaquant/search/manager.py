"""The configuration manager (method 1.4): finds, at every checkpoint, the configuration that its weights get."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from dynaquant.quantize.grid import GridConfiguration
from dynaquant.quantize.grid_weights import GridWeights
from dynaquant.quantize.kmeans_weights import KMeansWeights
from dynaquant.quantize.knobs import Knobs, in_short
from dynaquant.quantize.partition import Configuration
from dynaquant.search.displacement import Progress
from dynaquant.search.exhaustive import guided_exhaustive
from dynaquant.search.history import History
from dynaquant.search.judge import DISTORTION_SCALE, DistortionJudge, Judge, JudgedBy, MetricJudge
from dynaquant.search.metric import UserMetric
from dynaquant.search.neighbourhood import delta_neighbourhood
from dynaquant.search.noise import Noise
from dynaquant.search.quality import Evaluate, Quality, Value
from dynaquant.search.scale_search import scale_search
from dynaquant.search.size import ClusteredWeights, SizeModel
from dynaquant.search.space import Candidate, Space
from dynaquant.search.trials import Mixed, Quantizer, Trial, Trials, shortfall
from dynaquant.tensors.stored import QuantizedTensor
from dynaquant.training.ranks import Group

log = logging.getLogger("dynaquant")

Search = Literal["fixed", "scale", "exhaustive", "neighbourhood", "more bins", "lossless"]
"""How a configuration was found. ``scale``: of the grid; the others by k-means. ``more bins``: nothing in the published
space was good enough; ``lossless``: nothing at all was, and the weights are stored exactly."""

LEAST_PROGRESS = 0.8
"""Share of the way that weights have come since a restore that a checkpoint must keep (``search.progress``)."""
MOST_DISTORTION = 0.1
"""The share of the weights, by squares and as the loss weights them, that a scale may lose whatever the metric says: at
the beginning of a training the metric may prefer a model without any."""
LEAST_DISTORTION = 1e-9
"""Where finer scales are not tried: about what 16-bit floats are off by."""
CLEARLY = 0.1
"""Share of the limit by which another pruning metric must be better to take over."""


@dataclass(frozen=True)
class Decision:
    """What the weights of one checkpoint get.

    configuration: None for lossless. quality: None where there is no metric or it failed. limit: the degradation that
    was allowed, None for a configuration of the user's. judged_by: None where nothing was judged.
    """

    search: Search
    configuration: Knobs | None
    quantized: Mapping[str, QuantizedTensor] = field(default_factory=dict)
    quality: Quality | None = None
    limit: float | None = None
    judged_by: JudgedBy | None = None
    trials: list[Trial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def predicted(self) -> float | None:
        """Predicted bytes of the coded weights."""
        return self._trial.predicted if self._trial else None

    @property
    def progress(self) -> float | None:
        """The share that is kept of the way since the last restore.

        None where nothing was restored, where that is forgotten, and where weights are exact.
        """
        return self._trial.progress if self._trial else None

    @property
    def _trial(self) -> Trial | None:
        return next((trial for trial in self.trials if trial.configuration == self.configuration), None)


class ConfigurationManager:
    """Chooses configurations, from one checkpoint to the next.

    max_degradation: ε, the largest relative loss of quality of one checkpoint; it may be changed at any time.
    fixed: a configuration of the user's, which is not searched for; the metric only takes note of it. group: the ranks
    that score candidates in parallel; all of them call ``decide``, with the same weights. noise: the noise of
    ``evaluate`` as another manager knows it.
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
        self._noise = noise or Noise()
        self._metric = None if evaluate is None else UserMetric(model, evaluate, higher_is_better, self._noise, group)
        self._fixed, self._group = fixed, group
        self.history = History()
        """What ``resume`` needs to know."""
        self._restored: Mapping[str, QuantizedTensor] = {}
        self._size_factor = 1.0
        self._gave_up = False  # whether the last checkpoint found nothing good enough

    @property
    def judges_by_distortion(self) -> bool:
        """Whether a stand-in decides, as there is no metric."""
        return self._metric is None and self._fixed is None

    def resume(self, record: Mapping[str, Any], restored: Mapping[str, QuantizedTensor]) -> None:
        """Goes on from a checkpoint that was restored: its record, in which anything may stand, and its weights."""
        search = record.get("search")
        self.history = History.from_json(search.get("history") if isinstance(search, Mapping) else None)
        self._restored = restored
        self._gave_up = False
        self._noise.look_again()

    def learn_size(self, predicted: float | None, stored: int) -> None:
        """Takes note that the weights of a delta took ``stored`` bytes."""
        if predicted and stored:
            self._size_factor *= stored / predicted

    def decide(
        self,
        weights: KMeansWeights | GridWeights,
        known: Mapping[str, Value],
        fisher: Mapping[str, float],
    ) -> Decision:
        """The most compact configuration that is good enough. Collective.

        weights: as the quantizer needs them. known: values of parameters whose quantization is not to be decided, or
        what makes them, by their name in the model. fisher: the mean squared gradient of each tensor, as far as known
        and the same on all ranks, for the distortion that judges where there is no ``evaluate``.

        Raises EvaluateError if ``evaluate`` fails on a rank of a distributed training. In a single process, a candidate
        on which it fails is not good enough. If it fails on the weights in training, EvaluateError is raised if it has
        never worked. Otherwise, and if it is not finite there, the decision is lossless.
        """
        quantizer: Quantizer = weights if isinstance(weights, GridWeights) else self._clustered(weights)
        if self._metric is None:
            if self._fixed is not None:
                return Decision("fixed", self._fixed, quantizer.quantize(self._fixed))
            # What decides has to be the same on every rank.
            limit = self._group.from_rank_0(self.max_degradation)
            return self._choose(quantizer, self._distortion(weights, fisher), limit, 0.0, [])
        try:
            return self._by_metric(self._metric, quantizer, known)
        except Mixed:  # from now on all ranks score the same candidate
            self._warn("evaluate communicates between ranks, but did not at first: all candidates are scored again")
            return self._by_metric(self._metric, quantizer, known)

    def _distortion(self, weights: KMeansWeights | GridWeights, fisher: Mapping[str, float]) -> DistortionJudge:
        if isinstance(weights, GridWeights):
            weighting = weights.fisher
        else:
            weighting = fisher if fisher.keys() >= weights.weights.keys() else {}
        judged_by: JudgedBy = "fisher distortion" if fisher and weighting else "distortion"
        return DistortionJudge(weights.weights, weighting, judged_by)

    def _by_metric(self, metric: UserMetric, quantizer: Quantizer, known: Mapping[str, Value]) -> Decision:
        original = metric.original()
        allowed = min(self._group.all_gather(self.max_degradation))
        if original.problem is not None:
            return self._without_quality(quantizer, allowed, original.problem)
        judge = metric.judge(original.score, known)
        return self._choose(quantizer, judge, allowed, original.margin, metric.notes(original, allowed))

    def _clustered(self, sketched: KMeansWeights) -> ClusteredWeights:
        self._size_factor = self._group.from_rank_0(self._size_factor)  # only rank 0 learns it
        return ClusteredWeights(sketched, SizeModel(sketched), self._size_factor)

    def _without_quality(self, quantizer: Quantizer, allowed: float, reason: str) -> Decision:
        if self._fixed is None:
            note = f"{reason}: candidates cannot be judged, so the weights are stored exactly"
            self._warn(note)
            return Decision("lossless", None, limit=allowed, notes=[note])
        note = f"{reason}: what this checkpoint costs is unknown"
        return Decision("fixed", self._fixed, quantizer.quantize(self._fixed), notes=[note])

    def _warn(self, note: str) -> None:
        """Logs a note at once, as the record comes later."""
        if self._group.rank == 0:
            log.warning(note)

    def _choose(self, quantizer: Quantizer, judge: Judge, allowed: float, margin: float, notes: list[str]) -> Decision:
        """allowed: the degradation. margin: the part of it that the noise of the metric takes."""
        limit = allowed - margin
        progress = Progress(quantizer.weights, self._restored)
        trials = Trials(quantizer, judge, progress, limit, self._group, self._group.saw_communication())
        if self._fixed is not None:
            return self._take_note_of_fixed(trials, judge, notes)
        if not quantizer.weights:
            search, configuration = self._choose_nothing(quantizer, trials, limit)
        elif isinstance(quantizer, GridWeights):
            search, configuration = self._choose_scale(quantizer, trials, limit, notes)
        else:
            assert isinstance(quantizer, ClusteredWeights)
            search, configuration = self._choose_clusters(quantizer, trials, limit, notes)
        failures = dict.fromkeys(trial.error for trial in trials.done if trial.error)
        notes += [f"evaluate failed on a candidate ({error})" for error in failures]
        if configuration is None:
            notes.append(
                "no candidate is good enough: weights are stored exactly and the file is many times larger; "
                + shortfall(trials.done, judge.judged_by, limit, margin)
            )
            self._warn(notes[-1])
            return Decision("lossless", None, {}, None, limit, judge.judged_by, trials.done, notes)
        quantized, quality = trials.result(configuration)
        if not isinstance(judge, MetricJudge):
            quality = None
        return Decision(search, configuration, quantized, quality, limit, judge.judged_by, trials.done, notes)

    def _choose_scale(
        self, weights: GridWeights, trials: Trials, limit: float, notes: list[str]
    ) -> tuple[Search, Knobs | None]:
        lowest, highest = weights.scale_exponent_for(LEAST_DISTORTION), weights.scale_exponent_for(MOST_DISTORTION)

        def score(scales: Sequence[int], dithered: bool = False) -> list[float]:
            return trials.score([GridConfiguration(scale, dithered) for scale in scales])

        # Where nothing was good enough last time, the most that can be tried says whether a search is worth its cost.
        if self._gave_up and not score([lowest])[0] <= limit:
            return "lossless", None
        guess = weights.scale_exponent_for(max(limit, 0) / DISTORTION_SCALE) if limit > 0 else lowest
        start, settled = self.history.scale(limit) or (guess, False)
        found = scale_search(start, lowest, highest, score, limit, settled, trials.width)
        self._gave_up = found is None
        if found is None:
            return "lossless", None
        by_quality = GridConfiguration(found)
        self.history.note(limit, by_quality)
        if self._keeps_enough(trials, by_quality):
            return "scale", by_quality
        # Rounded at random, weights keep their way in the mean; a second search finds what that costs.
        dithered = scale_search(found, lowest, highest, lambda scales: score(scales, True), limit, True, trials.width)
        # Even the finest may fail by chance where little is allowed: what lies beyond its levels is rounded to 16 bits.
        chosen = _keeping_most(trials, limit) if dithered is None else GridConfiguration(dithered, True)
        notes.append(
            f"rounded to the nearest level, weights keep {trials.trial(by_quality).progress:.0%} of the way since the "
            f"restore; {'with ' + in_short(chosen) if dithered is None else 'rounded at random'}, "
            f"{trials.trial(chosen).progress:.0%}"
        )
        return "scale", chosen

    def _keeps_enough(self, trials: Trials, by_quality: Knobs) -> bool:
        """Whether what was found by quality keeps enough of the way since a restore, which is then forgotten."""
        kept = trials.trial(by_quality).progress
        if kept is not None and kept >= LEAST_PROGRESS:
            self._restored = {}
        return kept is None or kept >= LEAST_PROGRESS

    def _choose_clusters(
        self, weights: ClusteredWeights, trials: Trials, limit: float, notes: list[str]
    ) -> tuple[Search, Knobs | None]:
        sketched = weights.sketched
        space = Space(
            embeddings="embedding" in sketched.layer_types.values(),
            metrics=("magnitude", "sensitivity") if sketched.sensitivities else ("magnitude",),
        )
        search, found = self._search(space, weights.sizes, trials, limit)
        self._gave_up = found is None
        if found is None:
            return search, None
        self.history.note(limit, space.configuration(found))
        return search, self._with_progress(space, weights.sizes, found, trials, limit, notes)

    def _with_progress(
        self, space: Space, sizes: SizeModel, found: Candidate, trials: Trials, limit: float, notes: list[str]
    ) -> Knobs:
        """What was found by quality, or the smallest with more bins or less pruned that also keeps enough progress.

        Where nothing good enough does, it is what keeps most. The history is none of its business: as training goes on,
        the way since the restore grows, until what quality asks for is enough and the restore is forgotten.
        """
        by_quality = space.configuration(found)
        if self._keeps_enough(trials, by_quality):
            return by_quality

        def finer(step: Candidate) -> Configuration:
            return space.configuration(space.finer(found, *step.point))

        best = guided_exhaustive(
            space.finer_shape(found),
            [found.metric],
            lambda step: sizes.predict(finer(step)),
            lambda steps: trials.score([finer(step) for step in steps], LEAST_PROGRESS),
            limit,
            trials.width,
        )
        chosen = _keeping_most(trials, limit) if best is None else finer(best)
        notes.append(
            f"{in_short(by_quality)}, would be good enough, but keep {trials.trial(by_quality).progress:.0%} "
            f"of the way since the restore; "
            f"{in_short(chosen)}, keep {trials.trial(chosen).progress:.0%}"
        )
        return chosen

    def _choose_nothing(self, quantizer: Quantizer, trials: Trials, limit: float) -> tuple[Search, Knobs | None]:
        """No weight is to be quantized: there is nothing to choose, and nothing to learn for the next checkpoint."""
        on_grid = isinstance(quantizer, GridWeights)
        last = self.history.scale(limit) or (0, False)
        configuration = GridConfiguration(last[0]) if on_grid else self.history.nearest(limit) or Configuration()
        if not trials.score([configuration])[0] <= limit:
            return "lossless", None
        return "scale" if on_grid else "neighbourhood", configuration

    def _take_note_of_fixed(self, trials: Trials, judge: Judge, notes: list[str]) -> Decision:
        assert self._fixed is not None
        trials.score([self._fixed])
        quantized, quality = trials.result(self._fixed)
        if quality is None or not math.isfinite(quality.degradation):
            error = trials.done[0].error
            reason = f"evaluate failed ({error})" if error else "the metric is not finite"
            notes.append(f"{reason}: what this checkpoint costs is unknown")
        return Decision("fixed", self._fixed, quantized, quality, None, judge.judged_by, trials.done, notes)

    def _search(self, space: Space, sizes: SizeModel, trials: Trials, limit: float) -> tuple[Search, Candidate | None]:
        def size(candidate: Candidate) -> float:
            return sizes.predict(space.configuration(candidate))

        def score(candidates: Sequence[Candidate]) -> list[float]:
            return trials.score([space.configuration(candidate) for candidate in candidates])

        # Where nothing was good enough last time, the most that can be tried says whether a search is worth its cost.
        if self._gave_up and not score(space.more_bins[-1:])[0] <= limit:
            return "lossless", None
        width = trials.width
        beyond = 0  # how many of the steps to more bins are known not to be enough
        if (start := self.history.nearest(limit)) is not None:
            last = space.candidate(start)
            found = delta_neighbourhood(
                last, space.wide_shape, space.metrics, size, score, limit, clearly=CLEARLY * max(limit, 0), width=width
            )
            if found is not None:
                return "neighbourhood", found
            beyond = max(last.point[0] - space.shape[0] + 1, 0)
        if beyond == 0 and (found := guided_exhaustive(space.shape, space.metrics, size, score, limit, width)):
            return "exhaustive", found
        rest = space.more_bins[beyond:]
        for i in range(0, len(rest), width):
            for candidate, found_degradation in zip(rest[i : i + width], score(rest[i : i + width]), strict=True):
                if found_degradation <= limit:
                    return "more bins", candidate
        return "lossless", None


def _keeping_most(trials: Trials, limit: float) -> Knobs:
    """Of what was tried and is good enough, that which keeps most of the way since the restore."""
    tried = sorted(trials.done, key=lambda trial: trial.progress or 0.0, reverse=True)
    return next(knobs for knobs in (trial.configuration for trial in tried) if trials.score([knobs])[0] <= limit)
