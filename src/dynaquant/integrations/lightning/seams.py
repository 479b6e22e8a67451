"""Checks that the installed Lightning has the methods that are overridden, and calls them as expected.

A method that is no longer called would be overridden without effect, and a resumed training would go on otherwise. So a
change is an error when a CheckpointIO or a Training is made.
"""

from __future__ import annotations

import inspect

import lightning
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loops import _FitLoop, _TrainingEpochLoop
from lightning.pytorch.strategies import Strategy

from dynaquant.errors import DynaquantError

TESTED = "2.6.6"

_HOOK = ("trainer", "pl_module")
METHODS: dict[type, dict[str, tuple[str, ...]]] = {
    CheckpointIO: {
        "save_checkpoint": ("checkpoint", "path", "storage_options"),
        "load_checkpoint": ("path", "map_location", "weights_only"),
        "remove_checkpoint": ("path",),
    },
    Callback: {
        "setup": (*_HOOK, "stage"),
        "on_validation_batch_start": (*_HOOK, "batch", "batch_idx", "dataloader_idx"),
        "state_dict": (),
        "load_state_dict": ("state_dict",),
        "on_fit_start": _HOOK,
        "on_fit_end": _HOOK,
        "on_train_start": _HOOK,
        "on_train_epoch_start": _HOOK,
        "on_train_batch_start": (*_HOOK, "batch", "batch_idx"),
    },
}
"""Methods that are overridden, with their arguments."""
USED: dict[type, dict[str, tuple[str, ...]]] = {
    Strategy: {
        "save_checkpoint": ("checkpoint_io", "save_checkpoint"),
        "load_checkpoint": ("checkpoint_io", "load_checkpoint"),
        "remove_checkpoint": ("checkpoint_io", "remove_checkpoint"),
    },
    _TrainingEpochLoop: {"on_run_start": ("is_resuming", "iter")},
    Trainer: {"__init__": ("fit_loop",), "_run": ("_restore_modules_and_callbacks", "restore_training_state")},
}
"""Where Lightning uses them, restores a checkpoint, and makes the iterator of an epoch."""
PROPERTIES: dict[type, tuple[str, ...]] = {
    Trainer: ("global_step", "optimizers", "precision_plugin", "world_size"),
    _FitLoop: ("is_resuming",),
}
"""Properties that are read."""


def check() -> None:
    """Raise DynaquantError if Lightning is not as it was in the version that was tested."""
    for of, methods in METHODS.items():
        for name, arguments in methods.items():
            method = getattr(of, name, None)
            if method is None or tuple(inspect.signature(method).parameters)[1:] != arguments:
                _refuse(f"{of.__name__}.{name}({', '.join(arguments)})")
    for of, users in USED.items():
        for name, used in users.items():
            method = getattr(of, name, None)
            names = () if method is None else inspect.unwrap(method).__code__.co_names  # Trainer.__init__ is decorated
            if not set(used) <= set(names):
                _refuse(f"{of.__name__}.{name} with {' and '.join(used)}")
    for of, properties in PROPERTIES.items():
        for name in properties:
            if not hasattr(of, name):
                _refuse(f"{of.__name__}.{name}")


def _refuse(what: str) -> None:
    raise DynaquantError(
        f"lightning {lightning.__version__} has no {what}, on which dynaquant.integrations.lightning relies; "
        f"it was tested with lightning {TESTED}: install that version"
    )
