"""Parts of the files of several peers: a header and streams, exact tensors, packed bits, Huffman codes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.engine.coding import rearrange
from dynaquant.engine.coding.rearrange import Levels
from dynaquant.engine.tensors.dtypes import dtype_name

_LENGTH = 8
"""Bytes of the header's length."""
_LEVEL = 3
"""Compression level of zstd."""


def join(header: Any, parts: Sequence[bytes]) -> bytes:
    """Return a JSON header and the parts after it as bytes."""
    text = json.dumps({"header": header, "sizes": [len(part) for part in parts]}, separators=(",", ":")).encode()
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *parts])


def split(data: bytes) -> tuple[Any, list[bytes]]:
    """Return the inverse of ``join``: header and parts."""
    start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    described = json.loads(data[_LENGTH:start])
    parts = []
    for size in described["sizes"]:
        parts.append(data[start : start + size])
        start += size
    return described["header"], parts


def described(tensor: Tensor) -> dict[str, Any]:
    """Return what ``restored`` needs beside the bytes of a tensor."""
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}


def bytes_of(tensor: Tensor) -> bytes:
    """Return the tensor's bytes in C order."""
    flat = tensor.detach().contiguous().reshape(-1)
    # An empty tensor from an array has no strides that allow a view as bytes.
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def restored(data: bytes | memoryview, entry: dict[str, Any]) -> Tensor:
    """Return the tensor with these bytes. entry: as ``described`` returns it."""
    dtype = getattr(torch, entry["dtype"])
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
    return flat.reshape(entry["shape"])


def exact(tensors: dict[str, Tensor]) -> bytes:
    """Return tensors coded without loss: byte planes, then zstd."""
    planes = []
    for tensor in tensors.values():
        data = np.frombuffer(bytes_of(tensor), dtype=np.uint8).reshape(-1, tensor.dtype.itemsize)
        planes.append(zstandard.compress(np.ascontiguousarray(data.T).data, _LEVEL))
    return join({name: described(tensor) for name, tensor in tensors.items()}, planes)


def from_exact(data: bytes) -> dict[str, Tensor]:
    """Return the tensors that ``exact`` coded."""
    entries, planes = split(data)
    found = {}
    for (name, entry), part in zip(entries.items(), planes, strict=True):
        size = getattr(torch, entry["dtype"]).itemsize
        plane = np.frombuffer(zstandard.decompress(part), dtype=np.uint8)
        found[name] = restored(np.ascontiguousarray(plane.reshape(size, -1).T).tobytes(), entry)
    return found


def pack(indices: NDArray[np.uint8], bits: int) -> bytes:
    """Pack indices below ``2**bits`` into ``bits`` bits each, the highest bit first. Zeros fill the last byte."""
    return np.packbits(np.unpackbits(indices.reshape(-1, 1), axis=1)[:, 8 - bits :]).tobytes()


def unpack(packed: bytes, bits: int, count: int) -> NDArray[np.uint8]:
    """Return the ``count`` indices that ``pack`` has packed."""
    each = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=count * bits).reshape(count, bits)
    return np.packbits(np.pad(each, ((0, 0), (8 - bits, 0))), axis=1).reshape(-1)


def huffman(symbols: NDArray[np.uint8], count: int) -> bytes:
    """Return symbols below ``count`` in Huffman codes, with the code lengths. ``count`` is at most 256."""
    return rearrange.encode_as("alone", Levels(symbols, count), None, run_length=False)


def from_huffman(data: bytes, count: int, size: int) -> NDArray[np.uint8]:
    """Return the ``size`` symbols that ``huffman`` coded."""
    return rearrange.decode(data, size, count, "alone", None).values


def matrices(tensors: dict[str, Tensor]) -> Iterable[str]:
    """The names of those with two or more dimensions that hold something.

    The others (biases, norms) are a percent of a model, and peers that quantize by layer or row leave them exact.
    """
    return [name for name, tensor in tensors.items() if tensor.ndim >= 2 and tensor.numel()]


def flat(tensor: Tensor) -> NDArray[np.float32]:
    """Return the values in C order, as float32."""
    values: NDArray[np.float32] = tensor.detach().reshape(-1).to(torch.float32).numpy()
    return values


def bits_for(bins: int) -> int:
    """Return the bits that an index of this many bins takes."""
    return (bins - 1).bit_length()
