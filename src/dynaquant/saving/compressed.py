"""A state as it is to be stored, and what the next save needs to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.label import Label
from dynaquant.saving.assemble import Assembled
from dynaquant.saving.division import Division
from dynaquant.saving.memory import Memory
from dynaquant.saving.unchanged_weights import ComparedWeights
from dynaquant.search.decision import Decision


@dataclass(frozen=True)
class Compressed:
    """The tensors of a state as they are to be stored, and how that was decided.

    assembled: empty on ranks other than 0. division: among the ranks; None if rank 0 writes all. memory: of this
    save, as far as it depends on what is here. compared: of the weights with those of the last checkpoint.
    """

    assembled: Assembled
    division: Division | None
    labels: Mapping[str, Label]
    decision: Decision
    notes: list[str]
    memory: Memory
    compared: ComparedWeights

    @property
    def quantized_weights(self) -> set[str]:
        """The names of the weights that are stored as levels, as far as this rank knows."""
        if self.decision.configuration is None:
            return set()
        return {*self.compared.unchanged, *self.decision.quantized}

    def with_last_weights(self, stored: Mapping[str, StoredTensor]) -> Compressed:
        """Return the same with the quantized weights in the memory, for the next save. stored: at least those."""
        last = self.compared.last_weights(stored)
        return replace(self, memory=replace(self.memory, last_weights=last))
