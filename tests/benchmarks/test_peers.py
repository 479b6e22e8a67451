"""Every peer's bytes decode to the checkpoint that its encoder returned, on a chain of real checkpoints."""

from importlib.util import find_spec

import numpy as np
import pytest
from checkpoints import assert_same, real_chain
from peers.bitsnap import BITSNAP
from peers.block_dct import BLOCK_DCT
from peers.body import exact, from_exact, from_huffman, huffman, pack, unpack
from peers.check_n_run import CHECK_N_RUN
from peers.dedup import DEDUP
from peers.delta_dnn import DELTA_DNN
from peers.excp import EXCP
from peers.gobo import GOBO
from peers.lc_checkpoint import LC_CHECKPOINT
from peers.paddlenlp import O1, O2
from peers.peer import Checkpoint, Known, smallest
from peers.qd_compressor import QD_COMPRESSOR
from peers.zfp import ZFP

NEEDS_ZFP = pytest.mark.skipif(find_spec("zfpy") is None, reason="zfpy is not installed")
QUANTIZING = [CHECK_N_RUN, QD_COMPRESSOR, GOBO, LC_CHECKPOINT, EXCP, BITSNAP, O1, O2]
LOSSY = [*QUANTIZING, DELTA_DNN, pytest.param(ZFP, marks=NEEDS_ZFP), BLOCK_DCT]
LOSSLESS = [DEDUP]
PEERS = [*LOSSY, *LOSSLESS]


def named(peer):
    return peer.name


def stored(peer, checkpoint):
    """Return those groups of a checkpoint that a peer stores."""
    groups = {group: tensors for group, tensors in checkpoint.groups().items() if group in peer.groups}
    return Checkpoint(**{"weights": {}, **groups})


@pytest.mark.parametrize("peer", PEERS, ids=named)
@pytest.mark.parametrize("place", [0, 0.5, 1], ids=["smallest", "middle", "finest"])
def test_bytes_decode_to_the_checkpoint_that_the_encoder_returned(peer, place):
    chain = real_chain()
    settings = peer.space[int(place * (len(peer.space) - 1))]
    encoding = decoding = Known(Checkpoint(chain[0].weights))
    for checkpoint in chain[1:]:
        encoded = peer.encode(checkpoint, encoding, settings)
        encoding, decoding = encoded.known, peer.decode(encoded.pack(), decoding)
        assert_same(decoding.checkpoint, encoding.checkpoint)
        assert decoding.levels.keys() == encoding.levels.keys()
        assert all(np.array_equal(decoding.levels[name], encoding.levels[name]) for name in decoding.levels)
        assert not decoding.errors
        for group, tensors in stored(peer, checkpoint).groups().items():
            found = decoding.checkpoint.groups()[group]
            assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in tensors.items()}


@pytest.mark.parametrize("peer", PEERS, ids=named)
def test_coding_continues_from_the_decoded_checkpoint_as_after_a_crash(peer):
    chain = real_chain()
    initial = Known(Checkpoint(chain[0].weights))
    settings = peer.space[len(peer.space) // 2]
    first = peer.decode(peer.encode(chain[1], initial, settings).pack(), initial)
    encoded = peer.encode(chain[2], first, settings)
    assert_same(peer.decode(encoded.pack(), first).checkpoint, encoded.known.checkpoint)


@pytest.mark.parametrize("peer", LOSSY, ids=named)
def test_the_space_goes_from_small_files_to_good_values(peer):
    chain = real_chain()
    known = Known(Checkpoint(chain[0].weights))
    ends = [peer.encode(chain[1], known, settings) for settings in (peer.space[0], peer.space[-1])]
    errors = [
        sum(float((tensor - found.known.checkpoint.weights[name]).square().sum()) for name, tensor in now.items())
        for found, now in zip(ends, [chain[1].weights] * 2, strict=True)
    ]
    assert len(ends[0].pack()) < len(ends[1].pack())
    assert errors[0] > errors[1]
    assert errors[1] < 1e-3 * sum(float(tensor.square().sum()) for tensor in chain[1].weights.values())


@pytest.mark.parametrize("peer", LOSSLESS, ids=named)
def test_lossless_peers_return_all_tensors_bit_for_bit(peer):
    chain = real_chain()
    known = None
    for checkpoint in chain:
        for settings in peer.space:
            encoded = peer.encode(checkpoint, known, settings)
            assert_same(peer.decode(encoded.pack(), known).checkpoint, checkpoint)
        known = encoded.known


@pytest.mark.parametrize("bits", range(1, 9))
def test_indices_are_packed_tightly(bits):
    indices = np.random.default_rng(0).integers(2**bits, size=1001).astype(np.uint8)
    packed = pack(indices, bits)
    assert len(packed) == -(-1001 * bits // 8)
    assert np.array_equal(unpack(packed, bits, 1001), indices)
    if bits == 4:
        assert list(pack(np.array([1, 15, 2], dtype=np.uint8), 4)) == [0x1F, 0x20]


def test_huffman_codes_decode_to_the_same_symbols():
    symbols = np.random.default_rng(0).geometric(0.3, size=10_000).clip(max=255).astype(np.uint8)
    coded = huffman(symbols, 256)
    assert len(coded) < 0.4 * symbols.size
    assert np.array_equal(from_huffman(coded, 256, symbols.size), symbols)


def test_exact_tensors_decode_to_the_same_values():
    tensors = {**real_chain()[0].first, **real_chain()[0].others}
    assert_same(Checkpoint(from_exact(exact(tensors))), Checkpoint(tensors))


@pytest.mark.parametrize("first", range(6))
def test_bisection_finds_the_smallest_settings_that_are_good_enough(first):
    asked = []

    def is_good(settings):
        asked.append(settings)
        return settings >= first

    assert smallest(range(5), is_good) == ((first, True) if first < 5 else (4, False))
    assert len(asked) <= 3
