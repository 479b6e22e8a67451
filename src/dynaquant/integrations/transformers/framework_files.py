"""Keeps in the run what a Trainer needs besides a checkpoint's state, for ``dynaquant export --to transformers``."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils import logging as messages

from dynaquant.interop.frameworks import ADAPTER_WEIGHTS, ADAPTERS
from dynaquant.store.atomic_files import atomic_folder
from dynaquant.store.pointers import FRAMEWORK_FOLDER

log = logging.getLogger("dynaquant")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.index.json")
_STATES = (".bin", ".pt", ".pth", ".ckpt")
_LARGEST = 64 * 2**20
"""Maximum bytes of a file that is kept. Tokenizers are smaller."""


def write(trainer: Any, run: Path) -> None:
    """Write configuration, tokenizer and training arguments into a run, as Transformers writes them. Collective.

    Of adapters, PEFT's configuration, and the names that PEFT gives their weights. Raises what Transformers raises.
    """
    # The state dict that is saved has numbers in place of weights. They tell which name became which key.
    names = list(trainer.model.state_dict()) if hasattr(trainer.model, "peft_config") else []
    with TemporaryDirectory() as temporary, _without_progress_bars():
        made = Path(temporary) / "made"  # others may read it, unlike the temporary folder, whose mode would be copied
        made.mkdir()
        trainer._save(str(made), state_dict={name: torch.tensor([i]) for i, name in enumerate(names)})
        if not trainer.is_world_process_zero():
            return
        if names:
            adapters = {}
            for path in made.rglob(ADAPTER_WEIGHTS):
                folder = path.parent.relative_to(made).as_posix().removeprefix(".")  # empty for ``made`` itself
                adapters[folder] = _names_in(path, names)
            (made / ADAPTERS).write_text(json.dumps(adapters, indent=1))
        for path in [path for pattern in _WEIGHTS for path in made.rglob(pattern)]:
            path.unlink()
        _leave_out_states(made, run)
        with atomic_folder(run / FRAMEWORK_FOLDER, replacing=True) as kept:
            shutil.copytree(made, kept, dirs_exist_ok=True)


def _leave_out_states(made: Path, run: Path) -> None:
    """Delete files that hold the state of one step: a subclass of Trainer may write some. Logs a warning."""
    for path in [path for path in made.rglob("*") if path.is_file() and path.name != TRAINING_ARGS_NAME]:
        if path.suffix in _STATES or path.stat().st_size > _LARGEST:
            log.warning(
                "%s: %s, which the Trainer saves beside the model, is not kept for an export: it looks like weights or "
                "other state of one step. Save such state in extras, dynaquant={'extras': …}",
                run,
                path.relative_to(made),
            )
            path.unlink()


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keep Transformers from drawing bars of weights, as none are written."""
    enabled = messages.is_progress_bar_enabled()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            messages.enable_progress_bar()


def _names_in(path: Path, names: list[str]) -> dict[str, str]:
    """Return the name for each key of a file whose tensors are numbers of names. Raises ValueError for another one."""
    found = load_file(path)
    if computed := [key for key, tensor in found.items() if tensor.dtype != torch.int64 or tensor.numel() != 1]:
        raise ValueError(f"PEFT computes {computed[0]} when it saves an adapter")
    return {key: names[int(tensor)] for key, tensor in found.items()}
