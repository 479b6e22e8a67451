"""Exact values <-> bytes: byte planes + zstd.

The first bytes of all elements, then all second bytes, and so on: exponents are alike and compress, low mantissa
bytes are noise and don't.
"""

from __future__ import annotations

import struct

import numpy as np
import zstandard
from numpy.typing import NDArray

_LEVEL = 3
_MAX_EXPANSION = 32_768
"""zstd spends 4 bytes on at most 128 KiB."""


def encode(data: NDArray[np.uint8], itemsize: int) -> bytes:
    """``data``: the elements' bytes, flat, a whole number of elements of ``itemsize`` bytes."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    planes = data.reshape(-1, itemsize).T
    frames = [compressor.compress(np.ascontiguousarray(plane).data) for plane in planes]
    return b"".join(struct.pack("<Q", len(frame)) + frame for frame in frames)


def decode(stream: bytes, size: int, itemsize: int) -> NDArray[np.uint8]:
    """The ``size`` bytes that ``encode`` was given. Raises ValueError when the stream is not one of so many bytes."""
    count = size // itemsize
    frames = []
    position = 0
    for _ in range(itemsize):
        if len(stream) - position < 8:
            raise ValueError("the byte planes end too early")
        (length,) = struct.unpack_from("<Q", stream, position)
        position += 8
        if length > len(stream) - position:
            raise ValueError("the byte planes end too early")
        frames.append(memoryview(stream)[position : position + length])
        position += length
    if position != len(stream):
        raise ValueError("the byte planes go on after their end")
    try:
        # Asked before anything is allocated: what a frame claims to hold need not be true.
        for frame in frames:
            if zstandard.frame_content_size(frame) != count or count > _MAX_EXPANSION * len(frame):
                raise ValueError("a byte plane holds another number of bytes than the tensor has elements")
        out = np.empty((count, itemsize), dtype=np.uint8)
        decompressor = zstandard.ZstdDecompressor()
        for plane, frame in enumerate(frames):
            content = decompressor.decompress(frame, max_output_size=count, allow_extra_data=False)
            if len(content) != count:
                raise ValueError("a byte plane is shorter than the tensor has elements")
            out[:, plane] = np.frombuffer(content, dtype=np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"a byte plane cannot be decompressed ({error})") from None
    return out.reshape(-1)
