"""Quantizing peers do what their papers describe."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from checkpoints import assert_same, real_chain
from peers import check_n_run, gobo, lc_checkpoint, qd_compressor
from peers.check_n_run import CHECK_N_RUN
from peers.gobo import GOBO
from peers.lc_checkpoint import LC_CHECKPOINT
from peers.peer import Checkpoint, Known
from peers.qd_compressor import QD_COMPRESSOR

PEERS = [CHECK_N_RUN, QD_COMPRESSOR, GOBO, LC_CHECKPOINT]


@pytest.fixture
def normal():
    return torch.randn(32, 300, generator=torch.Generator().manual_seed(0)) * 0.04


def of(**weights):
    return Checkpoint(weights)


def through(peer, checkpoint, known, settings):
    """Encode and decode a checkpoint. Checks that the encoder returned the decoded checkpoint."""
    encoded = peer.encode(checkpoint, known, settings)
    decoded = peer.decode(encoded.pack(), known)
    assert_same(decoded.checkpoint, encoded.known.checkpoint)
    return decoded


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_odd_tensors_keep_shape_and_dtype(peer):
    weights = {
        "nothing": torch.empty(0, 3),
        "constant": torch.full((3, 4), 0.3),
        "one": torch.tensor([[2.5]]),
        "convolution": torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0)),
        "half": torch.linspace(-1, 1, 60).reshape(6, 10).to(torch.bfloat16),
        "bias": torch.linspace(-1, 1, 7),
    }
    zeros = Known(Checkpoint({name: torch.zeros_like(tensor) for name, tensor in weights.items()}))
    for settings in (peer.space[0], peer.space[-1]):
        found = through(peer, Checkpoint(weights), zeros, settings).checkpoint.weights
        if peer is not LC_CHECKPOINT:
            assert torch.equal(found["bias"], weights["bias"])
            assert torch.allclose(found["constant"], weights["constant"])
            assert torch.allclose(found["one"], weights["one"])
    for name, tensor in weights.items():
        assert torch.allclose(found[name].float(), tensor.float(), atol=0.04)


def test_check_n_run_without_a_search_reaches_from_the_least_to_the_largest_value_of_each_row(normal):
    levels, ranges = check_n_run.quantize(normal, check_n_run.Settings(10, steps=10, ratio=0.0))
    assert torch.equal(ranges, torch.stack((normal.amin(1), normal.amax(1)), dim=1))
    assert torch.equal(levels.amin(1), torch.full((32,), 0))
    assert torch.equal(levels.amax(1), torch.full((32,), 9))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("steps", "ratio"), [(25, 0.5), (100, 0.3)])
def test_check_n_run_searches_like_pytorch_and_finds_a_range_at_least_as_good(normal, bits, steps, ratio):
    low, high = check_n_run.adapted_range(normal, check_n_run.Settings(2**bits, steps, ratio))

    def error(row, low, high):
        scale = (high - low) / (2**bits - 1)
        return float((((row - low) / scale).round().clamp(0, 2**bits - 1) * scale + low - row).square().sum())

    total = 0.0
    for row, its_low, its_high in zip(normal, low, high, strict=True):
        highest, lowest = torch.choose_qparams_optimized(row, row.numel(), steps, ratio, bits)
        found, found_there = error(row, its_low, its_high), error(row, lowest, highest)
        assert found <= found_there * 1.001
        total += found
        whole = row.max() - row.min()
        assert its_high - its_low >= (1 - ratio - 1e-4) * whole
    assert total < 0.95 * sum(error(row, row.min(), row.max()) for row in normal)


def test_check_n_run_stores_whole_bits_and_two_floats_for_each_row(normal):
    sizes = [
        len(CHECK_N_RUN.encode(of(w=normal), None, check_n_run.Settings(bins, 10, 0.1)).pack()) for bins in (17, 32, 33)
    ]
    assert sizes[0] == sizes[1] == sizes[2] - normal.numel() // 8
    assert 32 * (300 * 5 / 8 + 8) < sizes[0] < 32 * (300 * 5 / 8 + 8) + 300


def test_qd_compressor_gives_layers_bins_by_their_entropy():
    random = np.random.default_rng(0)
    layers = {
        "flat": random.uniform(size=10_000).astype(np.float32),
        "between": random.normal(size=10_000).astype(np.float32),
        "peaked": (random.normal(size=10_000) ** 5).astype(np.float32),
    }
    bins = qd_compressor.bins_by_entropy(layers, qd_compressor.Settings(8, 256))
    entropy = {name: qd_compressor.entropy(values) for name, values in layers.items()}
    assert entropy["flat"] == pytest.approx(8, abs=0.05)
    assert (bins["peaked"], bins["flat"]) == (8, 256)
    share = (entropy["between"] - entropy["peaked"]) / (entropy["flat"] - entropy["peaked"])
    assert bins["between"] == round(8 + 248 * share)
    assert set(qd_compressor.bins_by_entropy(layers, qd_compressor.Settings(16, 16)).values()) == {16}


def test_qd_compressor_feeds_back_the_error_of_the_previous_checkpoint_if_asked():
    chain, settings = real_chain(), qd_compressor.Settings(8, 8, feedback=True)
    first = QD_COMPRESSOR.encode(chain[1], None, settings).known
    second = QD_COMPRESSOR.encode(chain[2], first, settings).known
    for name in ("embedding.weight", "linear.weight"):
        error = chain[1].weights[name] - first.checkpoint.weights[name]
        assert torch.equal(first.errors[name], error)
        corrected = (chain[2].weights[name] + error).flatten().numpy()
        levels = qd_compressor.quantize(corrected, float(corrected.min()), float(corrected.max()), 8)
        assert np.array_equal(second.levels[name], levels)


def test_qd_compressor_codes_only_levels_that_have_changed(normal):
    settings = qd_compressor.Settings(256, 256)
    first = through(QD_COMPRESSOR, of(w=normal), None, settings)
    alone = len(QD_COMPRESSOR.encode(of(w=normal), None, settings).pack())
    moved = normal.clone()
    moved[0, :10] += 0.01
    again = len(QD_COMPRESSOR.encode(of(w=moved), first, settings).pack())
    assert alone > 0.7 * normal.numel()
    assert again < 0.25 * alone  # Huffman takes one bit for each level even if changes are rare


@pytest.mark.parametrize("bins", [(256, 8), (8, 256), (100, 101)])
def test_qd_compressor_codes_differences_between_different_numbers_of_bins(normal, bins):
    known = through(QD_COMPRESSOR, of(w=normal), None, qd_compressor.Settings(bins[0], bins[0]))
    then = through(QD_COMPRESSOR, of(w=normal * 1.01), known, qd_compressor.Settings(bins[1], bins[1]))
    assert int(then.levels["w"].max()) == bins[1] - 1


def test_gobo_keeps_outliers_below_a_log_density_of_minus_four(normal):
    values = normal.flatten().numpy()
    distribution = torch.distributions.Normal(float(values.mean()), float(values.std()))
    expected = (distribution.log_prob(normal.flatten()) < -4).numpy()
    assert 0 < expected.sum() < 0.001 * values.size
    assert np.array_equal(gobo.outliers(values), expected)
    found = through(GOBO, of(w=normal), None, gobo.Settings(4)).checkpoint.weights["w"].flatten().numpy()
    assert np.array_equal(found[expected], values[expected])
    assert np.unique(found[~expected]).size == 4


def test_gobo_selects_the_centroids_with_the_least_absolute_error():
    values = np.sort(np.random.default_rng(0).laplace(size=3000)).astype(np.float32)

    def absolute_error(centroids):
        return np.abs(values[:, None].astype(np.float64) - centroids).min(1).sum()

    centroids = np.array([part.mean(dtype=np.float64) for part in np.array_split(values, 8)])
    errors = []
    for _ in range(300):
        errors.append(absolute_error(centroids))
        nearest = np.abs(values[:, None] - centroids).argmin(1)
        centroids = np.array([values[nearest == index].mean(dtype=np.float64) for index in range(8)])
    assert np.argmin(errors) < len(errors) - 1
    assert absolute_error(gobo.centroids(values, 8)) == pytest.approx(min(errors), rel=1e-5)


def test_gobo_uses_few_values_as_their_own_centroids():
    values = np.array([1, 2, 2, 5], dtype=np.float32)
    layer = gobo.quantize(values, 8)
    assert np.array_equal(layer.centroids[layer.indices], values)


def test_lc_checkpoint_has_one_mean_for_a_sign_and_exponent_and_keeps_the_largest_exponents():
    differences = np.array([1, 1.5, -1.25, 0.3, 0.26, -0.1, 0, -0.07, 0.2], dtype=np.float32)
    for bits, rest in ((2, [0, 0, 0, 0]), (3, [-0.085, 0, -0.085, 0.2])):
        indices, values = lc_checkpoint.quantize(differences, lc_checkpoint.Settings(bits))
        found = np.concatenate(([0], values))[indices]
        assert found == pytest.approx([1.25, 1.25, -1.25, 0.28, 0.28, *rest])
        assert values.size <= 2**bits - 1


def test_lc_checkpoint_splits_exponents_by_the_mantissa_in_the_finest_settings():
    differences = np.array([1, 1.2, 1.5, 1.75, -1.75], dtype=np.float32)
    indices, values = lc_checkpoint.quantize(differences, lc_checkpoint.Settings(5, mantissa=1))
    assert np.concatenate(([0], values))[indices] == pytest.approx([1.1, 1.1, 1.625, 1.625, -1.75])


def test_lc_checkpoint_stores_dropped_differences_in_the_next_checkpoint():
    chain, settings = real_chain(), lc_checkpoint.Settings(3)
    known, errors = Known(Checkpoint(chain[0].weights)), []
    for _ in range(6):
        known = through(LC_CHECKPOINT, chain[1], known, settings)
        errors.append(sum(float((known.checkpoint.weights[n] - w).norm()) for n, w in chain[1].weights.items()))
    assert all(after < 0.6 * before for before, after in pairwise(errors))


def test_lc_checkpoint_is_exact_without_a_previous_checkpoint():
    weights = real_chain()[0].weights
    assert_same(through(LC_CHECKPOINT, Checkpoint(weights), None, LC_CHECKPOINT.space[0]).checkpoint, of(**weights))
