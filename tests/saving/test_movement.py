"""``every=Moved(…)``: a checkpoint is due once the weights have moved so far since the last one."""

import math

import pytest
import torch
from torch import nn
from training import model_of, train

import dynaquant as dq
from dynaquant.saving.movement import Movement
from dynaquant.saving.schedule import Schedule

MOST = 4096
SAMPLE = 16384


def movement_of(model, distance=0.02, mean_squares=None, interval=None):
    return Movement(dq.Moved(distance), {"model": model}).from_here(mean_squares or {}, interval)


def moved(before, model, mean_squares):
    """The measure as the docstring of Moved defines it, over all values."""
    change = sum(mean_squares[n] * (p - before[n]).double().square().sum() for n, p in model.named_parameters())
    size = sum(mean_squares[n] * p.double().square().sum() for n, p in model.named_parameters())
    return float((change / size).sqrt().detach())


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_training_saves_each_time_its_weights_have_moved_so_far(tmp_path):
    """The measure is checked against its definition at every save of a real training."""
    torch.manual_seed(0)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved = []
    with dq.Checkpointer(tmp_path, model, optimizer, every=dq.Moved(0.1)) as ckpt:
        before, mean_squares = values(model), None
        for step in range(1, 400):
            train(model, optimizer)
            if step == 1:
                before = values(model)  # as of the first call of due
            if ckpt.due(step):
                if mean_squares is not None:
                    assert 0.1 <= moved(before, model, mean_squares) < 0.115
                record = ckpt.save(step).result()
                assert record.interval == step - (saved[-1] if saved else 0)
                saved.append(step)
                before = values(model)
                mean_squares = {n: optimizer.state[p]["exp_avg_sq"].mean() for n, p in model.named_parameters()}
    assert len(saved) >= 4


def test_smaller_distances_give_more_checkpoints(tmp_path):
    counts = []
    for distance in (0.05, 0.1, 0.2):
        torch.manual_seed(0)
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        folder = tmp_path / str(distance)
        with dq.Checkpointer(folder, model, optimizer, every=dq.Moved(distance)) as ckpt:
            for step in range(1, 200):
                train(model, optimizer)
                if ckpt.due(step):
                    ckpt.save(step)
            counts.append(len(ckpt.records()))
    assert counts[0] > counts[1] > counts[2] >= 1


def test_after_a_restore_the_restored_weights_are_the_reference(tmp_path):
    torch.manual_seed(0)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with dq.Checkpointer(tmp_path, model, optimizer, every=dq.Moved(0.1)) as ckpt:
        train(model, optimizer, 30)
        ckpt.save(30)
        ckpt.wait()
        train(model, optimizer, 100)
        assert ckpt.due(131)  # without the restore, the weights are far away
        assert ckpt.restore() == 30
        assert not ckpt.due(31)
        steps = next(step for step in range(31, 300) if train(model, optimizer) or ckpt.due(step))
        assert steps > 33
    with dq.Checkpointer(tmp_path, model, optimizer, every=dq.Moved(0.1)) as ckpt:
        ckpt.restore()
        mean_squares = {n: optimizer.state[p]["exp_avg_sq"].mean() for n, p in model.named_parameters()}
        before = values(model)
        steps = next(step for step in range(31, 300) if train(model, optimizer) or ckpt.due(step))
        assert 0.1 <= moved(before, model, mean_squares) < 0.15
        assert ckpt.save(steps).result().interval == steps - 30


def test_the_sample_is_close_to_the_whole():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512, bias=False), nn.LayerNorm(512))
    mean_squares = {f"model.{n}": float(10 ** torch.randn(()).mul(2)) for n, _ in model.named_parameters()}
    watched, before = movement_of(model, mean_squares=mean_squares), values(model)
    assert watched.distance() == 0
    for p in model.parameters():
        p.data += 0.05 * torch.rand(()) * torch.randn_like(p)
    expected = moved(before, model, {name.removeprefix("model."): f for name, f in mean_squares.items()})
    assert watched.distance() == pytest.approx(expected, rel=0.1)


def test_the_sample_of_a_large_model_stays_small():
    model = nn.ModuleList([nn.Linear(700, 700) for _ in range(30)])
    sizes = [len(sampled) for sampled in movement_of(model)._reference.values.values()]
    assert sum(sizes) < 1.5 * SAMPLE
    assert max(sizes) <= MOST


def test_the_weights_are_read_at_few_steps(monkeypatch):
    """Checks lie where the distance should be reached: a handful in an interval, whatever its length."""
    model = nn.Linear(50, 50)
    original = model.weight.detach().clone()
    for interval in (None, 100, 1000, 2000):
        model.weight.data.copy_(original)
        watched = movement_of(model, interval=interval)
        looks = []
        look = watched.distance
        monkeypatch.setattr(watched, "distance", lambda look=look, looks=looks: (looks.append(1), look())[1])
        step = 0
        while True:
            step += 1
            model.weight.data.copy_(original * (1 + 2e-5 * step))
            if watched.reached(step):
                break
        assert 1000 <= step <= 1050
        assert len(looks) <= 20


def test_frozen_and_tied_weights():
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "frozen": nn.Linear(8, 8)})
    model["b"].weight = model["a"].weight
    model["frozen"].requires_grad_(False)
    watched = movement_of(model)
    assert len(watched._reference.places) == 3  # one weight, two biases
    model["frozen"].weight.data += 100
    assert watched.distance() == 0
    model["b"].weight.data *= 1.5
    assert watched.distance() > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    model = nn.Linear(32, 32, bias=False, dtype=dtype)
    watched = movement_of(model)
    model.weight.data *= 1.25
    assert watched.distance() == pytest.approx(0.2, rel=0.01)


def test_another_memory_format_has_the_same_movement():
    model = nn.Conv2d(16, 16, 3, bias=False).to(memory_format=torch.channels_last)
    watched = movement_of(model)
    model.weight.data *= 1.25
    assert watched.distance() == pytest.approx(0.2)


def test_new_and_reshaped_parameters_do_not_count():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    watched = movement_of(model)
    model.append(nn.Linear(8, 8))
    model[1] = nn.Linear(8, 8)
    model[0].bias = nn.Parameter(torch.ones(3))
    assert watched.distance() == 0
    model[0].weight.data *= 1.25
    assert watched.distance() > 0


def test_values_that_are_not_finite_do_not_count(caplog):
    model = nn.Linear(8, 8, bias=False)
    watched = movement_of(model)
    model.weight.data *= 1.25
    model.weight.data[0] = math.nan
    assert watched.distance() == pytest.approx(0.2)
    model.weight.data[:] = math.inf
    assert math.isnan(watched.distance())
    assert not any(watched.reached(step) for step in range(1, 100))
    assert caplog.text.count("no weight has a finite value") == 1


def test_weights_that_were_zero_or_become_zero():
    model = nn.Linear(8, 8, bias=False)
    model.weight.data.zero_()
    watched = movement_of(model)
    assert watched.distance() == 0
    model.weight.data.fill_(1.0)
    assert watched.distance() == 1
    watched = movement_of(model)
    model.weight.data.zero_()
    assert watched.distance() == math.inf


def test_a_checkpoint_that_is_due_stays_due():
    model = nn.Linear(8, 8, bias=False)
    original = model.weight.detach().clone()
    watched = movement_of(model)
    model.weight.data *= 2
    assert watched.reached(1)
    model.weight.data.copy_(original)
    assert watched.reached(2)


def test_gradients_are_recorded_before_the_earliest_look():
    schedule = Schedule(dq.Moved(0.1), movement=movement_of(nn.Linear(2, 2)))
    assert schedule.interval is None
    assert schedule.soonest is None
    schedule.begin(100, interval=300)
    assert schedule.interval == 300
    assert schedule.soonest == 150
    schedule.begin(100, interval="?")
    assert schedule.interval == 300
