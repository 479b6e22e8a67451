"""Checkpoints of deep-learning training in a small fraction of their size. Start with ``Checkpointer``."""

from importlib.metadata import version

from dynaquant.checkpointer import Checkpointer
from dynaquant.errors import CheckpointError, DynaquantError, EvaluateError, StateError
from dynaquant.quantize.grid import GridConfiguration
from dynaquant.quantize.partition import Configuration
from dynaquant.restore.load import load, load_into
from dynaquant.save.record import Record
from dynaquant.search.quality import LossOn

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Configuration",
    "DynaquantError",
    "EvaluateError",
    "GridConfiguration",
    "LossOn",
    "Record",
    "StateError",
    "load",
    "load_into",
]

__version__ = version("dynaquant")
