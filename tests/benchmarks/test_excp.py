"""ExCP does what its paper and the scripts of its authors do."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import assert_same, real_chain
from peers.excp import Settings, cluster, decode, encode, shrunk
from peers.peer import Checkpoint, Known

EXACT = Settings(alpha=0.0, beta=0.0, bits=8, moment_bits=8)
PAPER = Settings()


@pytest.fixture
def chain():
    return real_chain()


def packed(now, before, settings=PAPER):
    return encode(now, None if before is None else Known(before), settings).pack()


def unpacked(data, before):
    return decode(data, None if before is None else Known(before)).checkpoint


def through(now, before, settings=PAPER):
    """Return the decoded checkpoint. Checks that the encoder returned the same."""
    known = None if before is None else Known(before)
    encoded = encode(now, known, settings)
    decoded = decode(encoded.pack(), known).checkpoint
    assert_same(encoded.known.checkpoint, decoded)
    return decoded


def raw_size(checkpoint):
    return sum(tensor.nbytes for tensors in checkpoint.groups().values() for tensor in tensors.values())


def reconstruction(checkpoint, previous, settings):
    """Return what the bytes should decode to, computed without them."""
    result = Checkpoint({}, others=checkpoint.others)
    for name, weight in checkpoint.weights.items():
        for group, values in shrunk(checkpoint, previous, name, settings):
            indices, centres = cluster(values, 2 ** settings.bits_of(group) - 1)
            tensor = torch.from_numpy(np.concatenate(([np.float32(0)], centres))[indices]).reshape(weight.shape)
            result.groups()[group][name] = previous.weights[name] + tensor if group == "weights" else tensor
    return result


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_decoding_returns_the_reconstruction(chain, bits):
    settings = Settings(alpha=1e-3, bits=bits)
    decoded = through(chain[1], chain[0], settings)
    assert_same(decoded, reconstruction(chain[1], chain[0], settings))


def test_residuals_are_pruned_below_medians_and_moments_below_means_or_with_their_residual(chain):
    before, now, settings = chain[0], chain[1], Settings(alpha=1e-3)
    counts = []
    for name in now.weights:
        residual, first, second = now.weights[name] - before.weights[name], now.first[name], now.second[name]
        factor = min(2.5, 1e-3 / float(second.mean().sqrt()))
        kept = residual.abs() > factor * residual.abs().median()
        kept_moments = kept & (first.abs() > 2.0 * first.abs().mean())
        pruned = {group: values.reshape(residual.shape) for group, values in shrunk(now, before, name, settings)}
        assert np.array_equal(pruned["weights"], np.where(kept, residual, 0))
        assert np.array_equal(pruned["first"], np.where(kept_moments, first, 0))
        assert np.array_equal(pruned["second"], np.where(kept_moments, second, 0))
        counts.append((int(kept_moments.sum()), int(kept.sum()), kept.numel()))
    moments, residuals, everything = np.sum(counts, axis=0)
    assert 0 < moments < residuals < everything


def test_a_chain_of_residuals_refers_to_reconstructions_and_does_not_drift(chain):
    previous = Checkpoint(chain[0].weights)
    errors = []
    for checkpoint in chain[1:]:
        previous = through(checkpoint, previous)
        name = "linear.weight"
        errors.append(float((previous.weights[name] - checkpoint.weights[name]).norm()))
        moved = float((chain[1].weights[name] - chain[0].weights[name]).norm())
        assert errors[-1] < 0.2 * moved
    assert errors[-1] < 2 * errors[0]


def test_without_a_previous_checkpoint_everything_is_exact(chain):
    assert_same(through(chain[0], None), chain[0])


def test_coarser_settings_make_smaller_bytes(chain):
    exact = len(packed(chain[2], None))
    sizes = [len(packed(chain[2], chain[1], settings)) for settings in (EXACT, Settings(), Settings(5e-3, 4.0, 2))]
    assert exact > sizes[0] > sizes[1] > sizes[2]
    assert raw_size(chain[2]) > 8 * sizes[1]


def test_finest_settings_are_nearly_exact(chain):
    decoded = through(chain[1], chain[0], EXACT)
    for group in ("weights", "first", "second"):
        for name, tensor in chain[1].groups()[group].items():
            error = decoded.groups()[group][name] - tensor
            assert error.norm() < 0.02 * tensor.norm()


def test_momentum_alone_and_no_moments_at_all(chain):
    momentum = replace(chain[1], second={})
    settings = Settings(alpha=1e-2)
    decoded = through(momentum, chain[0], settings)
    assert_same(decoded, reconstruction(momentum, chain[0], settings))
    assert not decoded.second
    bare = Checkpoint(chain[1].weights)
    kept = dict(shrunk(bare, chain[0], "linear.weight", Settings(alpha=1.0)))["weights"]
    assert np.count_nonzero(kept) == np.count_nonzero(
        chain[1].weights["linear.weight"] - chain[0].weights["linear.weight"]
    )


def test_unchanged_weights_cost_almost_nothing_and_decode_exactly(chain):
    data = packed(Checkpoint(chain[0].weights), chain[0])
    assert_same(unpacked(data, chain[0]), Checkpoint(chain[0].weights))
    assert len(data) < 500


def test_a_moment_without_a_weight_is_an_error(chain):
    with pytest.raises(ValueError, match="every moment needs the weight"):
        encode(Checkpoint({}, first=chain[0].first), None)


def test_few_values_are_their_own_centres():
    values = np.array([0, 1.5, -2e-9, 0, 1.5, 3e-30], dtype=np.float32)
    indices, centres = cluster(values, 15)
    assert np.array_equal(np.concatenate(([np.float32(0)], centres))[indices], values)
