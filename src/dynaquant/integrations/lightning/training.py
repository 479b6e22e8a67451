"""A callback that knows what the dictionary of a checkpoint does not say."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from dynaquant.engine.shards import WHOLE
from dynaquant.errors import CheckpointError
from dynaquant.integrations.shared import check_version
from dynaquant.saving.moment_tolerances import bounded_by_weights, tolerances_of
from dynaquant.saving.presets import Preset
from dynaquant.saving.training_budget import scaled_by_rate
from dynaquant.state.plain_objects import leaves
from dynaquant.training import rng
from dynaquant.training.first_moments import corrected_keys, windows_of
from dynaquant.training.moment_correction import MomentCorrections
from dynaquant.training.moment_uses import exact_optimizers
from dynaquant.training.optimizers import names_of

log = logging.getLogger("dynaquant")
_MOMENT = re.compile(r"optimizer_states\.(\d+)\.state\.(\d+)\.(\w+)")
"""The name of a moment in a checkpoint of Lightning: the numbers of its optimizer and its parameter, and its key."""


class Training(Callback):  # type: ignore[misc]
    """Knows the training that a ``CheckpointIO`` saves.

    Give it to both: ``Trainer(plugins=[CheckpointIO(training=training)], callbacks=[training, …])``.

    - The global random number generators are saved, and restored when the training goes on. (With several processes,
      they are not: a checkpoint of Lightning has the state of one.)
    - Only parameters that train are quantized. Frozen parameters and buffers are stored exactly.
    - After a restore, the first steps correct the bias of first moments that the checkpoint dropped.
    - A metric can be a number that ``validation_step`` logs. It is computed on the first ``batches`` batches that the
      Trainer validates, with a copy of the module that has no trainer. So the Trainer's logs, state and random numbers
      stay as they are. Copies of the batches stay in host memory.

    Raises ValueError if ``batches`` is below 1, DynaquantError for a version of Lightning that is not
    supported.
    """

    def __init__(self, batches: int = 16) -> None:
        check_version("lightning")
        if batches < 1:
            raise ValueError(f"batches must be at least 1, not {batches}")
        self._number = batches
        self._trainer: Trainer | None = None
        self._module: LightningModule | None = None
        self._batches: dict[tuple[int, int], Any] = {}  # by dataloader and index
        self._restored: dict[str, Any] | None = None  # random numbers that were loaded and not yet set
        self._resumed = False
        self._dropped: Collection[str] = ()  # names of the first moments that the loaded checkpoint does not keep
        self._corrections = MomentCorrections(advice="CheckpointIO('lossless') keeps them")
        self.check_at_start: Callable[[Mapping[str, Any]], None] = lambda _: None
        """Called before the training begins: with parts of a checkpoint, as Lightning would save them."""

    @property
    def trained(self) -> frozenset[str]:
        """The names of the parameters that train, as in the module's state dict.

        Raises CheckpointError if the Trainer does not have this callback.
        """
        return frozenset(name for name, p in self._bound().named_parameters(remove_duplicate=False) if p.requires_grad)

    @property
    def can_validate(self) -> bool:
        """Whether the Trainer has validated a batch, so that a metric can be computed."""
        return bool(self._batches)

    def loaded(self, dropped: Collection[str]) -> None:
        """Remember the names of the first moments that a checkpoint just loaded does not keep, for ``fit``."""
        self._dropped = dropped

    @property
    def scaled_by_rate(self) -> bool:
        """Whether the learning rate alone scales the updates of the Trainer's optimizers, as far as that is known."""
        return scaled_by_rate(list(self._optimizers.values()))

    @property
    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The Trainer's optimizers by name in a checkpoint."""
        optimizers = [] if self._trainer is None else self._trainer.optimizers
        return {f"optimizer_states.{number}": optimizer for number, optimizer in enumerate(optimizers)}

    def first_tolerances(self, preset: Preset, interval: int | None) -> dict[str, float]:
        """Return the tolerances of first moments by their names in a checkpoint. interval: steps between two saves."""
        optimizers = self._optimizers
        unnamed = {name: names_of(optimizer, {}) for name, optimizer in optimizers.items()}
        windows = windows_of(optimizers, unnamed, corrected=True)
        weights = {name: name.rpartition(".")[0] for name in windows}
        tensors: dict[str, Tensor] = {}
        for name, optimizer in optimizers.items():
            for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                own, state = f"{name}.state.{number}", optimizer.state.get(parameter, {})
                tensors |= {own: parameter, **{f"{own}.{slot}": value for slot, value in state.items()}}
        limits = preset.step_limits
        return bounded_by_weights(tolerances_of(windows, preset, interval), windows, weights, tensors, limits, WHOLE)

    def exact_optimizers(self) -> dict[str, str]:
        """Return the optimizers whose moments are stored exactly, by name in a checkpoint, each with the reason."""
        return exact_optimizers(self._optimizers)

    def metric(self, checkpoint: Mapping[str, Any], name: str) -> float:
        """Return the mean over the batches of what ``validation_step`` logs as ``name``, with a checkpoint's weights.

        Raises ValueError if the step does not log one number of that name for each batch.
        """
        assert self._trainer is not None
        module = _copied(self._bound())  # without the trainer
        module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
        module.eval()
        logged: list[float] = []
        module.log = lambda key, value, *_, **__: logged.append(_number(key, value)) if key == name else None
        module.log_dict = lambda values, *_, **__: [module.log(key, value) for key, value in values.items()]
        takes_index = "dataloader_idx" in inspect.signature(module.validation_step).parameters
        for (loader, index), batch in self._batches.items():
            before = len(logged)
            own = apply_to_collection(batch, Tensor, Tensor.clone)  # the step may write to it
            own = move_data_to_device(own, module.device)
            with torch.no_grad(), self._trainer.precision_plugin.val_step_context():
                module.validation_step(own, index, *([loader] if takes_index else []))
            if len(logged) != before + 1:
                raise ValueError(
                    f"validation_step must log {name!r} once for each batch; it logged it {len(logged) - before} times"
                )
        return math.fsum(logged) / len(logged)

    def _bound(self) -> LightningModule:
        if self._module is None:
            raise CheckpointError(
                "CheckpointIO was given a Training that its Trainer does not have: Trainer(callbacks=[training, …])"
            )
        return self._module

    # What Lightning calls.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Remember the trainer and the module."""
        self._trainer, self._module = trainer, pl_module

    def on_validation_batch_start(
        self,
        trainer: Trainer,  # noqa: ARG002
        pl_module: LightningModule,  # noqa: ARG002
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep a copy of the first batches."""
        key = dataloader_idx, batch_idx
        if len(self._batches) < self._number and key not in self._batches:
            self._batches[key] = apply_to_collection(batch, Tensor, lambda tensor: tensor.detach().cpu().clone())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the global random number generators, in tensors and plain values."""
        state = rng.get_state()
        version, words, gauss = state["python"]
        kind, keys, *rest = state["numpy"]
        return {
            "python": (version, torch.from_numpy(words.astype(np.int64)), gauss),
            "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
            "torch": state["torch"],
            "cuda": state["cuda"],
            **({rng.ACCELERATORS: state[rng.ACCELERATORS]} if rng.ACCELERATORS in state else {}),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the random numbers of a checkpoint until the training goes on. A validation uses none of them."""
        if self._trainer is None or self._trainer.state.fn != TrainerFn.FITTING:
            return
        self._resumed = True
        kind, keys, *rest = state_dict["numpy"]
        self._restored = {**state_dict, "numpy": (kind, keys.cpu().numpy().astype(np.uint32), *rest)}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check what will be saved, and restore random numbers: the Trainer makes the iterator of the data next."""
        for holder in (pl_module, trainer.datamodule):
            self.check_at_start({"hyper_parameters": dict(getattr(holder, "hparams", {}))})
        self.check_at_start({"state_dict": pl_module.state_dict()})
        self._restore_random_numbers(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Begin to correct first moments. The Trainer has just loaded the states of the optimizers."""
        if self._resumed:
            found = [match.groups() for name in self._dropped if (match := _MOMENT.fullmatch(name))]
            for number, optimizer in enumerate(trainer.optimizers):
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                indices = {int(i) for of, i, key in found if int(of) == number and key in corrected_keys()}
                self._corrections.begin(f"optimizer {number}", optimizer, {parameters[i] for i in indices})
            for note in self._corrections.notes:
                log.warning("step %d: %s", trainer.global_step, note)
        self._resumed, self._dropped = False, ()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Remove the hooks of the corrections."""
        self._corrections.close()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Restore random numbers if the Trainer makes an iterator for this epoch."""
        if not trainer.fit_loop.is_resuming:
            self._restore_random_numbers(trainer)
        self._restored = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:  # noqa: ARG002
        """Restore random numbers in the middle of an epoch, after the Trainer has got its first batch."""
        self._restore_random_numbers(trainer)
        self._restored = None

    def _restore_random_numbers(self, trainer: Trainer) -> None:
        if self._restored is not None and trainer.world_size == 1:
            rng.set_state(self._restored)


def _copied(module: LightningModule) -> LightningModule:
    """Return a deep copy. What it has gathered, such as losses, or a weight that a hook computes, loses its graph."""
    gathered = (each for child in module.modules() for each in leaves(vars(child)))
    memo = {id(each): each.detach().clone() for each in gathered if isinstance(each, Tensor) and not each.is_leaf}
    return copy.deepcopy(module, memo)


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor | int | float):
        return float(value)
    raise ValueError(
        f"validation_step logs {name!r} as {type(value).__qualname__}; a metric for checkpoints must be a number or a "
        "tensor of one element in each batch"
    )
