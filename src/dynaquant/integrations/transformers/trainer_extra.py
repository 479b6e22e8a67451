"""What a Trainer remembers from step to step, as an extra of a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import broadcast_object_list
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dynaquant.state.flatten import unflatten
from dynaquant.state.tree import dict_items
from dynaquant.store.container import CheckpointFile

NAME = "trainer"
"""The name of the extra."""


class TrainerExtra:
    """The ``TrainerState`` of a Trainer, the loss that it has added up since it last logged one, and what lay beside.

    Transformers does not keep the second, so a resumed training would log another loss, unless every save is a multiple
    of ``logging_steps``. The third is the last checkpoint of Transformers beside the run (``OrdinaryCheckpoint``).

    All ranks hold the same state, so that it is stored once and can be restored on any number of ranks. Rank 0 decides
    on the ``TrainerState``, as in Transformers: those of others differ, in the times of evaluations, for example.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._state: dict[str, Any] = {}
        self._losses: list[float] = []
        self._beside: str | None = None
        self._restored: dict[str, Any] | None = None

    def update(self, output_dir: Path) -> None:
        """Take the states of callbacks, the losses of all ranks, and what lies in the folder. Collective."""
        trainer = self._trainer
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        exportable = [callback for callback in callbacks if isinstance(callback, ExportableState)]
        trainer.state.stateful_callbacks = transformers.TrainerState(stateful_callbacks=exportable).stateful_callbacks
        self._losses = trainer.accelerator.gather(trainer._tr_loss).flatten().tolist()
        # Through JSON, as Transformers stores it: numbers of NumPy become plain, tuples become lists.
        state = json.loads(json.dumps(asdict(trainer.state)))
        beside = ordinary_checkpoint(output_dir) if trainer.is_world_process_zero() else None
        self._state, self._beside = broadcast_object_list([state, beside and beside.fingerprint])

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        since = getattr(self._trainer, "_globalstep_last_logged", 0)  # not there before the first step
        return {"state": self._state, "unlogged": {"losses": self._losses, "since": since}, "beside": self._beside}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a state for ``resume``. Transformers reads the ``TrainerState`` from a file, earlier."""
        self._restored = state["unlogged"]

    def load_state_of_ranks(self, states: Sequence[dict[str, Any]]) -> None:
        """Do the same on another number of ranks. Older checkpoints hold a ``TrainerState`` of each rank."""
        self.load_state_dict(states[0])

    def resume(self) -> None:
        """Go on with the loss that was not logged, if one was restored. Its logged mean is over all ranks."""
        if self._restored is None:
            return
        trainer, losses = self._trainer, self._restored["losses"]
        same_ranks = len(losses) == trainer.args.world_size
        own = losses[trainer.args.process_index] if same_ranks else sum(losses) / max(len(losses), 1)
        trainer._tr_loss += torch.tensor(own, dtype=trainer._tr_loss.dtype)
        # ``train_loss`` is that of the steps from here on. When Transformers logs, it adds the mean of the ranks to it.
        trainer._total_loss_scalar -= sum(losses) / max(len(losses), 1)
        trainer._globalstep_last_logged = self._restored["since"]
        self._restored = None


@dataclass(frozen=True)
class OrdinaryCheckpoint:
    """A folder that Transformers wrote."""

    step: int
    path: Path

    @property
    def fingerprint(self) -> str | None:
        """The step, and a hash of the ``TrainerState``, which copies of the folder share. None if it is unreadable."""
        try:
            content = (self.path / TRAINER_STATE_NAME).read_bytes()
        except OSError:  # a save goes on without it
            return None
        return f"{self.step}-{hashlib.sha256(content).hexdigest()[:16]}"


def ordinary_checkpoint(folder: Path) -> OrdinaryCheckpoint | None:
    """Return the checkpoint with the highest step of those that Transformers wrote in a folder; None without one."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    found = [path.parent for path in folder.glob(f"{prefix}*/{TRAINER_STATE_NAME}")]
    steps = {int(number): path for path in found if (number := path.name.removeprefix(prefix)).isdecimal()}
    return OrdinaryCheckpoint(step := max(steps), steps[step]) if steps else None


def state_in(file: CheckpointFile) -> str | None:
    """Return the ``TrainerState`` of a checkpoint as JSON. None if no Trainer saved the checkpoint."""
    extra = _extra_in(file)
    return None if extra is None else json.dumps(extra["state"])


def beside_in(file: CheckpointFile) -> str | None:
    """Return the fingerprint of the ``OrdinaryCheckpoint`` that lay beside the run when a checkpoint was saved."""
    return (_extra_in(file) or {}).get("beside")


def _extra_in(file: CheckpointFile) -> dict[str, Any] | None:
    node = dict(dict_items(file.header.tree)).get(NAME)
    return None if node is None else unflatten(node, {})
