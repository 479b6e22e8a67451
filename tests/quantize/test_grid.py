"""The grid quantizer: how far values move, how steps stay where they are, and what is left to be stored exactly."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from training import bits

from dynaquant.quantize.grid import (
    SCALES_PER_OCTAVE,
    SMALLEST_FISHER,
    STAY,
    STEP_LIMIT,
    GridConfiguration,
    GridWeights,
    effective_fisher,
    grid_weights,
    quantize,
    rungs,
)
from dynaquant.search.distortion import distortion
from dynaquant.tensors.codebook import HIGHEST_RUNG, LOWEST_RUNG, Grid, rung_value
from dynaquant.tensors.dequantize import dequantize
from dynaquant.tensors.sketch import SKETCHED
from dynaquant.tensors.stored import PROTECTED

FAR = 127.0
"""Steps from zero beyond which values are protected."""


def assert_near(tensor, quantized, rung):
    """Half a step off at most, up to 127 steps from zero; beyond, as far as 16 bits are off; in the tensor's dtype."""
    found = dequantize(quantized)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    exact, restored = tensor.detach().double().reshape(-1), found.double().reshape(-1)
    assert bool(restored.isfinite().all())
    step = float(rung_value(rung))
    rounding = exact.abs() * torch.finfo(torch.float32 if tensor.dtype == torch.float64 else tensor.dtype).eps
    off = (restored - exact).abs()
    near = exact.abs() <= (FAR + 0.499) * step
    assert bool((off[near] <= 0.5 * step + rounding[near]).all())
    half = torch.float16 if tensor.dtype == torch.float16 else torch.bfloat16
    far = exact.abs() > (FAR + 0.501) * step
    largest = torch.finfo(half).max
    assert torch.equal(restored[far], exact[far].clamp(-largest, largest).float().to(half).double())
    levels = torch.from_numpy(quantized.levels)
    assert bool((levels[far] == PROTECTED).all())
    assert not bool((levels[near] == PROTECTED).any())


@pytest.mark.parametrize("dtype", SKETCHED)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (1, 1), (7, 5), (2, 3, 4), (300, 300)], ids=str)
@pytest.mark.parametrize("rung", [-40, -21, -3, 0, 9])
def test_values_move_by_half_a_step_at_most_in_every_dtype_and_shape(dtype, shape, rung):
    tensor = torch.randn(shape, dtype=torch.float32).to(dtype)
    assert_near(tensor, quantize(tensor, rung), rung)


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=30),
    rung=st.integers(LOWEST_RUNG, HIGHEST_RUNG - 8),
)
@example([127.5, 127.49, 128.0, -127.4, 1e30, -3.4e38], 0)
@example([1e-45, 0.0, -0.0], LOWEST_RUNG)
def test_no_float32_is_too_small_or_too_large_for_a_grid(values, rung):
    # With a step that rounds it up beyond the largest float there is nothing to be done.
    most = 3e38 if rung < 4 * 120 else 1e37
    tensor = torch.tensor([v for v in values if abs(v) < most], dtype=torch.float32)
    assert_near(tensor, quantize(tensor, rung), rung)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rung", [-20, 0, 30, 49, 52])
def test_finite_values_never_become_infinite(dtype, rung):
    largest = torch.finfo(dtype).max if dtype == torch.float16 else 1e37
    tensor = torch.tensor([largest, -largest, largest * 0.9, 1.0], dtype=dtype)
    assert bool(dequantize(quantize(tensor, rung)).isfinite().all())


@pytest.mark.parametrize("dtype", SKETCHED)
def test_values_far_from_zero_keep_16_bits(dtype):
    tensor = torch.cat((torch.randn(1000), torch.tensor([300.0, -1e4, 6e4, 127.0, -130.0]))).to(dtype)
    quantized = quantize(tensor, 0)
    assert_near(tensor, quantized, 0)
    assert len(quantized.protected) == 4


def test_how_a_tensor_lies_in_memory_does_not_matter():
    tensor = torch.randn(40, 30)
    for view in (tensor.t(), tensor[::2, 1::3], tensor[0].expand(5, 30), tensor.flip(0), tensor.unsqueeze(1)):
        apart, packed = quantize(view, -8), quantize(view.contiguous().clone(), -8)
        assert np.array_equal(apart.levels, packed.levels)
        assert_near(view, apart, -8)
    parameter = torch.nn.Parameter(tensor)
    assert np.array_equal(quantize(parameter, -8).levels, quantize(tensor, -8).levels)


def test_a_grid_has_as_many_bins_as_are_used():
    for values, bins in [([0.0, 0.4], 0), ([1.0], 1), ([-1.0], 2), ([5.0, -1.0], 9), ([-127.0], 254), ([128.0], 254)]:
        assert quantize(torch.tensor(values), 0).codebook == Grid(0, bins)


@pytest.mark.parametrize("dtype", SKETCHED)
def test_what_is_on_the_grid_already_stays_there(dtype):
    for rung in range(-44, 12):
        once = dequantize(quantize(torch.randn(500).to(dtype), rung))
        if float(once.abs().max()) < FAR * float(rung_value(rung)):
            assert bits(dequantize(quantize(once, rung))) == bits(once)


@given(st.integers(-60, 30), st.integers(0, 2**32 - 1))
def test_with_a_seed_values_become_a_neighbour_and_the_same_for_the_same_seed(rung, seed):
    tensor = torch.from_numpy(np.random.default_rng(0).normal(0, 0.3, 400).astype(np.float32))
    step = float(rung_value(rung))
    quantized = quantize(tensor, rung, seed)
    again = quantize(tensor.clone(), rung, seed)
    assert np.array_equal(quantized.levels, again.levels)
    assert np.array_equal(quantized.protected, again.protected)
    near = tensor.abs() < (FAR - 1) * step
    assert float((dequantize(quantized)[near] - tensor[near]).abs().max()) < step * 1.001


def test_with_a_seed_a_tensor_keeps_its_mean_where_rounding_to_the_nearest_loses_it():
    tensor = torch.full((200_000,), 0.3)
    assert float(dequantize(quantize(tensor, 0)).mean()) == 0.0
    assert abs(float(dequantize(quantize(tensor, 0, 1)).mean()) - 0.3) < 0.006


def test_weights_that_move_a_little_change_few_levels_with_the_same_seed():
    before = torch.randn(50_000)
    after = before + 0.001 * torch.randn(50_000)
    same = quantize(before, 0, 3).levels == quantize(after, 0, 3).levels
    other = quantize(before, 0, 3).levels == quantize(after, 0, 4).levels
    assert same.mean() > 0.99
    assert other.mean() < 0.9


def test_a_step_falls_with_the_root_of_how_much_the_loss_minds():
    fisher = {"a": 1.0, "b": 16.0, "c": 1 / 16}
    assert rungs(fisher, 0, {}) == {"a": 0, "b": -8, "c": 8}
    assert rungs(fisher, SCALES_PER_OCTAVE, {}) == {"a": 4, "b": -4, "c": 12}


def test_steps_stay_while_what_they_are_chosen_by_drifts_and_move_when_it_has_drifted_far():
    # F falls by half an octave for every rung that a step is to rise.
    last = {"w": 0}
    for drift in (-0.99 * STAY, -0.6, 0.0, 0.5, 0.99 * STAY):
        assert rungs({"w": 2.0 ** (-drift / 2)}, 0, last) == last
    for drift, rung in ((-2.1, -2), (1.01 * STAY, 1), (-1.01 * STAY, -1), (8.0, 8)):
        assert rungs({"w": 2.0 ** (-drift / 2)}, 0, last) == {"w": rung}


def test_steps_move_much_less_often_than_the_nearest_ones_would():
    drifting = 2.0 ** np.random.default_rng(0).normal(0.25, 0.15, 2000)
    kept, nearest = [0], []
    for value in drifting:
        kept.append(rungs({"w": value}, 0, {"w": kept[-1]})["w"])
        nearest.append(rungs({"w": value}, 0, {})["w"])
    assert np.count_nonzero(np.diff(kept)) < np.count_nonzero(np.diff(nearest)) / 2


@given(st.floats(1e-44, 1e30), st.integers(-2000, 2000), st.integers(-600, 600))
def test_steps_are_always_floats_that_there_are(fisher, scale, last):
    for before in ({}, {"w": min(max(last, LOWEST_RUNG), HIGHEST_RUNG)}):
        assert LOWEST_RUNG <= rungs({"w": fisher}, scale, before)["w"] <= HIGHEST_RUNG


def weights_of(*names, **spread):
    return {name: torch.randn(50, 20) * spread.get(name, 1.0) for name in (*names, *spread)}


def squares_of(weights):
    return {name: float(tensor.double().square().sum()) for name, tensor in weights.items()}


def test_where_the_loss_is_known_to_mind_it_is_taken_as_it_is():
    weights = weights_of("a", "b", "c")
    assert effective_fisher(weights, squares_of(weights), {"a": 2.0, "b": 3.0, "c": 4.0}) == {
        "a": 2.0,
        "b": 3.0,
        "c": 4.0,
    }


@pytest.mark.parametrize("unknown", [0.0, -1.0, math.nan, math.inf, None])
def test_where_the_loss_is_not_known_to_mind_a_tensor_costs_as_much_as_the_mean_one(unknown):
    weights = weights_of("a", large=10.0, small=0.1)
    fisher = {"a": 2.0} if unknown is None else {"a": 2.0, "large": unknown, "small": unknown}
    found = effective_fisher(weights, squares_of(weights), fisher)
    assert found["a"] == 2.0
    cost = {name: found[name] * float(tensor.square().mean()) for name, tensor in weights.items()}
    assert cost["large"] == pytest.approx(cost["a"], rel=1e-4)
    assert cost["small"] == pytest.approx(cost["a"], rel=1e-4)


@pytest.mark.parametrize("fisher", [{}, {"a": 0.0}, {"a": math.nan, "large": math.inf}])
def test_without_gradients_steps_go_by_the_size_of_the_weights(fisher):
    weights = weights_of("a", large=100.0)
    found = effective_fisher(weights, squares_of(weights), fisher)
    assert found["a"] * float(weights["a"].square().mean()) == pytest.approx(1, rel=1e-4)
    assert found["large"] * float(weights["large"].square().mean()) == pytest.approx(1, rel=1e-4)


def test_a_tensor_that_hardly_had_gradients_does_not_get_an_endless_step():
    weights = weights_of("a", "dead")
    found = effective_fisher(weights, squares_of(weights), {"a": 1.0, "dead": 1e-30})
    assert found["dead"] == pytest.approx(SMALLEST_FISHER / 2, rel=1e-6)


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-22, 1e-10, 1e10, 1e18, 1e20, 1e30, 9e36])
@pytest.mark.parametrize("fisher", [{}, {"other": 1.0}, {"w": 1e-3}], ids=["none", "other", "own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_any_size_get_a_step(size, fisher, dtype):
    weights = {"w": torch.linspace(-1, 1, 100, dtype=dtype) * size, "other": torch.randn(30)}
    ready = grid_weights(weights, fisher, {}, 0)
    assert all(value > 0 and math.isfinite(value) for value in ready.fisher.values())
    for scale in (ready.scale_for(1e-9), ready.scale_for(0.1), 0):
        for name, quantized in ready.quantize(GridConfiguration(scale)).items():
            assert_near(weights[name], quantized, quantized.codebook.rung)


def test_tensors_that_cannot_be_on_a_grid_are_left_out():
    weights = {
        "good": torch.randn(10),
        "empty": torch.zeros(0, 4),
        "constant": torch.full((5,), 0.7),
        "one": torch.tensor([3.0]),
        "scalar": torch.tensor(3.0),
        "zero": torch.zeros(8),
        "nan": torch.tensor([1.0, math.nan, math.nan]),
        "infinite": torch.tensor([[1.0, -math.inf], [0.0, 2.0]]),
        "huge": torch.tensor([1e38, 1.0]),
        "tiny": torch.tensor([1e-50, -1e-60], dtype=torch.float64),
        "subnormal": torch.tensor([1e-40, 1e-41]),
        "half": torch.tensor([math.inf, 1.0], dtype=torch.float16),
    }
    ready = grid_weights(weights, {}, {}, 0)
    assert list(ready.weights) == list(ready.fisher) == ["good"]
    assert ready.notes == [
        "nan: 2 infinite or NaN values, stored exactly",
        "infinite: 1 infinite or NaN values, stored exactly",
        "half: 1 infinite or NaN values, stored exactly",
    ]
    assert list(ready.quantize(GridConfiguration(0))) == ["good"]


def test_without_any_weights_there_is_a_scale_and_nothing_to_quantize():
    ready = grid_weights({"nan": torch.tensor([math.nan, 1.0])}, {"nan": 1.0}, {}, 0)
    assert ready.scale_for(0.01) == 0
    assert ready.quantize(GridConfiguration(3)) == {}


def test_steps_of_the_checkpoint_before_are_kept_where_they_fit():
    weights = weights_of("a", "b", "c")
    fisher = {"a": 1.2, "b": 1.2, "c": 2.0**8}
    last = {"a": 0, "c": 0, "gone": 40}
    ready = grid_weights(weights, fisher, last, 0)
    assert ready.last == {"a": 0, "c": 0}
    steps = {name: quantized.codebook.rung for name, quantized in ready.quantize(GridConfiguration(4)).items()}
    assert steps == {"a": 0, "b": 0, "c": -15}


@pytest.mark.parametrize("wanted", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("fisher", [{}, {"a": 1.0, "b": 30.0, "c": 0.01}])
def test_a_scale_for_a_distortion_has_about_that_distortion(wanted, fisher):
    weights = {"a": torch.randn(100, 100), "b": torch.randn(50, 100) * 0.1, "c": torch.rand(5000) * 3}
    ready = grid_weights(weights, fisher, {}, 0)
    quantized = ready.quantize(GridConfiguration(ready.scale_for(wanted)))
    assert 0.5 * wanted < distortion(weights, quantized, ready.fisher) < 1.5 * wanted


def test_a_larger_scale_is_a_larger_step_for_every_tensor():
    ready = grid_weights(weights_of("a", "b", c=0.01), {"a": 1.0, "b": 0.01}, {}, 0)
    steps = [rungs(ready.fisher, scale, {}) for scale in range(-40, 40)]
    for finer, coarser in pairwise(steps):
        assert all(0 <= coarser[name] - finer[name] <= 1 for name in coarser)


def test_no_step_takes_all_of_a_tensor_however_little_the_loss_minds():
    weights = weights_of("a", b=0.01, c=30.0)
    ready = grid_weights(weights, {"a": 1.0, "b": 1e-3, "c": 1e-9}, {}, 0)
    for name, quantized in ready.quantize(GridConfiguration(500)).items():
        largest = STEP_LIMIT * float(weights[name].square().mean().sqrt())
        assert 2**-0.25 * largest < float(rung_value(quantized.codebook.rung)) < 2**0.25 * largest
        assert quantized.levels.any()
    finer = {n: q.codebook.rung for n, q in ready.quantize(GridConfiguration(-300)).items()}
    assert finer == rungs(ready.fisher, -300, {})


def test_quantizing_changes_nothing_and_gives_the_same_every_time():
    weights = {"a": torch.randn(60, 60), "b": torch.randn(33).to(torch.bfloat16), "c": torch.randn(5, 5) * 1e4}
    before = bits(weights)
    ready = grid_weights(weights, {"a": 1.0}, {}, 7)
    for configuration in (GridConfiguration(-20), GridConfiguration(-20, dithered=True), GridConfiguration(-70)):
        first, second = ready.quantize(configuration), ready.quantize(configuration)
        assert bits({name: dequantize(q) for name, q in first.items()}) == bits(
            {name: dequantize(q) for name, q in second.items()}
        )
        fresh = grid_weights({name: tensor.clone() for name, tensor in weights.items()}, {"a": 1.0}, {}, 7)
        assert all(np.array_equal(first[n].levels, q.levels) for n, q in fresh.quantize(configuration).items())
    assert bits(weights) == before


def test_the_dither_differs_from_tensor_to_tensor_and_seed_to_seed():
    same = torch.rand(20_000)
    fisher = {"a": 1.0, "b": 1.0}

    def dithered(seed):
        ready = GridWeights({"a": same, "b": same}, fisher, dict.fromkeys("ab", 6667.0), {}, seed, [])
        return ready.quantize(GridConfiguration(0, dithered=True))

    first, other = dithered(1), dithered(2)
    assert not np.array_equal(first["a"].levels, first["b"].levels)
    assert not np.array_equal(first["a"].levels, other["a"].levels)
    for seed in (0, -1, 2**40):
        dithered(seed)
