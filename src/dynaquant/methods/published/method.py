"""The method ``"published"``, of the paper: protection, pruning and clusters (method, Part 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.quantize.candidate import CandidateWeights
from dynaquant.engine.quantize.kmeans_weights import KMeansWeights, kmeans_weights, quantize_weights
from dynaquant.engine.quantize.knobs import Configuration, Knobs
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.methods.method import Method, WeightsToPrepare
from dynaquant.methods.published.search import clusters_keep_enough, search_published
from dynaquant.methods.published.size import SizeModel
from dynaquant.ranks.group import Group
from dynaquant.search.decision import Found, Search
from dynaquant.search.judge import DistortionJudge
from dynaquant.search.search_memory import SearchMemory
from dynaquant.search.trials import Trials
from dynaquant.training.gradients import moving_averages


@dataclass(frozen=True)
class Clusters:
    """The weights of a checkpoint, ready for every configuration, and their predicted sizes.

    size_factor: size of earlier deltas, relative to their predicted size.
    """

    kmeans: KMeansWeights
    sizes: SizeModel
    size_factor: float
    shards: ClassVar[Shards] = WHOLE

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The weights by name."""
        return self.kmeans.weights

    def candidate(self, configuration: Configuration) -> CandidateWeights:
        """Return the weights as ``quantize`` would store them, to be scored."""
        return self.quantize(configuration)

    def quantize(self, configuration: Configuration) -> dict[str, QuantizedTensor]:
        """Return the quantized weights by name. A pure function."""
        return quantize_weights(self.kmeans, configuration)

    def predict(self, configuration: Configuration) -> float:
        """Return the bytes of the coded weights."""
        return self.size_factor * self.sizes.predict(configuration)


@dataclass(frozen=True)
class PreparedForClusters:
    """The weights of a checkpoint, and the search for their configuration.

    mean_squares: mean squared gradients, as far as known.
    """

    quantizer: Clusters
    mean_squares: Mapping[str, float]
    last_resort: ClassVar[Search] = "more bins"

    @property
    def estimate(self) -> DistortionJudge:
        """The judge that stands in for a metric."""
        weights = self.quantizer.weights
        weighting = self.mean_squares if self.mean_squares.keys() >= weights.keys() else {}
        return DistortionJudge(weights, weighting, "fisher distortion" if weighting else "distortion")

    def bound(self, estimated: Knobs | None) -> None:
        """Return None: its search is that of the paper, and knows no bound."""

    def find(self, trials: Trials, memory: SearchMemory) -> Found:
        """Return the smallest configuration that is good enough. Collective."""
        last = memory.history.last_configuration(trials.limit)
        return search_published(self.quantizer.kmeans, self.quantizer.sizes, trials, last, memory.gave_up)

    def last(self, memory: SearchMemory, limit: float) -> tuple[Search, Knobs]:
        """Return the last configuration for the limit, or for one near it."""
        return "neighbourhood", memory.history.last_configuration(limit) or Configuration()

    def after(self, memory: SearchMemory, limit: float, found: Knobs, trials: Trials) -> SearchMemory:
        """Return what the next search starts from. Far from the restored weights, nothing needs protection any more."""
        assert isinstance(found, Configuration)
        trial = trials.trial(found)
        restored = {} if trial.progress is not None and clusters_keep_enough(trial) else memory.restored
        return replace(memory, history=memory.history.after_configuration(limit, found), restored=restored)


def _prepare(weights: WeightsToPrepare, group: Group) -> tuple[PreparedForClusters, Sequence[str]]:
    """Return the weights prepared for clusters. Collective."""
    gradients = weights.gradients
    found = group.run_on_all_ranks(lambda: kmeans_weights(weights.tensors, weights.labels, gradients))
    notes = list(found.notes)
    if weights.records_gradients and found.weights and not gradients:
        notes.append("no gradients were recorded before this save: weight magnitudes were used in place of sensitivity")
    # Rank 0 alone writes checkpoints and learns their sizes.
    size_factor = group.from_rank_0(weights.size_factor)
    return PreparedForClusters(Clusters(found, SizeModel(found), size_factor), weights.mean_squares), notes


def _mean_square(recorded: Tensor) -> float:
    """Return the mean square of an average gradient."""
    return float(recorded.square().mean())


PUBLISHED = Method(
    coder="rearranged",  # run lengths and Huffman codes
    quantizes_vectors=False,
    quantizes_moments=False,
    supports_shards=False,
    uses_mean_squares=False,
    adds_up_steps=False,
    accumulate=moving_averages,
    mean_square=_mean_square,
    prepare=_prepare,
)
