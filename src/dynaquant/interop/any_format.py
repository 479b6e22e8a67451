"""Reads files of other programs as the tree and the tensors of a state, and writes them."""

from __future__ import annotations

from pathlib import Path

from dynaquant.errors import CheckpointError
from dynaquant.interop import folder, safetensors, torchfile
from dynaquant.interop.model_file import ModelFile
from dynaquant.store.container import MAGIC
from dynaquant.store.files import kind_of


def read(path: Path) -> ModelFile:
    """Reads a file of safetensors or ``torch.save``, or a folder of Hugging Face, a trainer or
    ``torch.distributed.checkpoint``. The format is detected by content, not by name.

    No code in it is run. Raises CheckpointError, naming it and what is wrong, for anything else.
    """
    try:
        kind = kind_of(path)
        if kind == "a folder":
            return folder.read(path)
        if kind is not None:
            raise CheckpointError(f"{path} is {kind} and no file; give a file or a folder")
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: cannot be read ({error.strerror})") from error
    if start.startswith(MAGIC):
        raise CheckpointError(f"{path} is compressed already; `dynaquant decompress` is the way back")
    if start[8:9] == b"{":  # checked first: the 8 bytes before it are a length, which may look like any other magic
        return safetensors.read(path)
    if start.startswith(torchfile.STARTS):
        return torchfile.read(path)
    raise CheckpointError(
        f"{path}: neither safetensors nor made by torch.save"
        + ("; it is empty" if not start else "")
        + "; give a .safetensors, .pt, .pth, .bin or .ckpt file, or a folder of such"
    )
