"""Whether two stored tensors are equal, bit for bit."""

import pytest
import torch

from dynaquant.engine.forms.form import stored_equal


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 31])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_exact_tensors_are_equal_only_if_every_byte_is(size, offset):
    memory = torch.randint(0, 256, (size + offset,), dtype=torch.uint8)
    tensor = memory[offset:]  # may begin at any address
    other = tensor.clone()
    assert stored_equal(tensor, other)
    for i in range(size):
        other[i] ^= 1
        assert not stored_equal(tensor, other)
        other[i] ^= 1


def test_nans_are_compared_by_their_bits():
    tensor = torch.tensor([float("nan"), 0.0, -0.0])
    assert stored_equal(tensor, tensor.clone())
    assert not stored_equal(tensor, -tensor)
    assert not stored_equal(tensor, tensor.double())
