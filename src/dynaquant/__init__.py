"""Checkpoints of deep-learning training in a small fraction of their size. Start with ``Checkpointer``.

The public names are imported when they are first used, so that ``dynaquant --help`` does not load PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from dynaquant.errors import CheckpointError, DynaquantError, EvaluateError, StateError

__all__ = [
    "Auto",
    "Bound",
    "CheckpointError",
    "Checkpointer",
    "Configuration",
    "DynaquantError",
    "EvaluateError",
    "Gradients",
    "GridConfiguration",
    "Keep",
    "LossOn",
    "Moved",
    "OnBatches",
    "Quality",
    "Record",
    "StateError",
    "follow",
    "load",
    "load_into",
    "save",
]

if TYPE_CHECKING:
    from dynaquant.checkpointer import Checkpointer
    from dynaquant.engine.bound import Bound
    from dynaquant.engine.quantize.knobs import Configuration, GridConfiguration
    from dynaquant.interop.state_file import save
    from dynaquant.options import Auto, Keep, Moved, Quality
    from dynaquant.restore.follow import follow
    from dynaquant.restore.load import load, load_into
    from dynaquant.saving.record import Record
    from dynaquant.search.evaluation import LossOn, OnBatches
    from dynaquant.training.accumulated import Gradients

    __version__: str
else:
    _MODULES = {
        "Auto": "options",
        "Bound": "engine.bound",
        "Checkpointer": "checkpointer",
        "Configuration": "engine.quantize.knobs",
        "Gradients": "training.accumulated",
        "GridConfiguration": "engine.quantize.knobs",
        "Keep": "options",
        "LossOn": "search.evaluation",
        "Moved": "options",
        "OnBatches": "search.evaluation",
        "Quality": "options",
        "Record": "saving.record",
        "follow": "restore.follow",
        "load": "restore.load",
        "load_into": "restore.load",
        "save": "interop.state_file",
    }

    def __getattr__(name):
        """Import a public name on first use (PEP 562)."""
        if name == "__version__":
            value = import_module("importlib.metadata").version("dynaquant")
        elif name in _MODULES:
            value = getattr(import_module(f"dynaquant.{_MODULES[name]}"), name)
        else:
            raise AttributeError(f"module 'dynaquant' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__, "__version__"})
