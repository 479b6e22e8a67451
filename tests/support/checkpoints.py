"""A chain of real checkpoints, for tests of other compressors."""

from functools import cache

import torch
from peers.peer import Checkpoint


@cache
def real_chain():
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
