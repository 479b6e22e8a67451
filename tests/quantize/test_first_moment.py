"""One first moment: the largest grid step within the tolerance."""

import math

import numpy as np
import pytest
import torch
from optimizer_moments import SLACK, first_effect, moments, numbers
from training import bits
from whole_tensors import quantize_first_moment, quantize_momentum
from whole_tensors import quantize_second_moment as second_moment_of

from dynaquant.engine.forms.form import dequantize, piece_length
from dynaquant.engine.forms.stored import encode
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.first_moment import FIRST_RUNGS
from dynaquant.engine.quantize.grid import quantize
from dynaquant.engine.quantize.moments import quantize_moments
from dynaquant.engine.tensors.codebook import RUNGS_PER_OCTAVE, rung_value

LARGEST_SHIFT = 2 * RUNGS_PER_OCTAVE
"""The steps that make and that decode levels differ by two octaves at most (native/moments.cpp)."""


@pytest.mark.parametrize("tolerance", [0.02, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("second_tolerance", [0.06, 0.5])
@pytest.mark.parametrize("shape", [(48, 40), (300,), (6, 5, 3, 3)], ids=str)
def test_a_first_moment_gets_the_coarsest_grid_within_the_tolerance(tolerance, second_tolerance, shape):
    first, second = moments((*shape, 1) if len(shape) == 1 else shape, seed=2)
    first, second = first.reshape(shape), second.reshape(shape)
    stored_second = second_moment_of(second, second_tolerance)
    restored_second = dequantize(stored_second)
    root = numbers(restored_second.sqrt())

    def effects_of(rung):
        return effects_on_grid(
            numbers(first) / root,
            rung,
            lambda units: first_effect(first, torch.from_numpy(units * root), restored_second),
        )

    stored = quantize_first_moment(first, stored_second, "v", tolerance)
    if stored is None:
        assert min(effects_of(FIRST_RUNGS[-1])) > tolerance
        return
    assert (stored.second_name, stored.second) == ("v", stored_second)
    assert first_effect(first, dequantize(stored), restored_second) <= tolerance * SLACK
    coarser = [rung for rung in FIRST_RUNGS if rung > stored.units.codebook.rung + LARGEST_SHIFT]
    assert all(min(effects_of(rung)) > tolerance / SLACK for rung in coarser)


def effects_on_grid(units, rung, effect):
    """Return the effects of multiples of a grid step, decoded with every step that is at most two octaves off."""
    levels = np.rint(units / float(rung_value(rung)))
    return [effect(levels * float(rung_value(rung + shift))) for shift in range(-LARGEST_SHIFT, LARGEST_SHIFT + 1)]


@pytest.mark.parametrize("tolerance", [0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("size", [1e-12, 1e-3, 1e6])
def test_a_momentum_gets_the_coarsest_grid_within_the_tolerance(tolerance, size):
    first = torch.randn(50, 30) * size
    exact = numbers(first)
    stored = quantize_momentum(first, tolerance)

    def effect(values):
        return np.linalg.norm(values - exact) / np.linalg.norm(exact)

    assert effect(numbers(dequantize(stored))) <= tolerance * SLACK
    rung = stored.codebook.rung + LARGEST_SHIFT + 2
    if rung <= 4 * math.log2(size) + FIRST_RUNGS[0]:
        assert min(effects_on_grid(exact, rung, effect)) > tolerance / SLACK


@pytest.mark.parametrize("tolerance", [0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("tails", [1.0, 2.0], ids=["normal", "heavy tails"])
def test_a_coarse_first_moment_has_its_full_length_along_its_own_direction(tolerance, tails):
    noise, second = moments((120, 90), seed=4)
    first = noise.sign() * noise.abs() ** tails
    first *= noise.norm() / first.norm()
    stored_second = second_moment_of(second, 0.5)
    root = dequantize(stored_second).sqrt()
    in_units = quantize_first_moment(first, stored_second, "v", tolerance)
    for weight, exact, restored in (
        (root, first / root, dequantize(in_units) / root),
        (torch.ones_like(root), first, dequantize(quantize_momentum(first, tolerance))),
    ):
        kept = float((weight * exact * restored).sum() / (weight * exact.square()).sum())
        assert 0.88 < kept < 1.13
        off, whole = (float((weight * each.square()).sum()) for each in (restored - exact, exact))
        assert 0.2 < math.sqrt(off / whole) <= tolerance * SLACK


def test_a_coarser_first_moment_is_smaller():
    first, second = moments((200, 150), seed=4)
    stored_second = second_moment_of(second, 0.5)
    sizes = [
        len(encode(quantize_first_moment(first, stored_second, "v", tolerance), None)[1]) * 8 / first.numel()
        for tolerance in (0.9, 0.7, 0.5, 0.3)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < 1 < 2 * sizes[0] < sizes[-1]


def test_a_first_moment_of_zeros_stays_zero_and_takes_no_space():
    _, second = moments((200, 150))
    stored_second = second_moment_of(second, 0.5)
    stored = quantize_first_moment(torch.zeros(200, 150), stored_second, "v", 0.5)
    assert not dequantize(stored).any()
    assert len(encode(stored, None)[1]) < 200


def test_dropped_first_moments_are_zero():
    first, second = moments()
    scaled = quantize_first_moment(first, second_moment_of(second, 0.5), "v", math.inf)
    for stored in (scaled, quantize_momentum(first, math.inf)):
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


@pytest.mark.parametrize("second_tolerance", [0.06, 0.5])
def test_a_first_moment_of_several_pieces_gets_the_levels_that_it_would_get_as_a_whole(second_tolerance):
    first, second = moments((700, 900), seed=3)
    stored_second = second_moment_of(second, second_tolerance)
    assert piece_length(first.shape, first.device) < first.numel()
    stored = quantize_first_moment(first, stored_second, "v", 0.3)
    root = torch.from_numpy(np.sqrt(dequantize(stored_second).numpy()))
    units = (first / root).masked_fill(root == 0, 0)
    assert any(np.array_equal(stored.units.levels, quantize(units, rung).levels) for rung in FIRST_RUNGS)
