"""The result of a search, and the decision for the weights of one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.quantize.knobs import Knobs
from dynaquant.search.judge import JudgedBy
from dynaquant.search.scores import MeasuredQuality, Trial
from dynaquant.search.search_memory import SearchMemory

Search = Literal["fixed", "scale", "exhaustive", "neighbourhood", "more bins", "lossless"]
"""How a configuration was found.

- ``fixed``: the user gave it.
- ``scale``: search for the grid's scale exponent.
- ``exhaustive``, ``neighbourhood``: search of the published configurations.
- ``more bins``: no published configuration is good enough, but one with more bins is.
- ``lossless``: no configuration is good enough; the weights are stored exactly.
"""


@dataclass(frozen=True)
class Found:
    """The result of one method's search.

    good_enough: the most compact configuration that is good enough; the next search starts from it. None if there is
    none. chosen: the configuration for this checkpoint. It differs from ``good_enough`` if that keeps too little of the
    displacement since a restore. notes: for the record.
    """

    search: Search
    good_enough: Knobs | None
    chosen: Knobs | None
    notes: tuple[str, ...] = ()


NOTHING_GOOD_ENOUGH = Found("lossless", None, None)


@dataclass(frozen=True)
class Decision:
    """The decision for the weights of one checkpoint.

    configuration: None for lossless. quantized: the weights by name, empty for lossless. quality: None if there is no
    metric or it failed. limit: the degradation that was allowed; None if the user gave the configuration.
    judged_by: None if nothing was judged. equivalents: what was spent on the weights in training and on candidates, in
    evaluations on all batches; 0 without a metric. memory: what the next search starts from. averages: the quality of
    averages of weights, by the name of the extra, where they were judged. estimated: what a restore counts as, if
    the metric was too coarse to measure it: what was allowed without one of its steps. None otherwise.
    """

    search: Search
    configuration: Knobs | None
    quantized: Mapping[str, QuantizedTensor] = field(default_factory=dict)
    quality: MeasuredQuality | None = None
    limit: float | None = None
    judged_by: JudgedBy | None = None
    trials: list[Trial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    equivalents: float = 0.0
    memory: SearchMemory = field(default_factory=SearchMemory)
    averages: Mapping[str, MeasuredQuality] = field(default_factory=dict)
    estimated: float | None = None

    @property
    def predicted(self) -> float | None:
        """Predicted bytes of the coded weights."""
        return self._trial.predicted if self._trial else None

    @property
    def progress(self) -> float | None:
        """The share of the displacement since the last restore that the checkpoint keeps.

        None if nothing was restored, if that restore no longer matters, and for lossless.
        """
        return self._trial.progress if self._trial else None

    @property
    def _trial(self) -> Trial | None:
        return next((trial for trial in self.trials if trial.configuration == self.configuration), None)
