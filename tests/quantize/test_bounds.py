"""A bound holds for every finite value, in every dtype, whatever the values are."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tiers import examples
from whole_tensors import within

import dynaquant as dq
from dynaquant.engine.forms.bounded import BoundedTensor
from dynaquant.engine.forms.form import Coded, dequantize, stored_equal
from dynaquant.engine.forms.registry import decode
from dynaquant.engine.forms.schemes import Bounded, Lossless
from dynaquant.engine.forms.stored import encode, values_of
from dynaquant.engine.kernels import HOST
from dynaquant.engine.tensors.dtypes import bytes_of

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
BITS = {torch.float32: np.uint32, torch.float64: np.uint64, torch.float16: np.uint16, torch.bfloat16: np.uint16}
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def tensor_of(bits, dtype):
    if not bits.size:
        return torch.empty(bits.shape, dtype=dtype)
    return torch.from_numpy(bits.reshape(-1).view(np.uint8).copy()).view(dtype).reshape(bits.shape)


def largest_error(bound, tensor):
    """The bound as an exact number."""
    if bound.absolute is not None:
        return Fraction(bound.absolute)
    finite = tensor.double()[tensor.isfinite()]
    if not len(finite):
        return 0
    return Fraction(bound.relative) * (Fraction(float(finite.max())) - Fraction(float(finite.min())))


def assert_held(tensor, stored, bound):
    """Compare in exact arithmetic."""
    values = values_of(tensor if stored is None else stored)
    assert (values.dtype, values.shape) == (tensor.dtype, tensor.shape)
    limit = largest_error(bound, tensor)
    same_bits = np.equal(*(bytes_of(t).reshape(-1, t.dtype.itemsize) for t in (tensor, values))).all(1)
    for original, value, same in zip(
        tensor.double().flatten().tolist(), values.double().flatten().tolist(), same_bits.tolist(), strict=True
    ):
        if math.isfinite(original):
            assert math.isfinite(value)
            assert abs(Fraction(original) - Fraction(value)) <= limit
        else:
            assert same


def assert_coded(stored, parent=None):
    scheme, stream = encode(stored, parent)
    assert isinstance(scheme, Bounded)
    assert stored_equal(decode(scheme, Coded(stored.dtype, stored.shape, stream, parent)), stored)
    return scheme, stream


BOUNDS = st.one_of(
    st.floats(0, 1e300).map(lambda b: dq.Bound(absolute=b)),
    st.floats(1e-9, 1e3).map(lambda b: dq.Bound(absolute=b)),
    st.integers(-1074, 1023).map(lambda e: dq.Bound(absolute=math.ldexp(1.0, e))),
    st.floats(0, 2).map(lambda b: dq.Bound(relative=b)),
    st.floats(1e-7, 0.1).map(lambda b: dq.Bound(relative=b)),
)
SHAPES = arrays.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=6)


@EVERY_DTYPE
@examples(200)
@given(data=st.data())
def test_the_bound_holds_for_any_bits(dtype, data):
    """Any bit patterns: NaNs with any payload, infinities, subnormal numbers, values of every size."""
    bits = data.draw(arrays.arrays(BITS[dtype], SHAPES))
    tensor, bound = tensor_of(np.asarray(bits), dtype), data.draw(BOUNDS)
    stored = within(tensor, bound)
    assert_held(tensor, stored, bound)
    if stored is not None:
        assert_coded(stored)


@EVERY_DTYPE
@examples(200)
@given(data=st.data())
def test_the_bound_holds_for_values_of_similar_size(dtype, data):
    """Most of these are stored on a grid; with bounds near half of the distance of two neighbours in the dtype."""
    size = data.draw(st.floats(-3, 3))
    numbers = data.draw(arrays.arrays(np.float64, SHAPES, elements=st.floats(-1, 1, allow_subnormal=False)))
    tensor = (torch.tensor(np.asarray(numbers)) * 10**size).to(dtype)
    ulps = data.draw(st.floats(0.3, 300))
    bound = dq.Bound(absolute=ulps * torch.finfo(dtype).eps * 10**size)
    stored = within(tensor, bound)
    assert_held(tensor, stored, bound)
    if stored is not None:
        assert_coded(stored)
        moved = (tensor.double() * data.draw(st.floats(0.9, 1.1)) + float(bound.absolute)).to(dtype)
        later = within(moved, data.draw(st.sampled_from([bound, dq.Bound(absolute=bound.absolute / 3)])))
        if later is not None:
            assert_coded(later, stored)
            assert_coded(later, tensor)


@EVERY_DTYPE
def test_a_field_takes_few_bytes(dtype):
    """Realistic: a smooth field. Nothing of it is stored exactly, and the error comes close to the bound."""
    x = torch.linspace(0, 6, 300, dtype=torch.float64)
    field = (torch.sin(x)[:, None] * torch.cos(2 * x)).to(dtype)
    bound = dq.Bound(absolute=0.01)
    stored = within(field, bound)
    assert_held(field, stored, bound)
    assert len(stored.positions) == 0
    error = float((dequantize(stored).double() - field.double()).abs().max())
    assert 0.004 < error <= 0.01
    scheme, stream = assert_coded(stored)
    assert scheme.axes == 2
    assert len(stream) < field.numel() / 3


def test_the_parent_predicts_if_that_takes_fewer_bytes():
    torch.manual_seed(0)
    weight = torch.randn(300, 200)
    bound = dq.Bound(absolute=1e-3)
    first = within(weight, bound)
    second = within(weight + 1e-3 * torch.randn(300, 200), bound)
    alone, whole = assert_coded(second)
    scheme, stream = assert_coded(second, first)
    assert (alone.axes, alone.needs_parent) == (0, False)
    assert (scheme.axes, scheme.needs_parent) == (0, True)
    assert len(stream) < len(whole) / 3
    unrelated = within(torch.randn(300, 200), bound)
    assert not assert_coded(unrelated, first)[0].needs_parent
    assert not assert_coded(second, within(torch.randn(200, 300), bound))[0].needs_parent


def test_values_that_are_not_finite_are_kept_and_do_not_disturb():
    field = torch.linspace(10, 20, 40_000).reshape(200, 200)
    field[50:90, 20:150] = math.nan
    field[3, 3] = -math.inf
    bound = dq.Bound(absolute=0.01)
    stored = within(field, bound)
    assert_held(field, stored, bound)
    assert len(stored.positions) == 40 * 130 + 1
    _, stream = assert_coded(stored)
    assert len(stream) < field.numel()
    noisy = torch.randn(200, 200) + field
    later = within(noisy + 0.05, bound)
    assert_held(noisy + 0.05, later, bound)
    assert len(assert_coded(later, within(noisy, bound))[1]) < 0.2 * len(assert_coded(later)[1])


def test_a_negative_zero_becomes_zero():
    stored = within(torch.tensor([-0.0, 1.0]), dq.Bound(absolute=0.1))
    assert math.copysign(1, dequantize(stored)[0]) == 1


def test_an_error_equal_to_the_bound_is_kept():
    """Whole numbers with a bound of one: odd ones lie half way between two levels."""
    tensor = torch.arange(1000.0)
    stored = within(tensor, dq.Bound(absolute=1))
    assert len(stored.positions) == 0
    assert_held(tensor, stored, dq.Bound(absolute=1))


@pytest.mark.parametrize(
    ("tensor", "bound"),
    [
        (torch.arange(9), dq.Bound(absolute=1)),
        (torch.tensor([True, False]), dq.Bound(absolute=1)),
        (torch.randn(9, dtype=torch.complex64), dq.Bound(absolute=1)),
        (torch.randn(9).to(torch.float8_e5m2), dq.Bound(absolute=1)),
        (torch.empty(0, 3), dq.Bound(absolute=1)),
        (torch.full((9,), math.nan), dq.Bound(relative=1)),
        (torch.randn(9), dq.Bound(absolute=0)),
        (torch.randn(9), dq.Bound(relative=0)),
        (torch.full((9,), 3.0), dq.Bound(relative=0.1)),
        (torch.randn(9), dq.Bound(absolute=1e-40)),
        (torch.randn(9, dtype=torch.float64), dq.Bound(absolute=5e-324)),
        (torch.randn(9), dq.Bound(absolute=1e-12)),
    ],
)
def test_what_is_stored_exactly(tensor, bound):
    assert within(tensor, bound) is None


def test_extreme_bounds():
    tensor = torch.tensor([3e38, -3e38, 1.0])
    assert dequantize(within(tensor, dq.Bound(absolute=1e300))).tolist() == [0, 0, 0]
    wide = torch.tensor([1.7e308, -1.7e308, 1.0], dtype=torch.float64)
    for bound in (dq.Bound(absolute=1e308), dq.Bound(absolute=1.7e308), dq.Bound(relative=0.4), dq.Bound(relative=1)):
        assert_held(wide, within(wide, bound), bound)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "either absolute= or relative="),
        ({"absolute": 1, "relative": 1}, "either absolute= or relative="),
        ({"absolute": -1e-9}, "finite number of at least 0"),
        ({"absolute": math.nan}, "finite number of at least 0"),
        ({"relative": math.inf}, "finite number of at least 0"),
        ({"relative": "0.1"}, "finite number of at least 0"),
        ({"absolute": True}, "finite number of at least 0"),
    ],
)
def test_bad_bounds(given, message):
    with pytest.raises(ValueError, match=message):
        dq.Bound(**given)


def test_levels_do_not_depend_on_how_a_tensor_is_cut_into_pieces():
    torch.manual_seed(0)
    tensor = torch.randn(100_000)
    tensor[::7] = math.nan
    bound = dq.Bound(absolute=0.01)
    stored = within(tensor, bound)
    assert isinstance(stored, BoundedTensor)
    whole = torch.cat(list(stored.pieces(1 << 20, HOST)))
    for size in (999, 65_536):
        assert torch.equal(torch.cat(list(stored.pieces(size, HOST))).nan_to_num(5), whole.nan_to_num(5))
    assert_coded(stored)


def test_an_exact_tensor_may_follow_and_precede_a_bounded_one():
    tensor = torch.randn(50, 50)
    stored = within(tensor, dq.Bound(absolute=0.01))
    scheme, stream = encode(tensor, stored)
    assert isinstance(scheme, Lossless)
    assert torch.equal(decode(scheme, Coded(tensor.dtype, tensor.shape, stream, stored)), tensor)
    assert assert_coded(stored, tensor)[0].needs_parent
