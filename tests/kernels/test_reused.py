"""Memory of candidates: it is used again, but never while something else still uses it."""

import numpy as np
import torch

from dynaquant.engine.kernels.reused import ReusedMemory

SHAPE = torch.Size([30, 40])


def test_a_tensor_gets_the_memory_of_the_last_one_of_its_name():
    memory = ReusedMemory()
    tensor = memory.empty("a", SHAPE, torch.float32)
    assert (tensor.shape, tensor.dtype) == (SHAPE, torch.float32)
    address = tensor.data_ptr()
    other = memory.empty("b", SHAPE, torch.float32)
    del tensor
    assert memory.empty("a", SHAPE, torch.float32).data_ptr() == address
    assert memory.empty("a", torch.Size([1200]), torch.float32).data_ptr() == address
    assert other.data_ptr() != address


def test_memory_that_is_still_in_use_is_not_used_again():
    memory = ReusedMemory()
    for keep in (
        lambda t: t,
        lambda t: t[3:, 5],
        lambda t: torch.nn.Parameter(t, requires_grad=False),
        lambda t: t.detach().view(-1),
        lambda t: t.numpy(),
        lambda t: t.untyped_storage(),
    ):
        kept = keep(memory.empty("a", SHAPE, torch.float32).fill_(1.0))
        memory.empty("a", SHAPE, torch.float32).fill_(2.0)
        if isinstance(kept, torch.UntypedStorage):
            kept = torch.tensor([], dtype=torch.float32).set_(kept)
        assert bool(np.all(np.asarray(kept) == 1.0))


def test_another_size_or_dtype_gets_memory_that_fits():
    memory = ReusedMemory()
    for shape, dtype in ((SHAPE, torch.float32), (torch.Size([7]), torch.float32), (SHAPE, torch.bfloat16)):
        tensor = memory.empty("a", shape, dtype)
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        tensor.zero_()
    assert memory.empty("a", torch.Size([0, 3]), torch.float32).shape == (0, 3)
