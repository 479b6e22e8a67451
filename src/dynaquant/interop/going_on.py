"""State that a framework's trainer carries from one checkpoint to the next."""

from __future__ import annotations

from collections.abc import Mapping

from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.saving.record import degradation_of
from dynaquant.saving.training_budget import TrainingBudget
from dynaquant.saving.unchanged_weights import restored_weights
from dynaquant.state.tree import dict_items
from dynaquant.store.container import Header


class GoingOn:
    """State of a training that a framework's trainer saves through a ``Packer``. A ``Checkpointer`` has a ``Memory``.

    budget: what the whole training may lose by restores; None if every checkpoint may use the limit of the preset.
    """

    def __init__(self, budget: TrainingBudget | None = None) -> None:
        self.budget = budget
        self.restored: Mapping[str, QuantizedTensor] = {}
        """The weights of the last restore by name, while checkpoints have to keep what has changed since."""
        self.restored_step = 0
        """Seed of the stochastic rounding."""
        self.interval: int | None = None
        """Steps of training from the last save to this one, if known."""
        self.first_tolerances: Mapping[str, float] = {}
        """Tolerances of first moments by name, where they are not those of the preset."""
        self.exact_optimizers: Mapping[str, str] = {}
        """Names of optimizers in the state whose moments are stored exactly, each with the reason."""
        self._last: int | None = None  # steps of training at the last save

    def resume(self, header: Header, tensors: Mapping[str, StoredTensor], learning_rate: float) -> None:
        """Continue from a restored checkpoint. tensors: as stored. learning_rate: the present one."""
        self.restored_step = header.step
        self.restored = {name: last.quantized for name, last in restored_weights(header, tensors).items()}
        interval = header.record.get("interval")
        self.interval = interval if isinstance(interval, int) and interval > 0 else None
        step = dict(dict_items(header.tree)).get("global_step")
        self._last = step if isinstance(step, int) else 0
        if self.budget is not None:
            self.budget = self.budget.continued(header.record.get("training_budget"), self._last, learning_rate)
            if self.restored:
                self.budget = self.budget.restored(degradation_of(header.record))

    def advance(self, step: int, learning_rate: float, has_schedule: bool) -> None:
        """Continue to a save. step: of the training; its checkpoint may have another number."""
        if self._last is not None and step > self._last:
            self.interval = step - self._last
        self._last = step
        if self.budget is not None:
            self.budget = self.budget.at(step, learning_rate, has_schedule)

    def keeps_exactly(self, name: str) -> bool:
        """Whether a tensor belongs to an optimizer whose moments are stored exactly."""
        return any(name.startswith(f"{optimizer}.") for optimizer in self.exact_optimizers)

    def allowed(self, largest: float) -> float:
        """Return the degradation that a checkpoint may have now. largest: what the preset or the user allows."""
        return largest if self.budget is None else self.budget.allowed
