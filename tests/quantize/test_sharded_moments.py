"""Moments and bounded tensors of sharded trainings: the ranks' forms, put together, are what one process stores.

Sums over ranks differ from those of one process in their last bits. The values here are random, or their sums are
exact, so that no decision is so close that these bits matter.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optimizer_moments import moments
from ranks_in_threads import divided, local, on_ranks, together
from tiers import examples
from whole_tensors import UNKNOWN, extremes_of, quantize_rank_one, quantize_second_moment, quantize_to_log_grid

from dynaquant.engine import reduction
from dynaquant.engine.bound import Bound
from dynaquant.engine.forms.form import dequantize, stored_equal
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.forms.rank_one import RankOne
from dynaquant.engine.forms.units import ScaledMoment
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.bounds import quantize_bounded
from dynaquant.engine.quantize.first_moment import quantize_first_moment, quantize_momentum
from dynaquant.engine.quantize.moment_sample import SAMPLE_SIZE, sample, sample_stored
from dynaquant.engine.quantize.moments import quantize_moments
from dynaquant.engine.quantize.second_moment import quantize_second_moment as second_moment_reduction
from dynaquant.engine.reduction import total
from dynaquant.engine.shards import Shards
from dynaquant.engine.tensors.codebook import LogGrid
from dynaquant.engine.tensors.dtypes import QUANTIZABLE_DTYPES
from dynaquant.engine.tensors.shard import Shard

LAYOUTS = {
    "rows, some ranks without": {0: (4, 1)},
    "columns": {1: (3, 1)},
    "last dimension": {-1: (2, 1)},
    "boxes": {0: (2, 1), 1: (2, 1)},
    "strided rows": {0: (2, 3)},
    "strided in two dimensions": {0: (2, 2), 1: (2, 2)},
}
SHAPES = [(37, 20), (5, 33), (1, 50), (70,), (9, 6, 5), (6, 5, 3, 3), (300, 260)]
LABELS = {"exp_avg": Label("first_moment"), "exp_avg_sq": Label("second_moment")}
LABELS["momentum_buffer"] = LABELS["exp_avg"]


def shards_of(shape, layout):
    """Return the shards of a layout. Dimensions that the tensor lacks are not divided."""
    ways = {d % len(shape) if d < 0 else d: way for d, way in LAYOUTS[layout].items()}
    return divided(shape, {d: way for d, way in ways.items() if d < len(shape)})


def labels_of(tensors):
    return {name: LABELS[name.rpartition(".")[2]] for name in tensors}


def state_of(shape, seed=0, spread=1.5, noise=0.0, dtype=torch.float32):
    """Return the moments of a parameter, and a momentum."""
    first, second = moments(shape if len(shape) > 1 else (*shape, 1), seed, spread)
    first, second = first.reshape(shape) * 1e3, second.reshape(shape) * 1e6
    generator = torch.Generator().manual_seed(seed)
    second = second * torch.exp(noise * torch.randn(shape, generator=generator))
    tensors = {"s.exp_avg": first, "s.exp_avg_sq": second, "s.momentum_buffer": first}
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def on_shards(tensors, shards, first_tolerance=0.5, second_tolerance=0.75, firsts=None):
    """Quantize the moments on ranks. shards: of every tensor, by rank. Return the local forms, and the reductions."""
    labels = labels_of(tensors)

    def work(rank, reduce):
        own = {name: local(tensor, shards[name][rank]) for name, tensor in tensors.items()}
        held = {name: shards[name][rank] for name in tensors}
        found = quantize_moments(
            own, labels, first_tolerance, second_tolerance, firsts or {}, Shards(held, reduce=reduce)
        )
        for name, stored in found.items():
            assert (stored.shape, stored.dtype) == (own[name].shape, own[name].dtype)
            assert dequantize(stored).shape == own[name].shape
        return found

    forms, reductions = on_ranks(len(next(iter(shards.values()))), work)
    for found in forms:
        assert {name: type(stored) for name, stored in found.items()} == {n: type(s) for n, s in forms[0].items()}
    return forms, reductions


def assert_as_in_one_process(tensors, shards, *tolerances):
    wanted = quantize_moments(tensors, labels_of(tensors), *tolerances)
    forms, _ = on_shards(tensors, shards, *tolerances)
    assert forms[0].keys() == wanted.keys()
    for name, stored in wanted.items():
        assert stored_equal(together([found[name] for found in forms], shards[name]), stored), name
    return wanted


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("noise", "tolerances"), [(0.0, (0.5, 0.75)), (2.0, (0.2, 0.75)), (0.0, (0.9, 0.07))], ids=str)
def test_ranks_store_what_one_process_stores(layout, shape, noise, tolerances):
    tensors = state_of(shape, noise=noise)
    shards = dict.fromkeys(tensors, shards_of(shape, layout))
    stored = assert_as_in_one_process(tensors, shards, *tolerances)
    assert isinstance(stored["s.exp_avg"], ScaledMoment)
    assert isinstance(stored["s.momentum_buffer"], QuantizedTensor)
    if len(shape) > 1 and min(shape) > 1:
        assert isinstance(stored["s.exp_avg_sq"], RankOne) == (noise == 0 and tolerances[1] == 0.75)


def test_one_of_the_shapes_is_larger_than_a_sample():
    assert max(map(math.prod, SHAPES)) > SAMPLE_SIZE > sorted(map(math.prod, SHAPES))[-2]


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
def test_ranks_store_what_one_process_stores_in_every_dtype(dtype):
    tensors = state_of((41, 30), spread=0.5, dtype=dtype)
    for layout in ("boxes", "strided rows"):
        assert_as_in_one_process(tensors, dict.fromkeys(tensors, shards_of((41, 30), layout)), 0.5, 0.3)


@examples(40)
@given(data=st.data())
def test_ranks_store_what_one_process_stores_in_any_layout(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    ways = data.draw(
        st.dictionaries(
            st.integers(0, len(shape) - 1), st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=2
        )
    )
    tensors = state_of(shape, data.draw(st.integers(0, 99)), noise=data.draw(st.sampled_from([0.0, 2.0])))
    zero = data.draw(st.integers(0, shape[0]))
    for tensor in tensors.values():
        tensor[:zero] = 0
    tolerances = data.draw(st.sampled_from([0.11, 0.37, 0.83])), data.draw(st.sampled_from([0.07, 0.29]))
    assert_as_in_one_process(tensors, dict.fromkeys(tensors, divided(shape, ways)), *tolerances)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(300, 260), (70, 60), (40, 41, 43)], ids=str)
def test_the_samples_of_all_ranks_are_that_of_one_process(layout, shape):
    numbers = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    shards = shards_of(shape, layout)
    parts = [sample(local(numbers, shard), shard) for shard in shards]
    wanted = sample(numbers, Shard.whole(shape))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.sort(wanted))
    for shard in (*shards, Shard.whole(shape)):
        for form in (quantize_rank_one(local(numbers, shard)), quantize_to_log_grid(local(numbers, shard), 4)):
            assert np.array_equal(sample_stored(form, shard), sample(dequantize(form), shard))


def test_the_grid_of_a_second_moment_spans_the_extremes_of_all_ranks():
    second = torch.rand(8, 5) + 0.5
    second[0, 0], second[7, 4], second[2:4] = 1e-6, 1e6, 0
    shards = divided((8, 5), {0: (5, 1)})
    forms, _ = on_shards({"s.exp_avg_sq": second}, {"s.exp_avg_sq": shards}, 0.5, 0.3)
    grids = [found["s.exp_avg_sq"].codebook for found in forms]
    assert grids == [quantize_second_moment(second, 0.3).codebook] * 5
    assert isinstance(grids[0], LogGrid)
    assert forms[4]["s.exp_avg_sq"].levels.size == 0


@pytest.mark.parametrize(
    ("where", "bad", "kept"),
    [
        *(("s.exp_avg", bad, {"s.exp_avg_sq", "s.momentum_buffer"}) for bad in (math.nan, math.inf, -math.inf)),
        *(("s.exp_avg_sq", bad, {"s.momentum_buffer"}) for bad in (math.nan, math.inf, -1e-3)),
    ],
)
def test_a_bad_number_on_one_rank_makes_a_tensor_exact_on_all(where, bad, kept):
    tensors = {name: tensor.clone() for name, tensor in state_of((12, 10)).items()}
    tensors["other.exp_avg_sq"] = tensors["s.exp_avg_sq"].clone()
    tensors[where][11, 3] = bad
    shards = dict.fromkeys(tensors, divided((12, 10), {0: (4, 1)}))
    assert assert_as_in_one_process(tensors, shards, 0.5, 0.3).keys() == kept | {"other.exp_avg_sq"}


def test_moments_of_zeros_take_no_levels():
    tensors = {name: torch.zeros(6, 4) for name in ("s.exp_avg", "s.exp_avg_sq", "s.momentum_buffer")}
    shards = dict.fromkeys(tensors, divided((6, 4), {0: (4, 1)}))
    stored = assert_as_in_one_process(tensors, shards, 0.5, 0.3)
    assert stored.keys() == {"s.exp_avg", "s.exp_avg_sq"}
    for found in on_shards(tensors, shards)[0]:
        assert found["s.exp_avg_sq"].codebook.bins == 0
        assert not dequantize(found["s.exp_avg"]).any()


def test_a_first_moment_without_a_divisor_on_one_rank_is_exact_on_all():
    tensors = state_of((8, 6))
    tensors["s.exp_avg_sq"][7] = 0
    shards = dict.fromkeys(tensors, divided((8, 6), {0: (4, 1)}))
    assert assert_as_in_one_process(tensors, shards, 0.5, 0.3).keys() == {"s.exp_avg_sq", "s.momentum_buffer"}


def test_a_first_moment_that_lies_on_other_ranks_than_its_second_is_exact():
    tensors = state_of((8, 6))
    shards = dict.fromkeys(tensors, divided((8, 6), {0: (2, 1)}))
    shards["s.exp_avg_sq"] = divided((8, 6), {1: (2, 1)})
    forms, _ = on_shards(tensors, shards)
    assert forms[0].keys() == {"s.exp_avg_sq", "s.momentum_buffer"}


def test_dropped_moments_are_zero_on_all_ranks():
    tensors = state_of((5, 6))
    shards = dict.fromkeys(tensors, divided((5, 6), {0: (4, 1)}))
    forms, _ = on_shards(tensors, shards, firsts={"s.exp_avg": math.inf, "s.momentum_buffer": math.inf})
    for found in forms:
        assert not dequantize(found["s.exp_avg"]).any()
        assert not dequantize(found["s.momentum_buffer"]).any()


@pytest.mark.parametrize("shape", [(300, 260), (30, 26), (70,)], ids=str)
def test_copies_are_counted_once(shape):
    """One rank gives a tensor as a whole, without a shard. The others hold copies and give nothing of it."""
    tensors = state_of(shape)
    nothing = torch.empty((0,) * len(shape))
    labels = labels_of(tensors)

    def work(rank, reduce):
        shards = {name: Shard.nothing(tensor.shape) for name, tensor in tensors.items()} if rank != 1 else {}
        own = tensors if rank == 1 else dict.fromkeys(tensors, nothing)
        return quantize_moments(own, labels, 0.5, 0.3, {}, Shards(shards, reduce=reduce))

    forms, _ = on_ranks(3, work)
    for name, stored in quantize_moments(tensors, labels, 0.5, 0.3).items():
        assert stored_equal(forms[1][name], stored)  # the same sums, bit for bit
        assert type(forms[0][name]) is type(stored)
        assert forms[0][name].shape == nothing.shape


def test_tensors_without_dimensions_or_elements_are_whole_on_all_ranks():
    tensors = {"s.exp_avg": torch.tensor(0.3), "s.exp_avg_sq": torch.tensor(0.2), "e.exp_avg_sq": torch.empty(0, 3)}
    labels = labels_of(tensors)
    forms, _ = on_ranks(3, lambda _, reduce: quantize_moments(tensors, labels, 0.5, 0.3, {}, Shards(reduce=reduce)))
    wanted = quantize_moments(tensors, labels, 0.5, 0.3)
    assert wanted.keys() == {"s.exp_avg", "s.exp_avg_sq"}
    for found in forms:
        assert found.keys() == wanted.keys()
        assert all(stored_equal(found[name], stored) for name, stored in wanted.items())


def many_tensors(count):
    tensors = {
        f"{i}.{name}": tensor
        for i in range(count)
        for name, tensor in state_of((12, 10), seed=i % 2, noise=2.0 * (i % 3 == 0)).items()
    }
    return tensors, dict.fromkeys(tensors, divided((12, 10), {0: (2, 1)}))


def test_the_number_of_reductions_does_not_depend_on_the_number_of_tensors():
    forms, few = on_shards(*many_tensors(6))
    assert {type(stored) for stored in forms[0].values()} == {RankOne, ScaledMoment, QuantizedTensor}
    _, many = on_shards(*many_tensors(60))
    assert many == few
    _, one = on_shards(*many_tensors(1))
    assert few <= 2 * one


def test_tensors_that_are_many_are_quantized_in_windows(monkeypatch):
    wanted, few = on_shards(*many_tensors(8))
    monkeypatch.setattr(reduction, "WINDOW", 240)  # two of these tensors
    forms, more = on_shards(*many_tensors(8))
    assert 2 * few < more
    for found, other in zip(forms, wanted, strict=True):
        assert list(found) == list(other)
        assert all(stored_equal(found[name], stored) for name, stored in other.items())


def test_windows_go_by_what_the_rank_with_the_most_holds(monkeypatch):
    monkeypatch.setattr(reduction, "WINDOW", 200)

    def work(rank, reduce):
        together = []

        def counting(numbers):
            together.append(len(numbers.sums))
            return reduce(numbers)

        reduction.run_in_windows("abcdef", lambda _: total(1), lambda _: 60 + 10 * rank, counting)
        return together

    assert on_ranks(2, work)[0] == [[0, 2, 2, 2]] * 2
    assert on_ranks(1, work)[0] == [[0, 3, 3]]


def held_while_waiting(computation):
    """Run a computation and return the most bytes of its own that it held while it waited for other ranks."""
    most, received = 0, None
    while True:
        try:
            received = computation.send(received)
        except StopIteration:
            return most
        held, frame = {}, computation
        while frame is not None:
            for value in frame.gi_frame.f_locals.values():
                if isinstance(value, torch.Tensor):
                    held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
                elif isinstance(value, np.ndarray):
                    held[value.__array_interface__["data"][0]] = value.nbytes
            frame = frame.gi_yieldfrom
        most = max(most, sum(held.values()))


def test_a_computation_holds_samples_only_while_it_waits():
    first, second = moments((1000, 900), spread=0.5)
    stored, shard = quantize_second_moment(second, 0.3), Shard.whole(second.shape)
    most = 5 * 4 * SAMPLE_SIZE
    assert most < first.nbytes / 2
    for computation, given_to_it in [
        (second_moment_reduction(second, 0.3, shard, UNKNOWN, extremes_of(second)), second),
        (second_moment_reduction(second, 0.1, shard, UNKNOWN, extremes_of(second)), second),
        (quantize_first_moment(first, stored, "v", 0.5, None, UNKNOWN), first),
        (quantize_momentum(first, 0.5, shard), first),
    ]:
        assert held_while_waiting(computation) <= given_to_it.nbytes + most


def bounded_on_shards(tensor, bound, shards):
    """Return the local bounded tensors; None where the tensor must be stored exactly."""
    bounds = {"field": bound}

    def work(rank, reduce):
        own = {"field": local(tensor, shards[rank])}
        found = quantize_bounded(own, bounds, Shards({"field": shards[rank]}, reduce=reduce)).get("field")
        assert found is None or found.shape == own["field"].shape
        return found

    forms, reductions = on_ranks(len(shards), work)
    assert reductions <= 3  # sizes, extremes, and what must be exact
    return forms, quantize_bounded({"field": tensor}, bounds).get("field")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bound", [Bound(relative=1e-3), Bound(absolute=1e-2), Bound(relative=3e-8)], ids=str)
@pytest.mark.parametrize("shape", [(5, 33), (70,), (6, 5, 3, 3)], ids=str)
def test_bounded_tensors_of_ranks_are_those_of_one_process(layout, bound, shape):
    """Only levels of values that are stored exactly may differ. They count for nothing."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    tensor.view(-1)[::7] = math.nan
    tensor.view(-1)[3], tensor.view(-1)[-2] = 40, -math.inf
    shards = shards_of(shape, layout)
    forms, wanted = bounded_on_shards(tensor, bound, shards)
    if wanted is None:
        assert forms == [None] * len(shards)
        return
    found = together(forms, shards)
    assert (found.step, found.bound) == (wanted.step, wanted.bound)
    assert np.array_equal(found.positions, wanted.positions)
    assert np.array_equal(found.exact, wanted.exact)
    on_grid = np.setdiff1d(np.arange(tensor.numel()), wanted.positions)
    assert np.array_equal(found.levels[on_grid], wanted.levels[on_grid])


@pytest.mark.parametrize(("share", "exact"), [(0.1, False), (0.4, True)])
def test_all_ranks_decide_by_the_whole_tensor_how_many_values_may_be_exact(share, exact):
    """Values too large for a level lie on the first rank. Alone, it would store its part exactly, the others theirs
    on a grid.
    """
    tensor = torch.rand(40, 10, generator=torch.Generator().manual_seed(0))
    tensor[: int(share * 40)] *= 1e6
    forms, wanted = bounded_on_shards(tensor, Bound(absolute=1e-6), divided((40, 10), {0: (4, 1)}))
    assert (wanted is None) == exact
    assert [found is None for found in forms] == [exact] * 4


def test_a_bounded_tensor_without_finite_values_is_exact_on_all_ranks():
    forms, wanted = bounded_on_shards(torch.full((4, 3), math.nan), Bound(relative=0.1), divided((4, 3), {0: (2, 1)}))
    assert forms == [None, None]
    assert wanted is None
