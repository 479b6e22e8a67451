"""The peers that benchmarks compare with do what was published about them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from peers.archives import PEERS
from peers.excp import SPACE, Checkpoint, Settings, cluster, decode, encode, pack, shrunk, unpack
from synthetic import adam_state, advance, named_tensors

EXACT = Settings(alpha=0.0, beta=0.0, bits=8)


@pytest.fixture(scope="module")
def chain():
    """Four whole Adam checkpoints of a small model in training."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(50, 24), "linear": torch.nn.Linear(24, 50)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    taken = []
    for step in range(40):
        tokens = torch.randint(50, (64,))
        logits = model["linear"](model["embedding"](tokens))
        torch.nn.functional.cross_entropy(logits, (tokens * 7 + 3) % 50).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            taken.append(taken_now(model, optimizer, step))
    return taken


def taken_now(model, optimizer, step):
    state = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    return Checkpoint(
        {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        {name: moments["exp_avg"].clone() for name, moments in state.items()},
        {name: moments["exp_avg_sq"].clone() for name, moments in state.items()},
        {"step": torch.tensor(step), "mask": torch.arange(5).to(torch.bfloat16), "nothing": torch.empty(0, 3)},
    )


def assert_same(found, expected):
    for group, tensors in expected.groups().items():
        assert found.groups()[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            restored = found.groups()[group][name]
            assert restored.dtype == tensor.dtype
            assert torch.equal(restored, tensor), (group, name)


def raw_size(checkpoint):
    return sum(tensor.nbytes for tensors in checkpoint.groups().values() for tensor in tensors.values())


def reconstruction(checkpoint, previous, settings):
    """What the bytes should decode to, made without them."""
    result = Checkpoint({}, others=checkpoint.others)
    for name, weight in checkpoint.weights.items():
        for group, values in shrunk(checkpoint, previous, name, settings):
            indices, centres = cluster(values, 2**settings.bits - 1)
            tensor = torch.from_numpy(np.concatenate(([np.float32(0)], centres))[indices]).reshape(weight.shape)
            result.groups()[group][name] = previous.weights[name] + tensor if group == "weights" else tensor
    return result


@pytest.mark.parametrize("bits", SPACE["bits"])
def test_what_is_decoded_is_the_reconstruction(chain, bits):
    settings = Settings(alpha=1e-3, bits=bits)
    decoded = decode(encode(chain[1], chain[0], settings), chain[0])
    assert_same(decoded, reconstruction(chain[1], chain[0], settings))


def test_residuals_are_pruned_below_medians_and_moments_below_means_and_where_their_residual_is(chain):
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
        previous = decode(encode(checkpoint, previous), previous)
        name = "linear.weight"
        errors.append(float((previous.weights[name] - checkpoint.weights[name]).norm()))
        moved = float((chain[1].weights[name] - chain[0].weights[name]).norm())
        assert errors[-1] < 0.2 * moved
    assert errors[-1] < 2 * errors[0]


def test_without_a_previous_checkpoint_everything_is_exact(chain):
    assert_same(decode(encode(chain[0], None), None), chain[0])


def test_coarser_settings_make_smaller_bytes(chain):
    exact = len(encode(chain[2], None))
    sizes = [len(encode(chain[2], chain[1], settings)) for settings in (EXACT, Settings(), Settings(5e-3, 4.0, 2))]
    assert exact > sizes[0] > sizes[1] > sizes[2]
    assert raw_size(chain[2]) > 8 * sizes[1]


def test_finest_settings_are_nearly_exact(chain):
    decoded = decode(encode(chain[1], chain[0], EXACT), chain[0])
    for group in ("weights", "first", "second"):
        for name, tensor in chain[1].groups()[group].items():
            error = decoded.groups()[group][name] - tensor
            assert error.norm() < 0.02 * tensor.norm()


def test_momentum_alone_and_no_moments_at_all(chain):
    momentum = replace(chain[1], second={})
    settings = Settings(alpha=1e-2)
    decoded = decode(encode(momentum, chain[0], settings), chain[0])
    assert_same(decoded, reconstruction(momentum, chain[0], settings))
    assert not decoded.second
    bare = Checkpoint(chain[1].weights)
    kept = dict(shrunk(bare, chain[0], "linear.weight", Settings(alpha=1.0)))["weights"]
    assert np.count_nonzero(kept) == np.count_nonzero(
        chain[1].weights["linear.weight"] - chain[0].weights["linear.weight"]
    )


def test_what_has_not_moved_costs_next_to_nothing_and_comes_back(chain):
    data = encode(Checkpoint(chain[0].weights), chain[0])
    assert_same(decode(data, chain[0]), Checkpoint(chain[0].weights))
    assert len(data) < 500


def test_a_moment_of_no_weight_is_an_error(chain):
    with pytest.raises(ValueError, match="every moment needs the weight"):
        encode(Checkpoint({}, first=chain[0].first), None)


def test_few_values_are_their_own_centres():
    values = np.array([0, 1.5, -2e-9, 0, 1.5, 3e-30], dtype=np.float32)
    indices, centres = cluster(values, 15)
    assert np.array_equal(np.concatenate(([np.float32(0)], centres))[indices], values)


@pytest.mark.parametrize("bits", SPACE["bits"])
def test_indices_are_packed_tightly(bits):
    indices = np.random.default_rng(0).integers(2**bits, size=1001).astype(np.uint8)
    packed = pack(indices, bits)
    assert packed.size == -(-1001 * bits // 8)
    assert np.array_equal(unpack(packed, bits, 1001), indices)
    if bits == 4:
        assert pack(np.array([1, 15, 2], dtype=np.uint8), 4).tolist() == [0x1F, 0x20]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # ZipNN's import
@pytest.mark.parametrize("name", PEERS)
def test_archives_bring_a_whole_adam_state_back_and_leave_it_alone(name, tmp_path):
    peer = PEERS[name]
    if not peer.installed:
        pytest.skip(f"{peer.package} is not installed")
    tensors = named_tensors(*adam_state(30_000, torch.Generator().manual_seed(0)))
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    peer.write(tensors, tmp_path / "checkpoint", 2)
    assert all(torch.equal(tensors[name], saved[name]) for name in saved)
    for tensor in tensors.values():
        tensor.zero_()
    peer.read(tensors, tmp_path / "checkpoint", 2)
    assert all(torch.equal(tensors[name], saved[name]) for name in saved)


def test_the_synthetic_state_has_its_size_and_moves_a_little():
    generator = torch.Generator().manual_seed(0)
    model, optimizer = adam_state(3_000_000, generator)
    before = {name: tensor.clone() for name, tensor in named_tensors(model, optimizer).items()}
    assert sum(tensor.numel() for tensor in before.values()) == pytest.approx(3_000_000, rel=0.05)
    advance(optimizer, generator)
    for name, parameter in model.named_parameters():
        moved = float((parameter.detach() - before[name]).norm() / before[name].norm())
        assert 5e-4 < moved < 2e-2
        state = optimizer.state[parameter]
        assert (state["exp_avg_sq"] > 0).all()
        directions = state["exp_avg"] / state["exp_avg_sq"].sqrt()
        assert float(directions.square().mean().sqrt()) == pytest.approx(0.3, rel=0.2)
