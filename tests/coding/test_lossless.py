"""Exact values conditioned on the parent's: exact round trips, fewer bytes, and sizes checked before allocating."""

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from dynaquant.engine.coding import byte_planes
from dynaquant.engine.coding.lossless import decode, encode, needs_parent

BLOCK = 65_536
ITEMSIZES = st.sampled_from([1, 2, 3, 4, 8, 12, 16])
KINDS = st.sampled_from(["noise", "floats", "few", "zeros", "counting"])


def bytes_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def data_like(kind, size, random):
    """Bytes: random, floats, a few different values, zeros, or consecutive integers."""
    if kind == "noise":
        return random.integers(0, 256, size, dtype=np.uint8)
    if kind == "floats":
        return random.normal(0, 0.02, size // 4 + 1).astype(np.float32).view(np.uint8)[:size].copy()
    if kind == "few":
        return np.minimum(random.geometric(0.7, size), 255).astype(np.uint8)
    if kind == "zeros":
        return np.zeros(size, dtype=np.uint8)
    return np.arange(size // 8 + 1).view(np.uint8)[:size].copy()


def parent_of(data, relation, random):
    """A parent: the same, nearly the same, unrelated, or none."""
    if relation == "none":
        return None
    if relation == "equal":
        return data.copy()
    if relation == "unrelated":
        return data_like("noise", data.size, random)
    return np.where(random.random(data.size) < 0.02, data + np.uint8(1), data)


def check_round_trip(data, itemsize, parent):
    stream = encode(data, itemsize, parent)
    assert np.array_equal(decode(stream, data.size, itemsize, parent), data)
    return stream


@examples(300)
@given(
    count=st.integers(0, 300) | st.sampled_from([4095, 5000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77]),
    itemsize=ITEMSIZES,
    kind=KINDS,
    relation=st.sampled_from(["none", "equal", "near", "unrelated"]),
    seed=st.integers(0, 2**32),
)
def test_any_values_survive_a_round_trip_with_any_parent(count, itemsize, kind, relation, seed):
    random = np.random.default_rng(seed)
    data = data_like(kind, count * itemsize, random)
    check_round_trip(data, itemsize, parent_of(data, relation, random))


@given(st.binary(max_size=64), st.binary(min_size=64, max_size=64), st.sampled_from([1, 2, 4, 8, 16]))
def test_any_short_bytes_survive_a_round_trip(data, parent, itemsize):
    size = len(data) // itemsize * itemsize
    array, context = (np.frombuffer(bytes_[:size], dtype=np.uint8) for bytes_ in (data, parent))
    check_round_trip(array, itemsize, None)
    check_round_trip(array, itemsize, context)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_differences_at_the_ends_of_the_range_survive_a_round_trip(itemsize):
    ends = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1], dtype=np.uint64)
    ends = np.concatenate([ends, ends >> np.uint64(64 - 8 * itemsize)]).astype(f"u{itemsize}")
    values, parents = (pair.reshape(-1).copy().view(np.uint8) for pair in np.meshgrid(ends, ends))
    # Enough unchanged elements around them, so that the coder chooses differences.
    same = np.arange(40_000, dtype=np.uint64).astype(f"u{itemsize}").view(np.uint8)
    data, parent = np.concatenate([values, same]), np.concatenate([parents, same])
    assert needs_parent(check_round_trip(data, itemsize, parent))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex128])
def test_values_that_changed_little_take_fewer_bytes_with_their_parent(dtype):
    parent = (torch.randn(300_000, dtype=torch.float64) * 0.02).to(dtype)
    tensor = (parent + 1e-4 * torch.randn(300_000, dtype=torch.float64)).to(dtype)
    data, context = bytes_of(tensor), bytes_of(parent)
    alone, given_parent = (check_round_trip(data, dtype.itemsize, p) for p in (None, context))
    assert needs_parent(given_parent)
    assert not needs_parent(alone)
    assert len(given_parent) < len(alone) < data.size


def test_a_parent_that_does_not_help_is_not_used():
    data, parent = bytes_of(torch.randn(100_000) * 0.02), bytes_of(torch.randn(100_000) * 0.02)
    stream = encode(data, 4, parent)
    assert stream == encode(data, 4, None)
    assert np.array_equal(decode(stream, data.size, 4, None), data)
    assert np.array_equal(decode(stream, data.size, 4, parent), data)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_unchanged_values_take_almost_no_bytes(itemsize):
    data = np.random.default_rng(0).integers(0, 256, 20 * BLOCK * itemsize, dtype=np.uint8)
    blocks = 20 * max(1, itemsize // 8)
    assert len(encode(data, itemsize, data.copy())) <= 1 + blocks * (4 + 3 + 2 * 8)


def test_noise_grows_by_a_few_bytes_per_block():
    data = np.random.default_rng(0).integers(0, 256, 4 * 4 * BLOCK, dtype=np.uint8)
    assert len(encode(data, 4, None)) <= data.size + 1 + 4 * 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats_take_fewer_bytes_than_byte_planes_with_the_strongest_zstd(dtype):
    data = bytes_of((torch.randn(500_000) * 0.02).to(dtype))
    compressor = zstandard.ZstdCompressor(level=19)
    strongest = sum(len(compressor.compress(p.tobytes())) for p in data.reshape(-1, dtype.itemsize).T)
    assert len(encode(data, dtype.itemsize, None)) < strongest < len(byte_planes.encode(data, dtype.itemsize))


def test_no_stream_expands_more_than_the_format_allows():
    data = np.zeros(8 * BLOCK * 10, dtype=np.uint8)
    for parent in (None, data.copy()):
        assert data.size <= 131_072 * len(encode(data, 8, parent))


@pytest.mark.parametrize("stream", [b"", b"\0", b"\1", b"\0" * 7])
def test_a_short_stream_that_claims_many_bytes_is_refused_before_allocation(stream):
    with pytest.raises(ValueError, match="too early"):
        decode(stream, 2**60, 8, None)


def test_data_and_parents_that_do_not_fit_are_refused():
    data = np.zeros(8, dtype=np.uint8)
    with pytest.raises(ValueError, match="whole elements"):
        encode(data[:7], 4, None)
    with pytest.raises(ValueError, match="another number of bytes"):
        encode(data, 4, data[:4])
    stream = encode(data, 4, data)
    with pytest.raises(ValueError, match="another number of bytes"):
        decode(stream, 8, 4, np.zeros(12, dtype=np.uint8))


def test_differences_without_their_parent_are_refused():
    data = np.random.default_rng(0).integers(0, 256, 4000, dtype=np.uint8)
    with pytest.raises(ValueError, match="need the parent's"):
        decode(encode(data, 4, data), data.size, 4, None)


def test_a_stream_with_the_wrong_number_of_bytes_is_refused():
    data = bytes_of(torch.randn(10_000) * 0.02)
    stream = encode(data, 4, None)
    for size in (0, 4, data.size - 4, data.size + 4, 8 * BLOCK):
        with pytest.raises(ValueError, match=r"(exact|coded) values"):
            decode(stream, size, 4, None)
