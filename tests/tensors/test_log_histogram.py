"""Log histograms: mergeable, with quantiles within 2⁻⁸ of the exact ones."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dynaquant.engine.kernels.host import bits_of
from dynaquant.engine.tensors.dtypes import QUANTIZABLE_DTYPES
from dynaquant.engine.tensors.log_histogram import BUCKETS, LogHistogram, bucket_values, table_for

ALPHA = 2.0**-8
SMALLEST_NORMAL = 2.0**-126

FLOATS = arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
DTYPES = st.sampled_from(QUANTIZABLE_DTYPES)


def check_quantile(tensor, q):
    exact = float(np.quantile(tensor.abs().to(torch.float64).numpy(), q, method="lower"))
    estimate = LogHistogram.of(tensor).quantile(q)
    # float64 is rounded to float32 first.
    assert abs(estimate - exact) <= ALPHA * (1 + 2**-15) * exact + (SMALLEST_NORMAL if exact < SMALLEST_NORMAL else 0)


def same(a, b):
    return np.array_equal(a.buckets, b.buckets) and np.array_equal(a.counts, b.counts)


@given(FLOATS, st.floats(0, 1), DTYPES)
def test_quantiles_of_any_floats_are_within_the_relative_error(values, q, dtype):
    tensor = torch.from_numpy(values).to(dtype)
    check_quantile(tensor[tensor.isfinite()] if tensor.isfinite().any() else tensor.new_zeros(1), q)


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
@pytest.mark.parametrize("q", [0.0, 0.001, 0.1, 0.5, 0.9, 0.995, 1.0])
def test_quantiles_of_weights_are_within_the_relative_error(q, dtype):
    heavy_tailed = torch.distributions.StudentT(3.0).sample((30_000,)) * 0.02
    for tensor in (heavy_tailed, torch.randn(30_001), torch.nn.Linear(200, 150).weight.detach()):
        check_quantile(tensor.to(dtype), q)


@pytest.mark.parametrize("q", [-0.1, 1.1, float("nan")])
def test_a_quantile_outside_0_to_1_is_refused(q):
    with pytest.raises(ValueError, match=r"q in \[0, 1\]"):
        LogHistogram.of(torch.ones(3)).quantile(q)


def test_an_empty_histogram_has_no_quantile():
    with pytest.raises(ValueError, match="at least one value"):
        LogHistogram.of(torch.zeros(0, 4)).quantile(0.5)


@given(st.lists(FLOATS, max_size=4), DTYPES)
def test_histograms_of_shards_add_up_to_the_histogram_of_the_whole(shards, dtype):
    tensors = [torch.from_numpy(shard).to(dtype) for shard in shards]
    total = sum((LogHistogram.of(tensor) for tensor in tensors), LogHistogram.empty())
    assert same(total, LogHistogram.of(torch.cat(tensors) if tensors else torch.zeros(0, dtype=dtype)))


def test_histograms_of_different_dtypes_share_their_buckets():
    values = torch.tensor([0.0, 1.0, -2.5, 0.0625, 300.0])
    histograms = [LogHistogram.of(values.to(dtype)) for dtype in QUANTIZABLE_DTYPES]
    assert all(same(histogram, histograms[0]) for histogram in histograms)


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
def test_infinities_and_nans_are_counted(dtype):
    values = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), 0.0, -3.0, -float("nan")], dtype=dtype)
    assert LogHistogram.of(values).nonfinite == 4
    assert LogHistogram.of(values[values.isfinite()]).nonfinite == 0


def test_shape_and_layout_do_not_matter():
    matrix = torch.randn(60, 70)
    whole = LogHistogram.of(matrix)
    assert whole.counts.sum() == 4200
    assert same(whole, LogHistogram.of(matrix.t()))
    assert same(whole, LogHistogram.of(matrix[::2]) + LogHistogram.of(matrix[1::2]))
    assert same(whole, LogHistogram.of(torch.nn.Parameter(matrix)))
    assert LogHistogram.of(torch.tensor(3.0)).counts.tolist() == [1]
    assert same(LogHistogram.of(torch.zeros(0)), LogHistogram.empty())


def test_the_two_signs_add_up_in_magnitudes():
    magnitudes = LogHistogram.of(torch.tensor([1.5, -1.5, 1.5, -0.0, 0.0])).magnitudes()
    assert magnitudes[0] == 2
    assert magnitudes[0x3FC0] == 3
    assert magnitudes.sum() == 5


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
def test_the_bits_of_a_tensor_are_a_view_if_possible(dtype):
    tensor = torch.randn(8, 3).to(dtype)
    bits = bits_of(tensor)
    assert bits.shape == (24,)
    assert (bits.ctypes.data == tensor.data_ptr()) == (dtype != torch.float64)


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
def test_bucket_values_are_within_the_relative_error_of_all_values_in_the_bucket(dtype):
    values = torch.randn(5000).to(dtype).to(torch.float32).numpy()
    buckets = values.view(np.uint32) >> 16
    assert np.all(np.abs(bucket_values()[buckets] - values) <= ALPHA * np.abs(values))


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
def test_table_for_rearranges_a_table_for_the_top_bits_of_every_dtype(dtype):
    values = torch.randn(5000).to(dtype)
    by_bucket = np.arange(BUCKETS).astype(np.uint8)
    bits = bits_of(values)
    looked_up = table_for(dtype, by_bucket)[bits >> 16 if bits.dtype == np.uint32 else bits]
    assert np.array_equal(looked_up, by_bucket[values.to(torch.float32).numpy().view(np.uint32) >> 16])
