"""Checks that the installed Transformers has the methods that are overridden.

Most of them are private to Transformers, and may change in any version. A method that is no longer called would be
overridden without effect, and the training would not be saved. So a change is an error when a Trainer is made.
"""

from __future__ import annotations

import inspect

import transformers

from dynaquant.errors import DynaquantError

TESTED = "5.23.0"

METHODS = {
    "train": ("resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "log": ("logs", "start_time"),
    "prediction_step": ("model", "inputs", "prediction_loss_only", "ignore_keys"),
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "_get_output_dir": ("trial",),
    "_save_checkpoint": ("model", "trial"),
    "_save": ("output_dir", "state_dict"),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_load_rng_state": ("checkpoint",),
    "_load_best_model": (),
}
"""Methods that are overridden or called, with their arguments."""
USED = {
    "train": ("_load_from_checkpoint", "load_from_json"),
    "_inner_training_loop": ("_tr_loss", "_globalstep_last_logged", "on_train_begin"),
    "_prepare_for_training": ("_load_optimizer_and_scheduler",),
    "_run_epoch": ("get_batch_samples", "_load_rng_state", "on_step_end", "on_epoch_end"),
    "_maybe_log_save_evaluate": ("should_save", "_save_checkpoint"),
    "_finalize_training": ("best_model_checkpoint", "_load_best_model"),
}
"""Where Transformers uses them, and attributes that are read and set here."""


def check() -> None:
    """Raise DynaquantError if Transformers' ``Trainer`` is not as it was in the version that was tested."""
    for name, arguments in METHODS.items():
        method = getattr(transformers.Trainer, name, None)
        if method is None or tuple(inspect.signature(method).parameters)[1:] != arguments:
            _refuse(f"Trainer.{name}({', '.join(arguments)})")
    for name, used in USED.items():
        code = getattr(getattr(transformers.Trainer, name, None), "__code__", None)
        if code is None or not set(used) <= set(code.co_names):
            _refuse(f"Trainer.{name} with {' and '.join(used)}")


def _refuse(what: str) -> None:
    raise DynaquantError(
        f"transformers {transformers.__version__} has no {what}, on which dynaquant.integrations.transformers relies; "
        f"it was tested with transformers {TESTED}: install that version"
    )
