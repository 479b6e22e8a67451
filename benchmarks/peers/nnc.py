"""NNCodec 2 as a peer: the ISO/IEC standard of neural network coding (NNC), in the implementation of Fraunhofer HHI.

Becking et al., "NNCodec: An Open Source Software Implementation of the Neural Network Coding ISO/IEC Standard", ICML
2023 workshop Neural Compression; PyPI package ``nncodec`` 2.1.3. Trellis-coded (dependent) quantization on one uniform
grid for all matrices, then DeepCABAC, a context-adaptive binary arithmetic coder. All other settings are the defaults
of ``nncodec.nn.encode``: vectors have ``nonweight_qp`` -75, a step far below any error that matters.

- A quantization parameter (QP) sets the step. Four less halve it. The space has whole QPs.
- Each checkpoint stands alone. The package also codes differences, for federated learning.
- It needs NumPy 1, so it has an environment of its own, which ``make benchmark-setup`` builds; arrays go there and back
  in files (``nncodec_process.py``).

Weights of other types go there as float32, and single values as vectors. Empty tensors and integers are stored exactly.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from peers.body import described, exact, flat, from_exact, join, split
from peers.peer import Checkpoint, Encoded, Known, Peer
from torch import Tensor

PYTHON = Path(__file__).parents[2] / "build" / "nncodec" / "bin" / "python"
"""The interpreter of its environment."""
PROCESS = Path(__file__).with_name("nncodec_process.py")


@dataclass(frozen=True)
class Settings:
    """qp: of matrices."""

    qp: int


SPACE = tuple(Settings(qp) for qp in range(-8, -49, -1))


def installed() -> bool:
    """Return whether its environment is there."""
    return PYTHON.exists()


def encode(checkpoint: Checkpoint, _previous: Known | None, settings: Settings) -> Encoded:
    """Encode a checkpoint without a parent."""
    coded = {name: t for name, t in checkpoint.weights.items() if t.is_floating_point() and t.numel()}
    kept = {name: tensor for name, tensor in checkpoint.weights.items() if name not in coded}
    entries = [{"name": name, **described(tensor)} for name, tensor in coded.items()]
    stream = _encoded({str(i): flat(t).reshape(t.shape or -1) for i, t in enumerate(coded.values())}, settings.qp)
    decoded = kept | _restored(stream, entries)
    return Encoded(Known(Checkpoint(decoded)), lambda: join(entries, [exact(kept), stream]))


def decode(data: bytes, _previous: Known | None) -> Known:
    """Decode the weights."""
    entries, (kept, stream) = split(data)
    return Known(Checkpoint(from_exact(kept) | _restored(stream, entries)))


def _encoded(arrays: dict[str, Any], qp: int) -> bytes:
    if not arrays:
        return b""
    with TemporaryDirectory() as folder:
        source, out = Path(folder) / "weights.npz", Path(folder) / "weights.nnc"
        np.savez(source, **arrays)
        _run("encode", source, out, f"--qp={qp}")
        return out.read_bytes()


def _restored(stream: bytes, entries: list[dict[str, Any]]) -> dict[str, Tensor]:
    if not entries:
        return {}
    with TemporaryDirectory() as folder:
        source, out = Path(folder) / "weights.nnc", Path(folder) / "weights.npz"
        source.write_bytes(stream)
        _run("decode", source, out)
        with np.load(out) as arrays:
            return {
                entry["name"]: torch.from_numpy(arrays[str(i)]).reshape(entry["shape"]).to(_dtype(entry))
                for i, entry in enumerate(entries)
            }


def _dtype(entry: dict[str, Any]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    return dtype


def _run(*arguments: object) -> None:
    # -P: without this folder on the path, whose modules have names of packages.
    subprocess.run([PYTHON, "-P", PROCESS, *map(str, arguments)], check=True)


NNCODEC = Peer("NNCodec 2", SPACE, encode, decode)
