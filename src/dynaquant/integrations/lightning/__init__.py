"""Lightning's checkpoints in a run of dynaquant.

    from dynaquant.integrations.lightning import CheckpointIO, Training

    training = Training()
    trainer = Trainer(plugins=[CheckpointIO(training=training)], callbacks=[training, ModelCheckpoint(save_last=True)])
    trainer.fit(module, ckpt_path="last")

The files, in reading order:

- ``training.py``: a callback that knows the training: its random numbers, what trains, its validation
- ``progress.py``: how far the training is when it saves, and what it remembers of the saves before
- ``paths.py``: the paths that Lightning names, and the checkpoints of the run that they stand for
- ``checkpoint_io.py``: saves, loads and removes checkpoints
"""

try:
    import lightning as _lightning  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    from dynaquant.errors import MissingPackageError

    raise MissingPackageError("dynaquant.integrations.lightning", "lightning", "lightning") from None

from dynaquant.integrations.lightning.checkpoint_io import CheckpointIO
from dynaquant.integrations.lightning.training import Training

__all__ = ["CheckpointIO", "Training"]
