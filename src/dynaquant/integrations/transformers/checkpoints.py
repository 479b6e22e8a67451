"""The ``Checkpointer`` of a Trainer, while it trains."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from dynaquant.checkpointer import Checkpointer
from dynaquant.errors import DynaquantError, StateError
from dynaquant.integrations.shared import BEST
from dynaquant.integrations.transformers import framework_files
from dynaquant.integrations.transformers.metric import (
    higher_is_better,
    loss_on_evaluation_set,
    number_of_evaluation,
    without_traces,
)
from dynaquant.integrations.transformers.options import OF_RESTORE, Options
from dynaquant.integrations.transformers.resume import Asked, has_checkpoints, trainer_state
from dynaquant.integrations.transformers.trainer_extra import NAME, TrainerExtra
from dynaquant.saving.record import record_of
from dynaquant.state.tree import dict_items
from dynaquant.state.wrappers import named_parameters
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import CheckpointFile
from dynaquant.store.pointers import RUN_FOLDER
from dynaquant.store.retention import Retention, damaged_among_kept, prune, steps_to_delete
from dynaquant.store.run import LOSSLESS_COPY, Run
from dynaquant.store.tags import open_step_or_tag, set_tag
from dynaquant.training import rng

log = logging.getLogger("dynaquant")
_ORIGINAL = "original_module"
"""What PEFT calls the module that a copy of it replaces."""


class OlderCheckpointError(Exception):
    """The newest checkpoint is damaged, so an older one was restored, which has another ``TrainerState``."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class Checkpoints:
    """Saves and restores a Trainer. Between two calls of ``train``, no run is open.

    trainer: a ``transformers.Trainer``. options: for the ``Checkpointer``.
    """

    def __init__(self, trainer: Any, options: Options) -> None:
        self._trainer, self._options = trainer, options
        self._extra = TrainerExtra(trainer)
        self._open = ExitStack()
        self._checkpointer: Checkpointer | None = None
        self._run = Path()
        self._resumed: tuple[Asked, int, str] | None = None  # what was asked for, its step, the folder of its state
        self._best: int | None = None  # the step of a checkpoint that is to be tagged
        self._rng: dict[str, Any] | None = None
        self._save_requested = False
        self._has_files = False  # whether this training has saved, and written framework_files
        self._retention = Retention()
        self.is_measuring = False
        """Whether the metric is being evaluated. Its loss function must not log then."""

    # While the Trainer trains.

    @contextmanager
    def training(self, trial: Any) -> Iterator[Path]:
        """Yield the folder of the run. At the end, wait for the last write and release the run."""
        output_dir = Path(self._trainer._get_output_dir(trial))
        self._run, self._best = output_dir / RUN_FOLDER, None
        self._save_requested = self._has_files = False
        try:
            with self._open:
                yield self._run
        except BaseException:
            try:
                self._tag_best()
            except DynaquantError as error:
                log.warning("the best checkpoint was not tagged: %s", error)
            raise
        finally:
            self._checkpointer = None
        self._tag_best()
        self._apply_retention()
        for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            with suppress(OSError):  # JITCheckpointCallback leaves an empty folder
                folder.rmdir()

    @contextmanager
    def resuming(self, asked: Asked, found: int | None = None) -> Iterator[str]:
        """Yield the folder that Transformers resumes from. found: the step that was restored when asked for the newest.

        Raises CheckpointError if there is no such checkpoint.
        """
        with trainer_state(self._run, asked if found is None else Asked(found)) as (step, folder):
            self._resumed = asked, step, folder
            try:
                yield folder
            finally:
                self._resumed = self._rng = None

    def is_resuming(self, folder: Any) -> bool:
        """Whether a folder that Transformers wants to load from stands for a checkpoint of the run."""
        return self._resumed is not None and folder == self._resumed[2]

    def begin(self) -> None:
        """Make the ``Checkpointer``, unless ``restore`` has. Transformers has just set its own counters."""
        if self._resumed is None:
            if self._trainer.state.global_step == 0 and has_checkpoints(self._run):
                log.warning(
                    "%s has checkpoints of an earlier training; this one begins anew and replaces them step by step. "
                    "trainer.train(resume_from_checkpoint=True) goes on from the newest",
                    self._run,
                )
            self._make_checkpointer()
        self._extra.resume()

    def restore(self) -> None:
        """Make the ``Checkpointer`` and restore everything but the random number generators.

        Raises OlderCheckpointError if another checkpoint than expected was restored, as the expected one is damaged.
        """
        assert self._resumed is not None
        asked, expected, _ = self._resumed
        checkpointer = self._make_checkpointer()
        before = rng.get_state()
        try:
            step = checkpointer.restore(asked.step, only=self._to_restore(expected), strict=self._strict)
        except StateError as error:
            error.add_note(
                "Of a Trainer, strict and only are options: dynaquant={'strict': False} restores what fits, and "
                "dynaquant={'only': 'model'} the weights without the optimizer"
            )
            raise
        self._rng = rng.get_state()
        rng.set_state(before)  # Transformers skips batches first
        if step is not None and step != expected:
            raise OlderCheckpointError(step)
        state = self._trainer.state
        if state.best_model_checkpoint is not None:
            kept = state.best_global_step in Run(self._run).steps()
            self._best = state.best_global_step if kept else None
            state.best_model_checkpoint = str(self._run) if kept else None
            self._tag_best()

    def restore_random_numbers(self) -> None:
        """Set the random number generators to the state of the checkpoint."""
        if self._rng is not None:
            rng.set_state(self._rng)

    def has_best(self) -> bool:
        """Whether the best checkpoint is one of the run."""
        return bool(self._trainer.state.best_model_checkpoint == str(self._run))

    def restore_best(self) -> None:
        """Restore the weights of the best checkpoint."""
        checkpointer = self._made()
        checkpointer.wait()
        self._tag_best()
        checkpointer.restore(BEST, only="model", strict=self._strict)
        run = Run(self._run)
        file = open_step_or_tag(run, BEST)
        if record_of(file).configuration is not None and run.lossless_copy(file) is None:
            log.warning(
                "the weights of the best checkpoint, step %d, come back quantized, so their metric differs a little "
                "from best_metric: %s",
                file.header.step,
                self._why_quantized(file),
            )

    def _why_quantized(self, file: CheckpointFile) -> str:
        """Return why a checkpoint has no exact copy of its weights, in words."""
        if file.header.record.get(LOSSLESS_COPY) is None:
            return "it was saved without an exact copy, with dynaquant={'exact': None} or from a sharded model"
        if (keep := self._options["keep"]) and keep.lossless_copy:
            return "dq.Keep(lossless_copy=True) keeps an exact copy of the newest checkpoint only"
        return "its exact copy was deleted when a later step became the best"

    def save(self) -> None:
        """Save, or ask the training loop to save at the end of the step if it is not the loop that calls this.

        Callbacks save in the middle of a step, after the gradients or before the logs (``JITCheckpointCallback``). A
        training that resumed from there would not be the same.
        """
        trainer = self._trainer
        checkpointer = self._made()
        if not trainer.control.should_save:
            trainer.control.should_save = self._save_requested = True
            return
        trainer.store_flos()
        state = trainer.state
        self._tag_best()
        is_best = state.best_global_step == state.global_step
        if is_best:
            state.best_model_checkpoint = str(self._run)
        self._extra.update(self._run.parent)
        checkpointer.save(state.global_step, exact_weights=is_best and self._keeps_best)
        if is_best:
            self._best = state.global_step
        if not self._has_files:
            self._has_files = True
            self._write_files()

    def agree_on_saving(self) -> None:
        """Save and stop on all ranks if one was told to stop: a signal does not reach all of them in the same step."""
        trainer = self._trainer
        if trainer.args.enable_jit_checkpoint and trainer.args.world_size > 1:
            requested = torch.tensor(int(self._save_requested), device=trainer.args.device)
            if trainer.accelerator.reduce(requested).item():
                trainer.control.should_save = trainer.control.should_training_stop = True
        self._save_requested = False

    # What they are made of.

    def _made(self) -> Checkpointer:
        if self._checkpointer is None:
            raise RuntimeError("checkpoints are saved while trainer.train(…) runs; use trainer.save_model(…)")
        return self._checkpointer

    def _make_checkpointer(self) -> Checkpointer:
        self._open.close()  # of a training that began again with smaller batches
        trainer = self._trainer
        options: dict[str, Any] = {name: value for name, value in self._options.items() if name not in OF_RESTORE}
        extras = {NAME: self._extra, **(options.pop("extras", None) or {})}
        if not trainer.args.save_only_model:
            extras["scheduler"] = trainer.lr_scheduler
            if getattr(trainer.accelerator, "scaler", None) is not None:
                extras["scaler"] = trainer.accelerator.scaler
        options.pop("exact", None)
        if "evaluate" not in options and options["quality"].preset == "lossless":
            options["evaluate"] = None  # nothing is lost that a metric could see
        elif "evaluate" not in options:
            options["evaluate"] = loss_on_evaluation_set(trainer, self._loss)
        elif isinstance(name := options["evaluate"], str):
            options["evaluate"] = number_of_evaluation(trainer, name)
            options.setdefault("higher_is_better", higher_is_better(trainer, name))
        if callable(metric := options["evaluate"]):
            options["evaluate"] = without_traces(trainer, metric)
        limit = trainer.args.save_total_limit
        keep = replace(options.pop("keep"), last=limit if limit and limit > 0 else None)
        self._retention = Retention(keep, options.get("higher_is_better", False))
        self._checkpointer = Checkpointer(
            self._run,
            trainer.model_wrapped,
            None if trainer.args.save_only_model else trainer.optimizer,
            extras=extras,
            roles={**_roles(trainer), **(options.pop("roles", None) or {})},
            every=_steps_between_saves(trainer),
            keep=keep,
            **options,
        )
        return self._open.enter_context(self._checkpointer)

    def _write_files(self) -> None:
        try:
            framework_files.write(self._trainer, self._run)
        except Exception as error:  # of Transformers, PEFT and other people's models; the checkpoint is sound
            log.warning(
                "%s: configuration and tokenizer are not kept, so 'dynaquant export --to transformers' will lack them: "
                "%s",
                self._run,
                error,
            )

    def _loss(self, model: Any, inputs: Any) -> Any:
        """Return the loss of a batch, as an evaluation computes it, without the logs."""
        self.is_measuring = True
        try:
            loss, _, _ = self._trainer.prediction_step(model, inputs, prediction_loss_only=True)
        finally:
            self.is_measuring = False
        if loss is None:
            raise ValueError(
                "the evaluation set has no labels, so there is no loss to measure checkpoints with; give a metric, "
                "Trainer(…, dynaquant={'evaluate': …}), or none: {'evaluate': None}"
            )
        return loss

    @property
    def _keeps_best(self) -> bool:
        """Whether the weights of the best checkpoint are kept exactly."""
        keep = self._options["keep"]
        return self._options.get("exact", BEST) == BEST and not (keep and keep.lossless_copy)

    @property
    def _strict(self) -> bool:
        return self._options.get("strict", True)

    def _to_restore(self, step: int) -> str | Collection[str] | None:
        """Return which objects to restore, None for all: as asked for, or what both have with ``save_only_model``."""
        if (asked := self._options.get("only")) is not None:
            return asked
        stored = dict(dict_items(Run(self._run).file(step).header.tree))
        if ("optimizer" in stored) != self._trainer.args.save_only_model:
            return None
        log.warning(
            "%s: save_only_model is or was set, so only the weights and the TrainerState of step %d are restored",
            self._run,
            step,
        )
        return "model", NAME

    def _tag_best(self) -> None:
        """Tag the best checkpoint, once it is written. Retention keeps it then."""
        if self._best is None:
            return
        step, self._best = self._best, None
        if self._checkpointer is not None:
            self._checkpointer.wait()
        if self._trainer.is_world_process_zero():
            run = Run(self._run)
            set_tag(run, BEST, run.file(step), force=True)

    def _apply_retention(self) -> None:
        """Delete the best checkpoint before, with its exact copy, if the last save became the best.

        Each save does so for those before it, but it cannot have the tag yet.
        """
        if not self._has_files or not self._trainer.is_world_process_zero():
            return
        run = WritableRun(self._run)
        try:
            with run.locked():  # which deletes exact copies
                damaged = damaged_among_kept(run, self._retention) if steps_to_delete(run, self._retention) else ()
                notes = prune(run, self._retention, damaged)
        except (DynaquantError, OSError) as error:
            notes = [str(error)]
        for note in notes:
            log.warning(
                "%s: after the training, not all was deleted that retention does not keep: %s", run.folder, note
            )


class StepBoundaries(TrainerCallback):  # type: ignore[misc]  # Transformers is not type-checked
    """Calls ``Checkpoints`` when a training begins, and after each step."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Make the ``Checkpointer``."""
        self._checkpoints.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Find out whether another rank was told to stop."""
        self._checkpoints.agree_on_saving()

    on_epoch_end = on_step_end


def _roles(trainer: Any) -> dict[str, str]:
    """Return roles that leave out the frozen base of a PEFT model, which everybody has."""
    adapters = set(getattr(trainer.model, "peft_config", ()))
    if not adapters:
        return {}
    # Adapters that do not train now are stored: their name is in those of their parameters. So is the original of a
    # module that trains as a whole (``modules_to_save``): that of a new head has random values, which nobody else has.
    return {
        f"model.{name}": "omit"
        for name, parameter in named_parameters(trainer.model_wrapped)
        if not parameter.requires_grad and not {*adapters, _ORIGINAL} & set(name.split("."))
    }


def _steps_between_saves(trainer: Any) -> int | None:
    """Return how many steps lie between two saves; None if that is not known."""
    args, state = trainer.args, trainer.state
    strategy = args.eval_strategy if args.save_strategy == SaveStrategy.BEST else args.save_strategy
    if strategy == SaveStrategy.STEPS:
        return int(state.eval_steps if args.save_strategy == SaveStrategy.BEST else state.save_steps)
    known = strategy == SaveStrategy.EPOCH and 0 < state.num_train_epochs <= state.max_steps
    return math.ceil(state.max_steps / state.num_train_epochs) if known else None
