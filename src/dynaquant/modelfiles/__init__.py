"""The files of other programs: read as the tree and the tensors of a state, and written from them."""

from __future__ import annotations

from pathlib import Path

from dynaquant.container import MAGIC
from dynaquant.errors import CheckpointError
from dynaquant.modelfiles import dcp, safetensors, torchfile
from dynaquant.modelfiles.modelfile import ModelFile

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"


def read(path: Path) -> ModelFile:
    """What a file or folder holds: safetensors, ``torch.save``, a Hugging Face folder, or a folder of
    ``torch.distributed.checkpoint``. It is told by its content, not by its name.

    No code in it is run. Raises CheckpointError, naming it and what is wrong, for anything else.
    """
    if path.is_dir():
        if (path / dcp.METADATA).exists():
            return dcp.read(path)
        return safetensors.read_folder(path)
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if start.startswith(MAGIC):
        raise CheckpointError(f"{path} is compressed already; `dynaquant decompress` is the way back")
    if start[8:9] == b"{":  # asked first: before it is a length, which may begin like anything
        return safetensors.read(path)
    if start.startswith((_ZIP, _PICKLE)):
        return torchfile.read(path)
    raise CheckpointError(
        f"{path}: neither safetensors nor made by torch.save"
        + ("; it is empty" if not start else "")
        + "; give a .safetensors, .pt, .pth, .bin or .ckpt file, or a folder of such"
    )


__all__ = ["ModelFile", "read"]
