"""Levels coded as published: round trips in every arrangement, and the smallest one is chosen."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaquant.engine.coding.rearrange import Levels, decode, encode, encode_as


def some_levels(size, count, random):
    return Levels(random.integers(0, count, size).astype(np.uint8), count)


def moved(parent, count, share, random):
    """The parent's levels with a share of them changed."""
    new = some_levels(parent.values.size, count, random).values
    stays = (random.random(new.size) >= share) & (parent.values < count)
    return Levels(np.where(stays, parent.values, new), count)


COUNTS = st.integers(1, 256)


@given(st.integers(0, 2000) | st.just(70_000), COUNTS, COUNTS, st.floats(0, 1), st.booleans(), st.integers(0, 9))
def test_levels_survive_a_round_trip_in_the_chosen_arrangement(size, count, parent_count, share, has_parent, seed):
    random = np.random.default_rng(seed)
    parent = some_levels(size, parent_count, random)
    levels = moved(parent, count, share, random)
    arrangement, stream = encode(levels, parent if has_parent else None)
    assert has_parent or arrangement == "alone"
    back = decode(stream, size, count, arrangement, parent if arrangement != "alone" else None)
    assert np.array_equal(back.values, levels.values)
    assert back.count == count


@pytest.mark.parametrize("arrangement", ["alone", "delta", "rearranged"])
@pytest.mark.parametrize("run_length", [True, False])
@pytest.mark.parametrize(("count", "parent_count"), [(18, 18), (6, 34), (34, 6), (256, 256), (1, 1)])
def test_levels_survive_a_round_trip_in_every_arrangement(arrangement, run_length, count, parent_count):
    random = np.random.default_rng(0)
    parent = some_levels(5000, parent_count, random)
    levels = moved(parent, count, 0.3, random)
    stream = encode_as(arrangement, levels, parent, run_length)
    assert np.array_equal(decode(stream, 5000, count, arrangement, parent).values, levels.values)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("size", [0, 1, 20, 400, 3000])
def test_small_tensors_get_the_smallest_arrangement(size, share):
    random = np.random.default_rng(size)
    parent = some_levels(size, 18, random)
    levels = moved(parent, 18, share, random)
    sizes = {name: len(encode_as(name, levels, parent)) for name in ("rearranged", "delta", "alone")}
    arrangement, stream = encode(levels, parent)
    assert len(stream) == sizes[arrangement] == min(sizes.values())


def test_each_arrangement_is_the_smallest_for_some_levels():
    random = np.random.default_rng(0)
    parent = some_levels(3000, 18, random)
    busy_source = Levels(np.where(parent.values == 3, random.integers(0, 18, 3000), parent.values).astype(np.uint8), 18)
    assert encode(busy_source, parent)[0] == "rearranged"
    assert encode(moved(parent, 18, 0.05, random), parent)[0] == "delta"
    assert encode(Levels(np.full(3000, 5, dtype=np.uint8), 18), parent)[0] == "alone"


def test_rearranging_saves_bytes_if_one_parent_level_changes_often():
    random = np.random.default_rng(1)
    parent = some_levels(200_000, 18, random)
    restless = parent.values < 4
    levels = Levels(np.where(restless, random.integers(0, 18, parent.values.size), parent.values).astype(np.uint8), 18)
    assert len(encode_as("rearranged", levels, parent)) * 1.15 < len(encode_as("delta", levels, parent))


@pytest.mark.parametrize("arrangement", ["delta", "rearranged"])
def test_a_delta_cannot_be_decoded_without_the_parent(arrangement):
    parent = some_levels(100, 18, np.random.default_rng(0))
    stream = encode_as(arrangement, parent, parent)
    with pytest.raises(ValueError, match="conditioned on a parent, and there is none"):
        decode(stream, 100, 18, arrangement, None)
    with pytest.raises(ValueError, match="another number of levels"):
        decode(stream, 100, 18, arrangement, Levels(parent.values[:99], 18))


@pytest.mark.parametrize("arrangement", ["alone", "delta", "rearranged"])
def test_truncated_and_extended_streams_are_refused(arrangement):
    random = np.random.default_rng(0)
    parent = some_levels(300, 18, random)
    stream = encode_as(arrangement, moved(parent, 18, 0.4, random), parent)
    for end in range(len(stream)):
        with pytest.raises(ValueError, match=r"coded (levels|values)"):
            decode(stream[:end], 300, 18, arrangement, parent)
    with pytest.raises(ValueError, match="go on after their end"):
        decode(stream + b"\0", 300, 18, arrangement, parent)


@pytest.mark.parametrize("arrangement", ["alone", "delta", "rearranged"])
def test_altered_streams_decode_to_levels_of_the_codebook_or_are_refused(arrangement):
    random = np.random.default_rng(0)
    parent = some_levels(200, 34, random)
    stream = encode_as(arrangement, moved(parent, 18, 0.4, random), parent)
    refused = 0
    for bit in range(8 * len(stream)):
        altered = bytearray(stream)
        altered[bit // 8] ^= 1 << bit % 8
        try:
            assert decode(bytes(altered), 200, 18, arrangement, parent).values.max() < 18
        except ValueError:
            refused += 1
    assert refused > 32


def test_a_level_outside_the_codebook_is_refused():
    levels = Levels(np.array([0, 17, 3], dtype=np.uint8), 18)
    parent = Levels(np.zeros(3, dtype=np.uint8), 18)
    with pytest.raises(ValueError, match="outside the codebook"):
        decode(encode_as("delta", levels, parent), 3, 16, "delta", parent)
