"""Levels conditioned on the parent's: round trips with any codebooks, and few bytes for predictable levels."""

import numpy as np
import pytest
import torch
from format_levels import Codebook, Levels, conditional_levels
from hypothesis import given
from hypothesis import strategies as st
from training import bits

from dynaquant.engine.coding import conditional
from dynaquant.engine.forms.form import Coded
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.forms.registry import decode
from dynaquant.engine.forms.stored import encode, values_of
from dynaquant.engine.quantize.grid import quantize
from dynaquant.engine.tensors.codebook import FIRST_BIN, PROTECTED, Centres, Grid, LogGrid, rung_value

NOTHING = np.zeros(0, dtype=np.uint16)


def centres(count, seed=0):
    return Centres(np.sort(np.random.default_rng(seed).standard_normal(count)).astype(np.float32))


CODEBOOKS = {
    "no centre": centres(0),
    "one centre": centres(1),
    "16 centres": centres(16),
    "others": centres(16, seed=1),
    "254 centres": centres(254),
    "equal centres": Centres(np.zeros(5, dtype=np.float32)),
    "empty grid": Grid(0, 0),
    "one step": Grid(0, 1),
    "grid": Grid(-30, 20),
    "another step": Grid(-29, 17),
    "fine grid": Grid(-400, 254),
    "coarse grid": Grid(400, 6),
    "empty log grid": LogGrid(8, 0, 0),
    "log grid": LogGrid(4, -40, 12),
    "another pace": LogGrid(8, -22, 30),
    "another first": LogGrid(4, -38, 12),
    "long log grid": LogGrid(1, -200, 254),
}
ALIKE = [
    (book, parent)
    for book in CODEBOOKS
    for parent in CODEBOOKS
    if conditional.comparable(CODEBOOKS[book], CODEBOOKS[parent])
]


def levels_of(codebook, size, random, share_protected=0.02):
    """A tensor with this codebook, mostly in the lowest bins."""
    low = FIRST_BIN + np.minimum(random.geometric(0.3, size) - 1, codebook.bins - 1)
    levels = np.where(random.random(size) < 0.3, 0, np.maximum(low, 0)) if codebook.bins else np.zeros(size)
    levels = np.where(random.random(size) < share_protected, PROTECTED, levels).astype(np.uint8)
    protected = random.integers(0, 2**15, int((levels == PROTECTED).sum())).astype(np.uint16)
    return QuantizedTensor(torch.float32, torch.Size([size]), levels, codebook, protected)


def assert_round_trip(quantized, parent):
    """Assert that the tensor survives a round trip: by the coder of levels, and by a whole stream."""
    coded = conditional.encode(quantized, parent)
    found = conditional.decode(coded, quantized.levels.size, quantized.codebook, parent)
    assert np.array_equal(found, quantized.levels)
    scheme, whole = encode(quantized, parent)
    values = values_of(quantized)
    assert bits(values_of(decode(scheme, Coded(quantized.dtype, quantized.shape, whole, parent)))) == bits(values)


@pytest.mark.parametrize(("book", "parent"), ALIKE)
def test_levels_survive_a_round_trip_with_any_codebooks_of_one_kind_for_tensor_and_parent(book, parent):
    random = np.random.default_rng(0)
    before = levels_of(CODEBOOKS[parent], 700, random)
    assert_round_trip(levels_of(CODEBOOKS[book], 700, random), before)
    assert_round_trip(levels_of(CODEBOOKS[book], 700, random, share_protected=1.0), before)


@pytest.mark.parametrize("book", CODEBOOKS)
def test_levels_survive_a_round_trip_without_a_parent_and_with_an_equal_parent(book):
    random = np.random.default_rng(0)
    quantized = levels_of(CODEBOOKS[book], 700, random)
    assert_round_trip(quantized, None)
    assert_round_trip(quantized, quantized)


@given(
    values=st.lists(st.floats(-100, 100, width=32), max_size=60),
    moves=st.lists(st.floats(-3, 3, width=32), min_size=60, max_size=60),
    rungs=st.tuples(st.integers(-12, 12), st.integers(-12, 12)),
)
def test_weights_on_a_grid_survive_a_round_trip_if_weights_and_grid_step_changed(values, moves, rungs):
    before = torch.tensor(values)
    after = before + torch.tensor(moves)[: len(values)]
    assert_round_trip(quantize(after, rungs[1]), quantize(before, rungs[0]))


@pytest.mark.parametrize("parent", ["log grid", "grid"])
def test_a_parent_of_another_kind_or_size_is_not_used(parent):
    random = np.random.default_rng(0)
    book = {"log grid": "grid", "grid": "log grid"}[parent]
    quantized = levels_of(CODEBOOKS[book], 700, random)
    for before in (levels_of(CODEBOOKS[parent], 700, random), levels_of(CODEBOOKS[book], 701, random)):
        scheme, coded = encode(quantized, before)
        assert not scheme.needs_parent
        assert coded == encode(quantized, None)[1]


def documented(quantized):
    """The levels and the codebook as the second decoder takes them."""
    return Levels(quantized.levels, Codebook("grid", quantized.codebook.bins, quantized.codebook.rung))


@pytest.mark.parametrize("size", [150_000, 0, 700, 9_000, 400_000, 800_000])
def test_streams_are_as_documented(size):
    random = np.random.default_rng(size)
    before, after = levels_of(Grid(0, 12), size, random), levels_of(Grid(1, 9), size, random)
    for parent in (None, before):
        coded = conditional.encode(after, parent)
        given = None if parent is None else documented(parent)
        assert np.array_equal(conditional_levels(coded, size, documented(after).codebook, given), after.levels)


def test_levels_can_take_the_place_of_the_parents():
    random = np.random.default_rng(0)
    before, after = levels_of(Grid(0, 12), 200_000, random), levels_of(Grid(1, 9), 200_000, random)
    coded = conditional.encode(after, before)
    found = conditional.decode(coded, 200_000, after.codebook, before, out=before.levels)
    assert found is before.levels
    assert np.array_equal(found, after.levels)


def test_a_link_of_a_chain_can_overwrite_the_levels_of_its_parent():
    values, random = weights(100_000)
    before, after = on_grid(values, -26), on_grid(values + random.normal(0, 0.001, values.size), -26)
    scheme, stream = encode(after, before)
    kept = decode(scheme, Coded(after.dtype, after.shape, stream, before))
    assert not np.shares_memory(kept.levels, before.levels)
    found = decode(scheme, Coded(after.dtype, after.shape, stream, before, overwrite=True))
    assert found.levels is before.levels
    assert bits(values_of(found)) == bits(values_of(after)) == bits(values_of(kept))


def on_grid(values, rung):
    quantized = quantize(torch.from_numpy(values.astype(np.float32)), rung)
    assert not len(quantized.protected)
    return quantized


def entropy(levels, parent):
    """The bytes that the levels take at their entropy conditioned on the parent's."""
    pairs = np.bincount(parent.astype(int) * 256 + levels, minlength=65_536).reshape(256, 256).astype(float)
    share = np.divide(pairs, pairs.sum(1, keepdims=True), out=np.ones_like(pairs), where=pairs > 0)
    return -(pairs * np.log2(share)).sum() / 8


def weights(size, seed=0):
    """Weights like those of a layer: most are small, a few are large."""
    random = np.random.default_rng(seed)
    return random.standard_t(5, size) * 0.02, random


@pytest.mark.parametrize("moved", [0.0005, 0.002, 0.01])
def test_weights_that_drift_take_about_their_conditional_entropy(moved):
    values, random = weights(300_000)
    before = on_grid(values, -26)
    after = on_grid(values + random.normal(0, moved, values.size), -26)
    coded = conditional.encode(after, before)
    assert len(coded) < 1.02 * entropy(after.levels, before.levels) + 100
    assert len(coded) < 0.9 * len(conditional.encode(after, None))


@pytest.mark.parametrize("rungs", [-4, -1, 1, 2, 4])
def test_a_parent_with_another_grid_step_still_saves_bytes(rungs):
    values, random = weights(300_000)
    before = on_grid(values, -26)
    after = on_grid(values + random.normal(0, 0.001, values.size), -26 + rungs)
    coded = len(conditional.encode(after, before))
    assert coded < 1.02 * entropy(after.levels, before.levels) + 200
    assert coded < 0.7 * len(conditional.encode(after, None))


@pytest.mark.parametrize("book", ["16 centres", "254 centres", "grid", "fine grid", "log grid", "long log grid"])
def test_an_unchanged_tensor_takes_almost_no_bytes(book):
    quantized = levels_of(CODEBOOKS[book], 400_000, np.random.default_rng(0))
    assert len(conditional.encode(quantized, quantized)) < 100
    assert len(conditional.encode(quantized, None)) > 50_000


def test_only_the_ratio_of_two_grid_steps_matters():
    values, random = weights(20_000)
    moved = values + random.normal(0, 0.005, values.size)
    coded = conditional.encode(on_grid(moved, -26), on_grid(values, -25))
    for octaves in (-20, 3):
        scale = 2.0**octaves
        rungs = 4 * octaves
        again = conditional.encode(on_grid(moved * scale, -26 + rungs), on_grid(values * scale, -25 + rungs))
        assert again == coded


def test_moves_away_from_zero_have_the_same_symbols_on_both_sides_of_zero():
    values, random = weights(200_000)
    before, after = np.abs(values), np.abs(values) * 1.2 + np.abs(random.normal(0, 0.002, values.size))
    sign = np.where(random.random(values.size) < 0.5, -1, 1)
    one_sided = len(conditional.encode(on_grid(after, -24), on_grid(before, -24)))
    two_sided = len(conditional.encode(on_grid(sign * after, -24), on_grid(sign * before, -24)))
    # A sign takes bits only if the parent's level is zero.
    from_zero = (on_grid(before, -24).levels == 0) & (on_grid(after, -24).levels != 0)
    assert abs(two_sided - from_zero.sum() / 8 - one_sided) < 0.01 * one_sided + 100


def test_a_tensor_and_its_negative_take_the_same_bytes():
    values, random = weights(100_000)
    moved = values + random.normal(0, 0.003, values.size)
    there = len(conditional.encode(on_grid(moved, -26), on_grid(values, -26)))
    back = len(conditional.encode(on_grid(-moved, -26), on_grid(-values, -26)))
    assert abs(there - back) < 0.002 * there + 20


def test_outliers_of_the_parent_are_expected_to_be_outliers_again():
    random = np.random.default_rng(0)
    before = levels_of(Grid(0, 20), 100_000, random, share_protected=0.3)
    assert len(conditional.encode(before, before)) < 100


def test_the_centre_nearest_to_the_parents_value_takes_the_fewest_bits():
    values, random = weights(200_000)
    book, other = centres(16), centres(24, seed=3)

    def nearest(values, codebook):
        levels = FIRST_BIN + np.abs(values[:, None] * 50 - codebook.values).argmin(1)
        return QuantizedTensor(torch.float32, torch.Size([values.size]), levels.astype(np.uint8), codebook, NOTHING)

    before, after = nearest(values, book), nearest(values + random.normal(0, 0.002, values.size), other)
    coded = len(conditional.encode(after, before))
    assert coded < 1.02 * entropy(after.levels, before.levels) + 200


@pytest.mark.parametrize("size", [1, 300_000, 2**60])
def test_a_tiny_stream_is_refused_for_any_claimed_size(size):
    for coded in (b"", b"\0", b"\0\0\0"):
        with pytest.raises(ValueError, match="end too early"):
            conditional.decode(coded, size, Grid(0, 4), None)


def test_the_wrong_parent_or_codebook_gives_valid_levels_or_an_error():
    random = np.random.default_rng(0)
    before, other = levels_of(Grid(0, 20), 3000, random), levels_of(Grid(0, 20), 3000, random)
    after = levels_of(Grid(1, 20), 3000, random)
    coded = conditional.encode(after, before)
    for parent, codebook in [(other, Grid(1, 20)), (before, Grid(1, 3)), (None, Grid(1, 20)), (before, centres(5))]:
        try:
            levels = conditional.decode(coded, 3000, codebook, parent)
        except ValueError:
            continue
        assert levels.max() < FIRST_BIN + codebook.bins


def test_rung_values_are_powers_of_two_to_a_quarter():
    assert [rung_value(4 * k) for k in (-126, -1, 0, 1, 127)] == [2.0**-126, 0.5, 1.0, 2.0, 2.0**127]
    for rung in range(-504, 505, 7):
        assert rung_value(rung) == np.float32(2.0 ** (rung / 4))


@pytest.mark.parametrize("size", [50, 3000, 200_000])
@pytest.mark.parametrize("noise", [0.0, 0.2, 1.0, 2.5, 7.0])
def test_a_parent_that_saves_little_is_not_needed(size, noise):
    random = np.random.default_rng(1)
    values = random.normal(0, 0.05, size).astype(np.float32)
    after = on_grid((values + noise * random.normal(0, 0.05, size)).astype(np.float32), -24)
    before = on_grid(values, -24)
    conditioned, alone = conditional.encode(after, before), conditional.encode(after, None)
    for least_gain in (0.0, 0.03, 0.5):
        shorter = conditional.encode_if_shorter(after, before, least_gain)
        assert shorter in (None, conditioned)
        tables = 10 if size > 50 else 40  # bytes by which the estimate may be wrong
        if len(conditioned) < (1 - least_gain) * len(alone) - tables:
            assert shorter == conditioned
        if len(conditioned) > (1 - least_gain) * len(alone) + tables:
            assert shorter is None
