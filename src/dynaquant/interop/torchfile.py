"""Files of ``torch.save``. Only tensors and plain values are read from them: nothing in a file is ever run."""

from __future__ import annotations

import pickle
import re
import struct
import warnings
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile, is_zipfile

import torch
from safetensors import SafetensorError
from torch import Tensor

from dynaquant.errors import CheckpointError, StateError
from dynaquant.formatting import in_bytes
from dynaquant.interop.model_file import ModelFile
from dynaquant.state.flatten import flatten
from dynaquant.store.files import system_error

SAFE = (2, 10)
"""The first version of PyTorch whose weights_only keeps what it promises."""
STARTS = (b"PK\x03\x04", b"\x80")
"""The first bytes of these files: a zip archive, or a bare pickle."""
REPEATED_BYTES = 1 << 30
"""Most bytes of a tensor that repeats its values (``expand``), if that is more than is stored of it."""
BROKEN = (
    *(pickle.UnpicklingError, struct.error, EOFError, RuntimeError, OSError, ImportError, MemoryError, BadZipFile),
    *(ValueError, KeyError, IndexError, TypeError, AttributeError, AssertionError, OverflowError, RecursionError),
    SafetensorError,  # of torch.load, by the name of a file
)
"""What is raised while something is unpickled that is no whole pickle, or no harmless one."""
_NAMES_CODE = re.compile(r"(?:GLOBAL |^)([\w.]+)(?: was not an allowed global| whose module|$)", re.MULTILINE)


def read(path: Path) -> ModelFile:
    """A file. Raises CheckpointError when it holds other objects than tensors and plain values, or is not whole;
    StateError for values that a checkpoint cannot hold."""
    tree, tensors = flatten_file(path, load(path))
    return ModelFile("torch", tree, tensors, {})


def load(path: Path) -> dict[Any, Any]:
    """Returns the dictionary in a file, with memory-mapped tensors. Raises CheckpointError as ``read`` does."""
    check_version(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on pickles of other protocols; whether it can be read is told by reading
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except BROKEN as error:
        raise CheckpointError(f"{path}: {problem(error, 'a whole file of torch.save')}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: it holds a {type(state).__name__} and no dictionary, such as a state dict")
    return state


def flatten_file(path: Path, state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Returns ``state.flatten`` of what was read from a file or folder; errors name it.

    Raises CheckpointError for a tensor that claims far more memory than is stored of it, because it repeats values.
    """
    try:
        tree, tensors = flatten(state)
    except StateError as error:
        raise StateError(f"{path}: {error}") from None
    except (MemoryError, RuntimeError) as error:  # ``flatten`` copies some views
        raise CheckpointError(f"{path}: a tensor in it takes more memory than there is ({error})") from None
    for name, tensor in tensors.items():
        size, held = tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes()
        if size > max(held, REPEATED_BYTES):
            raise CheckpointError(
                f"{path}: {name} claims {in_bytes(size)}, but repeats {in_bytes(held)} of stored values; save "
                "only the values that it repeats"
            )
    return tree, tensors


def check_version(path: Path) -> None:
    """Raises CheckpointError where PyTorch can be made to run code by a file even so (CVE-2025-32434, -2026-24747)."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < SAFE:
        raise CheckpointError(
            f"{path}: PyTorch {torch.__version__} can be made to run code by such a file, whatever is asked of it; "
            f"install {'.'.join(map(str, SAFE))} or newer, or give a safetensors file"
        )


def problem(error: BaseException, expected: str) -> str:
    """What is wrong with something that could not be unpickled: code that it names, or that it is not as expected.

    PyTorch's own words are mostly advice to run that code.
    """
    if isinstance(error, pickle.UnpicklingError) and (found := _NAMES_CODE.search(str(error))):
        return (
            f"refused, as reading it would run code that it names ({found[1]}). Where you trust it, load it with "
            "torch.load(…, weights_only=False) and save state_dict()s alone"
        )
    lines = str(error).strip().split("\n")
    said = lines[0] if not isinstance(error, pickle.UnpicklingError) else "the pickle in it is no such thing"
    return f"not {expected} ({said.split('. ')[0] or type(error).__name__})"


def write(file: BinaryIO, state: Any) -> None:
    """Raises OSError when the file cannot be written."""
    try:
        torch.save(state, file)
    except RuntimeError as error:  # what it makes of an OSError
        if cause := system_error(error):
            raise OSError(cause.errno, cause.strerror) from error
        raise OSError(f"torch.save failed ({error})") from error
