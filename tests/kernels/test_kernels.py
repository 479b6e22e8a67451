"""Kernels: PyTorch operations on every available device give the same results as the native core."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import bits, model_of, train
from whole_tensors import quantize_first_moment, quantize_momentum, quantize_second_moment, quantize_to_log_grid

import dynaquant as dq
from dynaquant import _native
from dynaquant.engine import kernels
from dynaquant.engine.forms.form import dequantize
from dynaquant.engine.forms.levels import QuantizedTensor, protected_values
from dynaquant.engine.forms.rank_one import RankOne
from dynaquant.engine.forms.units import ScaledMoment
from dynaquant.engine.kernels import device, host
from dynaquant.engine.kernels.seconds import OfLevels, Outer
from dynaquant.engine.quantize.grid import begin_quantize, quantize
from dynaquant.engine.tensors.codebook import PROTECTED, rung_value
from dynaquant.engine.tensors.dtypes import QUANTIZABLE_DTYPES
from dynaquant.store.run import Run

DEVICES = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
DEVICES += ["emulated:0"] if "emulated" in sys.modules else []
SHAPES = [(), (0,), (1,), (5,), (3, 0), (7, 9), (2, 3, 4, 5), (401, 101)]

on_devices = pytest.mark.parametrize("where", DEVICES)
of_dtypes = pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(device, "PIECE", 1000)
    monkeypatch.setattr(device, "SMALL", 0)


def some(shape, dtype, scale=1.0):
    """A random tensor with zeros of both signs, values half way between two levels, and outliers."""
    flat = torch.randn(math.prod(shape)) * scale
    special = torch.tensor([0.0, -0.0, 0.5, -0.5, 1.5, -2.5, 127.0, -127.5, 128.0, 3e4]) * scale
    flat[: len(special)] = special[: len(flat)]
    return flat.reshape(shape).to(dtype)


@on_devices
@of_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", [None, 0, 12345, 2**32 - 1])
def test_grid_levels_are_the_same_on_every_device(where, dtype, shape, seed):
    tensor = some(shape, dtype, 0.02)
    for rung in (-40, -22, -8):
        inverse = float(np.float32(1) / rung_value(rung))
        wanted, highest = host.grid_levels(tensor, inverse, seed)
        found, found_highest = device.grid_levels(tensor.to(where), inverse, seed)
        assert found.device == torch.device(where)
        assert torch.equal(found.cpu(), wanted)
        assert min(found_highest(), 256) == highest()


@on_devices
@pytest.mark.parametrize("seed", [None, 5])
def test_grid_levels_of_many_blocks_are_the_same_on_every_device(where, seed, monkeypatch):
    monkeypatch.setattr(device, "PIECE", 1 << 17)
    tensor = some((300_001,), torch.float32)
    assert torch.equal(device.grid_levels(tensor.to(where), 3.0, seed)[0].cpu(), host.grid_levels(tensor, 3.0, seed)[0])


@on_devices
def test_small_tensors_come_to_the_host_together(where, monkeypatch):
    monkeypatch.setattr(device, "SMALL", 100)
    tensors = {
        "weight": some((9, 11), torch.float32),
        "transposed": some((4, 7), torch.bfloat16).T,
        "scalar": torch.tensor(3.5),
        "number": torch.tensor([True, False]),
        "complex": torch.ones(2, 3, dtype=torch.complex64),
        "empty": torch.zeros(0, 3),
        "large": some((101,), torch.float32),
    }
    there = {name: tensor.to(where) for name, tensor in tensors.items()}
    found = kernels.small_on_host(there)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        stays = where == "cpu" or name in ("empty", "large")
        assert found[name].device == torch.device(where if stays else "cpu")
        assert stays == (found[name] is there[name])
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].cpu(), tensor)


@on_devices
def test_totals_and_extremes_of_many_tensors_are_those_of_each(where, monkeypatch):
    monkeypatch.setattr(device, "SMALL", 100)
    tensors = {str(size): some((size,), torch.float32) for size in (0, 1, 50, 5000)}
    tensors["nan"] = torch.tensor([1.0, math.nan])
    there = {name: tensor.to(where) for name, tensor in tensors.items()}
    sums = {name: math.fsum(tensor.double().tolist()) for name, tensor in tensors.items()}
    assert kernels.totals(there) == pytest.approx(sums, rel=1e-12, abs=1e-9, nan_ok=True)
    extremes = kernels.all_extremes(there)
    assert all(map(math.isnan, extremes.pop("nan")))
    assert extremes == {n: (float(t.min()), float(t.max())) for n, t in tensors.items() if n not in ("0", "nan")}


def values_on_grid(kernel, tensor, rung, seed, first=0):
    out, step = torch.full_like(tensor, math.nan), rung_value(rung)
    kernel.grid_values(tensor, float(np.float32(1) / step), float(step), seed, first, out)
    return bits(out.cpu())


@on_devices
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", [None, 0, 12345, 2**32 - 1])
def test_values_on_a_grid_are_those_of_their_levels_on_every_device(where, shape, seed):
    tensor = some(shape, torch.float32, 0.02)
    for rung in (-60, -40, -22, -8):
        wanted = bits(dequantize(quantize(tensor, rung, seed)))
        assert values_on_grid(host, tensor, rung, seed) == wanted
        assert values_on_grid(device, tensor.to(where), rung, seed) == wanted


@pytest.mark.parametrize("size", [0, 1, 15, 512, 700, 200_003])
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("outliers", [False, True])
def test_levels_and_errors_of_one_pass_are_those_of_two(size, seed, outliers):
    tensor, step = some((size,), torch.float32, 0.02), rung_value(-22)
    tensor[: size // 9 : 3] = 100.0 if outliers else 0.0
    inverse = float(np.float32(1) / step)
    levels, highest, errors = host.grid_levels_and_errors(tensor, inverse, float(step), seed)
    wanted, wait = host.grid_levels(tensor, inverse, seed)
    assert torch.equal(levels, wanted)
    assert highest == wait()
    assert errors == host.grid_errors(tensor, inverse, float(step), seed, 0)


@on_devices
@pytest.mark.parametrize("size", [0, 1, 15, 512, 700, 200_003])
@pytest.mark.parametrize("seed", [None, 7])
def test_errors_of_a_grid_are_those_of_its_values_on_every_device(where, size, seed, monkeypatch):
    monkeypatch.setattr(device, "PIECE", 1 << 16)
    tensor, step = some((size,), torch.float32, 0.02), rung_value(-22)
    tensor[: size // 9 : 3] = 100.0  # protected
    inverse, out = float(np.float32(1) / step), torch.empty_like(tensor)
    host.grid_values(tensor, inverse, float(step), seed, 5, out)
    wanted = host.errors(out, tensor)
    assert host.grid_errors(tensor, inverse, float(step), seed, 5) == wanted
    assert device.grid_errors(tensor.to(where), inverse, float(step), seed, 5) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("seed", [None, 7])
def test_values_on_a_grid_do_not_depend_on_alignment_or_size(seed):
    size = (1 << 20) + 70_001  # from a million values on, they are written past the caches
    tensor = some((size,), torch.float32, 0.02)
    tensor[:: 1 << 14] = 3.0
    wanted = dequantize(quantize(tensor, -22, seed))
    for begin in (0, 1, 7, 513, size - 100, size - 1):
        memory = torch.full((size + 2,), math.nan)
        out = memory[begin + 1 : size + 1]
        host.grid_values(
            tensor[begin:], float(np.float32(1) / rung_value(-22)), float(rung_value(-22)), seed, begin, out
        )
        assert bits(out) == bits(wanted[begin:])
        assert bool(memory[: begin + 1].isnan().all())  # nothing is written outside
        assert bool(memory[size + 1 :].isnan().all())


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40), st.integers(-100, 100))
def test_values_on_a_grid_of_any_floats_are_those_of_their_levels(values, rung):
    tensor = torch.tensor(values, dtype=torch.float32)
    for seed in (None, 7):
        wanted = bits(dequantize(quantize(tensor, rung, seed)))
        assert values_on_grid(host, tensor, rung, seed) == values_on_grid(device, tensor, rung, seed) == wanted


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40), st.integers(-100, 100))
def test_grid_levels_of_any_floats_are_the_same_on_every_device(values, rung):
    tensor, inverse = torch.tensor(values, dtype=torch.float32), float(np.float32(1) / rung_value(rung))
    for seed in (None, 7):
        assert torch.equal(device.grid_levels(tensor, inverse, seed)[0], host.grid_levels(tensor, inverse, seed)[0])


@on_devices
@of_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_histograms_and_levels_by_table_are_the_same_on_every_device(where, dtype, shape):
    tensor, other = some(shape, dtype), some(shape, torch.float32).abs()
    there, other_there = tensor.to(where), other.to(where)
    assert np.array_equal(device.log_histogram(there), host.log_histogram(tensor))
    random = np.random.default_rng(0)
    table = random.integers(0, 256, 65_536, dtype=np.uint8)
    by_sensitivity = random.choice(np.array([0, 1, _native.UNDECIDED], dtype=np.uint8), 65_536)
    assert torch.equal(device.table_levels(there, table).cpu(), host.table_levels(tensor, table))
    found = device.table_levels(there, table, (other_there, by_sensitivity))
    assert torch.equal(found.cpu(), host.table_levels(tensor, table, (other, by_sensitivity)))


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [0, 1, 999, 5000])
def test_values_of_levels_are_the_same_on_every_device(where, dtype, size):
    random = np.random.default_rng(size)
    levels = random.integers(0, 30, size, dtype=np.uint8)
    table, count = torch.randn(30).to(dtype), int((levels == PROTECTED).sum())
    protected = torch.randn(count).to(torch.bfloat16 if dtype == torch.float32 else dtype).view(torch.uint16).numpy()
    found = device.values(levels, table, protected, torch.device(where))
    assert found.device == torch.device(where)
    assert bits(found.cpu()) == bits(host.values(levels, table, protected, kernels.HOST))
    for kernel in (host, device):
        if size:
            with pytest.raises(ValueError, match="outside the codebook"):
                kernel.values(np.full_like(levels, 30), table, protected[:0], torch.device("cpu"))
        with pytest.raises(ValueError, match="number of protected values"):
            kernel.values(levels, table, np.append(protected, np.uint16(1)), torch.device("cpu"))


@on_devices
@of_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_the_same_on_every_device(where, dtype, shape):
    tensor = some(shape, dtype)
    values = tensor.double().reshape(-1).tolist()
    for total in (host.total(tensor), device.total(tensor.to(where))):
        assert float(total) == pytest.approx(math.fsum(values), rel=1e-12, abs=1e-9)
    assert kernels.totals({"a": tensor, "b": tensor.to(where)}) == pytest.approx(
        dict.fromkeys("ab", math.fsum(values)), rel=1e-12, abs=1e-9
    )
    if len(shape) >= 2 and tensor.numel():
        matrix = tensor.reshape(shape[0], -1)
        for rows, columns in (host.row_and_column_sums(matrix), device.row_and_column_sums(matrix.to(where))):
            assert rows == pytest.approx(matrix.double().sum(1).numpy(), rel=1e-12, abs=1e-9)
            assert columns == pytest.approx(matrix.double().sum(0).numpy(), rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("shape", [(1, 1), (3, 2049), (1025, 3), (2500, 5000), (1, 100_000), (100_000, 1)], ids=str)
def test_sums_of_the_rows_and_columns_of_large_matrices_are_correct(shape):
    matrix = torch.randn(shape)
    rows, columns = host.row_and_column_sums(matrix)
    assert rows == pytest.approx(matrix.double().sum(1).numpy(), rel=1e-12, abs=1e-9)
    assert columns == pytest.approx(matrix.double().sum(0).numpy(), rel=1e-12, abs=1e-9)


def test_tensors_at_an_unaligned_address_work():
    weight = some((64, 10), torch.float32)
    odd = torch.frombuffer(bytearray(b"\0" + weight.numpy().tobytes()), dtype=torch.float32, offset=1)
    assert odd.data_ptr() % 4 == 1  # safetensors gives such tensors after an odd number of bytes
    assert host.total(odd) == host.total(weight)
    assert torch.equal(host.grid_levels(odd, 3.0, None)[0], host.grid_levels(weight, 3.0, None)[0])
    assert np.array_equal(host.log_histogram(odd), host.log_histogram(weight))


@on_devices
@of_dtypes
@pytest.mark.parametrize("size", [1, 7, 1000, 200_003])
def test_extremes_are_the_lowest_and_highest_value_on_every_device(where, dtype, size):
    tensor = some((size,), dtype)
    wanted = float(tensor.min()), float(tensor.max())
    assert host.extremes(tensor) == device.extremes(tensor.to(where)) == wanted
    tensor[size // 2] = -math.inf
    assert host.extremes(tensor)[0] == device.extremes(tensor.to(where))[0] == -math.inf


@on_devices
@of_dtypes
@pytest.mark.parametrize("bits_of_nan", [0x7FC00000, 0x7F800001, 0xFFC00000, 0xFFFFFFFF])
def test_extremes_are_nan_if_any_value_is(where, dtype, bits_of_nan):
    nan = torch.from_numpy(np.array([bits_of_nan], dtype=np.uint32).view(np.float32))
    for at in (0, 500, 69_999):
        tensor = some((70_000,), dtype)
        tensor[at] = nan if dtype == torch.float32 else math.nan
        tensor[-at] = math.inf if at else tensor[-at]
        assert all(map(math.isnan, (*host.extremes(tensor), *device.extremes(tensor.to(where)))))


def test_extremes_of_no_values_are_refused():
    with pytest.raises(ValueError, match="no values"):
        _native.extremes(np.zeros(0, dtype=np.float32))


@on_devices
@of_dtypes
@pytest.mark.parametrize("limit", [2.0**-133, 2.0**-20, 0.5, 3e38])
def test_the_smallest_value_from_a_limit_on_is_the_same_on_every_device(where, dtype, limit):
    tensor = torch.cat((some((200_003,), torch.float32, 0.02), torch.tensor([1e-45, 2.0**-134, 2.0**-133, 2.0**-20])))
    tensor = torch.cat((tensor, torch.tensor([-math.inf, math.inf]))).to(dtype)
    values = tensor.float()
    wanted = float(tensor.min()), float(tensor.max()), float(values[values >= limit].min())
    assert host.extremes_from(tensor, limit) == device.extremes_from(tensor.to(where), limit) == wanted
    on_devices = kernels.all_extremes_from({"a": tensor.to(where), "empty": torch.zeros(0, device=where)}, limit)
    assert on_devices == {"a": wanted}
    zeros = torch.zeros(5)
    assert host.extremes_from(zeros, limit) == device.extremes_from(zeros.to(where), limit) == (0, 0, math.inf)
    zeros[2] = math.nan
    for found in (host.extremes_from(zeros, limit), device.extremes_from(zeros.to(where), limit)):
        assert all(map(math.isnan, found[:2]))


@on_devices
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (40, 1700), (70_000, 2), (2, 70_000), (0, 3), (3, 0)], ids=str)
def test_roots_of_outer_products_are_those_of_their_values(where, shape):
    rows, columns = torch.rand(shape[0]), torch.rand(shape[1]) * 1e-3
    rows[:1], columns[-1:] = 0, 1e-45
    seconds, values = torch.outer(rows, columns).view(-1), torch.randn(math.prod(shape))
    divided, multiplied = torch.empty(len(values)), values.clone()
    host.divide_by_roots(values, seconds, divided)
    host.multiply_by_roots(multiplied, seconds)
    for kernel, place in ((host, "cpu"), (device, where)):
        out, found = torch.empty(len(values), device=place), values.to(place, copy=True)
        kernel.divide_by_roots(values.to(place), Outer(rows.to(place), columns.to(place)), out)
        kernel.multiply_by_roots(found, Outer(rows.to(place), columns.to(place)))
        assert bits(out.cpu()) == bits(divided)
        assert bits(found.cpu()) == bits(multiplied)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 5), (40, 1700), (70_000, 2), (2, 70_000), (20, 4097), (0, 3), (3, 0)], ids=str
)
def test_levels_of_units_are_those_of_the_quotients(where, shape, dtype):
    rows, columns = torch.rand(shape[0]), torch.rand(shape[1]) * 1e-3
    seconds, values = torch.outer(rows, columns).view(-1), torch.randn(math.prod(shape)).to(dtype)
    units = torch.empty(len(values))
    host.divide_by_roots(values.float(), seconds, units)
    wanted, highest = host.grid_levels(units, 0.3, None)
    for kernel, place in ((host, "cpu"), (device, where)):
        for of in (Outer(rows.to(place), columns.to(place)), seconds.to(place)):
            levels = torch.empty(len(values), dtype=torch.uint8, device=place)
            found = kernel.grid_levels_of_units(values.to(place), of, 0.3, levels)
            assert torch.equal(levels.cpu(), wanted)
            assert min(found(), 256) == highest()


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 63, 4097, 200_003])
def test_roots_of_levels_are_those_of_their_values(where, dtype, size):
    random = np.random.default_rng(size)
    levels, table = random.integers(0, 200, size, dtype=np.uint8), torch.rand(200)
    table[:9], of_levels = 0, OfLevels(levels, table)
    levels[levels == PROTECTED] = 0
    seconds, values = table[torch.from_numpy(levels).long()], torch.randn(size).to(dtype)
    divided, multiplied = torch.empty(size), values.to(torch.float32, copy=True)
    host.divide_by_roots(values.float(), seconds, divided)
    host.multiply_by_roots(multiplied, seconds)
    wanted, highest = host.grid_levels(divided, 0.3, None)
    for kernel, place in ((host, "cpu"), (device, where)):
        there, out = values.to(place), torch.empty(size, device=place)
        found, units = there.to(torch.float32, copy=True), torch.empty(size, dtype=torch.uint8, device=place)
        kernel.divide_by_roots(there.float(), of_levels, out)
        kernel.multiply_by_roots(found, of_levels)
        most = kernel.grid_levels_of_units(there, of_levels, 0.3, units)
        assert (bits(out.cpu()), bits(found.cpu())) == (bits(divided), bits(multiplied))
        assert torch.equal(units.cpu(), wanted)
        assert min(most(), 256) == highest()
        if size:
            beyond = OfLevels(np.full_like(levels, 200), table)
            with pytest.raises(ValueError, match="outside the codebook"):
                kernel.multiply_by_roots(found, beyond)
            with pytest.raises(ValueError, match="outside the codebook"):
                kernel.grid_levels_of_units(there, beyond, 0.3, units)


@on_devices
@of_dtypes
@pytest.mark.parametrize("shape", [(1, 1), (64, 33), (200, 7, 3), (100_003,)], ids=str)
def test_levels_in_turns_are_those_of_the_table_that_the_row_takes(where, dtype, shape):
    random, tensor = np.random.default_rng(0), some(shape, dtype)
    low, high = random.integers(0, 256, (2, 65_536), dtype=np.uint8)
    high[::2], goes_up = low[::2], random.random((64, 256)) < 0.5
    turns = (np.arange(shape[0]) * 64 // shape[0]).astype(np.uint8)
    buckets = host.bits_of(tensor) >> (16 if dtype in (torch.float32, torch.float64) else 0)
    ups = goes_up[np.repeat(turns, math.prod(shape[1:])), low[buckets]]
    wanted = torch.from_numpy(np.where(ups, high[buckets], low[buckets]))
    assert torch.equal(host.levels_in_turns(tensor, low, high, goes_up, turns), wanted)
    assert torch.equal(device.levels_in_turns(tensor.to(where), low, high, goes_up, turns).cpu(), wanted)


def test_levels_in_turns_refuse_arguments_that_do_not_fit():
    values, table = np.zeros(6, dtype=np.uint32), np.zeros(65_536, dtype=np.uint8)
    ups, levels = np.zeros(512, dtype=np.uint8), np.zeros(6, dtype=np.uint8)
    with pytest.raises(ValueError, match="so many rows"):
        _native.levels_in_turns(values, table, table, ups, np.zeros(4, dtype=np.uint8), levels)
    with pytest.raises(ValueError, match="too large"):
        _native.levels_in_turns(values, table, table, ups, np.full(2, 2, dtype=np.uint8), levels)


@pytest.mark.parametrize("size", [0, 1, 65_536, 70_001])
@pytest.mark.parametrize("share", [0, 0.001, 1])
def test_protected_places_are_where_the_levels_are_protected(size, share):
    levels = np.where(np.random.default_rng(size).random(size) < share, PROTECTED, 7).astype(np.uint8)
    found = np.frombuffer(_native.protected_places(levels), dtype=np.int64)
    assert np.array_equal(found, np.flatnonzero(levels == PROTECTED))


@pytest.mark.parametrize("size", [0, 1, 15, 17, 1000, 32_768])
def test_changes_of_roots_are_those_of_the_formula(size):
    values, decoded = torch.rand(size).numpy(), torch.rand(size).numpy() + np.float32(1e-3)
    values[::5] = decoded[::10] = 0  # only the first of these are decoded to zero
    counted = values > 0
    changes = np.sqrt(values[counted] / decoded[counted], dtype=np.float64) - 1
    unusable, squares, count = _native.root_changes(values, decoded, 0.0)
    assert (unusable, count) == (False, counted.sum())
    assert squares == pytest.approx(np.square(changes).sum(), rel=1e-12)
    for bad in (0, math.inf, math.nan, -1):
        if size > 1:
            decoded[1] = bad
            assert _native.root_changes(values, decoded, 0.0) == (True, 0, count)


@pytest.mark.parametrize("size", [0, 1, 15, 17, 1000, 32_768])
def test_fits_of_updates_are_those_of_the_formula(size):
    firsts, seconds = torch.randn(size).numpy(), torch.rand(size).numpy()
    firsts[::5] = seconds[::5] = 0
    inverses, epsilon = np.array([0.25, 1, 300], dtype=np.float32), 1e-8
    roots = np.sqrt(seconds.astype(np.float64))
    updates, factors = firsts / (roots + epsilon), roots / (roots + epsilon)
    units, wanted, found = torch.empty(size), np.empty(12), np.empty(12)
    host.divide_by_roots(torch.from_numpy(firsts), torch.from_numpy(seconds), units)
    _native.grid_fits(units.numpy(), roots * updates * factors, roots * factors * factors, inverses, wanted)
    squares, largest = _native.update_fits(firsts, seconds, epsilon, inverses, found)
    assert np.array_equal(found, wanted)
    assert squares == pytest.approx((roots * np.square(updates)).sum(), rel=1e-12)
    assert largest == np.abs(firsts).max(initial=0)


def many_seconds():
    return torch.cat((torch.rand(80_000), torch.rand(20_000) * 1e-38, torch.tensor([0.0, 0.0, 1e-45, 3e38, math.inf])))


@on_devices
def test_values_in_units_of_roots_are_correctly_rounded_and_zero_where_the_second_is_zero(where):
    seconds = many_seconds()
    values = torch.randn(len(seconds))
    root = np.sqrt(seconds.double().numpy()).astype(np.float32)
    with np.errstate(divide="ignore"):
        wanted = np.where(root == 0, np.float32(0), values.numpy() / root)
    for kernel, place in ((host, "cpu"), (device, where)):
        out = torch.empty(len(seconds), device=place)
        kernel.divide_by_roots(values.to(place), seconds.to(place), out)
        assert np.array_equal(out.cpu().numpy(), wanted)
    strided = torch.stack((values, values), dim=1)[:, 0]
    out = torch.empty(len(seconds))
    host.divide_by_roots(strided, seconds, out)
    assert np.array_equal(out.numpy(), wanted)


@on_devices
def test_products_with_roots_are_correctly_rounded(where):
    seconds = many_seconds()
    values = torch.randn(len(seconds))
    wanted = values.numpy() * np.sqrt(seconds.double().numpy()).astype(np.float32)
    for kernel, place in ((host, "cpu"), (device, where)):
        found = values.to(place, copy=True)
        kernel.multiply_by_roots(found, seconds.to(place))
        assert np.array_equal(found.cpu().numpy(), wanted)


@on_devices
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000, 200_003])
def test_errors_are_sums_of_squares(where, size):
    values, exact = torch.randn(size), torch.randn(size)
    wanted = [exact.double().square().sum(), (values - exact).double().square().sum()]
    for found in (host.errors(values, exact), device.errors(values.to(where), exact.to(where))):
        assert found == pytest.approx([float(each) for each in wanted], rel=1e-12)


@on_devices
def test_outer_products_are_the_same_on_every_device(where):
    rows, columns = torch.randn(300), torch.randn(70)
    wanted = (rows[:, None] * columns).reshape(-1)
    assert torch.equal(host.outer(rows, columns), wanted)
    assert torch.equal(device.outer(rows.to(where), columns.to(where)).cpu(), wanted)


@pytest.mark.parametrize("size", [0, 1, 15, 511, 512, 513, 40_000])
def test_fits_of_grids_are_sums_over_the_values_as_the_grids_restore_them(size):
    values = some((size,), torch.float32, 0.02)
    products, squares = np.random.default_rng(1).normal(size=(2, size))
    rungs = [-60, -40, -22, -8, 0]
    inverses = np.array([np.float32(1) / rung_value(rung) for rung in rungs])
    found = np.full(4 * len(rungs), math.nan)
    _native.grid_fits(values.numpy(), products, squares, inverses, found)
    for rung, fit in zip(rungs, found.reshape(-1, 4), strict=True):
        quantized = quantize(values, rung)
        restored, outlier = dequantize(quantized).double().numpy(), quantized.levels == PROTECTED
        multiples = np.where(outlier, 0, np.rint(restored / float(rung_value(rung))))
        restored = np.where(outlier, restored, 0)
        wanted = [each @ along for each in (multiples, restored) for along in (products, squares)]
        wanted[1], wanted[3] = multiples**2 @ squares, restored**2 @ squares
        assert fit == pytest.approx(wanted, rel=1e-9, abs=1e-9)
        assert outlier.any() == (size > 9)


def test_fits_of_grids_refuse_arrays_that_do_not_fit():
    three, two = np.zeros(3), np.zeros(2)
    steps = np.ones(2, dtype=np.float32)
    for products, squares, out in ((two, three, 8), (three, two, 8), (three, three, 7)):
        with pytest.raises(ValueError, match="differ in size"):
            _native.grid_fits(np.zeros(3, dtype=np.float32), products, squares, steps, np.zeros(out))


@on_devices
@of_dtypes
@pytest.mark.parametrize("seed", [None, 3])
def test_a_tensor_is_quantized_the_same_on_every_device(where, dtype, seed, monkeypatch):
    tensor = some((53, 29), dtype, 0.02)
    wanted = quantize(tensor, -24, seed)
    monkeypatch.setattr(kernels, "for_device", lambda _: device)
    found = begin_quantize(tensor.to(where), -24, seed)()
    assert same(found, wanted)
    for stored in (found, wanted):
        assert bits(dequantize(stored, torch.device(where)).cpu()) == bits(dequantize(wanted))
    assert np.array_equal(
        protected_values(tensor.to(where), torch.from_numpy(wanted.levels).to(where)), wanted.protected
    )


@on_devices
@pytest.mark.parametrize("tolerance", [0.001, 0.1, 0.3, 1.0])
def test_moments_are_quantized_the_same_on_every_device(where, tolerance, monkeypatch):
    rows, columns = torch.rand(61, 1), torch.rand(1, 83)
    seconds = [rows * columns, rows * columns * torch.exp(torch.randn(61, 83)), torch.rand(300), torch.zeros(4, 4)]
    wanted = [quantize_second_moment(second, tolerance) for second in seconds]
    firsts = [0.3 * second.sqrt() * torch.randn(second.shape) for second in seconds]
    wanted_firsts = [quantize_momentum(first, tolerance) for first in firsts]

    def scaled(first, stored):
        return stored and quantize_first_moment(first, stored, "v", tolerance)

    wanted_scaled = [scaled(*parts) for parts in zip(firsts, wanted, strict=True)]
    wanted_logs = [quantize_to_log_grid(second, 4) for second in seconds]
    monkeypatch.setattr(kernels, "for_device", lambda _: device)
    for i, (second, first) in enumerate(zip(seconds, firsts, strict=True)):
        second_there, first_there = second.to(where), first.to(where)
        assert same(quantize_second_moment(second_there, tolerance), wanted[i])
        assert same(quantize_momentum(first_there, tolerance), wanted_firsts[i])
        assert same(scaled(first_there, wanted[i]), wanted_scaled[i])
        assert same(quantize_to_log_grid(second_there, 4), wanted_logs[i])
        if wanted_scaled[i] is not None:
            there = dequantize(wanted_scaled[i], torch.device(where))
            monkeypatch.setattr(kernels, "for_device", lambda _: host)
            assert bits(there.cpu()) == bits(dequantize(wanted_scaled[i]))
            monkeypatch.setattr(kernels, "for_device", lambda _: device)


def same(a, b):
    """Whether two quantized tensors are equal, or both None."""
    if a is None or b is None:
        return a is b
    if isinstance(a, RankOne):
        return same(a.rows, b.rows) and same(a.columns, b.columns)
    if isinstance(a, ScaledMoment):
        return same(a.units, b.units) and same(a.second, b.second)
    assert isinstance(a, QuantizedTensor)
    return (
        (a.dtype, a.shape, a.codebook) == (b.dtype, b.shape, b.codebook)
        and np.array_equal(a.levels, b.levels)
        and np.array_equal(a.protected, b.protected)
    )


@on_devices
@pytest.mark.parametrize(
    "arguments",
    [{}, {"quality": "high"}, {"quality": "lossless"}, {"quality": dq.Quality(method="published")}],
    ids=str,
)
def test_a_run_is_the_same_on_every_device(where, arguments, tmp_path, monkeypatch):
    def run(folder, place):
        torch.manual_seed(0)
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer)
        model.to(place)
        state = optimizer.state_dict()
        optimizer = torch.optim.AdamW(model.parameters())  # moved parameters may be other objects
        optimizer.load_state_dict(state)
        with dq.Checkpointer(folder, model, optimizer, **arguments) as ckpt:
            ckpt.save(1).result()
            with torch.no_grad():
                for i, parameter in enumerate(model.parameters()):
                    parameter.add_(0.01 * torch.linspace(-1, i, parameter.numel()).reshape(parameter.shape).to(place))
            ckpt.save(2).result()
            ckpt.restore(1)
            restored = [parameter.detach().cpu() for parameter in model.parameters()]
        return [
            {
                (entry.name, entry.hash, str(entry.scheme))
                for entry in Run(folder).file(step).header.entries
                if not entry.name.startswith("rng")
            }
            for step in (1, 2)
        ], [bits(value) for value in restored]

    wanted = run(tmp_path / "host", "cpu")
    monkeypatch.setattr(kernels, "for_device", lambda _: device)
    assert run(tmp_path / "device", where) == wanted
