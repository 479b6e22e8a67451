"""A configuration of torchtitan that saves to a run of dynaquant: its small Llama 3, with checkpoints and a validator.

    pip install 'PATH/TO/THE/CLONE[torchtitan]'

In a clone of torchtitan, which has the tokenizer and the text that this configuration uses, on a machine with a GPU:

    PYTHONPATH=PATH/TO/THE/CLONE/examples torchrun --nproc-per-node 1 -m torchtitan.train \
        --module torchtitan_config --config llama3_small

Kill it and start it again, and it goes on. The run is in outputs/checkpoint.
"""

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

import dynaquant as dq
from dynaquant.integrations.torchtitan import CheckpointManager


def llama3_small() -> Trainer.Config:
    """Return torchtitan's debug model, saved every 10 steps. The validation loss may get 0.5 % worse at each save."""
    config = llama3_debugmodel()
    config.training.steps = 100
    config.validator.enable = True
    config.validator.steps = 5
    config.checkpoint = CheckpointManager.Config(enable=True, interval=10, quality=dq.Quality(max_degradation=0.005))
    return config
