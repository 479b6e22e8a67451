"""How large values are: a few huge ones do not decide, and neither do rows of large values."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks_in_threads import on_ranks

from dynaquant import _native
from dynaquant.engine.forms.form import dequantize
from dynaquant.engine.quantize.grid_weights import grid_weights
from dynaquant.engine.quantize.knobs import GridConfiguration
from dynaquant.engine.quantize.magnitude import magnitudes
from dynaquant.engine.shards import Shards
from dynaquant.engine.tensors.shard import Shard

SEED = 3
LARGEST_SHARE, SMALLEST_SHARE = 4.0, 1 / 8
"""As in native/magnitudes.hpp."""


def magnitude_of(tensor):
    return magnitudes({"w": tensor})["w"]


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED))


@pytest.mark.parametrize("shape", [(300, 200), (64, 32, 3, 3), (20_000, 16), (500, 1), (400,), (1, 400)])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_of_normally_distributed_values_both_are_about_the_standard_deviation(shape, size, dtype):
    found = magnitude_of((size * normal(*shape)).to(dtype))
    assert math.sqrt(found.mean_square) == pytest.approx(size, rel=0.15)
    assert 0.7 * size < found.small < 1.15 * size


@pytest.mark.parametrize("shape", [(64, 64), (32, 16, 3, 3), (256,), (2, 50)])
@pytest.mark.parametrize("outlier", [1e3, 1e6, 1e18])
def test_one_huge_value_changes_little(shape, outlier):
    values = normal(*shape)
    before = magnitude_of(values)
    values.view(-1)[17] = outlier
    after = magnitude_of(values)
    assert after.small < 1.3 * before.small
    assert after.mean_square < LARGEST_SHARE**2 * before.mean_square


def test_a_column_of_huge_values_does_not_hide_the_others():
    values = normal(200, 100)
    values[:, 7] *= 1e4
    assert magnitude_of(values).small < 1.1
    assert magnitude_of(values).mean_square < 2
    assert magnitude_of(values.T.contiguous()).small < 1.1


def test_rows_of_small_values_count_even_if_most_are_large():
    table = normal(1000, 16)
    table[:200] *= 0.2
    assert 0.1 < magnitude_of(table).small < 0.2


def test_rows_that_are_all_but_zero_matter_no_more_than_a_share_of_the_others():
    layer = normal(1000, 64)
    layer[:400] *= 1e-9
    assert magnitude_of(layer).small == pytest.approx(SMALLEST_SHARE * math.sqrt(0.6), rel=0.1)
    layer[:400] = 0
    assert magnitude_of(layer).small == pytest.approx(math.sqrt(0.6), rel=0.15)


@pytest.mark.parametrize("rows", [30, 80, 300, 600, 950])
@pytest.mark.parametrize("columns", [0, 6, 30])
def test_dead_rows_and_columns_make_no_matrix_uneven(rows, columns):
    layer, decayed = normal(1000, 64), torch.zeros(1000, 64, dtype=torch.bool)
    decayed[:rows], decayed[:, :columns] = True, True
    layer[decayed] *= 1e-9
    uneven = []
    assert magnitudes({"w": layer}, uneven=uneven)
    assert not uneven


def test_what_a_norm_has_learned_is_how_its_weights_differ():
    found = magnitude_of(1 + 0.05 * normal(512))
    assert found.small == pytest.approx(0.05, rel=0.15)
    assert found.mean_square == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("changed", [1, 2, 30])
def test_values_that_are_mostly_the_same_have_a_magnitude(changed):
    values = torch.zeros(100)
    values[:changed] = torch.arange(1, changed + 1) * 0.1
    assert 0 < magnitude_of(values).small < math.inf
    assert magnitude_of(values).mean_square > 0


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**32 - 1), st.floats(-30, 18), st.floats(0, 0.95))
def test_a_magnitude_is_finite_and_no_larger_than_the_largest_value(rows, columns, seed, exponent, zeros):
    numbers = np.random.default_rng(seed)
    values = numbers.standard_normal((rows, columns)) * 10**exponent * (numbers.random((rows, columns)) >= zeros)
    tensor = torch.from_numpy(values.astype(np.float32))
    if len(tensor.unique()) > 1:
        largest = float(tensor.abs().max())
        found = magnitude_of(tensor)
        assert 0 < found.small <= 2 * largest / 0.6745
        assert 0 < found.mean_square <= 1.01 * largest**2


@pytest.mark.parametrize("dimension", [0, 1])
def test_ranks_that_hold_parts_of_a_tensor_find_what_one_process_finds(dimension):
    whole = normal(48, 24)
    expected = magnitude_of(whole)
    parts = [part.contiguous() for part in whole.chunk(3, dimension)]
    spans = [[(0, size)] * 3 for size in whole.shape]
    length = whole.shape[dimension] // 3
    spans[dimension] = [(i * length, (i + 1) * length) for i in range(3)]
    held = [Shard(whole.shape, ((spans[0][i],), (spans[1][i],))) for i in range(3)]

    def work(rank, reduce):
        return magnitudes({"w": parts[rank]}, Shards({"w": held[rank]}, reduce=reduce))["w"]

    (found, *others), _ = on_ranks(3, work)
    assert others == [found, found]
    assert found.small == pytest.approx(expected.small, rel=1e-9)
    assert found.mean_square == pytest.approx(expected.mean_square, rel=1e-9)


def with_constants(*shape, constant=-1e4):
    """Return values like the transitions of a conditional random field, of which huge constants forbid some."""
    values = normal(*shape)
    values[shape[0] // 2], values[:, -1] = constant, constant
    return values


@pytest.mark.parametrize("shape", [(8, 8), (300, 200), (16, 8, 3, 3)])
@pytest.mark.parametrize("constant", [-1e4, 1e6, -1e2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_matrix_with_huge_constants_in_every_row_and_column_is_left_out(shape, constant, dtype):
    if constant == -1e2 and shape != (8, 8):
        constant = -1e3  # one in hundreds has to be larger to count
    values = {"w": with_constants(*shape, constant=constant).to(dtype), "other": normal(*shape).to(dtype)}
    uneven = []
    assert list(magnitudes(values, uneven=uneven)) == ["other"]
    assert uneven == ["w"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("masked", ["half", "nearly all"])
def test_a_mask_among_trained_values_is_left_out(masked, dtype):
    """As a learned bias of attention with the causal mask in it, or a learned graph without most edges."""
    values = normal(40, 40)
    forbidden = torch.ones(40, 40).triu(1).bool() if masked == "half" else normal(40, 40) > -1
    values[forbidden] = -1e9
    uneven = []
    assert not magnitudes({"w": values.to(dtype)}, uneven=uneven)
    assert uneven == ["w"]


def test_a_mask_that_all_heads_share_is_left_out():
    values = normal(4, 24, 24)
    values[:, torch.ones(24, 24).triu(1).bool()] = -1e4
    uneven = []
    assert not magnitudes({"w": values}, uneven=uneven)
    assert uneven == ["w"]


def test_a_matrix_of_two_sizes_is_not_left_out_where_each_row_has_its_own():
    """As in a table of which training has seen some rows."""
    values = 1e-4 * normal(400, 30)
    values[::3] *= 1e6
    assert magnitudes({"w": values})["w"].small < 2e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["heavy tails", "zeros", "tiny rows", "tiny columns", "one dimension", "one row"])
def test_a_matrix_of_uneven_values_that_a_grid_can_hold_is_not_left_out(kind, dtype):
    values = normal(200, 120)
    if kind == "heavy tails":
        values = values.exp() * normal(200, 120).sign()
    elif kind == "zeros":
        values *= torch.rand(200, 120) < 0.02
    elif kind == "tiny rows":
        values[:150] *= 1e-4
    elif kind == "tiny columns":
        values[:, ::2] *= 1e-4
    elif kind == "one dimension":
        values = with_constants(200, 120).view(-1)
    else:
        values[7] = -1e4
    uneven = []
    assert magnitudes({"w": values.to(dtype)}, uneven=uneven)
    assert not uneven


def test_ranks_agree_that_a_matrix_is_uneven():
    whole = with_constants(48, 24)
    held = [Shard(whole.shape, (((16 * i, 16 * i + 16),), ((0, 24),))) for i in range(3)]

    def work(rank, reduce):
        uneven = []
        found = magnitudes(
            {"w": whole[16 * rank : 16 * rank + 16]}, Shards({"w": held[rank]}, reduce=reduce), None, uneven
        )
        return found, uneven

    found, _ = on_ranks(3, work)
    assert found == [({}, ["w"])] * 3


def test_a_matrix_with_huge_constants_is_stored_exactly_and_a_note_says_so():
    ready = grid_weights({"w": with_constants(8, 8)}, {"w": 1.0}, {}, 0)
    assert not ready.weights
    assert ready.notes == ["w: values far apart in size, as with a mask of constants, stored exactly"]


@pytest.mark.parametrize("kind", ["rows", "columns", "one value"])
def test_no_scale_rounds_what_was_learned_to_zero(kind):
    """A metric that feels nothing lets the scale grow without end."""
    weights = 0.1 * normal(256, 64)
    if kind == "rows":
        weights[:128] *= 8
    elif kind == "columns":
        weights[:, :32] *= 8
    else:
        weights[3, 4] = 1e4
    ready = grid_weights({"w": weights}, {"w": 1e-12}, {}, 0)
    restored = dequantize(ready.quantize(GridConfiguration(5000))["w"])
    small = weights[128:, 32:]
    lost = (restored[128:, 32:] - small).square().sum() / small.square().sum()
    assert lost < 0.05


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 2**32 - 1), st.floats(-10, 10), st.floats(0, 0.9))
def test_one_call_finds_what_several_do(rows, columns, seed, exponent, zeros):
    """float32 takes one native call; the same values in float64 take the steps that ranks take together."""
    numbers = np.random.default_rng(seed)
    values = numbers.standard_normal((rows, columns)) * 10**exponent * (numbers.random((rows, columns)) >= zeros)
    tensor = torch.from_numpy(values.astype(np.float32))
    found, wanted = magnitudes({"w": tensor}), magnitudes({"w": tensor.double()})
    assert found.keys() == wanted.keys()
    for name, each in found.items():
        assert each.small == pytest.approx(wanted[name].small, rel=1e-5)
        assert each.mean_square == pytest.approx(wanted[name].mean_square, rel=1e-5)


def test_values_without_a_magnitude_are_refused():
    same, zeros = np.full(5, 2.0), np.zeros(5)
    for refused in (lambda: _native.vector_magnitude(same), lambda: _native.matrix_magnitude(zeros, zeros)):
        with pytest.raises(ValueError, match="all values are the same"):
            refused()
    with pytest.raises(ValueError, match="so many rows"):
        _native.tensor_magnitude(np.ones(6, dtype=np.float32), 4)
