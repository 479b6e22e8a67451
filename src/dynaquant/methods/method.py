"""What every method has. The rest of the code knows no more of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.forms.scheme import Coder
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.step_limits import StepLimits
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.ranks.group import Group
from dynaquant.search.manager import PreparedWeights
from dynaquant.training.gradients import Accumulate


@dataclass(frozen=True)
class WeightsToPrepare:
    """The weights of a checkpoint, and what is known of them. All mappings are by name.

    tensors: the values. shards: which part of each this rank holds. mean_squares: F, the mean squared gradient of each,
    as far as known. gradients: what ``Method.accumulate`` has returned. records_gradients: whether it records at all.
    last: of the last checkpoint. restored_step: seed of stochastic rounding. step_limits: of the preset. displaced: how
    far each has moved since the training began. size_factor: bytes that deltas took lately, relative to predictions.
    on_access: whether tensors are read on access, and are to be quantized only when they are written.
    vectors_count_more: whether vectors count more than other weights if no F is known.
    """

    tensors: Mapping[str, Tensor]
    labels: Mapping[str, Label]
    step_limits: StepLimits
    shards: Shards = WHOLE
    mean_squares: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    records_gradients: bool = False
    last: Mapping[str, QuantizedTensor] = field(default_factory=dict)
    restored_step: int = 0
    displaced: Mapping[str, float] = field(default_factory=dict)
    size_factor: float = 1.0
    on_access: bool = False
    vectors_count_more: bool = False


@dataclass(frozen=True)
class Method:
    """How weights are quantized and coded, and how a configuration is found.

    coder: of levels. quantizes_vectors, quantizes_moments: whether parameters of one dimension, and moments, are
    quantized, too. supports_shards: whether ranks may hold parts of a state. uses_mean_squares: whether ``prepare``
    needs mean squared gradients.

    accumulate: returns what to record of gradients; adds_up_steps: whether it adds up all steps. mean_square: returns
    the mean squared gradient of a tensor, up to a factor, from what was recorded of it.

    prepare: reads the weights, and returns what every configuration needs, and notes for the record. Collective.
    """

    coder: Coder
    quantizes_vectors: bool
    quantizes_moments: bool
    supports_shards: bool
    uses_mean_squares: bool
    adds_up_steps: bool
    accumulate: Accumulate
    mean_square: Callable[[Tensor], float]
    prepare: Callable[[WeightsToPrepare, Group], tuple[PreparedWeights, Sequence[str]]]
