"""A state as it is to be stored, and what the next save needs to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynaquant.engine.label import Label
from dynaquant.saving.assemble import Assembled
from dynaquant.saving.division import Division
from dynaquant.saving.memory import Memory
from dynaquant.search.decision import Decision


@dataclass(frozen=True)
class Compressed:
    """The tensors of a state as they are to be stored, and how that was decided.

    assembled: empty on ranks other than 0. frozen: names of parameters that do not train and have not changed.
    division: which rank writes what; None if rank 0 writes all. displaced: how far the training has moved each
    parameter. memory: of this save, as far as it depends on what is here.
    """

    assembled: Assembled
    division: Division | None
    frozen: frozenset[str]
    labels: dict[str, Label]
    decision: Decision
    notes: list[str]
    displaced: Mapping[str, float]
    memory: Memory
