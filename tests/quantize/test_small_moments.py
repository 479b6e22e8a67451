"""Moments of small tensors: one native call decides as the functions for all other tensors do."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from whole_tensors import UNKNOWN, quantize_first_moment, quantize_second_moment

from dynaquant import _native
from dynaquant.engine.forms.form import stored_equal
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.epsilon import Epsilon
from dynaquant.engine.quantize.first_moment import FIRST_RUNGS, LARGEST, inverses, rungs
from dynaquant.engine.quantize.moment_sample import SAMPLE_SIZE
from dynaquant.engine.quantize.moments import quantize_moments
from dynaquant.engine.quantize.small_moments import (
    quantize_small_first_moment,
    quantize_small_second_moment,
    small_values,
)

TOLERANCES = st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.5, 0.9])
SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 40)),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4)),
)


@st.composite
def pairs(draw):
    """Draw a first and a second moment: of any size and noise, with zeros and with outliers."""
    shape, generator = draw(SHAPES), torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = torch.exp(draw(st.floats(0, 8)) * torch.randn(shape[:1], generator=generator))
    second = rows.reshape((*shape[:1], *[1] * (len(shape) - 1))) * torch.ones(shape)
    second = second * torch.exp(draw(st.floats(0, 4)) * torch.randn(shape, generator=generator))
    second = second * 10.0 ** draw(st.integers(-45, 36))
    first = torch.randn(shape, generator=generator) * second.sqrt() * draw(st.sampled_from([1e-6, 1.0, 1e4]))
    zero = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.0, 0.2, 1.0]))
    second = second.masked_fill(zero, 0.0)
    first = first.masked_fill(zero & (draw(st.booleans()) | (torch.rand(shape, generator=generator) < 0.9)), 0.0)
    if draw(st.booleans()):
        first.view(-1)[0] *= 1e5
    return first, second


def second_of(tensor, tolerance, epsilon=UNKNOWN):
    return quantize_small_second_moment(small_values(tensor), tensor.shape, tolerance, epsilon)


def first_of(tensor, stored_second, tolerance, epsilon=UNKNOWN):
    return quantize_small_first_moment(small_values(tensor), stored_second, "v", tolerance, epsilon)


def same(a, b):
    """Whether two moments have the same stored form, or are both to be stored exactly."""
    return a is b if a is None or b is None else type(a) is type(b) and stored_equal(a, b)


@given(pairs(), TOLERANCES, TOLERANCES, st.sampled_from([0.0, 1e-30, 1e-15, 1e-8, 1.0]))
@example((torch.ones(3, 2), torch.ones(3, 2)), 0.5, 0.5, 0.0)
def test_small_moments_are_quantized_as_large_ones_are(pair, first_tolerance, second_tolerance, epsilon):
    (first, second), epsilon = pair, Epsilon(epsilon)
    usable = bool(torch.isfinite(second).all())
    stored = second_of(second, second_tolerance, epsilon)
    wanted = quantize_second_moment(second, second_tolerance, epsilon) if usable else None
    assert same(stored, wanted)
    if stored is None:
        return
    usable = bool(torch.isfinite(first).all())
    wanted = quantize_first_moment(first, stored, "v", first_tolerance, epsilon) if usable else None
    assert same(first_of(first, stored, first_tolerance, epsilon), wanted)


@given(pairs(), TOLERANCES)
def test_as_many_grids_are_fitted_as_necessary(pair, tolerance):
    """All grids are fitted if ranks decide together. The decision is the same."""
    first, second = (tensor.reshape(-1).contiguous().numpy() for tensor in pair)
    first = np.where(second > 0, first, 0).astype(np.float32)
    if np.isfinite(first).all() and np.isfinite(second).all():
        fits = np.empty(4 * len(FIRST_RUNGS))
        squares, largest = _native.update_fits(first, second, UNKNOWN.assumed, inverses(0), fits)
        wanted = _native.coarsest(squares, fits, rungs(0), tolerance) if largest <= LARGEST else None
        assert _native.coarsest_update(first, second, UNKNOWN.assumed, rungs(0), inverses(0), tolerance) == wanted


def test_moments_that_begin_at_any_byte_are_quantized():
    tensors = {}
    for name in ("exp_avg", "exp_avg_sq"):
        values = torch.rand(20, 10) + 0.1
        memory = torch.empty(values.nbytes + 1, dtype=torch.uint8)
        memory[1:] = values.view(-1).view(torch.uint8)
        tensors[f"a.{name}"] = torch.frombuffer(memory.numpy(), dtype=torch.float32, offset=1).view(20, 10)
    labels = {"a.exp_avg": Label("first_moment"), "a.exp_avg_sq": Label("second_moment")}
    found = quantize_moments(tensors, labels, 0.5, 0.5)
    wanted = quantize_moments({name: tensor.clone() for name, tensor in tensors.items()}, labels, 0.5, 0.5)
    assert found.keys() == wanted.keys() == tensors.keys()
    assert all(same(found[name], wanted[name]) for name in wanted)


def test_outliers_of_a_first_moment_are_kept():
    torch.manual_seed(0)
    first, second = torch.randn(60, 50), torch.ones(60, 50)
    first[3, 4], first[20, 1] = 100, -130
    stored_second = second_of(second, 0.5)
    stored = first_of(first, stored_second, 0.04)
    assert same(stored, quantize_first_moment(first, stored_second, "v", 0.04))
    assert len(stored.units.protected) == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1e-30])
def test_moments_that_are_not_usable_stay_exact(bad):
    labels = {"a.exp_avg": Label("first_moment"), "a.exp_avg_sq": Label("second_moment")}
    good = {"a.exp_avg": torch.randn(20, 10), "a.exp_avg_sq": torch.rand(20, 10) + 0.1}
    assert len(quantize_moments(good, labels, 0.5, 0.5)) == 2
    second = good["a.exp_avg_sq"].clone()
    second[7, 3] = bad
    assert not quantize_moments({**good, "a.exp_avg_sq": second}, labels, 0.5, 0.5)
    first = good["a.exp_avg"].clone()
    first[7, 3] = bad
    assert len(quantize_moments({**good, "a.exp_avg": first}, labels, 0.5, 0.5)) == (2 if math.isfinite(bad) else 1)


def test_only_float32_tensors_on_the_host_are_small():
    assert small_values(torch.arange(6.0).view(2, 3)).tolist() == [0, 1, 2, 3, 4, 5]
    assert small_values(torch.zeros(())).shape == (1,)
    assert len(small_values(torch.zeros(SAMPLE_SIZE))) == SAMPLE_SIZE
    unaligned = torch.frombuffer(bytearray(9), dtype=torch.float32, offset=1, count=2)
    for other in (
        torch.zeros(SAMPLE_SIZE + 1),
        torch.zeros(0),
        torch.zeros(4, 5).t(),
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(4, device="meta"),
        unaligned,
    ):
        assert small_values(other) is None
