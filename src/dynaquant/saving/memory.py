"""All that one save of a training remembers for the next."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dynaquant.engine.forms.form import StoredTensor
from dynaquant.options import Quality
from dynaquant.saving import displacements
from dynaquant.saving.displacements import Displacements
from dynaquant.saving.presets import budget_of, largest_degradation
from dynaquant.saving.record import degradation_of, limit_of
from dynaquant.saving.schedule import Schedule
from dynaquant.saving.training_budget import TrainingBudget
from dynaquant.saving.unchanged_weights import LastWeight, restored_weights
from dynaquant.search.search_memory import SearchMemory
from dynaquant.store.container import DISPLACED, Header

TYPICAL_EQUIVALENTS = 2.0
"""What a search is expected to cost before any was measured, in evaluations on all batches: one of the weights in
training, one of the candidate that is chosen."""
SEARCHES_REMEMBERED = 9
"""An automatic schedule expects the median cost of so many searches."""


@dataclass(frozen=True)
class Memory:
    """All that one save remembers for the next. A save makes a new one, which replaces it after the hand-over.

    So a save that fails leaves it as it was. What the live objects gather between two saves, such as gradients, is not
    in it.

    displacements: how far the training has moved each tensor since it began. schedule: when the next save is due; each
    save makes its own copy. search: of the configuration.
    budget: what the whole training may lose by restores, and has lost; None if every checkpoint may use the limit.
    last_weights: the weights of the last checkpoint, by name. last_limit: the degradation that it was allowed; None if
    there is none. restored_step: of the last restore, the seed of stochastic rounding. costs: of the last searches, in
    evaluations on all batches. begun: whether this training has saved or restored a checkpoint. diverged: whether the
    last one has infinite or NaN weights. differed: names of the tensors in which ranks differed; None if unknown.
    noted: notes that were logged. strongest_gradients: the largest energy that they have had (``GradientEnergy``).
    """

    displacements: Displacements = field(default_factory=Displacements)
    schedule: Schedule = field(default_factory=lambda: Schedule(None))
    search: SearchMemory = field(default_factory=SearchMemory)
    budget: TrainingBudget | None = None
    last_weights: Mapping[str, LastWeight] = field(default_factory=dict)
    last_limit: float | None = None
    restored_step: int = 0
    costs: tuple[float, ...] = (TYPICAL_EQUIVALENTS,)
    begun: bool = False
    diverged: bool = False
    differed: frozenset[str] | None = None
    noted: frozenset[str] = frozenset()
    strongest_gradients: float = 0.0

    @classmethod
    def at_start(cls, quality: Quality) -> Memory:
        """Return the memory before the first save of a training."""
        if (total := budget_of(quality)) is None:
            return cls()
        return cls(budget=TrainingBudget(float(total), largest_degradation(quality), quality.expected_restores))

    def typical_cost(self, cost: float) -> float:
        """Return the cost of a typical search, in evaluations on all batches. cost: of the present one."""
        return statistics.median_low([*self.costs, cost])

    def after_search(self, cost: float) -> tuple[float, ...]:
        """Return the costs that the next save remembers. cost: of the present search."""
        return (*self.costs, cost)[-SEARCHES_REMEMBERED:]

    def to_record(self, displaced: Mapping[str, float]) -> dict[str, Any]:
        """Return what a record keeps beside the search. displaced: of the present save."""
        found: dict[str, Any] = {
            DISPLACED: displacements.to_json(displaced),
            "costs": list(self.costs),
            "strongest_gradients": self.strongest_gradients,
        }
        return found if self.budget is None else {**found, "training_budget": self.budget.to_json()}

    def restored(
        self,
        header: Header,
        tensors: Mapping[str, StoredTensor],
        from_lossless_copy: bool,
        rate: float,
        step: int | None = None,
    ) -> Memory:
        """Return the memory of a restored checkpoint. Invalid content of its record is ignored.

        tensors: the stored forms of the tensors that models and optimizers got. from_lossless_copy: whether they got
        the values of the lossless copy instead. rate: the present learning rate. step: of the training, if that is not
        the number of the checkpoint.
        """
        record = header.record
        last_weights = restored_weights(header, tensors)
        weights = {} if from_lossless_copy else {name: last.quantized for name, last in last_weights.items()}
        budget = self.budget
        if budget is not None:
            budget = budget.continued(record.get("training_budget"), header.step if step is None else step, rate)
            if last_weights and not from_lossless_copy:
                budget = budget.restored(degradation_of(record))
        return replace(
            self,
            displacements=self.displacements.continued(record.get(DISPLACED)),
            search=SearchMemory.from_record(record, weights),
            budget=budget,
            last_weights=last_weights,
            last_limit=limit_of(record),
            restored_step=header.step,
            costs=_costs(record.get("costs")) or self.costs,
            strongest_gradients=_energy(record.get("strongest_gradients")),
            begun=True,
            diverged=not header.summary.finite,
            differed=None,
        )

    def following(self, header: Header, tensors: Mapping[str, StoredTensor]) -> Memory:
        """Return the memory for the next save after a checkpoint that was written, not restored. tensors: as stored.

        The values from which its weights were quantized are not known, so none counts as unchanged.
        """
        search = SearchMemory.from_record(header.record, self.search.restored)
        known = restored_weights(header, tensors).items()
        last_weights = {name: LastWeight(last.quantized, b"", None) for name, last in known}
        return replace(self, search=search, last_weights=last_weights, last_limit=limit_of(header.record))


def _energy(stored: Any) -> float:
    """Return an energy from a record; 0 if it is invalid."""
    return stored if isinstance(stored, float) and 0 < stored < math.inf else 0.0


def _costs(stored: Any) -> tuple[float, ...]:
    """Return costs from a record; none if they are invalid."""
    try:
        costs = tuple(float(cost) for cost in stored)
    except (OverflowError, TypeError, ValueError):
        return ()
    return costs[-SEARCHES_REMEMBERED:] if all(0 <= cost < 1e9 for cost in costs) else ()
