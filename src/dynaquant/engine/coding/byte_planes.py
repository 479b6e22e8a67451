"""Exact values to bytes and back: byte planes compressed with zstd.

A byte plane holds one byte of every element: all first bytes, then all second bytes, and so on. The bytes of exponents
are similar and compress well; the low bytes of mantissas are noise and do not.
"""

from __future__ import annotations

import numpy as np
import zstandard
from numpy.typing import NDArray

_LEVEL = 3
_MAX_EXPANSION = 32_768
"""zstd takes at least 4 bytes for 128 KiB."""


def encode(data: NDArray[np.uint8], itemsize: int) -> bytes:
    """Return the stream of the elements. data: their bytes, flat, ``itemsize`` bytes for each."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    planes = data.reshape(-1, itemsize).T
    frames = [compressor.compress(np.ascontiguousarray(plane).data) for plane in planes]
    return b"".join(len(frame).to_bytes(8, "little") + frame for frame in frames)


def decode(stream: bytes, size: int, itemsize: int) -> NDArray[np.uint8]:
    """Return the ``size`` bytes of a stream of ``encode``. Raises ValueError if it is damaged or has another size."""
    count = size // itemsize
    frames, end = [], 0
    for _ in range(itemsize):
        begin = end + 8
        end = begin + int.from_bytes(stream[end:begin], "little")
        if end > len(stream):
            raise ValueError("the byte planes end too early")
        frames.append(memoryview(stream)[begin:end])
    if end != len(stream):
        raise ValueError("there are extra bytes after the byte planes")
    try:
        # Checked before allocating anything, because a damaged frame may claim any size.
        for frame in frames:
            if zstandard.frame_content_size(frame) != count or count > _MAX_EXPANSION * len(frame):
                raise ValueError("a byte plane has another number of bytes than the tensor has elements")
        out = np.empty((count, itemsize), dtype=np.uint8)
        decompressor = zstandard.ZstdDecompressor()
        for plane, frame in enumerate(frames):
            content = decompressor.decompress(frame, max_output_size=count, allow_extra_data=False)
            if len(content) != count:
                raise ValueError("a byte plane has fewer bytes than the tensor has elements")
            out[:, plane] = np.frombuffer(content, dtype=np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"a byte plane cannot be decompressed ({error})") from None
    return out.reshape(-1)
