"""The native coder of levels conditioned on a parent, and the native grid: exact, near the entropy, safe decoders."""

from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiers import examples

from dynaquant import _native
from dynaquant.engine.tensors.codebook import PROTECTED

MANY = 8192  # blocks of at least this many levels are coded with several states
BLOCK = 131_072
WIDE = 1 << 20  # levels of a block in the wide layout, which streams of more than BLOCK levels have
SIZES = (0, 1, 2, 3, 5, 300, MANY - 1, MANY, MANY + 1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + MANY + 3)
INSTRUCTIONS = _native.instructions()
NOTHING = np.zeros(0, dtype=np.uint8)
PLAIN = np.tile(np.arange(256, dtype=np.uint8), 256)  # every level is its own symbol
ALIKE = np.zeros(256, dtype=np.uint8)  # one context for all
APART = np.arange(256, dtype=np.uint8)


def tables(symbols, contexts, random):
    """For every parent level: a random order of the levels below ``symbols``, its inverse, and a context."""
    level_of = np.zeros((256, 256), dtype=np.uint8)
    level_of[:, :symbols] = random.permuted(np.tile(np.arange(symbols, dtype=np.uint8), (256, 1)), axis=1)
    symbol_of = np.zeros((256, 256), dtype=np.uint8)
    np.put_along_axis(symbol_of, level_of[:, :symbols].astype(int), np.arange(symbols, dtype=np.uint8)[None], axis=1)
    return level_of.reshape(-1), symbol_of.reshape(-1), random.integers(0, contexts, 256).astype(np.uint8)


def some(kind, size, count, random):
    """Levels below count: all the same, mostly the lowest ones, mostly two of them, or all equally likely."""
    if kind == "constant":
        return np.full(size, random.integers(count), dtype=np.uint8)
    if kind == "skewed":
        return np.minimum(random.geometric(0.6, size) - 1, count - 1).astype(np.uint8)
    if kind == "two":
        rare = random.random(size) < 0.02
        return np.where(rare, random.integers(0, count, size), random.integers(0, min(count, 2), size)).astype(np.uint8)
    return random.integers(0, count, size).astype(np.uint8)


KINDS = ("constant", "skewed", "two", "random")


def decoded(stream, size, parent, level_of=PLAIN, context_of=ALIKE, contexts=1, symbols=256):
    levels = np.full(size, 0xEE, dtype=np.uint8)
    _native.decode_conditional(stream, parent, level_of, context_of, contexts, symbols, levels)
    return levels


@contextmanager
def limited(instructions):
    """Let the native functions use at most these instructions."""
    _native.limit_instructions(instructions)
    try:
        yield
    finally:
        _native.limit_instructions(INSTRUCTIONS[-1])


def bits(fields):
    """Pairs of a number and its bits as a bit stream."""
    joined, length = 0, 0
    for number, count in fields:
        joined |= number << length
        length += count
    return joined.to_bytes(-(-length // 8), "little")


def encoded(levels, parent=NOTHING, symbol_of=PLAIN, context_of=ALIKE, contexts=1):
    return _native.encode_conditional(levels, parent, symbol_of, context_of, contexts)


@given(
    size=st.sampled_from(SIZES) | st.integers(0, 1000),
    symbols=st.integers(1, 256),
    contexts=st.integers(1, 256),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from((*KINDS, "none"))),
    seed=st.integers(0, 2**32),
)
@example(2 * BLOCK + 7, 256, 256, ("random", "random"), 0)
@example(2 * BLOCK, 7, 31, ("skewed", "skewed"), 1)
@example(BLOCK + 1, 1, 1, ("constant", "none"), 2)
@example(20_000, 256, 1, ("two", "none"), 3)
def test_any_levels_survive_a_round_trip_with_any_parent_and_tables(size, symbols, contexts, kinds, seed):
    random = np.random.default_rng(seed)
    levels = some(kinds[0], size, symbols, random)
    parent = NOTHING if kinds[1] == "none" else some(kinds[1], size, 256, random)
    level_of, symbol_of, context_of = tables(symbols, contexts, random)
    stream = encoded(levels, parent, symbol_of, context_of, contexts)
    assert np.array_equal(decoded(stream, size, parent, level_of, context_of, contexts, symbols), levels)
    assert stream == encoded(levels, parent, symbol_of, context_of, contexts)


WIDE_SIZES = (BLOCK + 1, 3 * BLOCK + 13, 6 * BLOCK + 17)
"""With 8, 16 and 32 states."""
WIDER_SIZES = (3 * BLOCK, WIDE + 1, 2 * WIDE - 1, 3 * WIDE + 33)
"""With 8, 32, 32 and 32 states, and one to three blocks."""
COUNTS = ((3, 3), (8, 16), (8, 17), (40, 64), (40, 65), (200, 256))


@pytest.mark.parametrize(
    ("size", "counts"), [*product(WIDE_SIZES, COUNTS), *product(WIDER_SIZES, [(8, 16), (40, 65)])], ids=str
)
@pytest.mark.parametrize("kinds", [("skewed", "none"), ("two", "none"), ("random", "random"), ("skewed", "skewed")])
def test_all_instructions_give_the_same_bytes_and_levels(size, kinds, counts):
    symbols, sources = counts  # up to 16 parent levels, or with AVX-512 and NEON up to 64, are looked up in registers
    random = np.random.default_rng(size)
    levels = some(kinds[0], size, symbols, random)
    parent = NOTHING if kinds[1] == "none" else some(kinds[1], size, sources, random)
    level_of, symbol_of, context_of = tables(symbols, sources, random)
    streams = []
    for instructions in INSTRUCTIONS:
        with limited(instructions):
            streams.append(encoded(levels, parent, symbol_of, context_of, sources))
    assert len(set(streams)) == 1
    for instructions in INSTRUCTIONS:
        with limited(instructions):
            found = decoded(streams[0], size, parent, level_of, context_of, sources, symbols)
        assert np.array_equal(found, levels), instructions


def test_instructions_that_the_processor_lacks_are_refused():
    for other in ("", "sse", *{"plain", "avx2", "avx512", "neon"} - set(INSTRUCTIONS)):
        with pytest.raises(ValueError, match="instructions"):
            _native.limit_instructions(other)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("size", [700, BLOCK, 3 * BLOCK + 13, WIDE + 5])
def test_levels_may_take_the_place_of_the_parents(size, instructions):
    random = np.random.default_rng(0)
    for kind in KINDS:
        levels, parent = some(kind, size, 30, random), some("skewed", size, 40, random)
        level_of, symbol_of, context_of = tables(30, 256, random)
        stream = encoded(levels, parent, symbol_of, context_of, 256)
        with limited(instructions):
            _native.decode_conditional(stream, parent, level_of, context_of, 256, 30, parent)
        assert np.array_equal(parent, levels), kind


def narrow(block, count):
    """The stream of a block again and again, as earlier versions wrote it: blocks of BLOCK levels with few states."""
    stream = encoded(block)
    size = int.from_bytes(stream[:4], "little")
    return stream[:4] * count + stream[4:-size] + stream[-size:] * count


@pytest.mark.parametrize("count", [2, 3, 4, 6, 7, 8, 9, 17])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_streams_of_many_levels_are_decoded_and_wide_ones_are_not_larger(kind, count):
    block = some(kind, BLOCK, 20, np.random.default_rng(0))
    levels = np.tile(block, count)
    stream = narrow(block, count)
    assert np.array_equal(decoded(stream, levels.size, NOTHING), levels)
    assert len(encoded(levels)) <= len(stream)


def test_unknown_layouts_are_refused():
    for size in (300, 2 * BLOCK):
        stream = bytearray(encoded(some("skewed", size, 20, np.random.default_rng(0))))
        for layout in {1, 2, 255} - {stream[3]}:
            stream[3] = layout
            with pytest.raises(ValueError, match="unknown layout"):
                decoded(bytes(stream), size, NOTHING)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=60), st.sampled_from([1, 4]))
def test_any_short_sequence_of_levels_survives_a_round_trip(pairs, contexts):
    levels, parent = np.array(pairs, dtype=np.uint8).reshape(-1, 2).T.copy()
    context_of = APART % np.uint8(contexts)
    stream = encoded(levels, parent, PLAIN, context_of, contexts)
    assert np.array_equal(decoded(stream, levels.size, parent, PLAIN, context_of, contexts, 6), levels)


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=256), st.integers(0, 1))
@example([9874, 9872, *[1] * 254], 0)
@example([5000, 5000, 5000, *[1] * 200], 0)
@example([1] * 256, 0)
@example([100_000, *[1] * 255], 0)
def test_levels_survive_a_round_trip_with_any_counts(counts, reverse):
    levels = np.repeat(np.arange(len(counts), dtype=np.uint8), counts[::-1] if reverse else counts)
    levels = np.random.default_rng(0).permutation(levels)
    assert np.array_equal(decoded(encoded(levels), levels.size, NOTHING), levels)


def test_two_equally_frequent_levels_among_many_rare_ones_survive_a_round_trip():
    for first in range(4900, 5100, 7):
        counts = [first, 5000, *[1] * 250]
        levels = np.random.default_rng(0).permutation(np.repeat(np.arange(252, dtype=np.uint8), counts))
        assert np.array_equal(decoded(encoded(levels), levels.size, NOTHING), levels), first


def entropy_of(levels, parent):
    """The bytes that the levels take at their conditional entropy."""
    pairs = np.bincount(parent.astype(int) * 256 + levels, minlength=65_536).reshape(256, 256).astype(float)
    share = np.divide(pairs, pairs.sum(1, keepdims=True), out=np.ones_like(pairs), where=pairs > 0)
    return -(pairs * np.log2(share)).sum() / 8


def drifted(size, spread, step, random):
    """Levels of normal weights on a grid, and of the same weights before they moved by ``step`` steps."""

    def level(values):
        multiples = np.clip(np.rint(values), -127, 127).astype(int)
        return np.where(multiples > 0, 2 * multiples, np.where(multiples < 0, 1 - 2 * multiples, 0)).astype(np.uint8)

    before = random.normal(0, spread, size)
    return level(before + random.normal(0, step, size)), level(before)


@pytest.mark.parametrize("size", [200_000, 600_000])
@pytest.mark.parametrize(("spread", "step"), [(3, 0.2), (1, 0.5), (0.5, 0.1), (6, 1.0)])
def test_levels_take_about_their_conditional_entropy(size, spread, step):
    levels, parent = drifted(size, spread, step, np.random.default_rng(0))
    stream = encoded(levels, parent, PLAIN, APART, 256)
    assert len(stream) < 1.02 * entropy_of(levels, parent)


@pytest.mark.parametrize("decay", [0.3, 0.6, 0.9])
def test_levels_without_a_parent_take_about_their_entropy(decay):
    levels = np.minimum(np.random.default_rng(0).geometric(1 - decay, 300_000) - 1, 255).astype(np.uint8)
    parent = np.zeros_like(levels)
    assert len(encoded(levels)) < 1.02 * entropy_of(levels, parent)


def test_useless_contexts_cost_almost_nothing():
    random = np.random.default_rng(0)
    levels, parent = some("skewed", 200_000, 30, random), some("random", 200_000, 256, random)
    assert len(encoded(levels, parent, PLAIN, APART, 256)) < 1.002 * len(encoded(levels)) + 16


@pytest.mark.parametrize("level", [0, 1, 200, 255])
@pytest.mark.parametrize("size", [100, MANY, 10 * BLOCK])
def test_constant_levels_cost_almost_nothing(level, size):
    levels = np.full(size, level, dtype=np.uint8)
    stream = encoded(levels)
    assert len(stream) <= 5 + 20 * -(-size // BLOCK)
    assert np.array_equal(decoded(stream, size, NOTHING), levels)


def test_the_same_levels_as_the_parent_cost_almost_nothing():
    parent = some("random", 3 * BLOCK, 40, np.random.default_rng(0))
    symbol_of = (np.arange(256)[None] - np.arange(256)[:, None]).astype(np.uint8).reshape(-1)
    assert len(encoded(parent, parent, symbol_of, APART, 256)) < 3 * 20 + 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parent": np.zeros(9, dtype=np.uint8)}, "another number of levels"),
        ({"contexts": 0}, "1 to 256 contexts"),
        ({"contexts": 257}, "1 to 256 contexts"),
        ({"context_of": APART, "contexts": 255}, "not below the number of contexts"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    arguments = {"parent": NOTHING, "symbol_of": PLAIN, "context_of": ALIKE, "contexts": 1} | changes
    with pytest.raises(ValueError, match=message):
        _native.encode_conditional(np.zeros(10, dtype=np.uint8), *arguments.values())
    arguments["level_of"] = arguments.pop("symbol_of")
    with pytest.raises(ValueError, match=message):
        decoded(encoded(np.zeros(10, dtype=np.uint8)), 10, **arguments)


def test_more_symbols_than_a_byte_has_values_are_refused():
    # A table whose symbol 257 has a frequency of 1. It would be written beyond the 256 frequencies of a table.
    fields = [(0, 8), (0, 8), (300, 9)]  # one group; symbol 0 takes the rest; 300 symbols are listed
    fields += [(0, 4), (15, 4)] * 16 + [(1, 4)] + [(0, 4), (15, 4)] * 2 + [(0, 4), (9, 4)]
    block = (1 << 16).to_bytes(4, "little")
    stream = len(block).to_bytes(4, "little") + bits(fields) + block
    for symbols in (257, 400):
        with pytest.raises(ValueError, match="at most 256 symbols"):
            decoded(stream, 1, NOTHING, symbols=symbols)


@pytest.mark.parametrize(
    "changes",
    [
        {"levels": np.zeros(10, dtype=np.int8)},
        {"levels": np.zeros((2, 5), dtype=np.uint8)},
        {"levels": np.zeros(20, dtype=np.uint8)[::2]},
        {"symbol_of": PLAIN[:-1].copy()},
        {"context_of": ALIKE[:-1].copy()},
        {"contexts": -1},
        {"parent": None},
    ],
)
def test_arrays_of_another_kind_are_refused(changes):
    arguments = {"levels": np.zeros(10, dtype=np.uint8), "parent": NOTHING, "symbol_of": PLAIN, "context_of": ALIKE}
    with pytest.raises(TypeError):
        _native.encode_conditional(**(arguments | {"contexts": 1} | changes))


def cases(random):
    for size, symbols, contexts, kind in [
        (0, 4, 1, "random"),
        (1, 4, 3, "random"),
        (700, 20, 20, "skewed"),
        (3000, 256, 1, "random"),
        (3000, 90, 1, "two"),
        (MANY + 5, 6, 256, "skewed"),
        (500, 9, 9, "constant"),
        (BLOCK + 77, 20, 20, "two"),
        (3 * BLOCK + 77, 20, 20, "two"),
        (6 * BLOCK + 77, 20, 20, "two"),
    ]:
        level_of, _, context_of = scheme = tables(symbols, contexts, random)
        parent = some("skewed", size, 40, random)
        levels = some(kind, size, symbols, random)
        yield levels, (parent, level_of, context_of, contexts, symbols), encoded(levels, parent, *scheme[1:], contexts)


CASES = list(cases(np.random.default_rng(3)))


def decodes_to_levels(stream, size, given):
    """Whether the stream decodes. Asserts that then every level is below ``symbols``.

    Asserts that all instructions give the same levels, if the stream is so long that they could matter.
    """
    outcomes = []
    for instructions in INSTRUCTIONS if size > BLOCK else INSTRUCTIONS[-1:]:
        with limited(instructions):
            try:
                levels = decoded(stream, size, *given)
            except ValueError:
                outcomes.append(None)
                continue
        assert not levels.size or levels.max() < given[-1]
        outcomes.append(levels.tobytes())
    assert len(set(outcomes)) == 1
    return outcomes[0] is not None


@pytest.mark.parametrize("case", CASES)
def test_truncated_and_extended_streams_are_refused(case):
    levels, given, stream = case
    for end in {*range(0, len(stream), max(1, len(stream) // 300)), *range(min(len(stream), 200))}:
        assert not decodes_to_levels(stream[:end], levels.size, given)
    for tail in (b"\0", b"\0\0", b"\xff" * 7):
        assert not decodes_to_levels(stream + tail, levels.size, given)


def test_a_stream_that_claims_more_groups_than_contexts_is_refused_before_they_get_memory():
    for contexts, groups in [(1, 2), (1, 256), (7, 8), (255, 256)]:
        stream = (0).to_bytes(4, "little") + bytes([groups - 1]) + bytes(600)
        with pytest.raises(ValueError, match="more groups than contexts"):
            decoded(stream, 1, NOTHING, contexts=contexts)


@pytest.mark.parametrize("case", CASES)
def test_altered_streams_decode_to_levels_or_are_refused(case):
    levels, given, stream = case
    random = np.random.default_rng(0)
    early = range(8 * min(len(stream), 120))
    for bit in [*early, *random.integers(0, 8 * len(stream), 300).tolist()]:
        altered = bytearray(stream)
        altered[bit // 8] ^= 1 << bit % 8
        decodes_to_levels(bytes(altered), levels.size, given)


@pytest.mark.parametrize("case", CASES)
def test_streams_for_another_size_parent_or_number_of_symbols_decode_to_levels_or_are_refused(case):
    levels, (parent, level_of, context_of, contexts, symbols), stream = case
    telling = (
        np.unique(levels).size > 1
    )  # a certain level takes no bits, so its stream does not depend on the number of elements
    for size in (max(levels.size - 1, 0), levels.size + 1, 2 * levels.size + 9, BLOCK + 1):
        others = np.resize(parent, size) if parent.size else np.zeros(size, dtype=np.uint8)
        decodes = decodes_to_levels(stream, size, (others, level_of, context_of, contexts, symbols))
        assert not (decodes and telling)
    wild = np.full(parent.size, 255, dtype=np.uint8)
    decodes_to_levels(stream, levels.size, (wild, level_of, context_of, contexts, symbols))
    decodes_to_levels(stream, levels.size, (NOTHING, level_of, context_of, contexts, symbols))
    for fewer in (0, 1, symbols // 2):
        fits = level_of.reshape(256, 256).copy()
        fits[fits >= max(fewer, 1)] = 0
        decodes_to_levels(stream, levels.size, (parent, fits.reshape(-1), context_of, contexts, max(fewer, 1)))


@examples(300)
@given(st.binary(max_size=200), st.sampled_from([0, 1, 7, 3000]), st.integers(1, 256), st.integers(1, 256))
def test_random_bytes_decode_to_levels_or_are_refused(junk, size, contexts, symbols):
    level_of, _, context_of = tables(symbols, contexts, np.random.default_rng(contexts))
    parent = np.arange(size, dtype=np.uint32).astype(np.uint8)
    given = (parent, level_of, context_of, contexts, symbols)
    decodes_to_levels(junk, size, given)
    if size:
        for split in {0, len(junk) // 2, len(junk)}:
            decodes_to_levels((len(junk) - split).to_bytes(4, "little") + junk, size, given)
            # A valid table: one group, one symbol with all of the slots.
            decodes_to_levels(len(junk).to_bytes(4, "little") + b"\0\0\0\0" + junk, size, given)


def grid_reference(values, inverse):
    """The levels and the highest one, or 256: nearest multiple in float32, ties to even, protected beyond 127 steps."""
    with np.errstate(over="ignore"):
        steps = np.rint(values * np.float32(inverse))
    outside = np.abs(steps) > 127
    multiples = np.where(outside, 0, steps).astype(int)
    levels = np.where(multiples > 0, 2 * multiples, np.where(multiples < 0, 1 - 2 * multiples, 0))
    levels[outside] = _native.LEVEL_PROTECTED
    return levels.astype(np.uint8), 256 if outside.any() else int(levels.max(initial=0))


def grid(values, inverse, seed=None):
    levels = np.full(values.size, 0xEE, dtype=np.uint8)
    return levels, _native.grid_levels(values, float(inverse), seed, 0, levels)


def steps_of(levels):
    """The multiples of the step for levels that are not protected."""
    numbers = levels.astype(int)
    return np.where(numbers % 2 == 0, numbers // 2, (1 - numbers) // 2)


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40),
    inverse=st.floats(2**-126, 2**126, width=32),
)
@example([127.5, -127.5, 127.49999, -0.5, 0.5, 1.5, 2.5, 0.0, -0.0], 1.0)
@example([3.4e38, -3.4e38], 2**100)
@example([1e-45, -1e-45], 2**126)
def test_grid_levels_are_those_of_the_nearest_multiple_bit_for_bit(values, inverse):
    values = np.array(values, dtype=np.float32)
    levels, highest = grid(values, inverse)
    wanted, wanted_highest = grid_reference(values, inverse)
    assert levels.tolist() == wanted.tolist()
    assert highest == wanted_highest


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 200_001])
@pytest.mark.parametrize("spread", [0.3, 20, 60])
def test_grid_levels_of_large_tensors_are_those_of_the_nearest_multiple(size, spread):
    values = np.random.default_rng(0).normal(0, spread, size).astype(np.float32)
    values[: size // 2] = np.rint(values[: size // 2] * 2) / 2  # many are in the middle between two multiples
    for inverse in (1.0, 1.1892071, 0.25):
        levels, highest = grid(values, inverse)
        wanted, wanted_highest = grid_reference(values, inverse)
        assert np.array_equal(levels, wanted)
        assert highest == wanted_highest


@pytest.mark.parametrize("at", [0, 65_536, 199_999])
def test_the_highest_level_is_256_if_any_value_is_beyond_127_steps(at):
    values = np.zeros(200_000, dtype=np.float32)
    assert grid(values, 1.0)[1] == 0
    for value, level, highest in [(127, 254, 254), (-127, 255, 255), (128, 1, 256), (-1e30, 1, 256)]:
        values[at] = value
        levels, found = grid(values, 1.0)
        assert (levels[at], found) == (level, highest)
        assert np.count_nonzero(levels) == 1


@pytest.mark.parametrize("value", [0.0, 0.1, -0.5, 0.93, 3.25, -41.7, 100.99, -126.4])
def test_stochastic_rounding_picks_a_neighbour_and_is_right_on_average(value):
    values = np.full(1 << 20, value, dtype=np.float32)
    levels, _ = grid(values, 1.0, seed=7)
    steps = steps_of(levels)
    assert {*np.unique(steps).tolist()} <= {int(np.floor(value)), int(np.ceil(value))}
    fraction = value - np.floor(value)
    assert abs(steps.mean() - float(values[0])) <= 5 * np.sqrt(fraction * (1 - fraction) / values.size) + 1e-6


def test_stochastic_rounding_is_independent_of_the_value_and_its_neighbours():
    values = np.full(1 << 18, 0.5, dtype=np.float32)
    up = steps_of(grid(values, 1.0, seed=1)[0])
    for lag in (1, 2, 16, 256, 65_536):
        assert abs(np.corrcoef(up[:-lag], up[lag:])[0, 1]) < 0.01
    for seed in (0, 2, 3, 1 << 31, (1 << 32) - 1):
        assert abs(np.corrcoef(up, steps_of(grid(values, 1.0, seed)[0]))[0, 1]) < 0.01


def test_stochastic_rounding_repeats_with_the_same_seed_only():
    values = np.random.default_rng(0).normal(0, 3, 150_000).astype(np.float32)
    first = grid(values, 1.0, seed=5)[0]
    assert np.array_equal(first, grid(values, 1.0, seed=5)[0])
    assert not np.array_equal(first, grid(values, 1.0, seed=6)[0])
    moved = values.copy()
    moved[::1000] += 0.7
    assert np.count_nonzero(grid(moved, 1.0, seed=5)[0] != first) <= 150


@pytest.mark.parametrize("steps", [0, 1, -1, 2, 3, -64, 65, -101, 126, 127, -127])
def test_stochastic_rounding_does_not_move_values_on_a_level(steps):
    values = np.full(1 << 21, steps, dtype=np.float32)
    for seed in (0, 5):
        levels, highest = grid(values, 1.0, seed)
        wanted = 2 * steps if steps > 0 else 1 - 2 * steps if steps < 0 else 0
        assert np.count_nonzero(levels != wanted) == 0
        assert highest == wanted


def test_a_grid_refuses_arrays_that_differ_in_size():
    with pytest.raises(ValueError, match="differ in size"):
        _native.grid_levels(np.zeros(3, dtype=np.float32), 1.0, None, 0, np.zeros(4, dtype=np.uint8))


def nearest(positions, sources, is_parent):
    level_of = np.full(256 * 256, 77, dtype=np.uint8)
    _native.nearest_levels(np.asarray(positions, dtype=float), np.asarray(sources, dtype=float), is_parent, level_of)
    return level_of.reshape(256, 256)


@given(
    positions=st.lists(st.integers(-9, 9).map(lambda n: n / 4) | st.floats(-1e30, 1e30), min_size=2, max_size=256),
    sources=st.lists(st.integers(-9, 9).map(lambda n: n / 4) | st.floats(-1e30, 1e30), min_size=2, max_size=256),
    is_parent=st.booleans(),
)
def test_levels_are_sorted_by_their_distance(positions, sources, is_parent):
    level_of = nearest(positions, sources, is_parent)
    others = [level for level in range(len(positions)) if level != PROTECTED]
    for row, source in enumerate(sources):
        by_distance = sorted(others, key=lambda level: (abs(positions[level] - source), abs(positions[level]), level))
        first = is_parent and row == PROTECTED
        wanted = [PROTECTED, *by_distance] if first else [*by_distance, PROTECTED]
        assert level_of[row, : len(positions)].tolist() == wanted
    assert (level_of[len(sources) :, : len(positions)] == np.arange(len(positions))).all()
    assert not level_of[:, len(positions) :].any()
    symbol_of = np.full(256 * 256, 77, dtype=np.uint8)
    _native.symbols_of_levels(level_of.reshape(-1), len(positions), symbol_of)
    found = np.take_along_axis(symbol_of.reshape(256, 256), level_of[:, : len(positions)].astype(int), axis=1)
    assert (found == np.arange(len(positions))).all()


@pytest.mark.parametrize(
    ("positions", "sources"),
    [([0.0], [0.0]), ([0.0] * 257, [0.0]), ([0.0, 1.0], []), ([0.0, 1.0], [0.0] * 257), ([0.0, np.nan], [0.0])],
)
def test_positions_that_are_not_finite_and_wrong_numbers_of_levels_are_refused(positions, sources):
    with pytest.raises(ValueError, match=r"too few or too many|nowhere"):
        nearest(positions, sources, True)
    with pytest.raises(ValueError, match="too many"):
        _native.symbols_of_levels(np.zeros(65_536, dtype=np.uint8), 257, np.zeros(65_536, dtype=np.uint8))
