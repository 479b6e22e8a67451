"""Byte planes: exact round trips, smaller for real floats, and sizes checked before allocating."""

import struct

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dynaquant.engine.coding.byte_planes import decode, encode


def bytes_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def planes_of(*frames):
    return b"".join(struct.pack("<Q", len(frame)) + frame for frame in frames)


@given(st.binary(max_size=500), st.sampled_from([1, 2, 4, 8, 16]))
def test_any_bytes_survive_a_round_trip(data, itemsize):
    array = np.frombuffer(data[: len(data) // itemsize * itemsize], dtype=np.uint8)
    assert np.array_equal(decode(encode(array, itemsize), array.size, itemsize), array)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_tensors_survive_a_round_trip_and_shrink(dtype):
    tensor = (torch.randn(300_000) * 3).to(dtype)
    data = bytes_of(tensor)
    stream = encode(data, dtype.itemsize)
    assert np.array_equal(decode(stream, data.size, dtype.itemsize), data)
    assert len(stream) < 0.95 * data.size


def test_byte_planes_compress_floats_better_than_interleaved_bytes():
    data = bytes_of(torch.randn(100_000) * 0.02)
    assert len(encode(data, 4)) < 0.95 * len(zstandard.ZstdCompressor(level=3).compress(data.tobytes()))


def test_every_truncation_is_refused():
    data = bytes_of(torch.randn(40))
    stream = encode(data, 4)
    for end in range(len(stream)):
        with pytest.raises(ValueError, match="byte plane"):
            decode(stream[:end], data.size, 4)


def test_bytes_after_the_end_are_refused():
    data = bytes_of(torch.randn(40))
    with pytest.raises(ValueError, match="extra bytes after the byte planes"):
        decode(encode(data, 4) + b"\0", data.size, 4)


@pytest.mark.parametrize("tensor", [torch.randn(60), torch.zeros(500), torch.arange(200.0)])
def test_altered_streams_decode_to_the_same_number_of_bytes_or_are_refused(tensor):
    data = bytes_of(tensor)
    stream = encode(data, 4)
    refused = 0
    for bit in range(8 * len(stream)):
        altered = bytearray(stream)
        altered[bit // 8] ^= 1 << bit % 8
        try:
            assert decode(bytes(altered), data.size, 4).size == data.size
        except ValueError:
            refused += 1
    assert refused > 100


@given(st.lists(st.binary(max_size=50), max_size=4), st.integers(0, 40))
def test_frames_of_random_bytes_are_refused(frames, count):
    with pytest.raises(ValueError, match="byte plane"):
        decode(planes_of(*frames), count * 4, 4)


@pytest.mark.parametrize("size", [0, 3, 5, 2**20])
def test_a_stream_with_the_wrong_number_of_bytes_is_refused(size):
    stream = encode(np.arange(4, dtype=np.uint8), 1)
    with pytest.raises(ValueError, match="another number of bytes"):
        decode(stream, size, 1)


def test_a_frame_that_claims_more_bytes_than_the_tensor_is_refused_before_allocation():
    # A zstd frame that claims 2⁴⁸ bytes: single segment, content size in eight bytes, then an empty last block.
    bomb = struct.pack("<IBQ", 0xFD2FB528, 0xE0, 2**48) + b"\x01\x00\x00"
    assert zstandard.frame_content_size(bomb) == 2**48
    with pytest.raises(ValueError, match="another number of bytes"):
        decode(planes_of(bomb), 4, 1)


@pytest.mark.parametrize("claimed", [3, 5])
def test_a_frame_that_holds_another_number_of_bytes_than_it_claims_is_refused(claimed):
    honest = zstandard.ZstdCompressor(write_checksum=False).compress(b"abcd")
    assert honest[5] == 4
    liar = honest[:5] + bytes([claimed]) + honest[6:]
    with pytest.raises(ValueError, match="byte plane"):
        decode(planes_of(liar), claimed, 1)


def test_frames_that_are_empty_or_lack_their_size_are_refused():
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(b"abcd")
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"abcd"
    two = zstandard.ZstdCompressor().compress(b"abcd") * 2
    for frame in (silent, skippable, two):
        with pytest.raises(ValueError, match="byte plane"):
            decode(planes_of(frame), 4, 1)


def test_a_plane_that_claims_more_bytes_than_the_stream_has_is_refused():
    with pytest.raises(ValueError, match="end too early"):
        decode(struct.pack("<Q", 2**63) + b"x", 4, 1)
