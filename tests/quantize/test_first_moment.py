"""One first moment: the largest grid step within the tolerance."""

import math

import numpy as np
import pytest
import torch
from optimizer_moments import SLACK, first_effect, moments, numbers
from training import bits

from dynaquant.coding.encoder import encode
from dynaquant.quantize.first_moment import FIRST_RUNGS, quantize_first_moment, quantize_momentum
from dynaquant.quantize.grid import quantize
from dynaquant.quantize.moments import quantize_moments
from dynaquant.quantize.second_moment import quantize_second_moment as second_moment_of
from dynaquant.state.roles import Label
from dynaquant.tensors.codebook import rung_value
from dynaquant.tensors.dequantize import dequantize
from dynaquant.tensors.stored import LowRank


@pytest.mark.parametrize("tolerance", [0.02, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("second_tolerance", [0.06, 0.5])
@pytest.mark.parametrize("shape", [(48, 40), (300,), (6, 5, 3, 3)], ids=str)
def test_a_first_moment_gets_the_largest_step_within_the_tolerance(tolerance, second_tolerance, shape):
    first, second = moments((*shape, 1) if len(shape) == 1 else shape, seed=2)
    first, second = first.reshape(shape), second.reshape(shape)
    stored_second = second_moment_of(second, second_tolerance)
    restored_second = dequantize(stored_second)

    def effect_of(rung):
        root, step = np.sqrt(numbers(restored_second)), float(rung_value(rung))
        units = np.rint(numbers(first) / root / step) * step
        return first_effect(first, torch.from_numpy(units * root), restored_second)

    stored = quantize_first_moment(first, stored_second, "v", tolerance)
    if stored is None:
        assert effect_of(FIRST_RUNGS[-1]) > tolerance
        return
    assert (stored.second_name, stored.second) == ("v", stored_second)
    assert first_effect(first, dequantize(stored), restored_second) <= tolerance * SLACK
    if isinstance(stored.units, LowRank):
        return
    coarser = stored.units.codebook.rung + 2
    assert coarser > FIRST_RUNGS[0] or effect_of(coarser) > tolerance / SLACK


@pytest.mark.parametrize("tolerance", [0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("size", [1e-12, 1e-3, 1e6])
def test_a_momentum_gets_the_largest_step_within_the_tolerance(tolerance, size):
    first = torch.randn(50, 30) * size

    def effect_of(rung):
        step = float(rung_value(rung))
        exact = numbers(first)
        return np.linalg.norm(np.rint(exact / step) * step - exact) / np.linalg.norm(exact)

    stored = quantize_momentum(first, tolerance)
    assert np.linalg.norm(numbers(dequantize(stored) - first)) <= tolerance * SLACK * np.linalg.norm(numbers(first))
    if isinstance(stored, LowRank):
        return
    rung = stored.codebook.rung
    assert rung + 2 > 4 * math.log2(size) + FIRST_RUNGS[0] or effect_of(rung + 2) > tolerance / SLACK


@pytest.mark.parametrize("tolerance", [0.2, 0.5, 0.8])
def test_a_first_moment_with_few_large_singular_values_is_stored_at_low_rank_and_far_smaller(tolerance):
    noise, second = moments((120, 90), seed=4)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(120, 3, generator=generator) @ torch.randn(3, 90, generator=generator)
    first = vectors * second.sqrt() + 0.1 * noise
    stored_second = second_moment_of(second, 0.5)
    stored = quantize_first_moment(first, stored_second, "v", tolerance)
    assert isinstance(stored.units, LowRank)
    assert first_effect(first, dequantize(stored), dequantize(stored_second)) <= tolerance * SLACK
    momentum = quantize_momentum(vectors + 0.1 * torch.randn(120, 90, generator=generator), tolerance)
    assert isinstance(momentum, LowRank)
    on_grid = quantize(vectors, momentum.rows.codebook.rung)
    assert len(encode(momentum, None)[1]) < len(encode(on_grid, None)[1]) / 4


def test_with_a_tolerance_of_1_first_moments_are_zero():
    first, second = moments()
    scaled = quantize_first_moment(first, second_moment_of(second, 0.5), "v", 1.0)
    for stored in (scaled, quantize_momentum(first, 1.0)):
        assert bits(dequantize(stored)) == bits(torch.zeros_like(first))
        assert len(encode(stored, None)[1]) < 20


@pytest.mark.parametrize("tolerance", [0.1, 1.0])
@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e-20, 1e10, 1e18, 1e20, 1e30, 3e38])
def test_momentum_of_any_magnitude_is_within_the_tolerance_or_exact(tolerance, size):
    first = torch.linspace(-1, 1, 999) * size
    stored = quantize_moments({"s": first}, {"s": Label("first_moment")}, tolerance, 0.3).get("s")
    if stored is not None:
        off = np.linalg.norm(numbers(dequantize(stored)) - numbers(first))
        assert off <= tolerance * SLACK * np.linalg.norm(numbers(first))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_first_moments_of_other_dtypes_stay_within_the_tolerance(dtype):
    first, second = moments((30, 40))
    first, second = (first * 1e3).to(dtype), (second * 1e6).clamp(min=1e-3).to(dtype)
    first[3, 5] = 30 * second[3, 5].sqrt()  # more than 127 grid steps at this tolerance
    stored_second = second_moment_of(second, 0.02) or second_moment_of(second, 0.1)
    for tolerance in (0.05, 0.1, 0.2):
        stored = quantize_first_moment(first, stored_second, "v", tolerance)
        if stored is not None:
            restored = dequantize(stored)
            assert restored.dtype == dtype
            assert first_effect(first, restored, dequantize(stored_second)) <= tolerance * 1.02


def test_a_first_moment_that_is_not_zero_where_the_second_is_stays_exact():
    first, second = moments((40, 25))
    first[3], second[3] = 0, 0
    stored_second = second_moment_of(second, 0.5)
    stored = quantize_first_moment(first, stored_second, "v", 0.5)
    assert bool(dequantize(stored).isfinite().all())
    assert not bool(dequantize(stored)[3].any())
    first[3, 7] = 1e-9
    assert quantize_first_moment(first, stored_second, "v", 0.5) is None
