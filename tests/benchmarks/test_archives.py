"""Archives that benchmarks compare with, and the synthetic state for their timing."""

import pytest
import torch
from peers.archives import PEERS
from synthetic import adam_state, advance, named_tensors


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # ZipNN's import
@pytest.mark.parametrize("name", PEERS)
def test_archives_restore_a_whole_adam_state_and_do_not_change_it(name, tmp_path):
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
