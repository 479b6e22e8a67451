"""Matrices of low rank: their values, their error, their streams."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import bits

from dynaquant.coding.decoder import decode
from dynaquant.coding.encoder import encode
from dynaquant.coding.schemes import LowRankFactors
from dynaquant.quantize.grid import quantize
from dynaquant.quantize.low_rank import quantize_low_rank
from dynaquant.state.roles import Label
from dynaquant.store.entry import Entry
from dynaquant.tensors.codebook import Grid, rung_value
from dynaquant.tensors.dequantize import dequantize, pieces, values_of
from dynaquant.tensors.dtypes import QUANTIZABLE_DTYPES
from dynaquant.tensors.hashing import tensor_hash
from dynaquant.tensors.stored import MAX_RANK, LowRank, QuantizedTensor


def matrix_of(rank, rows=64, columns=48, noise=0.05, seed=0):
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
    return vectors + noise * torch.randn(rows, columns, generator=generator)


def integers(factor):
    """Return what the levels of a grid stand for, computed from the format alone."""
    multiples = [0, 0, *((i // 2 + 1) * (-1) ** i for i in range(254))]
    return np.array(multiples)[factor.levels].reshape(factor.shape)


@pytest.mark.parametrize("rank", [1, 2, 5, 12])
@pytest.mark.parametrize("tolerance", [0.2, 0.5, 0.9])
def test_the_error_is_within_the_tolerance(rank, tolerance):
    matrix = matrix_of(rank)
    stored = quantize_low_rank(matrix, torch.float32, matrix.shape, tolerance)
    assert stored.rank <= {1: 2, 2: 3, 5: 6, 12: 16}[rank]
    assert float((dequantize(stored) - matrix).norm() / matrix.norm()) <= tolerance * 1.0001


def test_noise_has_no_low_rank():
    noise = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    assert quantize_low_rank(noise, torch.float32, noise.shape, 0.2) is None


@pytest.mark.parametrize("shape", [(1, 50), (50, 1), (0, 4)])
def test_vectors_and_zeros_have_none(shape):
    assert quantize_low_rank(torch.ones(shape), torch.float32, torch.Size(shape), 0.5) is None
    assert quantize_low_rank(torch.zeros(40, 40), torch.float32, torch.Size([40, 40]), 0.5) is None


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e-15, 1e15, 1e30, 1e38])
def test_any_magnitude_is_within_the_tolerance_or_refused(size):
    matrix = matrix_of(2) / 20 * size
    stored = quantize_low_rank(matrix, torch.float32, matrix.shape, 0.5)
    if stored is not None:
        off = (dequantize(stored).double() - matrix.double()).norm() / matrix.double().norm()
        assert float(off) <= 0.5001
    assert stored is not None or not 1e-15 <= size <= 1e15


@given(st.integers(1, MAX_RANK), st.integers(2, 9), st.integers(1, 9), st.integers(-40, 40), st.data())
def test_values_are_sums_of_products_of_integers_and_survive_a_round_trip(rank, n, m, rung, data):
    dtype = data.draw(st.sampled_from(QUANTIZABLE_DTYPES))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))

    def factor(length):
        step = float(rung_value(rung))
        whole = torch.randint(-127, 128, (rank, length), generator=generator)
        return quantize(whole * step, rung)

    stored = LowRank(dtype, torch.Size([n, m]), factor(n), factor(m))
    sums = (integers(stored.rows).T @ integers(stored.columns)).astype(np.float32)
    expected = torch.from_numpy(sums * (rung_value(rung) * rung_value(rung)))
    if dtype in (torch.float16, torch.bfloat16):
        expected = expected.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    values = values_of(stored)
    assert bits(values) == bits(expected.to(dtype))
    assert bits(torch.cat(list(pieces(stored))).view(n, m)) == bits(values)
    scheme, coded = encode(stored, None)
    assert isinstance(scheme, LowRankFactors)
    entry = Entry("m", Label("first_moment"), dtype, stored.shape, tensor_hash(values), len(coded), scheme)
    entry = Entry.from_json(entry.to_json())
    found = decode(entry.scheme, dtype, stored.shape, coded, None)
    assert type(found) is LowRank
    assert bits(values_of(found)) == bits(values)


def test_values_do_not_depend_on_autocast():
    stored = quantize_low_rank(matrix := matrix_of(3), torch.float32, matrix.shape, 0.3)
    values = dequantize(stored)
    with torch.autocast("cpu", torch.bfloat16):
        assert bits(dequantize(stored)) == bits(values)


def test_factors_that_are_not_plain_grids_are_refused():
    plain = quantize(torch.ones(2, 4), 0)
    outliers = QuantizedTensor(torch.float32, plain.shape, plain.levels, Grid(0, 2), np.zeros(1, np.uint16))
    with pytest.raises(ValueError, match="outliers"):
        dequantize(LowRank(torch.float32, torch.Size([4, 4]), plain, outliers))
    with pytest.raises(ValueError, match="another shape"):
        dequantize(LowRank(torch.float32, torch.Size([4, 5]), plain, plain))
    with pytest.raises(ValueError, match="another shape"):
        dequantize(LowRank(torch.float32, torch.Size([4, 4]), plain, quantize(torch.ones(1, 4), 0)))


def test_a_stream_is_as_long_as_the_format_requires():
    rows, columns = quantize(torch.ones(1, 3000), 0), quantize(torch.ones(1, 2000), 0)
    stored = LowRank(torch.float32, torch.Size([3000, 2000]), rows, columns)
    assert len(encode(stored, None)[1]) >= math.prod(stored.shape) * 4 / 131_072
