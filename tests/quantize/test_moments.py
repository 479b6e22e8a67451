"""All moments of a checkpoint: which ones are quantized, and their streams."""

import math

import pytest
import torch
from optimizer_moments import moments
from training import bits
from whole_tensors import quantize_first_moment, quantize_momentum
from whole_tensors import quantize_second_moment as second_moment_of

from dynaquant.engine.forms.form import Coded
from dynaquant.engine.forms.rank_one import RankOne
from dynaquant.engine.forms.registry import decode
from dynaquant.engine.forms.schemes import RankOneFactors, SecondMomentUnits
from dynaquant.engine.forms.stored import encode, values_of
from dynaquant.engine.forms.units import ScaledMoment
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.moments import quantize_moments
from dynaquant.engine.tensors.codebook import Grid
from dynaquant.engine.tensors.dtypes import QUANTIZABLE_DTYPES, dtype_name
from dynaquant.engine.tensors.hashing import tensor_hash
from dynaquant.store.entry import Entry

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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tolerance", [0.5, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_value_of_a_large_moment_that_is_not_finite_keeps_it_exact(value, tolerance, dtype):
    second = torch.rand(300, 400) + 0.5
    first = (0.1 * torch.randn(300, 400)).to(dtype)
    for place in (0, 7, 119_999):
        bad = first.clone()
        bad.view(-1)[place] = value
        assert quantize_moments(*adam_state(bad, second), tolerance, 0.5).keys() == {"s.exp_avg_sq"}
    assert quantize_moments(*adam_state(first, second), tolerance, 0.5).keys() == {"s.exp_avg", "s.exp_avg_sq"}


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
    entry = Entry(name, role, dtype_name(values.dtype), values.shape, tensor_hash(values), len(coded), scheme)
    entry = Entry.from_json(entry.to_json())
    found = decode(entry.scheme, Coded(stored.dtype, stored.shape, coded, parent, getattr(stored, "second", None)))
    assert type(found) is type(stored)
    assert bits(values_of(found)) == bits(values)
    return scheme, len(coded)


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
@pytest.mark.parametrize("second_tolerance", [0.05, 0.5])
def test_moments_survive_a_round_trip_with_and_without_a_parent(dtype, second_tolerance):
    pairs = []
    for drift in (0.0, 0.02):
        first, second = (tensor * 1e4 for tensor in moments((90, 70)))
        first = first + drift * torch.randn_like(first) * first.abs().mean()
        second = second.to(dtype)
        stored_second = second_moment_of(second, second_tolerance)
        pairs.append((stored_second, quantize_first_moment(first.to(dtype), stored_second, "v", 0.5)))
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
    stored = quantize_first_moment(first, second_moment_of(second, 0.5), "v", 0.5)
    scheme, coded = encode(stored, None)
    for wrong in (None, first, stored):
        with pytest.raises(ValueError, match="in units of v"):
            decode(scheme, Coded(stored.dtype, stored.shape, coded, None, wrong))
    turned = second_moment_of(second.t().contiguous(), 0.5)
    with pytest.raises(ValueError, match="another shape"):
        values_of(decode(scheme, Coded(stored.dtype, stored.shape, coded, None, turned)))


def test_quantizing_moments_does_not_change_the_state():
    tensors, labels = adam_state(*moments())
    before = bits(tensors)
    quantize_moments(tensors, labels, 0.5, 0.5)
    assert bits(tensors) == before
    assert isinstance(quantize_momentum(tensors["s.exp_avg"], 0.5).codebook, Grid)
    assert bits(tensors) == before


@pytest.mark.parametrize("shape", [(30, 40), (300, 400)])
@pytest.mark.parametrize(
    ("key", "beside", "lasts"),
    [("sum", None, True), ("square_avg", "acc_delta", True), ("square_avg", None, False), ("exp_avg_sq", None, False)],
)
def test_second_moments_whose_errors_last_are_finer(shape, key, beside, lasts):
    """Adagrad adds up for ever, and Adadelta feeds its updates back; RMSprop and Adam forget an error."""
    second = torch.randn(shape).exp()
    tensors = {f"o.state.w.{key}": second} | ({f"o.state.w.{beside}": second.clone()} if beside else {})
    labels = {name: Label("exact" if beside and name.endswith(beside) else "second_moment") for name in tensors}
    for tolerance in (0.2, 0.05, 0.02):
        found = quantize_moments(tensors, labels, 0.5, tolerance).get(f"o.state.w.{key}")
        if found is None:  # no grid is so fine
            assert tolerance == 0.02
            continue
        change = ((second / values_of(found)).sqrt() - 1).square().mean().sqrt()
        assert change <= max(0.3 * tolerance, 0.045) if lasts else change > 0.4 * tolerance
