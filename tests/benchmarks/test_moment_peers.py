"""BitSnap and PaddleNLP do what their paper and their code describe: half-precision weights, and quantized moments."""

import numpy as np
import pytest
import torch
from checkpoints import assert_same, real_chain
from peers import bitsnap, paddlenlp
from peers.bitsnap import BITSNAP, clustered
from peers.half_precision import rounded
from peers.paddlenlp import O1, O2
from peers.peer import Checkpoint, Known

PEERS = [BITSNAP, O1, O2]
STAGES = [(O1, 8), (O2, 4)]


@pytest.fixture
def moments():
    """A matrix of both moments, with rows of all sizes, and their weights."""
    generator = torch.Generator().manual_seed(0)
    second = torch.exp(2 * torch.randn(20, 100, generator=generator)) * 1e-8
    first = 0.3 * second.sqrt() * torch.randn(20, 100, generator=generator)
    return Checkpoint({"w": 0.04 * torch.randn(20, 100, generator=generator)}, {"w": first}, {"w": second})


def through(peer, checkpoint, known=None, settings=None):
    """Return the decoded checkpoint and the bytes. Checks that the encoder returned the same."""
    encoded = peer.encode(checkpoint, known, settings or peer.space[0])
    data = encoded.pack()
    decoded = peer.decode(data, known).checkpoint
    assert_same(decoded, encoded.known.checkpoint)
    return decoded, data


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_odd_tensors_keep_shape_and_dtype(peer):
    tensors = {
        "nothing": torch.empty(0, 3),
        "no columns": torch.empty(3, 0),
        "scalar": torch.tensor(0.5),
        "zeros": torch.zeros(3, 40),
        "constant": torch.full((3, 4), 0.25),
        "convolution": 0.5 + 0.5 * torch.rand(4, 3, 2, 2, generator=torch.Generator().manual_seed(0)),
        "transposed": torch.linspace(0.5, 1, 60).reshape(6, 10).T,
        "half": torch.linspace(0.5, 1, 60).reshape(6, 10).to(torch.bfloat16),
        "double": torch.linspace(0.5, 1, 60, dtype=torch.float64),
    }
    checkpoint = Checkpoint(tensors, tensors, tensors, {"counter": torch.tensor(3)})
    zeros = Known(Checkpoint({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}))
    for known in (None, zeros, Known(checkpoint)):
        for settings in peer.space:
            decoded, _ = through(peer, checkpoint, known, settings)
            for group, found in decoded.groups().items():
                assert found.keys() == checkpoint.groups()[group].keys()
                for name, tensor in checkpoint.groups()[group].items():
                    assert found[name].dtype == tensor.dtype
                    assert found[name].shape == tensor.shape
                    assert torch.allclose(found[name].double(), tensor.double(), atol=0.15)
            for moments in (decoded.first, decoded.second):
                assert torch.allclose(moments["constant"], tensors["constant"])
                assert not moments["zeros"].any()


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_weights_are_rounded_to_the_type_of_the_settings(peer):
    weights = real_chain()[1].weights
    for settings in peer.space:
        dtype = settings.dtype if peer is BITSNAP else settings.weights
        decoded, _ = through(peer, Checkpoint(weights), None, settings)
        assert_same(decoded, Checkpoint({n: t.to(getattr(torch, dtype)).float() for n, t in weights.items()}))


def test_weights_too_large_for_a_type_are_not_rounded():
    assert rounded(torch.tensor([1e5, 1.0]), "float16").dtype == torch.float32
    assert rounded(torch.tensor([1e4, 1.0]), "float16").dtype == torch.float16
    assert rounded(torch.tensor([1.0]).to(torch.bfloat16), "float16").dtype == torch.bfloat16


def test_bitsnap_stores_a_bit_for_each_weight_that_has_not_changed():
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(100_000, generator=generator)
    now = before.clone()
    changed = torch.randperm(100_000, generator=generator)[:1000]
    now[changed] *= 1.5
    decoded, data = through(BITSNAP, Checkpoint({"w": now}), Known(Checkpoint({"w": before})))
    assert torch.equal(decoded.weights["w"], now.to(torch.bfloat16).float())
    assert len(data) < 100_000 / 8 + 2 * 1000 + 500
    kept = rounded(now, "bfloat16")
    assert torch.equal(bitsnap._changes(kept, before)["values"], kept[changed.sort().values])
    assert "mask" not in bitsnap._changes(kept, torch.zeros(100_000))  # all have changed
    unchanged = len(through(BITSNAP, Checkpoint({"w": before}), Known(Checkpoint({"w": before})))[1])
    assert unchanged < 500


def test_clusters_have_the_same_number_of_values_and_256_levels_each(moments):
    for group in (moments.first, moments.second):
        values = group["w"].reshape(-1).numpy()
        found = clustered(values)
        labels = bitsnap.unpack(found["labels"].numpy().tobytes(), 4, values.size)
        assert np.array_equal(np.bincount(labels, minlength=16), [125] * 16)
        for label, (low, high) in enumerate(found["ranges"].numpy()):
            assert low == values[labels == label].min()
            assert high == values[labels == label].max()
            levels = found["levels"].numpy()[labels == label]
            assert levels.min() == 0
            assert levels.max() == 255
        decoded = bitsnap._moment(found, {"shape": [20, 100], "dtype": "float32"}).reshape(-1).numpy()
        steps = (found["ranges"][:, 1] - found["ranges"][:, 0]).numpy() / 255
        assert (np.abs(decoded - values) <= 0.501 * steps[labels]).all()


def test_repeated_values_leave_clusters_empty():
    values = np.repeat(np.float32([0, 0, 0, 1e-9, 2.5]), 100)
    decoded = bitsnap._moment(clustered(values), {"shape": [500], "dtype": "float32"})
    assert np.array_equal(decoded.numpy(), values)


@pytest.mark.parametrize(("peer", "bits"), STAGES, ids=["O1", "O2"])
def test_paddlenlp_keeps_its_bounds(moments, peer, bits):
    decoded, _ = through(peer, moments)
    columns = 100 if bits == 8 else 32
    for start in range(0, 100, columns):
        group = slice(start, start + columns)
        first, second = moments.first["w"][:, group], moments.second["w"][:, group]
        step = first.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        assert ((decoded.first["w"][:, group] - first).abs() <= 0.501 * step).all()
        ratio, found = (1 / (v.sqrt() + 1e-8) for v in (second, decoded.second["w"][:, group]))
        step = (ratio.amax(1, keepdim=True) - ratio.amin(1, keepdim=True)) / (2**bits - 1)
        assert ((found - ratio).abs() <= 0.505 * step).all()


def test_o2_leaves_vectors_and_both_leave_first_moments_without_a_second():
    chain = real_chain()[1]
    decoded = through(O2, chain)[0]
    assert torch.equal(decoded.second["linear.bias"], chain.second["linear.bias"])
    assert not torch.equal(decoded.second["linear.weight"], chain.second["linear.weight"])
    assert not torch.equal(through(O1, chain)[0].second["linear.bias"], chain.second["linear.bias"])
    momentum = Checkpoint(chain.weights, chain.first)
    for peer in (O1, O2):
        assert_same(through(peer, momentum, None, peer.space[-1])[0], momentum)


def test_moments_take_the_bits_that_are_published(moments):
    values = moments.first["w"].numel()
    found = clustered(moments.first["w"].reshape(-1).numpy())
    assert found["labels"].nbytes + found["levels"].nbytes == values * 12 / 8
    for bits, groups in ((8, 1), (4, 4)):
        first, second = (paddlenlp._rows(group["w"]) for group in (moments.first, moments.second))
        found = paddlenlp.quantize(first, second, bits)
        assert found["first"].nbytes == found["second"].nbytes == values * bits / 8
        assert found["largest"].shape == found["low"].shape == found["high"].shape == (20, groups)
