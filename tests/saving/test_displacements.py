"""How far a training has moved its weights since it began, and what that protects."""

import json
import math

import pytest
import torch
from torch import nn

import dynaquant as dq
from dynaquant.engine.shards import WHOLE
from dynaquant.saving.displacements import PER_OCTAVE, Displacements, to_json
from dynaquant.store.run import Run


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 4))


def moved(model, size):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape))


def test_the_displacement_is_that_since_the_beginning():
    model = model_of()
    displacements = Displacements.from_here(model)
    assert set(displacements.since_the_start(WHOLE).values()) == {0.0}
    moved(model, 0.01)
    found = displacements.since_the_start(WHOLE)
    assert list(found) == [f"model.{name}" for name, _ in model.named_parameters()]
    assert found["model.0.weight"] == pytest.approx(0.01, rel=0.1)
    assert displacements.since_the_start(WHOLE) == found


def test_a_restore_adds_what_was_moved_before_it():
    model = model_of()
    displacements = Displacements.from_here(model)
    moved(model, 0.03)
    stored = json.loads(json.dumps(to_json(displacements.since_the_start(WHOLE))))
    again = displacements.continued(stored)
    assert again.since_the_start(WHOLE)["model.0.weight"] == pytest.approx(0.03, rel=0.2)
    moved(model, 0.04)
    assert again.since_the_start(WHOLE)["model.0.weight"] == pytest.approx(0.05, rel=0.2)


@pytest.mark.parametrize("stored", [None, [], {"model.0.weight": "far"}, {"model.0.weight": 10**9}, {3: 4}])
def test_an_invalid_record_counts_as_nothing(stored):
    displacements = Displacements.from_here(model_of())
    displacements = displacements.continued(stored)
    assert set(displacements.since_the_start(WHOLE).values()) == {0.0}


def test_parameters_that_are_new_or_not_finite_count_as_unmoved():
    model = model_of()
    displacements = Displacements.from_here(model)
    model.add_module("new", nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
        model[2].weight[0] = math.inf
    found = displacements.since_the_start(WHOLE)
    assert found["model.new.weight"] == found["model.0.weight"] == found["model.2.weight"] == 0.0
    assert to_json(found) == {}


class Wrapped(torch.Tensor):
    """A subclass that cannot be read like a tensor, as those of packages with 4-bit weights."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if "reshape" in str(function):
            raise TypeError("a packed weight")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_parameters_that_cannot_be_quantized_are_left_alone():
    model = model_of()
    model.packed = nn.Parameter(torch.randn(4, 4).as_subclass(Wrapped), requires_grad=False)
    model.wide, model.twofold = (nn.Parameter(torch.randn(3, dtype=d)) for d in (torch.float64, torch.complex64))
    model.eighth = nn.Parameter(torch.randn(3).to(torch.float8_e4m3fn), requires_grad=False)
    found = Displacements.from_here(model).since_the_start(WHOLE)
    assert {"model.packed", "model.twofold", "model.eighth"}.isdisjoint(found)
    assert found["model.wide"] == 0.0


def relative_error(restored, weights):
    return float((restored - weights).square().sum() / weights.square().sum())


@pytest.mark.parametrize(
    "evaluate",
    [lambda _: math.log(2), lambda model: 1 + 1e-9 * float(model[0].weight.sum())],
    ids=["constant", "feels almost nothing"],
)
@pytest.mark.parametrize(("quality", "share"), [("high", 1 / 32), ("balanced", 1 / 16), ("small", 1 / 4)])
def test_pretrained_weights_survive_a_metric_that_feels_nothing(tmp_path, quality, share, evaluate):
    """A new head: the metric is at chance, and gradients of the weights below it are tiny."""
    model = model_of()
    pretrained = model[0].weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate, quality=quality) as ckpt:
        for _ in range(5):
            (1e-6 * model(torch.randn(8, 64)).square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        ckpt.save(5).result()
    restored = dq.load(tmp_path, 5)["model"]["0.weight"]
    assert relative_error(restored, pretrained) < 1.5 * share**2 / 12


def test_weights_may_be_loaded_after_the_constructor(tmp_path):
    """As in ``if ckpt.restore() is None: model.load_state_dict(pretrained)``."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        assert ckpt.restore() is None
        moved(model, 1.0)
        for step in (1, 2):
            model(torch.randn(8, 64)).square().sum().backward()
            optimizer.step()
            ckpt.save(step).result()
            stored = Run(tmp_path).file(step).header.record["displaced"]
            assert 2.0 ** (stored["model.0.weight"] / PER_OCTAVE) == pytest.approx(step * 1e-5, rel=0.2)


def test_rows_that_are_rarely_seen_survive(tmp_path):
    """A table of categories of which most are rare: their gradients are nearly zero, and so is what they count now."""
    torch.manual_seed(0)
    table = nn.Embedding(2000, 16)
    head = nn.Linear(16, 2)
    model = nn.ModuleDict({"table": table, "head": head})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

    def loss(ids):
        return nn.functional.cross_entropy(head(table(ids)), ids % 2)

    held_out = torch.randint(20, (256,))

    def evaluate(_):
        return float(loss(held_out))

    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate) as ckpt:
        for _ in range(60):
            ids = (2000 * torch.rand(64) ** 8).long()
            loss(ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        ckpt.save(60).result()
    restored = dq.load(tmp_path, 60)["model"]["table.weight"]
    rare = slice(1000, 2000)
    assert relative_error(restored[rare], table.weight.detach()[rare]) < 0.03


def test_a_resumed_training_knows_how_far_it_had_moved(tmp_path):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        moved(model, 0.05)
        ckpt.save(1).result()
    again = model_of()
    with dq.Checkpointer(tmp_path, again, torch.optim.SGD(again.parameters(), lr=0.1)) as ckpt:
        ckpt.restore()
        ckpt.save(2).result()
    first, second = (Run(tmp_path).file(step).header.record["displaced"] for step in (1, 2))
    assert first == second
    assert set(first) == {f"model.{name}" for name, _ in model.named_parameters()}
