"""One tensor on a grid: errors of at most half a step, outliers in 16 bits, stochastic rounding."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from on_grid import FAR, assert_near
from training import bits

from dynaquant.engine.forms.form import dequantize, pieces, stored_equal
from dynaquant.engine.quantize.grid import RoundedToGrid, quantize
from dynaquant.engine.tensors.codebook import HIGHEST_RUNG, LOWEST_RUNG, Grid, rung_value
from dynaquant.engine.tensors.dtypes import QUANTIZABLE_DTYPES


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (1, 1), (7, 5), (2, 3, 4), (300, 300)], ids=str)
@pytest.mark.parametrize("rung", [-40, -21, -3, 0, 9])
def test_errors_are_at_most_half_a_step_in_every_dtype_and_shape(dtype, shape, rung):
    tensor = torch.randn(shape, dtype=torch.float32).to(dtype)
    assert_near(tensor, quantize(tensor, rung), rung)


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=30),
    rung=st.integers(LOWEST_RUNG, HIGHEST_RUNG - 8),
)
@example([127.5, 127.49, 128.0, -127.4, 1e30, -3.4e38], 0)
@example([1e-45, 0.0, -0.0], LOWEST_RUNG)
def test_every_float32_fits_a_grid(values, rung):
    # Large steps would round the largest floats up to infinity.
    most = 3e38 if rung < 4 * 120 else 1e37
    tensor = torch.tensor([v for v in values if abs(v) < most], dtype=torch.float32)
    assert_near(tensor, quantize(tensor, rung), rung)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rung", [-20, 0, 30, 49, 52])
def test_finite_values_never_become_infinite(dtype, rung):
    largest = torch.finfo(dtype).max if dtype == torch.float16 else 1e37
    tensor = torch.tensor([largest, -largest, largest * 0.9, 1.0], dtype=dtype)
    assert bool(dequantize(quantize(tensor, rung)).isfinite().all())


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
def test_outliers_keep_16_bits(dtype):
    tensor = torch.cat((torch.randn(1000), torch.tensor([300.0, -1e4, 6e4, 127.0, -130.0]))).to(dtype)
    quantized = quantize(tensor, 0)
    assert_near(tensor, quantized, 0)
    assert len(quantized.protected) == 4


def test_the_memory_layout_of_a_tensor_does_not_matter():
    tensor = torch.randn(40, 30)
    for view in (tensor.t(), tensor[::2, 1::3], tensor[0].expand(5, 30), tensor.flip(0), tensor.unsqueeze(1)):
        strided, packed = quantize(view, -8), quantize(view.contiguous().clone(), -8)
        assert np.array_equal(strided.levels, packed.levels)
        assert_near(view, strided, -8)
    parameter = torch.nn.Parameter(tensor)
    assert np.array_equal(quantize(parameter, -8).levels, quantize(tensor, -8).levels)


def test_a_grid_has_as_many_bins_as_are_used():
    for values, bins in [([0.0, 0.4], 0), ([1.0], 1), ([-1.0], 2), ([5.0, -1.0], 9), ([-127.0], 254), ([128.0], 254)]:
        assert quantize(torch.tensor(values), 0).codebook == Grid(0, bins)


def test_levels_are_compared_on_the_same_grid_however_many_bins_are_used():
    before, after = torch.tensor([1.0, 1.0, 0.0, -2.0]), torch.tensor([1.0, 5.0, 0.0, -2.0])
    assert quantize(before, 0).migrated(quantize(after, 0)) == 0.25
    assert quantize(before, 0).migrated(quantize(4 * before, 8)) is None  # as many bins, but other steps


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
def test_values_on_the_grid_do_not_change(dtype):
    for rung in range(-44, 12):
        once = dequantize(quantize(torch.randn(500).to(dtype), rung))
        if float(once.abs().max()) < FAR * float(rung_value(rung)):
            assert bits(dequantize(quantize(once, rung))) == bits(once)


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7, 5), (2, 3, 4), (700, 900)], ids=str)
@pytest.mark.parametrize("seed", [None, 5])
def test_a_rounded_tensor_has_the_values_of_the_quantized_one_also_in_pieces(dtype, shape, seed):
    tensor = torch.randn(shape).to(dtype)
    tensor.view(-1)[0] = 300.0
    for rung in (-20, -3, 4):
        quantized = quantize(tensor, rung, seed)
        rounded = RoundedToGrid(lambda: tensor, rung, seed)
        values = rounded.values()
        assert (values.dtype, values.shape) == (dtype, torch.Size(shape))
        assert bits(values) == bits(dequantize(quantized))
        assert [bits(piece) for piece in rounded.pieces()] == [bits(piece) for piece in pieces(quantized)]
        assert np.array_equal(rounded.begin_quantize()().levels, quantized.levels)
        keeping = RoundedToGrid(lambda: tensor, rung, seed, keeps_levels=True)
        assert keeping.errors(tensor) == rounded.errors(tensor)
        assert keeping.has_levels == (dtype == torch.float32)
        assert stored_equal(keeping.begin_quantize()(), quantized)
    transposed = RoundedToGrid(lambda: tensor.movedim(0, -1) if shape else tensor, -3, seed)
    assert bits(transposed.values()) == bits(dequantize(transposed.begin_quantize()()))


@given(st.integers(-60, 30), st.integers(0, 2**32 - 1))
def test_stochastic_rounding_picks_a_neighbouring_level_and_repeats_with_the_same_seed(rung, seed):
    tensor = torch.from_numpy(np.random.default_rng(0).normal(0, 0.3, 400).astype(np.float32))
    step = float(rung_value(rung))
    quantized = quantize(tensor, rung, seed)
    again = quantize(tensor.clone(), rung, seed)
    assert np.array_equal(quantized.levels, again.levels)
    assert np.array_equal(quantized.protected, again.protected)
    near = tensor.abs() < (FAR - 1) * step
    assert float((dequantize(quantized)[near] - tensor[near]).abs().max()) < step * 1.001


def test_stochastic_rounding_keeps_the_mean_where_rounding_to_the_nearest_loses_it():
    tensor = torch.full((200_000,), 0.3)
    assert float(dequantize(quantize(tensor, 0)).mean()) == 0.0
    assert abs(float(dequantize(quantize(tensor, 0, 1)).mean()) - 0.3) < 0.006


def test_with_the_same_seed_small_changes_of_weights_change_few_levels():
    before = torch.randn(50_000)
    after = before + 0.001 * torch.randn(50_000)
    same = quantize(before, 0, 3).levels == quantize(after, 0, 3).levels
    other = quantize(before, 0, 3).levels == quantize(after, 0, 4).levels
    assert same.mean() > 0.99
    assert other.mean() < 0.9
