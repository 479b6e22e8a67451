"""A checkpoint manager of torchtitan that saves to a run. Unfinished: it saves, but a resumed training fails.

torchtitan makes parameters DTensors even in a single process, and a restore gives the fused AdamW plain tensors among
them: the first step after a restore raises RuntimeError. Several processes are refused. It has no tests yet.

In a config function: ``checkpoint=CheckpointManager.Config(enable=True, interval=50, quality="balanced")``.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torchtitan.components.checkpointer.base import BaseCheckpointManager

from dynaquant.checkpointer import Checkpointer
from dynaquant.errors import DynaquantError
from dynaquant.saving.presets import QualityName


class CheckpointManager(BaseCheckpointManager):  # type: ignore[misc]  # torchtitan's classes are untyped to mypy
    """Saves a training of torchtitan to the run ``dump_folder/folder``, and resumes it from there.

    Saved are the model, the optimizers, the learning rate schedules, the position of the data loader, the step, the
    tokens seen and the random numbers. The metric of the search is the validation loss, if the validator is enabled.

    Raises DynaquantError for several processes, and for options of torchtitan that are not supported.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """Options of torchtitan's managers, and of ``Checkpointer``."""

        quality: QualityName = "balanced"
        """Preset of how much quality may be lost; "lossless" stores every tensor exactly."""

        max_degradation: float | None = None
        """How much worse the validation loss of one checkpoint may be, as a fraction."""

        last_save_model_only: bool = False
        """Must be False: the last checkpoint holds the whole state, too."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,  # noqa: ARG002  # torchtitan gives it by name
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        self.enable = False  # until all is checked: torchtitan closes a half-made manager, too
        self.save_future: Any = None
        _check(config, model_parts, base_folder)
        self._config = config
        self._folder = os.path.join(base_folder, config.folder)
        self._model, self._optimizers = model_parts[0], list(optimizers)
        self._trainer = states["train_state"]
        self._extras = {"lr_scheduler": lr_schedulers, "dataloader": dataloader, "train_state": self._trainer}
        self._checkpointer: Checkpointer | None = None
        self.enable = True

    def _opened(self) -> Checkpointer:
        """Return the checkpointer. It is made late, since torchtitan builds the validator after this manager."""
        if self._checkpointer is None:
            validator = getattr(self._trainer, "validator", None)
            self._checkpointer = Checkpointer(
                self._folder,
                self._model,
                self._optimizers,
                extras=self._extras,
                evaluate=None if validator is None or self._config.quality == "lossless" else _Loss(validator),
                quality=self._config.quality,
                max_degradation=self._config.max_degradation,
                keep_last=self._config.keep_latest_k or None,
            )
        return self._checkpointer

    def _load(self, step: int = -1) -> bool:
        return self._opened().restore(None if step == -1 else step) is not None

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self._config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (first or last_step or curr_step % config.interval == 0):
            return False
        self.save_future = self._opened().save(curr_step)
        return True

    def _wait_for_saving(self) -> None:
        self._opened().wait()
        self.save_future = None

    def _maybe_wait_for_staging(self) -> None:
        """Return at once: ``save`` returns when the state is captured."""

    def _close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()


class _Loss:
    """The loss of torchtitan's validator, which logs it. A copy of the validator reports it here instead."""

    def __init__(self, validator: Any) -> None:
        self._validator = copy.copy(validator)
        self._validator.metrics_processor = self
        self.ntokens_since_last_log = 0  # the validator counts here what must not count for the training
        self._loss: float | None = None

    def log_validation(self, loss: float, step: int, **_: Any) -> None:  # noqa: ARG002
        """Keep the loss."""
        self._loss = loss

    def __call__(self, model: nn.Module) -> float:
        self._loss = None
        self._validator.validate([model], 0)
        if self._loss is None:
            raise DynaquantError("torchtitan's validator reported no loss; install torchtitan 0.3.0, which was tested")
        return self._loss


def _check(config: Any, model_parts: list[nn.Module], base_folder: str) -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise DynaquantError("several processes are not supported yet: use torchtitan's own CheckpointManager")
    if len(model_parts) != 1:
        raise DynaquantError("pipeline parallelism is not supported: use torchtitan's own CheckpointManager")
    for name in ("initial_load_path", "initial_load_in_hf", "last_save_model_only", "create_seed_checkpoint"):
        if getattr(config, name):
            raise DynaquantError(f"checkpoint.{name} is not supported: leave it unset, or use torchtitan's own manager")
    if config.exclude_from_loading:
        raise DynaquantError("checkpoint.exclude_from_loading is not supported: leave it empty")
    folder = os.path.join(base_folder, config.folder)
    if "://" in folder:
        raise DynaquantError(f"{folder} is a remote folder, which is not supported: give a local one")
    if os.path.isdir(folder) and any(each.is_dir() and each.name.startswith("step-") for each in os.scandir(folder)):
        raise DynaquantError(f"{folder} holds torchtitan's own checkpoints: give another checkpoint.folder")
