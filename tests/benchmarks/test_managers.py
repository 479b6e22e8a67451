"""Asynchronous managers that benchmarks compare with restore what they have saved, while training goes on."""

import pytest
import torch
from peers.managers import MANAGERS
from synthetic import adam_state, advance, named_tensors


@pytest.mark.parametrize("name", MANAGERS)
@pytest.mark.parametrize("step", [2, 1])
def test_managers_restore_a_whole_adam_state_as_it_was_when_the_save_returned(name, step, tmp_path):
    manager = MANAGERS[name]
    if not manager.installed:
        pytest.skip(f"{manager.package} is not installed")
    generator = torch.Generator().manual_seed(0)
    model, optimizer = adam_state(300_000, generator)
    session = manager.open(tmp_path, model, optimizer, 1)
    saved = {}
    for now in (1, 2):
        saved[now] = {name: tensor.clone() for name, tensor in named_tensors(model, optimizer).items()}
        wait = session.save(now)
        advance(optimizer, generator)
        wait()
    session.close()
    for tensor in named_tensors(model, optimizer).values():
        tensor.zero_()
    session.restore(step)
    restored = named_tensors(model, optimizer)
    assert restored.keys() == saved[step].keys()
    assert all(torch.equal(restored[name], tensor) for name, tensor in saved[step].items())
