"""Weighted k-means over buckets: its error against the exact optimum, and the quantized tensors."""

import math
from itertools import pairwise

import kmeans1d
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynaquant.engine.forms.form import dequantize
from dynaquant.engine.quantize.kmeans import bins_table, codebook, kmeans, quantize, sample_weights
from dynaquant.engine.quantize.partition import Thresholds, thresholds
from dynaquant.engine.tensors.codebook import FIRST_BIN, PROTECTED, PRUNED
from dynaquant.engine.tensors.dtypes import QUANTIZABLE_DTYPES
from dynaquant.engine.tensors.log_histogram import MAGNITUDES, LogHistogram, bucket_values

ALPHA = 2.0**-8
SEEDS = range(8)
GENERATOR = torch.Generator().manual_seed(0)
"""Seed of the tensors that are parameters of tests, so that they are the same in every run."""

SAMPLES = {
    "a normal distribution": torch.distributions.Normal(0.0, 1.0),
    "a Laplace distribution": torch.distributions.Laplace(0.0, 1.0),
    "a heavy-tailed distribution": torch.distributions.StudentT(3.0),
    "a uniform distribution": torch.distributions.Uniform(0.0, 1.0),
}


def mean_cost(values, centres):
    return np.min((values[:, None] - centres[None]) ** 2, axis=1).mean()


def costs_and_optimum(values, clusters):
    """Mean squared errors on the data, for the codebook of each seed from its histogram, and the optimum."""
    raw = values.to(torch.float64).numpy()
    histogram = LogHistogram.of(values)
    middles = bucket_values()[histogram.buckets].astype(np.float64)
    order = np.argsort(middles)
    middles, counts = middles[order], histogram.counts[order].astype(np.float64)
    optimum = mean_cost(raw, np.array(kmeans1d.cluster(raw, clusters).centroids))
    return [mean_cost(raw, kmeans(middles, counts, clusters, seed)) for seed in SEEDS], optimum


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("clusters", [2, 4, 8, 16, 32])
def test_the_codebook_of_a_histogram_is_near_the_best_codebook_of_the_data(name, clusters):
    values = SAMPLES[name].sample((3000,))
    values = (values - values.min()) / (values.max() - values.min())
    costs, optimum = costs_and_optimum(values, clusters)
    assert np.mean(costs) <= 16 * (math.log(clusters) + 2) * (optimum + ALPHA**2)  # the bound of method 1.3
    assert np.mean(costs) <= 1.4 * optimum
    assert max(costs) <= 2 * optimum


@given(st.dictionaries(st.integers(0, 1000), st.integers(1, 6), min_size=4, max_size=30), st.integers(2, 5))
def test_weights_count_like_repetitions_of_a_value(weight_of, clusters):
    values = np.array(sorted(weight_of), dtype=np.float64) / 1000
    weights = np.array([weight_of[v] for v in sorted(weight_of)])
    raw = np.repeat(values, weights)
    optimum = mean_cost(raw, np.array(kmeans1d.cluster(raw, clusters).centroids))
    costs = [mean_cost(raw, kmeans(values, weights.astype(np.float64), clusters, seed)) for seed in SEEDS]
    assert np.mean(costs) <= 16 * (math.log(clusters) + 2) * optimum + 1e-12


def test_more_bins_leave_less_error():
    tensor = torch.randn(20_000)
    histogram = LogHistogram.of(tensor)
    errors = [(dequantize(quantize(tensor, histogram, bins)) - tensor).square().mean() for bins in range(1, 65)]
    assert all(later <= 1.25 * earlier for earlier, later in pairwise(errors))
    assert errors[-1] < errors[0] / 500


@given(st.sets(st.floats(-1e30, 1e30), min_size=1, max_size=20), st.integers(0, 5))
def test_with_as_many_clusters_as_values_every_value_is_a_centre(values, spare):
    ordered = np.array(sorted(values))
    assert np.array_equal(kmeans(ordered, np.ones(len(ordered)), len(ordered) + spare), ordered)


@given(st.sets(st.floats(-1, 1), min_size=3, max_size=60), st.integers(1, 30), st.integers(0, 3))
def test_centres_ascend_between_the_extremes(values, clusters, seed):
    ordered = np.array(sorted(values))
    centres = kmeans(ordered, sample_weights(ordered, np.ones(len(ordered), dtype=np.int64)), clusters, seed)
    assert 1 <= len(centres) <= clusters
    assert np.all(np.diff(centres) >= 0)
    assert ordered[0] - 1e-12 <= centres[0]
    assert centres[-1] <= ordered[-1] + 1e-12


def test_centres_ascend_when_values_span_many_orders_of_magnitude():
    tiny = np.outer([-1, 1], [1e-15, 7e-16, 4e-16, 7e-17, 1e-17]).ravel()
    values = np.sort(np.concatenate([[-1.5, 8.5], tiny]))
    weights = sample_weights(values, np.arange(1, 1 + len(values)))
    for clusters in range(2, len(values)):
        for seed in SEEDS:
            assert np.all(np.diff(kmeans(values, weights, clusters, seed)) >= 0)


def test_sample_weights_mix_normalised_frequency_and_magnitude():
    weights = sample_weights(np.array([-3.0, 0.0, 1.0]), np.array([1, 8, 1]))
    assert weights == pytest.approx([0.2 * 0.1 + 0.8 * 0.75, 0.2 * 0.8, 0.2 * 0.1 + 0.8 * 0.25])
    assert weights.sum() == pytest.approx(1)
    assert sample_weights(np.array([0.0]), np.array([5])) == pytest.approx([0.2])


def test_the_magnitude_term_keeps_resolution_in_the_tails():
    values = torch.randn(50_000)
    histogram = LogHistogram.of(values)
    middles = bucket_values()[histogram.buckets].astype(np.float64)
    order = np.argsort(middles)
    by_count = kmeans(middles[order], histogram.counts[order].astype(np.float64), 16)
    assert np.abs(codebook(histogram, 16)).max() > np.abs(by_count).max()


def test_the_same_seed_gives_the_same_centres():
    values, weights = np.sort(np.random.default_rng(0).normal(size=2000)), np.ones(2000)
    assert np.array_equal(kmeans(values, weights, 16, seed=3), kmeans(values, weights, 16, seed=3))
    assert not np.array_equal(kmeans(values, weights, 16, seed=3), kmeans(values, weights, 16, seed=4))


def test_every_bucket_gets_the_bin_of_the_nearest_centre():
    centres = np.array([-0.7, -0.1, 0.0, 0.02, 1.5])
    finite = np.isfinite(bucket_values())
    distances = np.abs(bucket_values()[finite].astype(np.float64)[:, None] - centres)
    chosen = distances[np.arange(finite.sum()), bins_table(centres)[finite] - FIRST_BIN]
    assert np.array_equal(chosen, distances.min(axis=1))


# -- Tensors ------------------------------------------------------------------------------------------------------


def quantized_with(tensor, pruned=0.1, protected=0.01, bins=16):
    histogram = LogHistogram.of(tensor)
    return quantize(tensor, histogram, bins, thresholds(histogram, pruned, protected))


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
def test_every_value_becomes_zero_or_its_16_bits_or_its_nearest_centre(dtype):
    tensor = (torch.distributions.StudentT(4.0).sample((100, 200)) * 0.02).to(dtype)
    quantized = quantized_with(tensor)
    restored = dequantize(quantized)
    assert restored.dtype == dtype
    assert restored.shape == tensor.shape
    levels = torch.from_numpy(quantized.levels).reshape(tensor.shape)
    half = torch.float16 if dtype == torch.float16 else torch.bfloat16
    assert set(quantized.levels) == set(range(2 + 16))
    assert torch.all(restored[levels == PRUNED] == 0)
    assert torch.equal(restored[levels == PROTECTED], tensor[levels == PROTECTED].to(half).to(dtype))

    binned = tensor[levels >= FIRST_BIN].to(torch.float64)
    centres = torch.from_numpy(quantized.centres).to(dtype).to(torch.float64)
    nearest = (binned[:, None] - centres).abs().min(dim=1).values
    error = (restored[levels >= FIRST_BIN].to(torch.float64) - binned).abs()
    assert torch.all(error <= nearest + 2 * ALPHA * binned.abs())


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_float_stays_finite_when_it_is_protected(dtype, sign):
    tensor = torch.randn(1000).to(dtype)
    tensor[3] = sign * min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    restored = dequantize(quantized_with(tensor, protected=0.005))
    assert restored.isfinite().all()
    assert restored[3].item() == pytest.approx(tensor[3].item(), rel=ALPHA)


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
def test_the_largest_float_stays_finite_when_it_is_a_centre(dtype):
    tensor = torch.tensor([1.0, 2.0, min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)], dtype=dtype)
    assert dequantize(quantize(tensor, LogHistogram.of(tensor), 16)).isfinite().all()


def test_fewer_bfloat16_values_than_bins_stay_exact():
    # Every bfloat16 has its own bucket, so nothing is lost.
    tensor = torch.tensor([1.0, 1.0078125, -1.5, 0.0, 300.0], dtype=torch.bfloat16)
    assert torch.equal(dequantize(quantize(tensor, LogHistogram.of(tensor), 16)), tensor)


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
def test_quantization_does_not_scale_the_weights(dtype):
    tensor = (torch.randn(50_000) * 0.02).to(dtype)
    restored = dequantize(quantize(tensor, LogHistogram.of(tensor), 254)).to(torch.float64)
    exact = tensor.to(torch.float64)
    assert (restored * exact).sum() / exact.square().sum() == pytest.approx(1, abs=0.001)


def test_there_are_at_most_as_many_different_values_as_bins():
    for bins in (1, 3, 16, 254):
        tensor = torch.randn(5000)
        quantized = quantized_with(tensor, pruned=0.0, protected=0.0, bins=bins)
        assert len(dequantize(quantized).unique()) == bins == len(quantized.centres)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(30, 40, generator=GENERATOR).t(),
        torch.randn(8, 9, 10, generator=GENERATOR)[::2, :, 1::3],
        torch.randn(6, 1, generator=GENERATOR).expand(6, 50),
        torch.tensor(0.37),
        torch.tensor([[-0.02]]),
        torch.full((50,), 0.3),
        torch.zeros(7, 3),
        torch.zeros(0, 4),
        torch.nn.Parameter(0.4 * torch.rand(30, 20, generator=GENERATOR) - 0.2),
    ],
    ids=[
        "transposed",
        "strided",
        "expanded",
        "zero-dimensional",
        "one element",
        "constant",
        "zeros",
        "empty",
        "parameter",
    ],
)
def test_tensors_of_any_shape_and_layout_survive_a_round_trip(tensor):
    quantized = quantized_with(tensor, pruned=0.0, protected=0.0, bins=200)
    restored = dequantize(quantized)
    assert restored.shape == tensor.shape
    assert restored.is_contiguous()
    assert torch.all(
        (restored - tensor).abs() <= 0.05 * tensor.abs() + 0.03 * tensor.abs().sum() / (tensor.numel() or 1)
    )


def test_the_memory_layout_does_not_matter():
    tensor = torch.randn(30, 40)
    a, b = quantized_with(tensor), quantized_with(tensor.t().contiguous().t())
    assert np.array_equal(a.levels, b.levels)
    assert np.array_equal(a.centres, b.centres)
    assert np.array_equal(a.protected, b.protected)


def test_sensitive_weights_are_protected_and_insensitive_ones_pruned():
    tensor = torch.rand(10_000) + 1
    sensitivity = torch.rand(10_000) + 1
    limits = thresholds(LogHistogram.of(sensitivity), 0.2, 0.05)
    quantized = quantize(tensor, LogHistogram.of(tensor), 16, sensitivity=(sensitivity, limits))
    pruned, protected = quantized.levels == PRUNED, quantized.levels == PROTECTED
    order = sensitivity.numpy()
    assert pruned.mean() == pytest.approx(0.2, abs=0.01)
    assert protected.mean() == pytest.approx(0.05, abs=0.01)
    assert order[pruned].max() <= order[~pruned].min()
    assert order[~protected].max() <= order[protected].min()
    assert np.abs(dequantize(quantized).numpy() - tensor.numpy())[protected].max() <= 2 * ALPHA


def test_a_weight_that_either_metric_protects_is_not_pruned_by_the_other():
    tensor = torch.tensor([0.001, 5.0, 0.5, 0.5, 0.002])
    sensitivity = torch.tensor([9.0, 0.01, 0.01, 1.0, 1.0])
    one_of_five = LogHistogram.of(sensitivity)
    quantized = quantize(
        tensor,
        LogHistogram.of(tensor),
        4,
        thresholds(LogHistogram.of(tensor), 0.4, 0.2),
        (sensitivity, thresholds(one_of_five, 0.4, 0.2)),
    )
    assert quantized.levels.tolist() == [PROTECTED, PROTECTED, PRUNED, FIRST_BIN, PRUNED]


def test_the_codebook_depends_only_on_weights_that_are_not_pruned_or_protected():
    tensor = torch.cat([torch.full((500,), 1e-4), torch.linspace(1, 2, 500), torch.full((5,), 1e6)])
    everywhere = quantize(tensor, LogHistogram.of(tensor), 4)
    partitioned = quantized_with(tensor, pruned=0.5, protected=0.005, bins=4)
    assert everywhere.centres.max() > 1e5
    assert 0.99 <= partitioned.centres.min() <= partitioned.centres.max() <= 2.01


def test_a_whole_tensor_can_be_pruned_or_protected():
    tensor = torch.randn(50)
    pruned = quantize(tensor, LogHistogram.of(tensor), 16, Thresholds(MAGNITUDES, MAGNITUDES))
    assert torch.equal(dequantize(pruned), torch.zeros(50))
    protected = quantize(tensor, LogHistogram.of(tensor), 16, Thresholds(0, 0x100))
    assert torch.equal(dequantize(protected), tensor.to(torch.bfloat16).to(torch.float32))
    assert len(pruned.centres) == len(protected.centres) == 0


def test_parent_levels_count_the_bins_and_the_two_extra_levels():
    levels = quantized_with(torch.randn(1000), bins=6).parent_levels
    assert levels.count == 8
    assert levels.values.max() == 7
