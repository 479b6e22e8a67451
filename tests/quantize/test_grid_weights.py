"""All weights of a checkpoint on grids: the choice of steps, and the tensors that are left out."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from on_grid import assert_near
from training import bits

from dynaquant.engine.forms.form import dequantize
from dynaquant.engine.quantize.grid_weights import (
    RUNG_HYSTERESIS,
    SMALLEST_MEAN_SQUARE,
    GridWeights,
    choose_rungs,
    effective_mean_squares,
    grid_weights,
)
from dynaquant.engine.quantize.knobs import SCALES_PER_OCTAVE, GridConfiguration
from dynaquant.engine.quantize.magnitude import magnitudes
from dynaquant.engine.quantize.step_limits import LOOSEST_LIMITS, StepLimits
from dynaquant.engine.tensors.codebook import HIGHEST_RUNG, LOWEST_RUNG, rung_value
from dynaquant.search.distortion import distortion


def test_a_step_is_inversely_proportional_to_the_root_of_the_sensitivity():
    mean_squares = {"a": 1.0, "b": 16.0, "c": 1 / 16}
    assert choose_rungs(mean_squares, 0, {}) == {"a": 0, "b": -8, "c": 8}
    assert choose_rungs(mean_squares, SCALES_PER_OCTAVE, {}) == {"a": 4, "b": -4, "c": 12}


def test_a_small_drift_of_the_sensitivity_keeps_the_rung_and_a_large_one_changes_it():
    # To raise the step by one rung, F must fall by half an octave.
    previous = {"w": 0}
    for drift in (-0.99 * RUNG_HYSTERESIS, -0.6, 0.0, 0.5, 0.99 * RUNG_HYSTERESIS):
        assert choose_rungs({"w": 2.0 ** (-drift / 2)}, 0, previous) == previous
    for drift, rung in ((-2.1, -2), (1.01 * RUNG_HYSTERESIS, 1), (-1.01 * RUNG_HYSTERESIS, -1), (8.0, 8)):
        assert choose_rungs({"w": 2.0 ** (-drift / 2)}, 0, previous) == {"w": rung}


def test_hysteresis_halves_the_number_of_rung_changes():
    drifting = 2.0 ** np.random.default_rng(0).normal(0.25, 0.15, 2000)
    kept, nearest = [0], []
    for value in drifting:
        kept.append(choose_rungs({"w": value}, 0, {"w": kept[-1]})["w"])
        nearest.append(choose_rungs({"w": value}, 0, {})["w"])
    assert np.count_nonzero(np.diff(kept)) < np.count_nonzero(np.diff(nearest)) / 2


@given(st.floats(1e-44, 1e30), st.integers(-2000, 2000), st.integers(-600, 600))
def test_rungs_stay_within_the_range_of_float32(mean_squares, scale, previous):
    for rungs in ({}, {"w": min(max(previous, LOWEST_RUNG), HIGHEST_RUNG)}):
        assert LOWEST_RUNG <= choose_rungs({"w": mean_squares}, scale, rungs)["w"] <= HIGHEST_RUNG


def weights_of(*names, **spread):
    return {name: torch.randn(50, 20) * spread.get(name, 1.0) for name in (*names, *spread)}


def sizes_of(weights):
    return {name: tensor.numel() for name, tensor in weights.items()}


def squares_of(weights):
    return {name: float(tensor.double().square().sum()) for name, tensor in weights.items()}


def test_a_measured_sensitivity_is_used_unchanged():
    weights = weights_of("a", "b", "c")
    assert effective_mean_squares(sizes_of(weights), squares_of(weights), {"a": 2.0, "b": 3.0, "c": 4.0}) == {
        "a": 2.0,
        "b": 3.0,
        "c": 4.0,
    }


@pytest.mark.parametrize("unknown", [0.0, -1.0, math.nan, math.inf, None])
def test_a_tensor_of_unknown_sensitivity_counts_as_much_as_the_average_tensor(unknown):
    weights = weights_of("a", large=10.0, small=0.1)
    mean_squares = {"a": 2.0} if unknown is None else {"a": 2.0, "large": unknown, "small": unknown}
    found = effective_mean_squares(sizes_of(weights), squares_of(weights), mean_squares)
    assert found["a"] == 2.0
    cost = {name: found[name] * float(tensor.square().mean()) for name, tensor in weights.items()}
    assert cost["large"] == pytest.approx(cost["a"], rel=1e-4)
    assert cost["small"] == pytest.approx(cost["a"], rel=1e-4)


@pytest.mark.parametrize("mean_squares", [{}, {"a": 0.0}, {"a": math.nan, "large": math.inf}])
def test_without_gradients_the_sensitivity_is_the_inverse_mean_square(mean_squares):
    weights = weights_of("a", large=100.0)
    found = effective_mean_squares(sizes_of(weights), squares_of(weights), mean_squares)
    assert found["a"] * float(weights["a"].square().mean()) == pytest.approx(1, rel=1e-4)
    assert found["large"] * float(weights["large"].square().mean()) == pytest.approx(1, rel=1e-4)


def test_a_tiny_sensitivity_is_raised_to_the_lower_limit():
    weights = weights_of("a", "dead")
    found = effective_mean_squares(sizes_of(weights), squares_of(weights), {"a": 1.0, "dead": 1e-30})
    assert found["dead"] == pytest.approx(SMALLEST_MEAN_SQUARE / 2, rel=1e-6)


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-22, 1e-10, 1e10, 1e18, 1e20, 1e30, 9e36])
@pytest.mark.parametrize("mean_squares", [{}, {"other": 1.0}, {"w": 1e-3}], ids=["none", "other", "own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_any_magnitude_can_be_quantized(size, mean_squares, dtype):
    weights = {"w": torch.linspace(-1, 1, 100, dtype=dtype) * size, "other": torch.randn(30)}
    ready = grid_weights(weights, mean_squares, {}, 0)
    assert all(value > 0 and math.isfinite(value) for value in ready.mean_squares.values())
    for scale in (ready.scale_exponent_for(1e-9), ready.scale_exponent_for(0.1), 0):
        for name, quantized in ready.quantize(GridConfiguration(scale)).items():
            assert_near(weights[name], quantized, quantized.codebook.rung)


def test_tensors_that_must_be_stored_exactly_are_left_out():
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
    assert list(ready.weights) == list(ready.mean_squares) == ["good"]
    assert ready.notes == [
        "nan: 2 infinite or NaN values, stored exactly",
        "infinite: 1 infinite or NaN values, stored exactly",
        "half: 1 infinite or NaN values, stored exactly",
    ]
    assert list(ready.quantize(GridConfiguration(0))) == ["good"]


@pytest.mark.parametrize("shape", [(50,), (50, 1), (1, 50)], ids=str)
def test_a_vector_whose_values_no_level_can_hold_is_left_out(shape):
    weights = {"matrix": torch.randn(20, 30), "offset": 1000 + torch.randn(shape), "bias": torch.randn(40)}
    ready = grid_weights(weights, dict.fromkeys(weights, 1.0), {}, 0, step_limits=LOOSEST_LIMITS)
    fine, coarse = GridConfiguration(-3 * SCALES_PER_OCTAVE), GridConfiguration(4 * SCALES_PER_OCTAVE)
    assert set(ready.rungs(fine)) == set(ready.candidate(fine)) == set(ready.quantize(fine)) == {"matrix", "bias"}
    assert set(ready.quantize(coarse)) == set(weights)


def test_a_matrix_whose_values_no_level_can_hold_has_outliers():
    ready = grid_weights({"w": torch.randn(20, 30)}, {"w": 1.0}, {}, 0)
    assert len(ready.quantize(GridConfiguration(-9 * SCALES_PER_OCTAVE))["w"].protected) > 400


def test_without_usable_weights_there_is_nothing_to_quantize():
    ready = grid_weights({"nan": torch.tensor([math.nan, 1.0])}, {"nan": 1.0}, {}, 0)
    assert ready.scale_exponent_for(0.01) == 0
    assert ready.quantize(GridConfiguration(3)) == {}


def test_rungs_of_the_previous_checkpoint_are_kept_if_close_enough():
    weights = weights_of("a", "b", "c")
    mean_squares = {"a": 1.2, "b": 1.2, "c": 2.0**8}
    previous = {"a": 0, "c": 0, "gone": 40}
    ready = grid_weights(weights, mean_squares, previous, 0, step_limits=StepLimits(4.0, 4.0))
    assert ready.previous_rungs == {"a": 0, "c": 0}
    rungs = {name: quantized.codebook.rung for name, quantized in ready.quantize(GridConfiguration(4)).items()}
    assert rungs == {"a": 0, "b": 0, "c": -15}


@pytest.mark.parametrize("wanted", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("mean_squares", [{}, {"a": 1.0, "b": 30.0, "c": 0.01}])
def test_the_scale_exponent_for_a_distortion_gives_about_that_distortion(wanted, mean_squares):
    weights = {"a": torch.randn(100, 100), "b": torch.randn(50, 100) * 0.1, "c": torch.rand(5000) * 3}
    ready = grid_weights(weights, mean_squares, {}, 0, step_limits=LOOSEST_LIMITS)
    quantized = ready.quantize(GridConfiguration(ready.scale_exponent_for(wanted)))
    assert 0.5 * wanted < distortion(weights, quantized, ready.mean_squares) < 1.5 * wanted


def test_a_larger_scale_never_makes_a_step_smaller():
    ready = grid_weights(weights_of("a", "b", c=0.01), {"a": 1.0, "b": 0.01}, {}, 0)
    rungs = [choose_rungs(ready.mean_squares, scale, {}) for scale in range(-40, 40)]
    for finer, coarser in pairwise(rungs):
        assert all(0 <= coarser[name] - finer[name] <= 1 for name in coarser)


def test_the_step_limit_keeps_levels_in_every_tensor_at_any_sensitivity():
    weights = weights_of("a", b=0.01, c=30.0)
    ready = grid_weights(weights, {"a": 1.0, "b": 1e-3, "c": 1e-9}, {}, 0, step_limits=StepLimits(1.5, 1.5))
    for name, quantized in ready.quantize(GridConfiguration(500)).items():
        largest = 1.5 * magnitudes(weights)[name].small
        assert 2**-0.25 * largest < float(rung_value(quantized.codebook.rung)) < 2**0.25 * largest
        assert quantized.levels.any()
    finer = {n: q.codebook.rung for n, q in ready.quantize(GridConfiguration(-300)).items()}
    assert finer == choose_rungs(ready.mean_squares, -300, {})


def test_quantizing_is_a_pure_function():
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


def test_stochastic_rounding_differs_by_tensor_and_by_seed():
    values = torch.rand(20_000)
    mean_squares = {"a": 1.0, "b": 1.0}

    def rounded(seed):
        weights = {"a": values, "b": values}
        ready = GridWeights(
            weights,
            sizes_of(weights),
            mean_squares,
            dict.fromkeys("ab", 6667.0),
            dict.fromkeys("ab", 4.0),
            {},
            seed,
            [],
        )
        return ready.quantize(GridConfiguration(0, dithered=True))

    first, other = rounded(1), rounded(2)
    assert not np.array_equal(first["a"].levels, first["b"].levels)
    assert not np.array_equal(first["a"].levels, other["a"].levels)
    for seed in (0, -1, 2**40):
        rounded(seed)
