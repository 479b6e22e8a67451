"""A checkpoint's model, or its whole state, as a file that other programs read."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from dynaquant.checkpointer import load
from dynaquant.errors import CheckpointError
from dynaquant.files import replacing


class Target(StrEnum):
    """What to write: the model as safetensors, the model as ``torch.save`` does, or the whole state so."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    TORCH_STATE = "torch-state"


def export(folder: str | os.PathLike[str], step: int, target: Target, out: Path) -> None:
    """Writes the checkpoint of a step to ``out``, which is replaced at once or, on any error, not at all.

    A tensor that has several names is written under the first of them to safetensors, which has no shared tensors; the
    file's metadata maps the others to it, as ``safetensors.torch.save_model`` does. Raises CheckpointError when the
    checkpoint cannot be read or the format has no place for it, OSError when the file cannot be written.
    """
    state = load(folder, step)
    with replacing(out) as file:
        if target is Target.SAFETENSORS:
            file.write(_safetensors(state["model"], step))
        else:
            _torch_save(state["model"] if target is Target.TORCH else state, file)


def _torch_save(value: Any, file: BinaryIO) -> None:
    try:
        torch.save(value, file)
    except RuntimeError as error:  # what it makes of an OSError
        raise OSError(f"torch.save failed ({error})") from error


def _safetensors(model: dict[str, Any], step: int) -> bytes:
    first_names: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    metadata = {"format": "pt", "step": str(step)}
    for name, value in model.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"safetensors holds only tensors, and {name} of the model is a {type(value).__name__}; "
                "export to torch instead"
            )
        first = first_names.setdefault(id(value), name)
        if first == name:
            tensors[name] = value.contiguous()
        else:
            metadata.setdefault(name, first)
    try:
        return save(tensors, metadata)
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"safetensors cannot hold this model ({error}); export to torch instead") from error
