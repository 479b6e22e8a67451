"""Peers with an error bound keep it for every value. Deduplication writes only what is new."""

import math
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from checkpoints import assert_same, real_chain
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from peers import block_dct, dedup, delta_dnn, zfp
from peers.block_dct import BLOCK_DCT
from peers.dedup import DEDUP, difference
from peers.delta_dnn import DELTA_DNN
from peers.peer import Checkpoint, Known
from peers.zfp import ZFP
from tiers import examples

NEEDS_ZFP = pytest.mark.skipif(find_spec("zfpy") is None, reason="zfpy is not installed")
SPREAD = [pytest.param(ZFP, marks=NEEDS_ZFP), BLOCK_DCT]
"""Peers with a bound in standard deviations."""
BOUNDED = [DELTA_DNN, *SPREAD]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ENDS = [0, 7, -1]
"""Positions in a search space."""


def named(peer):
    return peer.name


def through(peer, weights, setting, before=None):
    """Return the decoded weights. Checks that the encoder returned the same."""
    known = None if before is None else Known(Checkpoint(before))
    encoded = peer.encode(Checkpoint(weights), known, setting)
    decoded = peer.decode(encoded.pack(), known).checkpoint
    assert_same(decoded, encoded.known.checkpoint)
    assert decoded.weights.keys() == weights.keys()
    return decoded.weights


def assert_bounded(peer, weight, found, setting):
    """Check the bound; for Delta-DNN up to the rounding to the data type."""
    assert found.dtype == weight.dtype
    assert found.shape == weight.shape
    values, errors = weight.double(), (found.double() - weight.double()).abs()
    if peer is DELTA_DNN:
        assert (errors <= math.log1p(setting.bound) * 1.000001 + torch.finfo(weight.dtype).eps * values.abs()).all()
    elif weight.ndim < 2 or not weight.numel():
        assert torch.equal(found, weight)
    else:
        relative = setting.tolerance if peer is ZFP else setting.bound
        assert (errors <= relative * values.std(correction=0)).all()


def floats(limit):
    """Draw float32 tensors of any shape with small, large, equal or tiny values."""
    shapes = array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=12)
    numbers = st.floats(-limit, limit, width=32) | st.sampled_from([0.0, 1.0, 1e-35, -1e-40, 1e-6])
    return arrays(np.float32, shapes, elements=numbers).map(torch.from_numpy)


@pytest.mark.parametrize("peer", BOUNDED, ids=named)
@pytest.mark.parametrize("place", ENDS)
def test_the_bound_holds_for_every_value_of_real_weights(peer, place):
    before = None
    for checkpoint in real_chain():
        found = through(peer, checkpoint.weights, peer.space[place], before)
        for name, weight in checkpoint.weights.items():
            assert_bounded(peer, weight, found[name], peer.space[place])
        before = found


@pytest.mark.parametrize("peer", BOUNDED, ids=named)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("place", ENDS)
def test_the_bound_holds_for_any_shape_and_data_type(peer, dtype, place):
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 64), (5, 7), (1, 1), (3, 0), (0, 3), (), (9,), (4, 3, 3, 3), (2, 2, 2, 2, 3)]
    weights = {str(shape): (0.03 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes}
    weights["heavy tails"] = (torch.randn(50, 50, generator=generator) ** 5).to(dtype)
    weights["constant"] = torch.full((20, 20), 0.25, dtype=dtype)
    weights["transposed"] = weights["(5, 7)"].T
    found = through(peer, weights, peer.space[place])
    for name, weight in weights.items():
        assert_bounded(peer, weight, found[name], peer.space[place])
    assert torch.equal(found["constant"], weights["constant"]) or peer is DELTA_DNN


@pytest.mark.parametrize("peer", BOUNDED, ids=named)
@examples(50)
@given(weight=floats(2.0**100), place=st.sampled_from(ENDS))
def test_the_bound_holds_for_any_values(peer, weight, place):
    assert_bounded(peer, weight, through(peer, {"w": weight}, peer.space[place])["w"], peer.space[place])


@examples(30)
@given(data=st.data(), before=floats(16), place=st.sampled_from(ENDS))
def test_the_bound_of_delta_dnn_holds_for_any_reference(data, before, place):
    numbers = st.floats(-(2.0**60), 2.0**60, width=32)
    weight = torch.from_numpy(data.draw(arrays(np.float32, tuple(before.shape), elements=numbers)))
    setting = DELTA_DNN.space[place]
    assert_bounded(DELTA_DNN, weight, through(DELTA_DNN, {"w": weight}, setting, {"w": before})["w"], setting)


def test_delta_dnn_takes_whole_steps_from_the_reference():
    before = torch.tensor([1.0, -2.0, 0.5, 0.5])
    step = 2 * math.log(1.01)
    now = before + step * torch.tensor([0.49, 0.51, -3.2, 1000.0])
    found = through(DELTA_DNN, {"w": now}, delta_dnn.Settings(0.01), {"w": before})["w"]
    assert torch.equal(found, (before.double() + step * torch.tensor([0, 1, -3, 1000])).float())


def test_delta_dnn_stores_almost_nothing_if_nothing_has_changed():
    weights = {"w": torch.randn(300, 300, generator=torch.Generator().manual_seed(0))}
    encoded = DELTA_DNN.encode(Checkpoint(weights), Known(Checkpoint(weights)), DELTA_DNN.space[-1])
    assert len(encoded.pack()) < 400
    assert_same(encoded.known.checkpoint, Checkpoint(weights))


def test_delta_dnn_stores_values_too_far_away_exactly():
    weights = {"far": torch.tensor([1e20, 1e-5]), "near": torch.tensor([0.5]), "integers": torch.tensor([3, 4])}
    found = through(DELTA_DNN, weights, DELTA_DNN.space[0])
    assert torch.equal(found["far"], weights["far"])
    assert found["integers"].dtype == torch.int64


@NEEDS_ZFP
def test_zfp_stores_tensors_beyond_its_bound_exactly():
    tiny = 1e-35 * torch.randn(16, 16, generator=torch.Generator().manual_seed(0))  # overflows in ZFP
    assert torch.equal(through(ZFP, {"w": tiny}, ZFP.space[-1])["w"], tiny)
    weight = tiny * 1e30
    assert not torch.equal(through(ZFP, {"w": weight}, ZFP.space[-1])["w"], weight)


@NEEDS_ZFP
def test_zfp_is_smaller_for_smooth_matrices_than_for_noise():
    smooth = torch.outer(torch.linspace(0, 1, 128).sin(), torch.linspace(0, 2, 128).cos())
    noise = smooth.flatten()[torch.randperm(smooth.numel(), generator=torch.Generator().manual_seed(0))]
    sizes = [
        len(ZFP.encode(Checkpoint({"w": w}), None, zfp.Settings(0.1)).pack()) for w in (smooth, noise.view(128, 128))
    ]
    assert sizes[0] < 0.5 * sizes[1]


def test_the_dct_is_orthonormal_and_has_the_mean_first():
    matrix = block_dct._dct()
    assert np.allclose(matrix @ matrix.T, np.eye(64))
    assert np.allclose(matrix @ np.ones(64), [8] + [0] * 63)
    wave = np.cos(np.pi * 5 * (np.arange(64) + 0.5) / 64)
    assert np.argmax(np.abs(matrix @ wave)) == 5


def test_the_dct_peer_corrects_few_values_of_noise_and_none_of_a_smooth_tensor():
    noise = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    smooth = torch.linspace(-1, 1, 256 * 256).sin().reshape(256, 256)
    corrected = {}
    for name, weight in {"noise": noise, "smooth": smooth}.items():
        bound = 0.25 * float(weight.double().std(correction=0))
        entry = {"dtype": "float32", "shape": [256, 256], "bound": bound}
        corrected[name] = block_dct._coded(weight, entry)[1]["corrections"].numel()
    assert corrected["smooth"] == 0
    assert 0 < corrected["noise"] < 2e-3 * noise.numel()


def test_the_dct_peer_keeps_coefficients_outside_of_the_bins():
    weight = torch.zeros(64, 64)
    weight[7, 9] = 1.0
    setting = BLOCK_DCT.space[-1]
    assert_bounded(BLOCK_DCT, weight, through(BLOCK_DCT, {"w": weight}, setting)["w"], setting)
    entry = {"dtype": "float32", "shape": [64, 64], "bound": setting.bound * float(weight.double().std(correction=0))}
    assert block_dct._coded(weight, entry)[1]["outside"].numel() > 0


def state(**tensors):
    return Checkpoint({name: torch.tensor(list(values), dtype=torch.uint8) for name, values in tensors.items()})


def written(now, before, chunk=4):
    """Return the bytes of a file. Checks that it decodes to the state."""
    known = None if before is None else Known(before)
    data = DEDUP.encode(now, known, dedup.Settings(chunk)).pack()
    assert_same(DEDUP.decode(data, known).checkpoint, now)
    return len(data)


def test_an_unchanged_state_costs_only_its_description():
    checkpoint = Checkpoint({"w": torch.randn(100_000, generator=torch.Generator().manual_seed(0))})
    description = written(checkpoint, checkpoint, 512)
    assert description < 300
    assert written(checkpoint, None, 512) >= 400_000


def test_one_changed_value_costs_one_chunk():
    before = Checkpoint({"w": torch.randn(100_000, generator=torch.Generator().manual_seed(0))})
    now = Checkpoint({"w": before.weights["w"].clone()})
    now.weights["w"][54_321] += 1
    assert 512 <= written(now, before, 512) - written(before, before, 512) < 530


def test_equal_subtrees_are_not_listed_and_moved_ones_are_one_reference():
    chunks = [bytes([k] * 4) for k in range(16)]
    before = b"".join(chunks)
    halves_swapped = b"".join(chunks[8:] + chunks[:8])
    assert difference(before, before, 4) == dedup.Difference(16, [], [], [])
    assert difference(halves_swapped, before, 4) == dedup.Difference(16, [(2, 3), (3, 2)], [], [])
    one_new = before[:20] + b"new!" + before[24:]
    assert difference(one_new, before, 4) == dedup.Difference(16, [], [], [16 + 5])
    again = b"new!" + before[4:20] + b"new!" + before[24:]
    assert difference(again, before, 4) == dedup.Difference(16, [], [(16 + 5, 16)], [16])


def test_first_occurrences_are_listed_by_the_nodes_above_them():
    assert dedup._merged(range(16, 32)) == [1]
    assert dedup._merged([16, 17, 18, 19, 21]) == [4, 21]
    assert dedup._merged([]) == []


def test_states_of_other_lengths_decode_to_the_same_bytes():
    short, long = state(a=range(10)), state(a=range(10), b=range(50, 80))
    for now, before in ((short, long), (long, short), (state(), long), (long, state()), (state(a=[]), state(b=[1]))):
        written(now, before)
    twice = Checkpoint(short.weights, first=long.weights, second=short.weights, others={"n": torch.tensor(3)})
    written(twice, long)


@examples(200)
@given(
    now=st.lists(st.sampled_from([b"aaaa", b"bbbb", b"abcd", b"x"]), max_size=40),
    before=st.lists(st.sampled_from([b"aaaa", b"bbbb", b"abcd", b"yy"]), max_size=40),
    chunk=st.sampled_from([1, 3, 4, 16]),
)
def test_any_state_decodes_to_the_same_bytes_after_any_other_state(now, before, chunk):
    written(state(w=b"".join(now)), state(w=b"".join(before)), chunk)
