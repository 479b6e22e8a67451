"""Moments that are as good as zero beside the ε of an optimizer keep no other moment of their tensor exact."""

import math

import pytest
import torch
from whole_tensors import UNKNOWN, quantize_first_moment, quantize_second_moment

from dynaquant.engine.forms.form import dequantize
from dynaquant.engine.forms.rank_one import RankOne
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.epsilon import Epsilon
from dynaquant.engine.quantize.moments import quantize_moments

USUAL = Epsilon(1e-8)
SHAPES = [(40, 30), (300, 200)]
"""One that is quantized in one native call, and one that is judged by a sample."""


def moments(shape, dead, value):
    """Return moments of which the last rows have got no gradients for long: as in a layer with dead units."""
    generator = torch.Generator().manual_seed(3)
    rows, columns = (
        torch.rand(shape[0], 1, generator=generator) + 0.1,
        torch.rand(1, shape[1], generator=generator) + 0.1,
    )
    second = 1e-6 * rows * columns * torch.exp(0.1 * torch.randn(shape, generator=generator))
    first = second.sqrt() * torch.randn(shape, generator=generator)
    second[-dead:], first[-dead:] = value, 1e-44
    return first, second


def change(first, second, stored_first, stored_second):
    """Return the relative change of the update with the usual ε."""
    update = first.double() / (second.double().sqrt() + 1e-8)
    restored = dequantize(stored_first).double() / (dequantize(stored_second).double().sqrt() + 1e-8)
    return float((restored - update).norm() / update.norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("value", [1.3e-44, 1e-38, 1e-24, 1e-20])
@pytest.mark.parametrize("tolerance", [0.2, 0.09])
@pytest.mark.parametrize("share_dead", [0.03, 0.5])
def test_dead_rows_take_nothing(shape, value, tolerance, share_dead):
    first, second = moments(shape, round(share_dead * shape[0]), value)
    state = {"s.exp_avg": first, "s.exp_avg_sq": second}
    labels = {"s.exp_avg": Label("first_moment"), "s.exp_avg_sq": Label("second_moment")}
    found = quantize_moments(state, labels, 0.35, tolerance, epsilons={"s": 1e-8})
    if tolerance == 0.2:
        assert isinstance(found["s.exp_avg_sq"], RankOne)
    assert change(first, second, found["s.exp_avg"], found["s.exp_avg_sq"]) < 0.5


@pytest.mark.parametrize("shape", SHAPES)
def test_with_an_unknown_epsilon_no_value_is_negligible(shape):
    _, second = moments(shape, shape[0] // 2, 1.3e-44)
    assert quantize_second_moment(second, 0.2, UNKNOWN) is None
    assert quantize_second_moment(second, 0.2, Epsilon(1e-30)) is None


@pytest.mark.parametrize("shape", SHAPES)
def test_dead_rows_do_not_change_the_length_of_other_updates(shape):
    _, second = moments(shape, shape[0] // 2, 1e-24)
    stored = quantize_second_moment(second, 0.2, USUAL)
    live = slice(0, shape[0] // 2)
    assert float((second[live] / dequantize(stored)[live]).sqrt().mean()) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("value", "exact"), [(1e-44, False), (1e-16, False), (1e-12, True), (math.nan, True)])
def test_a_first_moment_that_matters_is_not_divided_by_zero(shape, value, exact):
    first, second = moments(shape, 1, 0.0)
    first[-1, 0] = value
    stored_second = quantize_second_moment(second[:-1], 0.2, USUAL)  # of what is not zero, so that no row is
    stored_second = quantize_second_moment(torch.cat((dequantize(stored_second), second[-1:])), 0.01, USUAL)
    assert bool((dequantize(stored_second)[-1] == 0).all())
    stored = quantize_first_moment(first, stored_second, "v", 0.5, USUAL)
    assert (stored is None) == exact
    if not exact:
        assert not dequantize(stored)[-1].any()


def test_second_moments_of_float64_that_float32_cannot_hold_stay_exact_unless_they_are_negligible():
    second = torch.full((20, 10), 1e-50, dtype=torch.float64)
    assert quantize_second_moment(second, 0.2, Epsilon(1e-30)) is None
    assert quantize_second_moment(second, 0.2, UNKNOWN) is None
    assert quantize_second_moment(second, 0.2, USUAL) is not None


@pytest.mark.parametrize("shape", SHAPES)
def test_a_moment_of_zeros_is_quantized_also_if_the_processor_flushes_subnormal_numbers(shape):
    wanted = quantize_second_moment(torch.zeros(shape), 0.2, USUAL)
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor cannot flush subnormal numbers")
    try:
        found = quantize_second_moment(torch.zeros(shape), 0.2, USUAL)
    finally:
        torch.set_flush_denormal(False)
    assert found.equals(wanted)
