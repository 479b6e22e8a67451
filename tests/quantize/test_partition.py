"""Which weights are pruned and protected: fractions, thresholds, and limits of the configuration."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynaquant.engine.quantize.kmeans import quantize
from dynaquant.engine.quantize.knobs import Configuration
from dynaquant.engine.quantize.partition import Thresholds, thresholds
from dynaquant.engine.tensors.codebook import PROTECTED, PRUNED
from dynaquant.engine.tensors.log_histogram import LogHistogram


def shares(tensor, pruned, protected):
    """The fractions of values that are pruned and protected, and the levels."""
    histogram = LogHistogram.of(tensor)
    levels = quantize(tensor, histogram, 4, thresholds(histogram, pruned, protected)).levels
    return (levels == PRUNED).mean(), (levels == PROTECTED).mean(), levels


FRACTIONS = st.floats(0, 1, exclude_max=True)


@given(FRACTIONS, FRACTIONS, st.integers(0, 5))
def test_fractions_are_upper_bounds_and_missed_by_one_bucket_at_most(pruned, protected, seed):
    tensor = torch.randn(20_000, generator=torch.Generator().manual_seed(seed))
    was_pruned, was_protected, _ = shares(tensor, pruned, protected)
    # The width of a bucket is 2⁻⁷ of its magnitudes, so it has at most 0.4 % of a normal distribution.
    assert pruned - 0.004 <= was_pruned <= pruned
    assert was_protected <= protected
    if pruned + protected <= 1:
        assert was_protected >= protected - 0.004


@pytest.mark.parametrize(("pruned", "protected"), [(0.1, 0.005), (0.5, 0.0005), (0.3, 0.01), (0.9, 0.05)])
def test_the_smallest_are_pruned_and_the_largest_protected(pruned, protected):
    tensor = torch.distributions.Laplace(0.0, 0.02).sample((50_000,))
    _, _, levels = shares(tensor, pruned, protected)
    magnitudes = tensor.abs().numpy()
    between = (levels != PRUNED) & (levels != PROTECTED)
    assert magnitudes[levels == PRUNED].max() <= magnitudes[between].min()
    assert magnitudes[between].max() <= magnitudes[levels == PROTECTED].min()


def test_nothing_is_pruned_or_protected_at_fractions_of_zero():
    assert shares(torch.randn(5000), 0.0, 0.0)[:2] == (0, 0)


def test_pruning_wins_where_large_fractions_overlap():
    pruned, protected, _ = shares(torch.randn(20_000), 0.9, 0.9)
    assert pruned == pytest.approx(0.9, abs=0.004)
    assert pruned + protected == 1


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.999])
def test_equal_values_are_pruned_or_protected_together(fraction):
    assert shares(torch.full((1000,), 0.25), fraction, fraction)[:2] == (0, 0)


def test_zeros_are_always_pruned():
    tensor = torch.randn(1000)
    tensor[:400], tensor[400:500] = 0.0, -0.0
    for fraction in (0.0, 0.1):
        pruned, _, levels = shares(tensor, fraction, 0.01)
        assert pruned == 0.5
        assert np.all(levels[:500] == PRUNED)


def test_zeros_count_towards_the_pruned_fraction():
    tensor = torch.randn(20_000)
    tensor[:6000] = 0.0
    assert shares(tensor, 0.5, 0.0)[0] == pytest.approx(0.5, abs=0.004)


def test_thresholds_of_two_tensors_together_are_those_of_their_union():
    small, large = torch.randn(3000) * 1e-3, torch.randn(5000)
    together = thresholds(LogHistogram.of(small) + LogHistogram.of(large), 0.3, 0.01)
    assert together == thresholds(LogHistogram.of(torch.cat([small, large])), 0.3, 0.01)


def test_thresholds_are_bucket_numbers_of_magnitudes():
    # Eight values, one in each of eight buckets; 1.0 is bucket 0x3F80 and 2.0 is 0x4000.
    tensor = torch.tensor([1.0, 1.125, -1.25, 1.375, 1.5, -1.625, 1.75, 2.0])
    assert thresholds(LogHistogram.of(tensor), 0.125, 0.125) == Thresholds(0x3F90, 0x3FE1)


@pytest.mark.parametrize("change", [{"bins": 0}, {"bins": 255}, {"embedding_bins": 0}, {"embedding_bins": 255}])
def test_bins_out_of_range_are_refused(change):
    with pytest.raises(ValueError, match="bins must be 1 to 254"):
        Configuration(**change)


@pytest.mark.parametrize("name", ["pruned", "protected"])
@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, float("nan")])
def test_fractions_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match="fractions from 0 to below 1"):
        Configuration(**{name: value})


@pytest.mark.parametrize("name", ["pruning_metric", "protection_metric"])
def test_unknown_metrics_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be .* not 'size'"):
        Configuration(**{name: "size"})


def test_pruning_by_both_metrics_is_refused():
    with pytest.raises(ValueError, match="pruning_metric must be 'magnitude' or 'sensitivity'"):
        Configuration(pruning_metric="both")


@pytest.mark.parametrize("pruning", ["magnitude", "sensitivity"])
@pytest.mark.parametrize("protection", ["magnitude", "sensitivity", "both"])
def test_gradients_are_needed_only_if_a_metric_uses_sensitivity(pruning, protection):
    configuration = Configuration(pruning_metric=pruning, protection_metric=protection)
    assert configuration.uses_sensitivity == ((pruning, protection) != ("magnitude", "magnitude"))
