"""Trials: the configurations of one checkpoint that are tried, one per rank at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from dynaquant.quantize.knobs import Knobs, knobs_from_json, knobs_to_json
from dynaquant.search.displacement import Progress
from dynaquant.search.failures import attempt, raise_on_every_rank, said
from dynaquant.search.judge import Judge, JudgedBy
from dynaquant.search.quality import Quality
from dynaquant.tensors.stored import QuantizedTensor
from dynaquant.training.ranks import Group


class Quantizer(Protocol):
    """The weights of one checkpoint, to be quantized with whatever configuration."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """By name."""
        ...

    def quantize(self, configuration: Any) -> Mapping[str, QuantizedTensor]:
        """By name; a pure function."""
        ...

    def predict(self, configuration: Any) -> float | None:
        """Bytes that they would take, as far as can be told without quantizing."""
        ...


@dataclass(frozen=True)
class Trial:
    """One configuration that was tried at a checkpoint.

    predicted: bytes of the coded weights, None where nothing predicts them. degradation: relative, NaN where the metric
    was not finite or failed, None where it was not asked, as too little progress was kept. progress: the share that is
    kept of the way since the last restore (``search.progress``), None where there is none. seconds: to quantize and to
    score. error: what ``evaluate`` raised.
    """

    configuration: Knobs
    predicted: float | None
    degradation: float | None
    progress: float | None
    seconds: float
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The trial as it stands in a record."""
        return {
            "configuration": knobs_to_json(self.configuration),
            "predicted": None if self.predicted is None else round(self.predicted),
            "degradation": number_to_json(self.degradation),
            "progress": number_to_json(self.progress),
            "seconds": round(self.seconds, 6),
            "error": self.error,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trial:
        """The inverse of ``to_json``. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            knobs_from_json(data["configuration"]),
            None if data["predicted"] is None else float(data["predicted"]),
            None if data["degradation"] is None else float(data["degradation"]),
            None if data["progress"] is None else float(data["progress"]),
            float(data["seconds"]),
            data["error"],
        )


def number_to_json(value: float | None) -> float | str | None:
    """What JSON has as it is, and the name of a number that it does not have: NaN and the infinities."""
    return value if value is None or math.isfinite(value) else repr(value)


class Mixed(Exception):  # noqa: N818
    """Ranks communicated while they scored different configurations, so their scores are mixed up."""


class Trials:
    """Scores configurations.

    progress: of the weights since a restore. limit: the largest degradation that is good enough. together: whether all
    ranks score the same configuration, because the metric communicates; then the number of rank 0 counts.
    """

    def __init__(
        self,
        quantizer: Quantizer,
        judge: Judge,
        progress: Progress,
        limit: float,
        group: Group,
        together: bool,
    ) -> None:
        self.width = 1 if together else group.size
        """Most configurations that are scored in one round."""
        self._quantizer, self._judge, self._progress = quantizer, judge, progress
        self._limit, self._group = limit, group
        self._known: dict[Knobs, tuple[Trial, Quality | None]] = {}
        self._kept: tuple[Knobs, Mapping[str, QuantizedTensor]] | None = None

    @property
    def done(self) -> list[Trial]:
        """What was tried, in order."""
        return [trial for trial, _ in self._known.values()]

    def score(self, configurations: Sequence[Knobs], least_progress: float = 0.0) -> list[float]:
        """Returns the degradations of at most ``width`` configurations. Collective.

        A configuration that keeps less than ``least_progress`` is infinitely bad, and not evaluated. With more ranks
        than configurations, several ranks score the same one. So if the metric unexpectedly communicates, no rank waits
        for one that does not evaluate.

        Raises EvaluateError on every rank of several if ``evaluate`` failed on one. Raises Mixed if the metric
        communicated while ranks scored different configurations.
        """
        new = [c for c in dict.fromkeys(configurations) if not self._is_known(c, least_progress)]
        if new:
            assert len(new) <= self.width
            mine = new[self._group.rank % len(new)]
            outcome = self._group.run_on_all_ranks(lambda: self._try(mine, least_progress))
            if self.width > 1 and self._group.saw_communication():
                raise Mixed
            outcomes = self._group.all_gather(outcome)
            if self._group.size > 1:
                raise_on_every_rank([trial.error for trial, _ in outcomes], None)
            for trial, quality in outcomes[: len(new)]:
                self._known[trial.configuration] = trial, quality
        trials = [self._known[configuration][0] for configuration in configurations]
        return [
            trial.degradation if trial.degradation is not None and _keeps(trial, least_progress) else math.inf
            for trial in trials
        ]

    def _is_known(self, configuration: Knobs, least_progress: float) -> bool:
        if configuration not in self._known:
            return False
        trial = self._known[configuration][0]
        return trial.degradation is not None or not _keeps(trial, least_progress)

    def _try(self, configuration: Knobs, least_progress: float) -> tuple[Trial, Quality | None]:
        start = time.perf_counter()
        quantized = self._quantizer.quantize(configuration)
        progress = self._progress.kept(quantized) if self._progress else None
        degradation, quality, error = None, None, None
        if progress is None or progress >= least_progress:
            quality, raised = attempt(lambda: self._judge(quantized))
            error = said(raised)
            degradation = math.nan if quality is None else quality.degradation
            if degradation <= self._limit:
                self._kept = configuration, quantized  # the last good one is mostly the one that is chosen
        seconds = time.perf_counter() - start
        predicted = self._quantizer.predict(configuration)
        return Trial(configuration, predicted, degradation, progress, seconds, error), quality

    def trial(self, configuration: Knobs) -> Trial:
        """What is known of a configuration that was tried."""
        return self._known[configuration][0]

    def result(self, configuration: Knobs) -> tuple[Mapping[str, QuantizedTensor], Quality | None]:
        """The weights quantized with a configuration that was scored, and their quality."""
        if self._kept is None or self._kept[0] != configuration:
            self._kept = configuration, self._quantizer.quantize(configuration)
        return self._kept[1], self._known[configuration][1]


def _keeps(trial: Trial, least_progress: float) -> bool:
    return trial.progress is None or trial.progress >= least_progress


def shortfall(trials: Sequence[Trial], judged_by: JudgedBy, limit: float, margin: float) -> str:
    """Returns why no trial is good enough, and what would help.

    limit: the degradation that was allowed, less ``margin``, which the noise of the metric takes.
    """
    told = [
        trial.degradation for trial in trials if trial.degradation is not None and not math.isnan(trial.degradation)
    ]
    if limit <= 0 < margin:
        return f"the noise of the metric takes all of the {limit + margin:.3g} allowed; evaluate on more batches"
    if not told:
        return "evaluate fails, or is not finite, on every candidate"
    if math.isinf(best := min(told)):
        return (
            "every candidate counts as infinitely worse: the metric is exactly 0 in training, or infinite for every "
            "candidate; use another metric, such as a loss"
        )
    left = f"{limit:.3g} left by its noise" if margin > 0 else f"{limit:.3g} allowed"
    if judged_by != "evaluate":
        return (
            f"the best of {len(told)} tried is estimated to be worse by {best:.3g}, beyond the {left}; allow more "
            "(max_degradation), or give evaluate"
        )
    return (
        f"the best of {len(told)} tried makes the metric worse by {best:.3g}, beyond the {left}; allow more "
        "(max_degradation), or use a metric that resolves smaller changes, such as a loss on more data"
    )
