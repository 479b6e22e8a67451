"""What a metric scores: something with weights, in whose place candidates are put. A search knows no more of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from dynaquant.engine.kernels.reused import ReusedMemory
from dynaquant.engine.quantize.candidate import CandidateWeights
from dynaquant.search.evaluation import Evaluate

ParameterValues = Tensor | Callable[[], Tensor]
"""Values for a parameter, or a function that returns them. Functions are called one at a time, to save memory."""


class Subject(Protocol):
    """What a metric scores: the model of a training, or a state that was read. Weights have the names of the state."""

    def values(self, candidate: CandidateWeights, reused: ReusedMemory) -> Mapping[str, ParameterValues]:
        """Return the values of a candidate, for ``score``. reused: memory for one candidate after another."""

    def score(self, values: Mapping[str, ParameterValues], evaluate: Evaluate) -> float:
        """Return the metric with other values for some weights. Names that the subject does not have are ignored.

        Nothing has changed when this returns or raises. Raises ValueError if ``evaluate`` does not return a number, and
        whatever it raises.
        """

    def uses_batch_statistics(self, evaluate: Evaluate) -> bool:
        """Whether a metric evaluates batch norms by the statistics of its batches."""
