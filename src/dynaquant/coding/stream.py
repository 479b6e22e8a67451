"""One tensor <-> one stream of bytes, given the parent's levels, for every coding of ``entry`` that has a stream."""

from __future__ import annotations

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from dynaquant.coding import planes, rearrange
from dynaquant.entry import Coding, Entry, Planes, Quantized, Raw
from dynaquant.quantized import FIRST_BIN, Levels, QuantizedTensor, dequantize
from dynaquant.state import dtype_name

StoredTensor = QuantizedTensor | Tensor
"""A tensor as a checkpoint holds it: quantized, or its exact values."""


def values_of(stored: StoredTensor) -> Tensor:
    """The values a restore returns, bit for bit."""
    return dequantize(stored) if isinstance(stored, QuantizedTensor) else stored


def levels_of(stored: StoredTensor) -> Levels | None:
    """What a delta can be coded against, if anything."""
    return stored.parent_levels if isinstance(stored, QuantizedTensor) else None


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.stride() != (1,):  # counts as contiguous when it has one element, but cannot be viewed as bytes
        flat = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)
    data: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return data


def tensor_hash(tensor: Tensor) -> str:
    """The hash of dtype, shape and values (docs/format.md, "Identity"), 64 hexadecimal digits."""
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode())
    hasher.update(_bytes_of(tensor).data)
    return hasher.hexdigest()


def encode(stored: StoredTensor, parent: Levels | None) -> tuple[Coding, bytes]:
    """Coding and stream of a tensor. parent: levels of the tensor of the same name and shape in the parent, if any."""
    if isinstance(stored, QuantizedTensor):
        levels = stored.parent_levels
        if parent is not None and parent.values.size != levels.values.size:
            parent = None
        arrangement, coded = rearrange.encode(levels, parent)
        protected = planes.encode(stored.protected.view(np.uint8), 2)
        coding = Quantized(len(stored.centres), len(stored.protected), len(protected), arrangement)
        return coding, stored.centres.astype("<f4").tobytes() + protected + coded
    data = _bytes_of(stored)
    coded = planes.encode(data, stored.dtype.itemsize)
    return (Planes(), coded) if len(coded) < data.size else (Raw(), data.tobytes())


def decode(entry: Entry, stream: bytes, parent: Levels | None) -> StoredTensor:
    """The tensor that ``encode`` made a stream of. parent: the same levels that ``encode`` was given, where needed.

    Raises ValueError when the stream is not that, or the parent does not fit.
    """
    coding = entry.coding
    if isinstance(coding, Quantized):
        return _decode_quantized(entry, coding, stream, parent)
    if isinstance(coding, Planes):
        data = planes.decode(stream, entry.raw_size, entry.dtype.itemsize)
    elif isinstance(coding, Raw):
        data = np.frombuffer(stream, dtype=np.uint8).copy()
    else:
        raise ValueError("a reference has no stream")
    if entry.dtype == torch.bool and data.size and int(data.max()) > 1:
        raise ValueError("a bool is neither 0 nor 1")
    if entry.elements == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)  # the strides of an empty array do not allow the view below
    return torch.from_numpy(data).view(entry.dtype).reshape(entry.shape)


def _decode_quantized(entry: Entry, coding: Quantized, stream: bytes, parent: Levels | None) -> QuantizedTensor:
    if coding.arrangement != "alone" and (parent is None or parent.values.size != entry.elements):
        raise ValueError("the parent has no levels of so many values for it")
    centres_end = 4 * coding.bins
    protected_end = centres_end + coding.protected_size
    return QuantizedTensor(
        dtype=entry.dtype,
        shape=entry.shape,
        levels=rearrange.decode(
            stream[protected_end:], entry.elements, FIRST_BIN + coding.bins, coding.arrangement, parent
        ).values,
        centres=np.frombuffer(stream[:centres_end], dtype="<f4").astype(np.float32),
        protected=planes.decode(stream[centres_end:protected_end], 2 * coding.protected, 2).view("<u2"),
    )
