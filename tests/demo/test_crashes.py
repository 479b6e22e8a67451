"""The trainings with crashes of the benchmarks: every method resumes from the values that its own bytes decode to."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from checkpointers import METHODS, Theirs, checkpoint_of
from crashes import Settings, Training, spread, train
from peers.excp import EXCP
from workloads import WORKLOADS, Uninterrupted, Workload

DATA, STEPS = Path("nowhere"), 12


def tiny(_data, _cache, steps, seed):
    """A small network that learns a regression; with batch norm, so that there are buffers."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 40), torch.nn.BatchNorm1d(40), torch.nn.ReLU(), torch.nn.Linear(40, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    truth = torch.randn(12, 3, generator=torch.Generator().manual_seed(9))
    held_out = torch.randn(200, 12, generator=torch.Generator().manual_seed(8))

    def next_loss():
        x = torch.randn(32, 12, generator=generator)
        return torch.nn.functional.mse_loss(model(x), x @ truth)

    @torch.no_grad()
    def loss(net):
        net.eval()
        return float(torch.nn.functional.mse_loss(net(held_out), held_out @ truth))

    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
    return Workload(model, (optimizer,), (scheduler,), generator, next_loss, loss, loss, False, loss)


@pytest.fixture(autouse=True)
def with_tiny(monkeypatch):
    monkeypatch.setitem(WORKLOADS, "tiny", tiny)


def settings(restores=2, limit=0.01):
    return Settings("tiny", limit, restores, steps=STEPS, every=3, lost=1, seeds=1)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_stores_every_checkpoint_and_training_resumes_from_them(method, tmp_path):
    told = []
    found = train(method, settings(), DATA, tmp_path, told.append)
    assert [saved.step for saved in found.saved] == [3, 6, 9, 12]
    assert told == list(range(1, STEPS + 2 + 1))  # two crashes, one step lost by each
    assert found.state > (0.9 if method == "BitSnap" else 1)  # its ranges of clusters outweigh so few values
    assert found.worst <= 0.01 or found.failed
    assert Training.from_json(json.loads(json.dumps(asdict(found)))) == found


def test_saving_checkpoints_does_not_change_a_training_without_crashes(tmp_path):
    finals = {train(method, settings(0), DATA, tmp_path, lambda _: None).final for method in ("ExCP", "dynaquant")}
    work = tiny(DATA, tmp_path, STEPS, 0)
    for _ in range(STEPS):
        work.train_step()
    assert finals == {work.final_quality(work.model)}


def test_a_peer_restores_the_whole_state_from_its_own_bytes():
    work = tiny(DATA, DATA, STEPS, 0)
    checkpoints = Theirs(EXCP, 0.05)
    assert checkpoints.attach(work) == 0
    for _ in range(4):
        work.train_step()
    saved = checkpoints.save(4)
    fresh = tiny(DATA, DATA, STEPS, 0)
    assert checkpoints.attach(fresh) == 4
    restored, trained = checkpoint_of(fresh), checkpoint_of(work)
    assert all(torch.equal(restored.others[name], tensor) for name, tensor in trained.others.items())
    assert any(not torch.equal(restored.weights[name], tensor) for name, tensor in trained.weights.items())
    worse = fresh.search_loss(fresh.model) / work.search_loss(work.model) - 1
    assert worse == pytest.approx(saved.degradation, abs=1e-6)
    assert all((restored.second[name] == 0).any() for name in ("0.weight",))  # ExCP prunes moments
    assert fresh.schedulers[0].state_dict() == work.schedulers[0].state_dict()
    assert torch.equal(fresh.generator.get_state(), work.generator.get_state())


def test_a_peer_stores_its_finest_candidate_if_none_is_within_the_limit():
    work = tiny(DATA, DATA, STEPS, 0)
    checkpoints = Theirs(replace(EXCP, space=EXCP.space[:2]), -1.0)
    checkpoints.attach(work)
    work.train_step()
    saved = checkpoints.save(1)
    assert saved.how == str(EXCP.space[1])
    assert saved.evaluations == 2
    assert saved.degradation > -1.0


def test_spread_is_the_relative_distance_between_seeds():
    ends = [Uninterrupted({}, final, 0, 0) for final in (0.5, 0.52, 0.48)]
    assert spread(ends) == pytest.approx(0.08)
