"""The native coder of exact values: exact round trips, near the entropy, safe with any bytes."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from dynaquant import _native

BLOCK = 65_536
NOTHING = np.zeros(0, dtype=np.uint8)


def exact_decoded(stream, size, itemsize, parent):
    data = np.full(size, 0xEE, dtype=np.uint8)
    _native.decode_lossless(stream, parent, itemsize, data)
    return data


def exact_cases(random):
    """Bytes of floats and of slightly changed floats, for every itemsize; together they use every kind of plane."""
    for itemsize, count in [(1, 700), (2, 3000), (4, 3000), (8, 1500), (4, BLOCK + 5000), (2, 2 * BLOCK)]:
        kind = {1: np.uint8, 2: np.float16, 4: np.float32, 8: np.float64}[itemsize]
        before = random.normal(0, 20, count)
        before = (before.astype(np.int64) if itemsize == 1 else before).astype(kind)  # of -1.5 to uint8: not on ARM
        after = (before + random.normal(0, 0.1, count)).astype(kind)
        before[: count // 3] = after[: count // 3] = 0
        yield itemsize, after.view(np.uint8), before.view(np.uint8)


EXACT = [
    (_native.encode_lossless(data, parent, itemsize), data, itemsize, parent)
    for itemsize, data, close in exact_cases(np.random.default_rng(3))
    for parent in (close, NOTHING, data)
]
SHORT_EXACT = [case for case in EXACT if case[1].size < 20_000]


@pytest.mark.parametrize("case", EXACT)
def test_a_stream_decodes_to_its_values_and_to_no_others(case):
    stream, data, itemsize, parent = case
    assert _native.decodes_to(stream, parent, itemsize, data)
    for at in (0, data.size // 2, data.size - 1):
        other = data.copy()
        other[at] ^= 1
        assert not _native.decodes_to(stream, parent, itemsize, other)


@pytest.mark.parametrize("case", SHORT_EXACT)
def test_a_damaged_stream_decodes_to_its_values_exactly_if_it_is_decoded_to_them(case):
    stream, data, itemsize, parent = case
    for at in np.random.default_rng(5).integers(0, len(stream), 60):
        damaged = stream[:at] + bytes([stream[at] ^ 8]) + stream[at + 1 :]
        try:
            wanted = np.array_equal(exact_decoded(damaged, data.size, itemsize, parent), data)
        except ValueError as error:
            with pytest.raises(ValueError, match=re.escape(str(error))):
                _native.decodes_to(damaged, parent, itemsize, data)
        else:
            assert _native.decodes_to(damaged, parent, itemsize, data) == wanted


@pytest.mark.parametrize("case", EXACT)
def test_exact_values_survive_a_round_trip(case):
    stream, data, itemsize, parent = case
    assert np.array_equal(exact_decoded(stream, data.size, itemsize, parent), data)


def test_exact_values_take_about_their_entropy():
    symbols = np.minimum(np.random.default_rng(0).geometric(0.3, 4 * BLOCK), 255).astype(np.uint8)
    share = np.bincount(symbols) / symbols.size
    entropy = -(share[share > 0] * np.log2(share[share > 0])).sum() * symbols.size / 8
    assert entropy < len(_native.encode_lossless(symbols, NOTHING, 1)) < 1.01 * entropy + 4 * 200


def test_other_element_sizes_are_refused():
    for itemsize in (0, 3, 16):
        with pytest.raises(ValueError, match="elements"):
            _native.encode_lossless(np.zeros(48, dtype=np.uint8), NOTHING, itemsize)


def exact_decodes_or_refuses(stream, size, itemsize, parent):
    try:
        exact_decoded(stream, size, itemsize, parent)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("case", SHORT_EXACT)
def test_truncated_streams_of_exact_values_are_refused(case):
    stream, data, itemsize, parent = case
    for end in {*range(0, len(stream), max(1, len(stream) // 300)), *range(min(len(stream), 200))}:
        assert not exact_decodes_or_refuses(stream[:end], data.size, itemsize, parent)
    assert not exact_decodes_or_refuses(stream + b"\0", data.size, itemsize, parent)


@pytest.mark.parametrize("case", SHORT_EXACT)
def test_altered_streams_of_exact_values_decode_or_are_refused(case):
    stream, data, itemsize, parent = case
    random = np.random.default_rng(0)
    early = range(8 * min(len(stream), 150))
    for bit in [*early, *random.integers(0, 8 * len(stream), 500).tolist()]:
        altered = bytearray(stream)
        altered[bit // 8] ^= 1 << bit % 8
        exact_decodes_or_refuses(bytes(altered), data.size, itemsize, parent)


@pytest.mark.parametrize("case", EXACT)
def test_streams_of_exact_values_with_truncated_or_exchanged_blocks_decode_or_are_refused(case):
    # The sizes of the blocks match the stream, so only the contents of blocks are wrong.
    stream, data, itemsize, parent = case
    blocks = -(-data.size // itemsize // BLOCK)
    head = 1 + 4 * blocks
    random = np.random.default_rng(1)
    for _ in range(100):
        sizes = [int.from_bytes(stream[1 + 4 * b : 5 + 4 * b], "little") for b in range(blocks)]
        body = stream[head:]
        cut = int(random.integers(0, sizes[-1] + 1))
        forged = stream[:1] + b"".join(n.to_bytes(4, "little") for n in [*sizes[:-1], sizes[-1] - cut])
        assert not exact_decodes_or_refuses(forged + body[: len(body) - cut], data.size, itemsize, parent) or cut == 0
        junk = bytearray(body)
        junk[random.integers(0, len(junk)) :] = b""
        junk += random.integers(0, 256, len(body) - len(junk), dtype=np.uint8).tobytes()
        exact_decodes_or_refuses(stream[:head] + bytes(junk), data.size, itemsize, parent)


@examples(400)
@given(st.binary(max_size=300), st.sampled_from([0, 1, 5, 1000]), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_random_bytes_decode_to_exact_values_or_are_refused(junk, count, itemsize, with_parent):
    size = count * itemsize
    parent = np.arange(size, dtype=np.uint32).astype(np.uint8) if with_parent else NOTHING
    framed = bytes([with_parent]) + len(junk).to_bytes(4, "little") + bytes([with_parent]) + junk
    for stream in (junk, framed):
        exact_decodes_or_refuses(stream, size, itemsize, parent)


def test_a_stream_of_exact_values_made_by_hand_decodes_as_the_format_describes():
    # 40 elements of one byte, 7 or 9, equally likely. The states are chosen so that no element takes a word.
    def before(state, byte):
        return (state // 1024 << 11) + state % 1024 + (0 if byte == 7 else 1024)

    folded = [7, 9, 9, 7] * 10
    states = [1 << 15] * 32
    for i in reversed(range(40)):
        states[i % 32] = before(states[i % 32], folded[i])
    # A number is its width and the bits below the highest. The table: seven zeros, 1024, a zero, 1024.
    fields = [(0, 4), (6, 4), (11, 4), (0, 10), (0, 4), (0, 4), (11, 4), (0, 10)]
    fields += [(0, 4), (15, 4)] * 15 + [(0, 4), (5, 4)]  # 246 zeros
    number = shift = 0
    for value, width in fields:
        number |= value << shift
        shift += width
    table = number.to_bytes(-(-shift // 8), "little")
    block = b"\0\2" + table + b"".join(s.to_bytes(4, "little") for s in states)
    stream = b"\0" + len(block).to_bytes(4, "little") + block
    # The sign of a folded byte is its lowest bit.
    assert exact_decoded(stream, 40, 1, NOTHING).tolist() == [(f >> 1) | (f & 1) << 7 for f in folded]
