"""Quantized moments: within the tolerance, in the coarsest form possible, and otherwise exact."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import bits

from dynaquant.coding.decoder import decode
from dynaquant.coding.encoder import encode
from dynaquant.coding.schemes import RankOneFactors, SecondMomentUnits
from dynaquant.quantize.first_moment import FIRST_RUNGS, quantize_first_moment, quantize_momentum
from dynaquant.quantize.log_grid import quantize_to_log_grid
from dynaquant.quantize.moments import quantize_moments
from dynaquant.quantize.second_moment import SECOND_PACES, quantize_rank_one
from dynaquant.quantize.second_moment import quantize_second_moment as second_moment_of
from dynaquant.state.roles import Label
from dynaquant.store.entry import Entry
from dynaquant.tensors.codebook import Grid, LogGrid, rung_value
from dynaquant.tensors.dequantize import dequantize, values_of
from dynaquant.tensors.dtypes import QUANTIZABLE_DTYPES
from dynaquant.tensors.hashing import tensor_hash
from dynaquant.tensors.stored import QuantizedTensor, RankOne, ScaledMoment

EPSILON = 1e-8
SLACK = 1.0001
"""Tolerances hold up to the precision of float32."""


def numbers(tensor):
    return tensor.detach().double().numpy()


def second_effect(second, stored):
    """The root mean square of ``sqrt(v / v̂) - 1`` over the elements that are not zero."""
    v, decoded = numbers(second), numbers(dequantize(stored))
    moved = v > 0
    with np.errstate(divide="ignore"):
        return float(np.sqrt(np.mean((np.sqrt(v[moved] / decoded[moved]) - 1) ** 2))) if moved.any() else 0.0


def first_effect(first, second, restored_first, restored_second):
    """The relative error of the next update."""
    wanted = numbers(first) / (np.sqrt(numbers(second)) + EPSILON)
    found = numbers(restored_first) / (np.sqrt(numbers(restored_second)) + EPSILON)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def moments(shape=(48, 40), seed=0, spread=1.5):
    """A first and a second moment like those of Adam: rows and columns differ much, single elements a little."""
    random = np.random.default_rng(seed)
    rows, columns = random.normal(0, spread, shape[:1]), random.normal(0, spread, math.prod(shape[1:]))
    v = 1e-6 * np.exp(rows[:, None] + columns + random.normal(0, 0.3, (len(rows), len(columns))))
    m = random.normal(0, 0.4, v.shape) * np.sqrt(v)
    return torch.tensor(m.reshape(shape), dtype=torch.float32), torch.tensor(v.reshape(shape), dtype=torch.float32)


@given(
    exponents=st.lists(st.floats(-100, 100) | st.none(), max_size=40),
    pace=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_errors_on_a_log_grid_are_at_most_half_a_pace_and_zero_stays_zero(exponents, pace):
    tensor = torch.tensor([0.0 if e is None else 2.0**e for e in exponents])
    stored = quantize_to_log_grid(tensor, pace)
    positive = tensor > 0
    rungs = 4 * np.log2(numbers(tensor[positive]))
    if stored is None:
        assert np.ptp(rungs / pace) > 252
        return
    restored = dequantize(stored)
    assert torch.equal(restored > 0, positive)
    off = np.abs(4 * np.log2(numbers(restored[positive])) - rungs)
    assert off.max(initial=0) <= pace / 2 + 0.025  # 0.4 % are 0.023 rungs


def test_a_log_grid_spans_from_the_smallest_to_the_largest_value():
    stored = quantize_to_log_grid(torch.tensor([0.0, 0.25, 16.0, 1.0]), 4)
    assert stored.codebook == LogGrid(4, -2, 7)
    assert stored.levels.tolist() == [0, 2, 8, 4]


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
def test_a_log_grid_works_for_any_dtype_and_shape(dtype):
    for shape in [(), (1,), (0,), (3, 4), (2, 3, 4)]:
        tensor = torch.rand(shape).to(dtype)
        restored = dequantize(quantize_to_log_grid(tensor, 2))
        assert (restored.dtype, restored.shape) == (dtype, tensor.shape)
        assert torch.all((restored / tensor).log2().abs() <= 0.27) or tensor.numel() == 0
    transposed = torch.rand(5, 7).t()
    assert bits(dequantize(quantize_to_log_grid(transposed, 2))) == bits(
        dequantize(quantize_to_log_grid(transposed.contiguous(), 2))
    )


def test_a_rank_one_matrix_is_stored_as_rows_and_columns():
    rows, columns = torch.rand(30) + 0.1, torch.rand(20) + 0.1
    exact = torch.outer(rows, columns)
    for tensor in (exact, exact.reshape(30, 4, 5)):
        stored = quantize_rank_one(tensor)
        assert dequantize(stored).shape == tensor.shape
        assert float((dequantize(stored) / tensor).log2().abs().max()) < 0.27  # an eighth of an octave for each factor


@pytest.mark.parametrize("tensor", [torch.tensor(1.0), torch.rand(9), torch.zeros(3, 3)], ids=["0", "1", "zero"])
def test_vectors_and_zeros_have_no_rank_one_form(tensor):
    assert quantize_rank_one(tensor) is None


@pytest.mark.parametrize("tolerance", [0.03, 0.05, 0.1, 0.2, 0.3, 0.5])
@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(40, 30), (200,), (8, 6, 3, 3), (1, 50)], ids=str)
def test_a_second_moment_gets_the_cheapest_form_within_the_tolerance(tolerance, noise, shape):
    torch.manual_seed(1)
    base = torch.outer(torch.rand(shape[0]) + 0.01, torch.rand(math.prod(shape[1:])) + 0.01).reshape(shape)
    second = 1e-7 * base * torch.exp(noise * torch.randn(shape))
    stored = second_moment_of(second, tolerance)
    forms = [quantize_rank_one(second), *(quantize_to_log_grid(second, pace) for pace in SECOND_PACES)]
    good = [form for form in forms if form is not None and second_effect(second, form) <= tolerance]
    if stored is None:
        assert not good
        return
    assert second_effect(second, stored) <= tolerance * SLACK
    assert type(stored) is type(good[0])
    if isinstance(stored, QuantizedTensor):
        assert stored.codebook == good[0].codebook


def test_zeros_of_a_second_moment_stay_zero_unless_it_is_rank_one():
    second = torch.rand(500) * 1e-6
    second[::3] = 0
    stored = second_moment_of(second, 0.3)
    assert torch.equal(dequantize(stored) == 0, second == 0)
    _, rows_without_gradients = moments((30, 20))
    rows_without_gradients[4:9] = 0
    stored = second_moment_of(rows_without_gradients, 0.5)
    assert second_effect(rows_without_gradients, stored) <= 0.5
    assert not bool(dequantize(stored)[4:9].any())


@pytest.mark.parametrize("shape", [(7,), (5, 4), ()])
def test_a_second_moment_of_zeros_has_no_bins(shape):
    stored = second_moment_of(torch.zeros(shape), 0.1)
    assert stored.codebook.bins == 0
    assert bits(dequantize(stored)) == bits(torch.zeros(shape))


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
@pytest.mark.parametrize("large", [1e30, 3.4e38, 1e200, 6e4, 3.3e4])
def test_large_second_moments_stay_finite(dtype, large):
    second = torch.tensor([large, *[large * 1e-3] * 400], dtype=torch.float64).to(dtype)
    for tensor in (second, second.reshape(1, -1), second[:400].reshape(20, 20)):
        if bool(tensor.isfinite().all()):
            stored = quantize_moments({"s": tensor}, {"s": Label("second_moment")}, 0.5, 0.3).get("s")
            assert stored is None or bool(dequantize(stored).isfinite().all())


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
@pytest.mark.parametrize("small", [1e-6, 1e-20, 1e-36, 1e-42])
def test_small_second_moments_stay_within_the_tolerance(dtype, small):
    second = (moments((20, 30))[1].double() * 1e6 * small).to(dtype)
    for tensor in (second, second.reshape(-1)):
        stored = second_moment_of(tensor, 0.3)
        assert stored is None or second_effect(tensor, stored) <= 0.3 * 1.01


def test_the_sample_of_a_large_tensor_does_not_line_up_with_its_columns():
    # A convolution: one column of its kernels is rank-one, the others are far from it.
    second = torch.ones(128, 128, 3, 3)
    chequered = (torch.arange(128)[:, None] + torch.arange(128)) % 2 == 0
    second[..., 1:] = torch.where(chequered, 1.0, 1e-4)[:, :, None, None]
    stored = second_moment_of(second, 0.3)
    assert stored is None or second_effect(second, stored) <= 0.35


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
        return first_effect(first, second, torch.from_numpy(units * root), restored_second)

    stored = quantize_first_moment(first, second, stored_second, "v", tolerance)
    if stored is None:
        assert effect_of(FIRST_RUNGS[-1]) > tolerance
        return
    assert (stored.second_name, stored.second) == ("v", stored_second)
    assert first_effect(first, second, dequantize(stored), restored_second) <= tolerance * SLACK
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
    rung = stored.codebook.rung
    assert np.linalg.norm(numbers(dequantize(stored) - first)) <= tolerance * SLACK * np.linalg.norm(numbers(first))
    assert rung + 2 > 4 * math.log2(size) + FIRST_RUNGS[0] or effect_of(rung + 2) > tolerance / SLACK


def test_with_a_tolerance_of_1_first_moments_are_zero():
    first, second = moments()
    scaled = quantize_first_moment(first, second, second_moment_of(second, 0.5), "v", 1.0)
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
    first[3, 5] = 30 * second[3, 5].sqrt()  # more than 127 of the small steps that this tolerance needs
    stored_second = second_moment_of(second, 0.02) or second_moment_of(second, 0.1)
    for tolerance in (0.05, 0.1, 0.2):
        stored = quantize_first_moment(first, second, stored_second, "v", tolerance)
        if stored is not None:
            restored = dequantize(stored)
            assert restored.dtype == dtype
            assert first_effect(first, second, restored, dequantize(stored_second)) <= tolerance * 1.02


def test_a_first_moment_that_is_not_zero_where_the_second_is_stays_exact():
    first, second = moments((40, 25))
    first[3], second[3] = 0, 0
    stored_second = second_moment_of(second, 0.5)
    stored = quantize_first_moment(first, second, stored_second, "v", 0.5)
    assert bool(dequantize(stored).isfinite().all())
    assert not bool(dequantize(stored)[3].any())
    first[3, 7] = 1e-9
    assert quantize_first_moment(first, second, stored_second, "v", 0.5) is None


DOUBTFUL = {
    "nan": torch.tensor([1e-3, math.nan]),
    "infinite": torch.tensor([1e-3, math.inf]),
    "minus infinity": torch.tensor([1e-3, -math.inf]),
    "empty": torch.zeros(0, 3),
}


@pytest.mark.parametrize("what", DOUBTFUL)
@pytest.mark.parametrize("tolerance", [0.5, 1.0])
def test_moments_that_are_empty_or_not_finite_stay_exact(what, tolerance):
    for role in ("first_moment", "second_moment"):
        assert quantize_moments({"s.x": DOUBTFUL[what]}, {"s.x": Label(role)}, tolerance, tolerance) == {}


def adam_state(first, second, extra=None):
    tensors = {"s.exp_avg": first, "s.exp_avg_sq": second} | ({"s.max_exp_avg_sq": extra} if extra is not None else {})
    return tensors, {n: Label("first_moment" if n == "s.exp_avg" else "second_moment") for n in tensors}


@pytest.mark.parametrize("second", [torch.tensor([-1e-9, 1.0]), DOUBTFUL["nan"], DOUBTFUL["infinite"]])
@pytest.mark.parametrize("tolerance", [0.5, 1.0])
def test_a_first_moment_stays_exact_if_its_second_moment_does(second, tolerance):
    assert quantize_moments(*adam_state(torch.tensor([0.1, 0.2]), second), tolerance, 0.5) == {}


def test_a_first_moment_is_in_units_of_the_second_moment_that_divides_it():
    first, second = moments()
    assert quantize_moments(*adam_state(first, second), 0.5, 0.5)["s.exp_avg"].second_name == "s.exp_avg_sq"
    stored = quantize_moments(*adam_state(first, second, second * 1.5), 0.5, 0.5)
    assert stored.keys() == {"s.exp_avg", "s.exp_avg_sq", "s.max_exp_avg_sq"}
    assert stored["s.exp_avg"].second_name == "s.max_exp_avg_sq"
    assert stored["s.exp_avg"].second is stored["s.max_exp_avg_sq"]


def round_trip(stored, parent, name="m"):
    """The decoded tensor, its scheme and the size of its stream."""
    scheme, coded = encode(stored, parent)
    values = values_of(stored)
    role = Label("first_moment" if isinstance(stored, ScaledMoment) else "second_moment")
    entry = Entry(name, role, values.dtype, values.shape, tensor_hash(values), len(coded), scheme)
    entry = Entry.from_json(entry.to_json())
    found = decode(entry.scheme, stored.dtype, stored.shape, coded, parent, getattr(stored, "second", None))
    assert type(found) is type(stored)
    assert bits(values_of(found)) == bits(values)
    return scheme, len(coded)


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
@pytest.mark.parametrize("second_tolerance", [0.05, 0.5])
def test_moments_come_back_from_their_streams_with_and_without_a_parent(dtype, second_tolerance):
    pairs = []
    for drift in (0.0, 0.02):
        first, second = (tensor * 1e4 for tensor in moments((90, 70)))
        first = first + drift * torch.randn_like(first) * first.abs().mean()
        second = second.to(dtype)
        stored_second = second_moment_of(second, second_tolerance)
        pairs.append((stored_second, quantize_first_moment(first.to(dtype), second, stored_second, "v", 0.5)))
    (before_second, before_first), (after_second, after_first) = pairs
    for stored, before in [(after_second, before_second), (after_first, before_first)]:
        scheme, alone = round_trip(stored, None)
        assert not scheme.needs_parent
        scheme, small = round_trip(stored, before)
        assert small <= alone
        assert isinstance(scheme, SecondMomentUnits) == isinstance(stored, ScaledMoment)
        assert isinstance(scheme, RankOneFactors) == isinstance(stored, RankOne)
    for other in (torch.zeros(90, 70), before_first, None):
        round_trip(after_second, other)
    for other in (torch.zeros(90, 70), before_second, None):
        round_trip(after_first, other)
    assert isinstance(after_second, RankOne) == (second_tolerance == 0.5)


def test_a_rank_one_stream_is_at_least_as_long_as_the_format_requires():
    second = torch.ones(2000, 1500)
    stored = second_moment_of(second, 0.5)
    assert isinstance(stored, RankOne)
    assert round_trip(stored, None)[1] < 200
    assert round_trip(stored, stored)[1] < 200


def test_a_first_moment_is_refused_without_its_second_moment():
    first, second = moments()
    stored = quantize_first_moment(first, second, second_moment_of(second, 0.5), "v", 0.5)
    scheme, coded = encode(stored, None)
    for wrong in (None, first, stored):
        with pytest.raises(ValueError, match="in units of v"):
            decode(scheme, stored.dtype, stored.shape, coded, None, wrong)
    with pytest.raises(ValueError, match="another shape"):
        values_of(
            decode(scheme, stored.dtype, stored.shape, coded, None, second_moment_of(second.t().contiguous(), 0.5))
        )


def test_quantizing_moments_does_not_change_the_state():
    tensors, labels = adam_state(*moments())
    before = bits(tensors)
    quantize_moments(tensors, labels, 0.5, 0.5)
    assert bits(tensors) == before
    assert isinstance(quantize_momentum(tensors["s.exp_avg"], 0.5).codebook, Grid)
    assert bits(tensors) == before
