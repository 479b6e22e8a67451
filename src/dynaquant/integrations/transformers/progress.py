"""What a Trainer remembers from step to step, as an extra of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch
import transformers
from transformers.trainer_callback import ExportableState

from dynaquant.state.flatten import unflatten
from dynaquant.state.tree import dict_items
from dynaquant.store.container import CheckpointFile

NAME = "trainer"
"""The name of the extra."""


class Progress:
    """The ``TrainerState`` of a Trainer, and the loss that it has added up since it last logged one.

    Transformers does not keep the second, so a resumed training would log another loss, unless every save is a multiple
    of ``logging_steps``.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._losses: list[float] = []
        self._restored: dict[str, Any] | None = None

    def update(self) -> None:
        """Take the states of the callbacks, and the losses of all ranks. All ranks must call it."""
        trainer = self._trainer
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        exportable = [callback for callback in callbacks if isinstance(callback, ExportableState)]
        trainer.state.stateful_callbacks = transformers.TrainerState(stateful_callbacks=exportable).stateful_callbacks
        self._losses = trainer.accelerator.gather(trainer._tr_loss).flatten().tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        trainer = self._trainer
        since = getattr(trainer, "_globalstep_last_logged", 0)  # not there before the first step
        # Through JSON, as Transformers stores it: numbers of NumPy become plain, tuples become lists.
        state = json.loads(json.dumps(asdict(trainer.state)))
        return {"state": state, "unlogged": {"losses": self._losses, "since": since}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a state for ``resume``. Transformers reads the ``TrainerState`` from a file, earlier."""
        self._restored = state["unlogged"]

    def resume(self) -> None:
        """Go on with the loss that was not logged, if one was restored. Its logged mean is over all ranks."""
        if self._restored is None:
            return
        trainer, losses = self._trainer, self._restored["losses"]
        same_ranks = len(losses) == trainer.args.world_size
        own = losses[trainer.args.process_index] if same_ranks else sum(losses) / max(len(losses), 1)
        trainer._tr_loss += torch.tensor(own, dtype=trainer._tr_loss.dtype)
        trainer._globalstep_last_logged = self._restored["since"]
        self._restored = None


def state_in(file: CheckpointFile) -> str | None:
    """Return the ``TrainerState`` of a checkpoint as JSON. None if no Trainer saved the checkpoint."""
    node = dict(dict_items(file.header.tree)).get(NAME)
    return None if node is None else json.dumps(unflatten(node, {})["state"])
