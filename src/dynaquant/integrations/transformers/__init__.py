"""Transformers' ``Trainer`` with checkpoints in a run of dynaquant.

    from dynaquant.integrations.transformers import Trainer

    trainer = Trainer(model, args, train_dataset=…, eval_dataset=…)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))

The files, in reading order:

- ``options.py``: what the argument ``dynaquant`` of ``Trainer`` may hold
- ``trainer_extra.py``: what a Trainer remembers from step to step, as an extra of a checkpoint
- ``untouched.py``: puts back what the metric of a checkpoint has changed in a Trainer
- ``metric.py``: what measures a checkpoint: the loss on a part of the evaluation set, or another number
- ``resume.py``: finds the checkpoint that ``resume_from_checkpoint`` asks for
- ``framework_files.py``: keeps configuration and tokenizer in the run, for an export
- ``checkpoints.py``: the ``Checkpointer`` of a Trainer, while it trains
- ``trainer.py``: ``CheckpointMixin`` and ``Trainer``
"""

try:
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    from dynaquant.errors import MissingPackageError

    raise MissingPackageError("dynaquant.integrations.transformers", "transformers", "transformers") from None

from dynaquant.integrations.transformers.options import Options
from dynaquant.integrations.transformers.resume import get_last_checkpoint
from dynaquant.integrations.transformers.trainer import CheckpointMixin, Trainer

__all__ = ["CheckpointMixin", "Options", "Trainer", "get_last_checkpoint"]
