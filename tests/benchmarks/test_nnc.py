"""NNCodec 2, in an environment of its own, as a peer."""

import pytest
import torch
from checkpoints import assert_same, real_chain
from peers import nnc
from peers.nnc import NNCODEC
from peers.peer import Checkpoint

pytestmark = pytest.mark.skipif(not nnc.installed(), reason="make benchmark-setup builds its environment")


def through(weights, qp):
    """Return the decoded weights and the bytes. Checks that the encoder returned the same."""
    encoded = NNCODEC.encode(Checkpoint(weights), None, nnc.Settings(qp))
    data = encoded.pack()
    decoded = NNCODEC.decode(data, None).checkpoint
    assert_same(decoded, encoded.known.checkpoint)
    assert decoded.weights.keys() == weights.keys()
    return decoded.weights, data


def test_four_less_of_the_parameter_halve_the_errors():
    weight = real_chain()[1].weights["linear.weight"]
    largest, sizes = [], []
    for qp in (-16, -20, -24):
        found, data = through({"w": weight}, qp)
        largest.append(float((found["w"] - weight).abs().max()))
        sizes.append(len(data))
    assert largest[0] > 1.5 * largest[1] > 1.5**2 * largest[2]
    assert sizes[0] < sizes[1] < sizes[2]


def test_odd_tensors_keep_shape_and_dtype():
    weights = {
        "nothing": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "constant": torch.full((3, 4), 0.25),
        "convolution": torch.rand(4, 3, 2, 2, generator=torch.Generator().manual_seed(0)),
        "transposed": torch.linspace(-1, 1, 60).reshape(6, 10).T,
        "half": torch.linspace(-1, 1, 60).reshape(6, 10).to(torch.bfloat16),
        "integers": torch.arange(6).reshape(2, 3),
        "a name/with.signs": torch.linspace(-1, 1, 7),
    }
    found, _ = through(weights, -40)
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.allclose(found[name].double(), tensor.double(), atol=0.01)
    assert torch.equal(found["integers"], weights["integers"])


def test_without_weights_there_is_no_stream():
    through({}, -20)
