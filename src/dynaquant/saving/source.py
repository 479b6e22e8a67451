"""What is compressed: the state of a live training, of a file, or a part that another program hands over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dynaquant.engine.forms.external import External
from dynaquant.engine.label import Label
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.saving.division import Division
from dynaquant.saving.gradient_energy import GradientEnergy
from dynaquant.saving.training_budget import TrainingPosition

Weights = Mapping[str, Tensor]


def _unknown_parameter(name: str) -> str:
    raise KeyError(name)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A state, and what is known of it. All mappings are by name.

    tensors: those whose values are stored; what this rank holds of those that are divided. labels: of all tensors, in
    the order of the state. on_access: whether tensors are read or made on access, because they may not fit into memory
    together; they are not copied then, and quantized only when they are written. position: returns how far the
    training is at this state; None if no training continues from it.

    Weights: ``master_of`` has the names of master weights by those of their half-precision weights. mean_squares:
    returns F of each of these weights, as far as known. energy: returns how strong gradients are. alignment: see
    ``gradient_alignment``. These three are collective if there are shards. gradients: what the method has recorded.
    records_gradients: whether it records at all. vectors_count_more: whether vectors count more than other weights if
    no F is known. displaced: how far the training has moved each tensor. untrained: names of the parameters that do not
    train. hash_of: returns the ``tensor_hash`` of one.

    All others: ``external`` has the tensors whose values are not stored. frozen: names of parameters that do not train
    and have not changed; they get a file of their own. first_tolerances: those of single first moments, in place of the
    preset's. epsilons: see ``quantize_moments``. copied_exactly: names of tensors that the checkpoint's lossless copy
    has exactly; without any, there is no copy.

    division: of the tensors among the ranks; None if every rank holds all of them. notes: for the record.
    """

    tensors: Mapping[str, Tensor]
    labels: Mapping[str, Label]
    on_access: bool = False
    position: Callable[[], TrainingPosition] | None = None
    master_of: Mapping[str, str] = field(default_factory=dict)
    mean_squares: Callable[[Weights], Mapping[str, float]] = lambda _: {}
    energy: Callable[[Weights], GradientEnergy] = lambda _: GradientEnergy()
    alignment: Callable[[Weights], float] = lambda _: 1.0
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    records_gradients: bool = False
    vectors_count_more: bool = False
    displaced: Mapping[str, float] = field(default_factory=dict)
    untrained: Collection[str] = ()
    hash_of: Callable[[str], str] = _unknown_parameter
    external: Mapping[str, External] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    first_tolerances: Mapping[str, float] = field(default_factory=dict)
    epsilons: Mapping[str, float] = field(default_factory=dict)
    copied_exactly: Collection[str] = ()
    division: Division | None = None
    notes: Sequence[str] = ()

    @property
    def shards(self) -> Shards:
        """Which part of each tensor this rank holds."""
        return WHOLE if self.division is None else self.division.shards

    @property
    def weight_names(self) -> dict[str, str]:
        """The names of the tensors that hold the weights, by the names of the weights: those of master weights."""
        return {name: self.master_of.get(name, name) for name in self.tensors if self.labels[name].role == "weight"}
