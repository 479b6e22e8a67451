"""Files of ``torch.save``. Only tensors and plain values are read from them: nothing in a file is ever run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile, is_zipfile

import torch

from dynaquant.errors import CheckpointError
from dynaquant.modelfiles.modelfile import ModelFile
from dynaquant.state import flatten

_BROKEN = (RuntimeError, EOFError, OSError, ValueError, KeyError, BadZipFile, AttributeError, IndexError, TypeError)


def read(path: Path) -> ModelFile:
    """A file. Raises CheckpointError when it holds other objects than tensors and plain values, or is not whole;
    StateError for values that a checkpoint cannot hold."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: refused, as reading it would run code that it names: {_reason(error)}. Where you trust the file, "
            "load it with torch.load(…, weights_only=False) and save its state_dict() alone"
        ) from None
    except _BROKEN as error:
        raise CheckpointError(f"{path}: not a whole file of torch.save ({_first_line(error)})") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: it holds a {type(state).__name__} and no dictionary, such as a state dict")
    tree, tensors = flatten(state)
    return ModelFile("torch", tree, tensors, {})


def _reason(error: pickle.UnpicklingError) -> str:
    """What PyTorch says is wrong, without its advice to allow it."""
    text = str(error)
    for start in ("WeightsUnpickler error:", "Weights only load failed."):
        text = text.rpartition(start)[2]
    return text.strip().split("\n")[0].split(" was not an allowed global")[0].strip().rstrip(".") or "unknown objects"


def _first_line(error: BaseException) -> str:
    return str(error).split("\n")[0] or type(error).__name__


def write(file: BinaryIO, state: Any) -> None:
    """Raises OSError when the file cannot be written."""
    try:
        torch.save(state, file)
    except RuntimeError as error:  # what it makes of an OSError
        raise OSError(f"torch.save failed ({error})") from error
