"""The native coder of levels as published, and table look-ups: exact round trips, near the entropy, safe decoders."""

import heapq

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiers import examples

from dynaquant import _native

BLOCK = 65_536
NOTHING = np.zeros(0, dtype=np.uint8)
SIZES = (0, 1, 2, 300, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7)


def levels_like(kind, size, count, random):
    """Levels below count: all the same, in long runs, mostly one of them, or all equally likely."""
    if kind == "constant":
        return np.full(size, random.integers(count), dtype=np.uint8)
    if kind == "runs":
        return np.repeat(random.integers(0, count, size // 50 + 1), 50)[:size].astype(np.uint8)
    if kind == "skewed":
        return np.minimum(random.geometric(0.6, size) - 1, count - 1).astype(np.uint8)
    return random.integers(0, count, size).astype(np.uint8)


KINDS = st.sampled_from(["constant", "runs", "skewed", "random"])


def decoded(stream, size, parent, modulus, groups):
    levels = np.full(size, 0xEE, dtype=np.uint8)
    _native.decode_levels(stream, parent, modulus, groups, levels)
    return levels


def check_round_trip(levels, parent, modulus, groups, run_length):
    stream = _native.encode_levels(levels, parent, modulus, groups, run_length)
    assert np.array_equal(decoded(stream, levels.size, parent, modulus, groups), levels)


@given(
    size=st.sampled_from(SIZES) | st.integers(0, 1000),
    counts=st.tuples(st.integers(1, 256), st.integers(1, 256)),
    kinds=st.tuples(KINDS, KINDS),
    arrangement=st.sampled_from(["alone", "delta", "rearranged"]),
    run_length=st.booleans(),
    seed=st.integers(0, 2**32),
)
@example(3 * BLOCK + 7, (256, 256), ("random", "random"), "rearranged", True, 0)
@example(3 * BLOCK + 7, (18, 34), ("constant", "constant"), "rearranged", True, 0)
@example(BLOCK, (1, 1), ("constant", "constant"), "delta", True, 0)
@example(BLOCK + 1, (18, 6), ("skewed", "runs"), "rearranged", True, 0)
def test_any_levels_survive_a_round_trip_with_any_parent(size, counts, kinds, arrangement, run_length, seed):
    random = np.random.default_rng(seed)
    count, parent_count = counts
    levels = levels_like(kinds[0], size, count, random)
    if arrangement == "alone":
        check_round_trip(levels, NOTHING, count, 1, run_length)
        return
    parent = levels_like(kinds[1], size, parent_count, random)
    groups = parent_count if arrangement == "rearranged" else 1
    check_round_trip(levels, parent, max(count, parent_count), groups, run_length)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=60), st.sampled_from([1, 4]), st.booleans())
def test_any_short_sequence_of_levels_survives_a_round_trip(pairs, groups, run_length):
    levels, parent = np.array(pairs, dtype=np.uint8).reshape(-1, 2).T.copy()
    check_round_trip(levels, parent, 6, groups, run_length)


@pytest.mark.parametrize("length", [2, 3, 9, 10, 11, 17, 18, 255, 4096, BLOCK - 1, BLOCK])
def test_runs_of_any_length_survive_a_round_trip(length):
    levels = np.zeros(BLOCK, dtype=np.uint8)
    levels[length:] = 1 + np.arange(BLOCK - length) % 2
    check_round_trip(levels, NOTHING, 3, 1, True)


def test_levels_that_changed_little_take_fewer_bytes_with_their_parent():
    random = np.random.default_rng(0)
    parent = levels_like("random", 200_000, 18, random)
    levels = np.where(random.random(parent.size) < 0.05, levels_like("random", parent.size, 18, random), parent)
    alone = _native.encode_levels(levels, NOTHING, 18, 1, True)
    delta = _native.encode_levels(levels, parent, 18, 18, True)
    assert len(delta) < len(alone) / 5


def bits_of_huffman_code(frequencies):
    """The number of bits of the best prefix code without a limit of length."""
    heap = [int(f) for f in frequencies if f > 0]
    heapq.heapify(heap)
    bits = 0
    while len(heap) > 1:
        pair = heapq.heappop(heap) + heapq.heappop(heap)
        bits += pair
        heapq.heappush(heap, pair)
    return bits


@pytest.mark.parametrize("decay", [0.5, 0.8, 0.95, 0.99])
def test_without_runs_levels_take_exactly_the_bits_of_a_huffman_code(decay):
    # Frequencies for which 12 bits are enough, in an order without structure.
    frequencies = np.maximum(4000 * decay ** np.arange(200), 60).astype(int)
    levels = np.random.default_rng(0).permutation(np.repeat(np.arange(200, dtype=np.uint8), frequencies))
    stream = _native.encode_levels(levels, NOTHING, 200, 1, False)
    table_bytes = int.from_bytes(stream[:4], "little")
    blocks = -(-levels.size // BLOCK)
    payload = len(stream) - 4 - 4 * blocks - table_bytes
    best = bits_of_huffman_code(frequencies) / 8
    assert best <= payload <= best + blocks
    assert table_bytes <= 200 / 2 + 10


def test_with_code_lengths_limited_to_12_bits_the_size_is_within_a_bit_of_the_entropy():
    frequencies = np.array([1, 1, *(2**i for i in range(18))])
    levels = np.random.default_rng(0).permutation(np.repeat(np.arange(20, dtype=np.uint8), frequencies))
    stream = _native.encode_levels(levels, NOTHING, 20, 1, False)
    share = frequencies / levels.size
    entropy = -(share * np.log2(share)).sum()
    assert len(stream) * 8 <= levels.size * (entropy + 0.1) + 8 * 64
    assert np.array_equal(decoded(stream, levels.size, NOTHING, 20, 1), levels)


@given(size=st.sampled_from(SIZES), counts=st.tuples(*[st.integers(1, 40)] * 2), kind=KINDS, seed=st.integers(0, 99))
def test_run_lengths_never_cost_more_than_the_padding_of_the_blocks(size, counts, kind, seed):
    random = np.random.default_rng(seed)
    levels, parent = levels_like(kind, size, counts[0], random), levels_like("skewed", size, counts[1], random)
    arguments = (levels, parent, max(counts), counts[1])
    with_runs, without = (len(_native.encode_levels(*arguments, run_length)) for run_length in (True, False))
    assert with_runs <= without + -(-size // BLOCK) + 1


def test_a_constant_tensor_takes_a_few_bytes_per_block():
    levels = np.full(10 * BLOCK, 7, dtype=np.uint8)
    assert len(_native.encode_levels(levels, NOTHING, 18, 1, True)) < 10 * 8 + 40


@pytest.mark.parametrize(
    ("levels", "parent", "modulus", "groups", "message"),
    [
        ([3], [], 3, 1, "not below the modulus"),
        ([0], [3], 3, 1, "not below the modulus"),
        ([0, 1], [0], 3, 1, "another number of levels"),
        ([0, 1], [], 3, 2, "needs the parent"),
        ([0], [2], 3, 2, "outside its codebook"),
        ([0], [0], 3, 4, "no more than levels"),
        ([0], [], 3, 0, "no more than levels"),
        ([0], [], 0, 1, "fewer than 257"),
        ([0], [], 257, 1, "fewer than 257"),
    ],
)
def test_levels_that_do_not_fit_the_arguments_are_refused(levels, parent, modulus, groups, message):
    levels, parent = np.array(levels, dtype=np.uint8), np.array(parent, dtype=np.uint8)
    with pytest.raises(ValueError, match=message):
        _native.encode_levels(levels, parent, modulus, groups, True)


@pytest.mark.parametrize(
    ("parent", "modulus", "groups", "message"),
    [
        ([0, 1, 2], 18, 4, "another number of levels"),
        ([0, 1, 17, 0], 18, 4, "outside its codebook"),
        ([0, 1, 2, 3], 3, 4, "no more than levels"),
        ([], 18, 4, "needs the parent"),
        ([0, 1, 2, 3], 300, 4, "fewer than 257"),
    ],
)
def test_a_parent_that_does_not_fit_is_refused_when_decoding(parent, modulus, groups, message):
    levels = np.array([0, 1, 2, 3], dtype=np.uint8)
    stream = _native.encode_levels(levels, levels, 18, 4, True)
    with pytest.raises(ValueError, match=message):
        decoded(stream, 4, np.array(parent, dtype=np.uint8), modulus, groups)


def test_a_parent_level_beyond_the_modulus_is_refused_when_decoding_plain_deltas():
    levels = np.array([0, 1, 2, 3], dtype=np.uint8)
    stream = _native.encode_levels(levels, levels, 18, 1, True)
    with pytest.raises(ValueError, match="outside its codebook"):
        decoded(stream, 4, np.array([0, 1, 18, 0], dtype=np.uint8), 18, 1)


def test_arrays_at_an_unaligned_address_are_refused():
    odd = np.zeros(4 * BLOCK + 1, dtype=np.uint8)[1:]
    with pytest.raises(ValueError, match="does not begin at a multiple"):
        _native.log_histogram(odd.view(np.uint32), np.zeros(65_536, dtype=np.int64))
    with pytest.raises(ValueError, match="does not begin at a multiple"):
        _native.sums(odd.view(np.float32))


def test_arrays_of_the_wrong_kind_are_refused():
    floats, levels = np.zeros(4, dtype=np.float32), np.zeros(8, dtype=np.uint8)
    with pytest.raises(TypeError):
        _native.encode_levels(floats, NOTHING, 3, 1, True)
    with pytest.raises(TypeError):
        _native.encode_levels(levels[::2], NOTHING, 3, 1, True)
    levels.flags.writeable = False
    with pytest.raises(TypeError):
        _native.decode_levels(b"", NOTHING, 3, 1, levels)


# -- Decoding streams that encode_levels did not write ---------------------------------------------------------------


def decodes_or_refuses(stream, size, parent, modulus, groups):
    """Whether the stream decodes to levels. Any error but ValueError fails the test."""
    try:
        levels = decoded(stream, size, parent, modulus, groups)
    except ValueError:
        return False
    assert np.all(levels < modulus)
    return True


def real_streams(random):
    """Streams of different kinds, each with the arguments to decode it."""
    for kind, size, run_length in [
        ("random", 300, False),
        ("runs", 500, True),
        ("skewed", 400, True),
        ("skewed", BLOCK + 20, True),
        ("constant", 2 * BLOCK + 5, True),
    ]:
        levels = levels_like(kind, size, 18, random)
        parent = np.where(random.random(size) < 0.5, levels, levels_like("skewed", size, 12, random) % 12)
        parent = (parent % 12).astype(np.uint8)
        yield _native.encode_levels(levels, NOTHING, 18, 1, run_length), size, NOTHING, 18, 1
        yield _native.encode_levels(levels, parent, 18, 12, run_length), size, parent, 18, 12


STREAMS = list(real_streams(np.random.default_rng(7)))


@pytest.mark.parametrize("arguments", [s for s in STREAMS if len(s[0]) < 2000])
def test_every_truncation_of_a_stream_is_refused(arguments):
    stream, *rest = arguments
    assert decodes_or_refuses(stream, *rest)
    assert not any(decodes_or_refuses(stream[:end], *rest) for end in range(len(stream)))


@pytest.mark.parametrize("arguments", STREAMS)
def test_bytes_after_the_end_of_a_stream_are_refused(arguments):
    stream, *rest = arguments
    with pytest.raises(ValueError, match="go on after their end"):
        decoded(stream + b"\0", *rest)


@pytest.mark.parametrize("arguments", [s for s in STREAMS if len(s[0]) < 2000])
def test_every_single_bit_flip_decodes_to_levels_or_is_refused(arguments):
    stream, *rest = arguments
    refused = 0
    for bit in range(8 * len(stream)):
        flipped = bytearray(stream)
        flipped[bit // 8] ^= 1 << bit % 8
        refused += not decodes_or_refuses(bytes(flipped), *rest)
    assert refused >= 32  # at least all sizes


@examples(400)
@given(st.data())
def test_spliced_streams_decode_to_levels_or_are_refused(data):
    first, second = data.draw(st.sampled_from(STREAMS)), data.draw(st.sampled_from(STREAMS))
    cut, resume = data.draw(st.integers(0, len(first[0]))), data.draw(st.integers(0, len(second[0])))
    decodes_or_refuses(first[0][:cut] + second[0][resume:], *data.draw(st.sampled_from([first, second]))[1:])


@examples(400)
@given(st.binary(max_size=200), st.sampled_from([0, 1, 5, 1000]), st.integers(1, 256), st.booleans())
def test_random_bytes_decode_to_levels_or_are_refused(junk, size, modulus, rearranged):
    parent = np.arange(size, dtype=np.uint32).astype(np.uint8) % np.uint8(min(modulus, 255))
    decodes_or_refuses(junk, size, parent, modulus, modulus if rearranged else 1)


@examples(400)
@given(st.binary(max_size=300), st.integers(0, 255))
def test_random_blocks_behind_a_good_table_decode_to_levels_or_are_refused(junk, seed):
    stream, size, parent, modulus, groups = STREAMS[seed % 6]
    table_end = 8 + int.from_bytes(stream[:4], "little")
    forged = stream[:4] + len(junk).to_bytes(4, "little") + stream[8:table_end] + junk
    decodes_or_refuses(forged, size, parent, modulus, groups)


@pytest.mark.parametrize("stream", [b"", b"\0" * 4, b"\0" * 8, b"\xff" * 8, b"\xff" * 400])
def test_a_short_stream_that_claims_many_levels_is_refused_at_once(stream):
    with pytest.raises(ValueError, match="too early"):
        _native.decode_levels(stream, NOTHING, 18, 1, np.empty(2**30, dtype=np.uint8))


def table_of(lengths):
    """A Huffman table as bytes, four bits for each length. After a zero comes the length of its run minus one."""
    nibbles = [*lengths, *[0] * (len(lengths) % 2)]
    return bytes(low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True))


def stream_of(lengths, block):
    table = table_of(lengths)
    return b"".join(n.to_bytes(4, "little") for n in (len(table), len(block))) + table + block


REST = [0, 15, 0, 15, 0, 1]  # 34 zeros: no run lengths


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 2, *REST], "not a prefix code"),  # leaves a quarter of the codes unused
        ([1, 1, 1, *REST[:4], 0, 0], "not a prefix code"),  # too many codes
        ([2, 0, 0, *REST], "not a prefix code"),  # a single code must have one bit
        ([13, 1, *REST], "table of the coded levels is broken"),
        ([1, 1, 0, 15, 0, 15, 0, 15], "table of the coded levels is broken"),  # more zeros than symbols
    ],
)
def test_a_table_that_is_not_a_full_prefix_code_is_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        decoded(stream_of(lengths, b"\0"), 4, NOTHING, 2, 1)


def test_a_stream_made_by_hand_decodes_as_the_format_describes():
    # Symbol 0 is bit 0 and symbol 1 is bit 1; without a parent a delta d means level (modulus - d) % modulus.
    assert decoded(stream_of([1, 1, *REST], b"\x05"), 4, NOTHING, 2, 1).tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (b"\x01", "run of nothing"),
        (b"\x02", "run too long"),
        (b"", "too early"),
        (b"\x00\x00", "go on after their end"),
    ],
)
def test_blocks_with_wrong_run_lengths_are_refused(block, message):
    # The value 0 is bit 0; the run length four, which is symbol 2 + 2 at modulus 2, is bit 1.
    stream = stream_of([1, 0, 2, 1, 0, 15, 0, 14], block)
    with pytest.raises(ValueError, match=message):
        decoded(stream, 3, NOTHING, 2, 1)


# -- Tables over the top 16 bits ----------------------------------------------------------------------------------


def values_of_bits(dtype, size, random):
    return random.integers(0, np.iinfo(dtype).max, size, dtype=dtype, endpoint=True)


@pytest.mark.parametrize("dtype", [np.uint32, np.uint16])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 4096, 2**20, 2**20 + 3, 2_500_001])
def test_the_log_histogram_counts_the_top_16_bits(dtype, size):
    values = values_of_bits(dtype, size, np.random.default_rng(size))
    if size > 100:
        values[: size // 2] = values[0]  # neighbours in one bucket
    counts = np.zeros(65_536, dtype=np.int64)
    _native.log_histogram(values, counts)
    top = values >> 16 if dtype == np.uint32 else values
    assert np.array_equal(counts, np.bincount(top, minlength=65_536))
    _native.log_histogram(values[: size // 3], counts)
    assert counts.sum() == size + size // 3


@pytest.mark.parametrize("dtype", [np.uint32, np.uint16])
@pytest.mark.parametrize("size", [0, 1, 1000, 2**20 + 3])
def test_levels_follow_the_tables(dtype, size):
    random = np.random.default_rng(size)
    values = values_of_bits(dtype, size, random)
    table = random.integers(0, 18, 65_536, dtype=np.uint8)
    pruned, protected, undecided = _native.LEVEL_PRUNED, _native.LEVEL_PROTECTED, _native.UNDECIDED
    by_sensitivity = random.choice(np.array([pruned, protected, undecided], dtype=np.uint8), 65_536)
    levels = np.empty(size, dtype=np.uint8)

    own = table[values >> 16 if dtype == np.uint32 else values]
    _native.assign_levels(values, table, np.zeros(0, dtype=np.uint32), by_sensitivity, levels)
    assert np.array_equal(levels, own)

    sensitivity = values_of_bits(np.uint32, size, random)
    decided = by_sensitivity[sensitivity >> 16]
    _native.assign_levels(values, table, sensitivity, by_sensitivity, levels)
    either_protects = (own == protected) | (decided == protected)
    either_prunes = (own == pruned) | (decided == pruned)
    assert np.array_equal(levels, np.where(either_protects, protected, np.where(either_prunes, pruned, own)))


def test_level_assignment_refuses_arrays_of_different_sizes():
    table, levels = np.zeros(65_536, dtype=np.uint8), np.zeros(4, dtype=np.uint8)
    values, sensitivity = np.zeros(4, dtype=np.uint32), np.zeros(3, dtype=np.uint32)
    with pytest.raises(ValueError, match="differ in size"):
        _native.assign_levels(values, table, sensitivity, table, levels)
    with pytest.raises(ValueError, match="differ in size"):
        _native.assign_levels(values[:3], table, sensitivity, table, levels)
    with pytest.raises(TypeError):
        _native.assign_levels(values, table[:-1], values, table, levels)


@pytest.mark.parametrize(("dtype", "shift"), [(np.uint32, 16), (np.uint16, 0)])
@pytest.mark.parametrize("size", [0, 1, 1000, 2 * 2**20 + 3])
def test_values_of_levels_are_the_centres_and_the_protected_values_in_order(dtype, shift, size):
    random = np.random.default_rng(size)
    levels = random.integers(0, 18, size, dtype=np.uint8)
    table = values_of_bits(dtype, 18, random)
    places = np.flatnonzero(levels == _native.LEVEL_PROTECTED)
    protected = values_of_bits(np.uint16, places.size, random)
    out = np.empty(size, dtype=dtype)
    _native.values_of_levels(levels, table, protected, out)
    expected = table[levels]
    expected[places] = protected.astype(dtype) << shift
    assert np.array_equal(out, expected)


def passes_over_values(size, random):
    """Results of all functions that are compiled once for each set of instructions, as bytes by name."""
    values = random.normal(0, 1, size).astype(np.float32)
    seconds = random.random(size).astype(np.float32)
    values[::7], seconds[::5] = 0, 0
    inverses, fits, wide = np.array([3, 0.5], np.float32), np.empty(8), seconds.astype(np.float64)
    levels, rounded, units = np.empty(size, np.uint8), np.empty(size, np.float32), np.empty(size, np.float32)
    rows, columns = np.empty(size // 10), np.empty(10)
    matrix = values[: size // 10 * 10]
    found = {
        "extremes": _native.extremes(values),
        "sums": _native.sums(values),
        "errors": _native.errors(seconds, values),
        "extremes from": _native.extremes_from(seconds, 0.25),
        "changes": _native.root_changes(seconds, seconds + np.float32(0.1), 0.01),
        "roots": _native.root_sums(seconds, seconds + np.float32(0.1), (levels * 0 + 3).astype(np.uint16), 5, 0.01),
        "updates": (*_native.update_fits(values, seconds, 1e-8, inverses, fits), fits.tobytes()),
    }
    _native.grid_fits(values, wide, wide * wide, inverses, fits)
    found["fits"] = fits.tobytes()
    _native.divide_by_roots(values, seconds, units)
    found["units"] = units.tobytes()
    _native.multiply_by_roots(units, seconds)
    found["multiplied"] = units.tobytes()
    found["levels of units"] = (_native.grid_levels_of_units(values, seconds, None, 0.3, levels), levels.tobytes())
    table, own = seconds[:200].copy(), np.arange(size, dtype=np.uint8) % min(size, 200)
    highest = _native.grid_levels_of_level_units(values, own, table, 0.3, levels)
    found["levels of units of levels"] = (highest, levels.tobytes())
    _native.multiply_by_level_roots(units, own, table)
    found["multiplied by roots of levels"] = units.tobytes()
    for seed in (None, 7):
        found["levels", seed] = (_native.grid_levels(values, 40.0, seed, 5, levels), levels.tobytes())
        found["grid errors", seed] = (_native.grid_errors(values, 40.0, 0.025, seed, 5, levels), levels.tobytes())
        _native.grid_values(values, 40.0, 0.025, seed, 5, rounded)
        found["values", seed] = rounded.tobytes()
    if len(rows):
        _native.row_and_column_sums(matrix, rows, columns)
        found["rows and columns"] = (rows.tobytes(), columns.tobytes())
        found["magnitude"] = _native.tensor_magnitude(matrix, len(rows))
    for itemsize in (2, 4, 8):
        data, parent = (each[: size // 2 * 2].view(np.uint8) for each in (values, rounded))
        for before in (parent, parent[:0]):
            stream = _native.encode_lossless(data, before, itemsize)
            decoded = np.empty_like(data)
            _native.decode_lossless(stream, before, itemsize, decoded)
            assert np.array_equal(decoded, data)
            found["exact", itemsize, len(before)] = stream
    return found


@pytest.mark.parametrize("size", [1, 15, 64, 1001, BLOCK + 100, (1 << 20) + 1])
def test_all_instructions_give_the_same_results(size):
    found = {}
    try:
        for instructions in _native.instructions():
            _native.limit_instructions(instructions)
            found[instructions] = passes_over_values(size, np.random.default_rng(size))
    finally:
        _native.limit_instructions(_native.instructions()[-1])
    plain, *others = found.values()
    for other in others:
        assert [name for name in plain if plain[name] != other[name]] == []


@pytest.mark.parametrize("dtype", [np.uint32, np.uint16])
@pytest.mark.parametrize("share_protected", [0, 0.001, 0.5])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, BLOCK + 100])
def test_all_instructions_give_the_same_values(size, share_protected, dtype):
    random = np.random.default_rng(size)
    levels = random.choice(np.delete(np.arange(256, dtype=np.uint8), _native.LEVEL_PROTECTED), size)
    levels[random.random(size) < share_protected] = _native.LEVEL_PROTECTED
    table = values_of_bits(dtype, 256, random)
    protected = values_of_bits(np.uint16, int((levels == _native.LEVEL_PROTECTED).sum()), random)
    expected = table[levels]
    expected[levels == _native.LEVEL_PROTECTED] = protected.astype(dtype) << (8 * (np.dtype(dtype).itemsize - 2))
    try:
        for instructions in _native.instructions():
            _native.limit_instructions(instructions)
            out = np.empty(size, dtype=dtype)
            _native.values_of_levels(levels, table, protected, out)
            assert np.array_equal(out, expected), instructions
    finally:
        _native.limit_instructions(_native.instructions()[-1])


@pytest.mark.parametrize(
    ("levels", "protected", "message"),
    [
        ([0, 3], [], "outside the codebook"),
        ([0, 255], [], "outside the codebook"),
        ([0, 1], [], "number of protected"),
        ([0, 2], [5], "number of protected"),
        ([1, 1], [5], "number of protected"),
    ],
)
def test_levels_that_do_not_fit_the_codebook_or_the_protected_values_are_refused(levels, protected, message):
    table, out = np.zeros(3, dtype=np.uint32), np.zeros(2, dtype=np.uint32)
    with pytest.raises(ValueError, match=message):
        _native.values_of_levels(np.array(levels, dtype=np.uint8), table, np.array(protected, dtype=np.uint16), out)


def test_values_of_levels_refuses_an_output_of_another_size():
    with pytest.raises(ValueError, match="differ in size"):
        _native.values_of_levels(
            np.zeros(2, dtype=np.uint8),
            np.zeros(3, dtype=np.uint32),
            np.zeros(0, dtype=np.uint16),
            np.zeros(3, dtype=np.uint32),
        )
