"""Detects the format of another program's file or folder, and reads it."""

from __future__ import annotations

from pathlib import Path

from dynaquant.errors import CheckpointError
from dynaquant.interop import folder, safetensors, torchfile
from dynaquant.interop.whole_state import WholeState
from dynaquant.store.container import MAGIC
from dynaquant.store.files import non_file_kind


def read(path: Path, skip_objects: bool = False) -> WholeState:
    """Read a file of safetensors or ``torch.save``, or a folder of Hugging Face, a trainer or DCP.

    The content decides the format, not the name. No code in a file is run. skip_objects: what files of ``torch.save``
    hold besides tensors and plain values is left out, instead of an error. Raises CheckpointError, naming the path and
    the problem, if it cannot be read.
    """
    try:
        kind = non_file_kind(path)
        if kind == "a folder":
            return folder.read(path)
        if kind is not None:
            raise CheckpointError(f"{path} is {kind}, not a file; give a file or a folder")
        with path.open("rb") as file:
            start = file.read(9)
        str(path).encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{path}: its path is not UTF-8, as PyTorch and safetensors need it; rename it") from None
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: cannot be read ({error.strerror})") from error
    if start.startswith(MAGIC):
        raise CheckpointError(f"{path} is compressed already; restore the original with `dynaquant decompress`")
    if start[8:9] == b"{":  # checked first, as the 8 bytes before are a length, which may look like other magic bytes
        return safetensors.read(path)
    if start.startswith(torchfile.FIRST_BYTES):
        return torchfile.read(path, skip_objects)
    raise CheckpointError(
        f"{path}: neither a safetensors file nor one of torch.save"
        + ("; it is empty" if not start else "")
        + "; give a .safetensors, .pt, .pth, .bin or .ckpt file, or a folder of them"
    )
