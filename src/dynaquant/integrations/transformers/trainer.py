"""``Trainer`` and ``CheckpointMixin``: Transformers' Trainer with checkpoints in a run of dynaquant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers
from transformers.trainer_utils import HubStrategy, SaveStrategy

from dynaquant.integrations.shared import check_version, unsupported
from dynaquant.integrations.transformers.checkpoints import Checkpoints, OlderCheckpointError, StepBoundaries
from dynaquant.integrations.transformers.options import Options, checked
from dynaquant.integrations.transformers.resume import asked_for

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class CheckpointMixin(_Base):  # type: ignore[misc]  # Transformers is not type-checked
    """Makes a subclass of ``transformers.Trainer`` save to a run: ``class MyTrainer(CheckpointMixin, Seq2SeqTrainer)``.

    Where the Trainer would write a folder ``checkpoint-400``, it saves step 400 of the run ``dynaquant`` in
    ``output_dir``: the model, the optimizer, the scheduler, a GradScaler, the ``TrainerState`` with the states of
    callbacks, and random number generators. The best checkpoint has the tag ``best``.

    dynaquant: options of the ``Checkpointer``, e.g. ``{"quality": "high"}``. All other arguments go to the base class.

    Raises DynaquantError for a version of Transformers that is not supported, and for DeepSpeed;
    ValueError if checkpoints are to be uploaded; TypeError and ValueError for options that are unknown or out of range;
    TypeError for a subclass whose bases do not begin with the mixin.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(CheckpointMixin)]
        if any(issubclass(base, transformers.Trainer) and not issubclass(base, CheckpointMixin) for base in before):
            raise TypeError(
                f"{cls.__name__} would write checkpoints as Transformers does: CheckpointMixin must come first, "
                f"class {cls.__name__}(CheckpointMixin, …)"
            )

    def __init__(self, *args: Any, dynaquant: Options | None = None, **kwargs: Any) -> None:
        check_version("transformers")
        self._dynaquant = Checkpoints(self, checked(dynaquant))
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            raise unsupported("DeepSpeed")
        uploads = self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END
        if uploads and self.args.save_strategy != SaveStrategy.NO:
            raise ValueError(
                f"hub_strategy={self.args.hub_strategy.value!r} uploads folders checkpoint-…, which are not written; "
                "set hub_strategy='end'"
            )
        self.add_callback(StepBoundaries(self._dynaquant))

    def train(
        self,
        resume_from_checkpoint: str | bool | int | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as ``transformers.Trainer.train`` does.

        resume_from_checkpoint: True, or the folder of the run, goes on from its newest checkpoint that verifies; a step
        or a tag from that one. The folder of a checkpoint that Transformers wrote works as well. If there is no
        checkpoint, True is a ValueError, as in Transformers; ``get_last_checkpoint`` returns None then.
        """
        found = None
        with self._dynaquant.training(trial) as run:
            asked = asked_for(resume_from_checkpoint, run)
            if asked is None:
                return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
            while True:
                with self._dynaquant.resuming(asked, found) as folder:
                    try:
                        return super().train(folder, trial, ignore_keys_for_eval)
                    except OlderCheckpointError as older:
                        found = older.step

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, unless it is a loss function that logs while a checkpoint is measured."""
        if not self._dynaquant.is_measuring:
            super().log(logs, start_time)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the batches of the next step; none at the end of the training, which a resumed one may begin with.

        Transformers would train one step more.
        """
        if self.state.global_step >= self.state.max_steps:
            return [], None
        batches: tuple[list[Any], Any] = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # noqa: ARG002
        self._dynaquant.save()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._dynaquant.is_resuming(resume_from_checkpoint):  # otherwise restored with the optimizer
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._dynaquant.is_resuming(checkpoint):
            self._dynaquant.restore()
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._dynaquant.is_resuming(checkpoint):
            self._dynaquant.restore_random_numbers()
        else:
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        if self._dynaquant.has_best():
            self._dynaquant.restore_best()
        else:  # in a folder that Transformers wrote before the training was continued here
            super()._load_best_model()


class Trainer(CheckpointMixin, transformers.Trainer):  # type: ignore[misc]  # Transformers is not type-checked
    """``transformers.Trainer`` with checkpoints in a run. The arguments are the same, and ``dynaquant``.

        trainer = Trainer(model, args, train_dataset=…, eval_dataset=…, dynaquant={"quality": "high"})
        trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))

    See ``CheckpointMixin``.
    """
