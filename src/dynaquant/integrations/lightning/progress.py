"""How far a training is when it saves, and what it remembers of the saves before."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynaquant.errors import CheckpointError
from dynaquant.integrations.lightning.training import Training
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
from dynaquant.saving.memory import Memory
from dynaquant.saving.training_budget import TrainingPosition, mean_learning_rate
from dynaquant.state.tree import dict_items
from dynaquant.store.container import Header

log = logging.getLogger("dynaquant")


@dataclass(frozen=True)
class Steps:
    """Steps of training. last: at the last save or restore; None before any. between: two saves, if known."""

    last: int | None = None
    between: int | None = None

    def at(self, step: int) -> Steps:
        """Return the steps at a save."""
        return Steps(step, step - self.last if self.last is not None and step > self.last else self.between)

    @classmethod
    def restored(cls, header: Header) -> Steps:
        """Return the steps after a restore. The number of a checkpoint may be another than that of its step."""
        step, interval = dict(dict_items(header.tree)).get("global_step"), header.record.get("interval")
        return cls(
            step if isinstance(step, int) else 0, interval if isinstance(interval, int) and interval > 0 else None
        )


@dataclass(frozen=True)
class Last:
    """What a save leaves for the next one. identity: of its checkpoint; empty before the first."""

    memory: Memory
    steps: Steps = Steps()
    identity: str = ""


@dataclass(frozen=True)
class Progress:
    """A training at a save.

    memory: of the last save or restore. position: what the training's budget needs; None if it has no part in it.
    is_restored: whether this is the first save after a restore.
    """

    memory: Memory
    steps: Steps
    position: TrainingPosition | None = None
    is_restored: bool = False


def progress_at(
    checkpoint: Mapping[str, Any], last: Last, loaded: StoredCheckpoint | None, training: Training | None
) -> Progress:
    """Return the progress of a training that does not save everything exactly.

    checkpoint: as Lightning saves it. last: of the last save. loaded: what the training goes on from, if it was loaded
    after the last save.
    """
    memory, steps, position, is_restored = last.memory, last.steps, None, False
    groups = [group for each in checkpoint.get("optimizer_states") or () for group in each.get("param_groups", ())]
    rate = mean_learning_rate(groups, [len(group["params"]) for group in groups])
    if loaded is not None:
        header = loaded.file.header
        restored = Steps.restored(header)
        try:
            memory = memory.restored(header, loaded.stored(), False, rate, restored.last)
            steps, is_restored = restored, True
        except CheckpointError as error:  # the training itself is not affected
            log.warning("what it has changed since step %d is not protected: %s", header.step, error)
    if groups:  # no training goes on from a checkpoint without optimizers (``save_weights_only=True``)
        step = checkpoint.get("global_step", 0)
        scaled = training is not None and training.scaled_by_rate
        steps, position = steps.at(step), TrainingPosition.of_groups(step, rate, groups, scaled)
    return Progress(memory, steps, position, is_restored)
