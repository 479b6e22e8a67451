"""What the benchmark of followers compares with returns the weights, bit for bit."""

import follow
import numpy as np
import pytest


@pytest.mark.parametrize("method", follow.PEERS)
@pytest.mark.parametrize("changed", [0, 1, 300, 4096])
def test_each_method_decodes_to_the_weights(method, changed):
    encode, decode = follow.PEERS[method]
    random = np.random.default_rng(0)
    parent = random.integers(0, 256, 8192, dtype=np.uint8)
    data = parent.copy()
    places = random.choice(4096, changed, replace=False)
    data.view(np.uint16)[places] += random.integers(1, 5, changed, dtype=np.uint16)
    frames = encode(data, parent)
    assert np.array_equal(decode(frames, parent), data)
    if changed < 4096:
        assert sum(map(len, frames)) < len(data) / 4
