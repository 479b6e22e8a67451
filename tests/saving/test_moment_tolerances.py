"""How coarse first moments may be, by interval, optimizer and preset."""

import math

import pytest
import torch
from torch import nn

import dynaquant as dq
from dynaquant.engine.forms.units import ScaledMoment
from dynaquant.saving.moment_tolerances import (
    FIRST_BESIDE_EXACT,
    SECOND_BESIDE_EXACT,
    MomentTolerances,
    tolerances_of,
)
from dynaquant.saving.presets import DROPPED, PRESETS
from dynaquant.store.run import Run
from dynaquant.training.first_moments import windows_of

COARSEST = 1.4
FINEST, FINEST_OF_HIGH = 0.5, 0.25
OF_SGD = 0.5


def first_tolerances(objects, preset, interval, corrected):
    return tolerances_of(windows_of(objects, corrected), preset, interval)


def tolerance(interval, quality="balanced", beta=0.9, optimizer=torch.optim.AdamW, corrected=True):
    model = nn.Linear(4, 3)
    options = {"momentum": beta} if optimizer is torch.optim.SGD else {"betas": (beta, 0.99)}
    objects = {"model": model, "optimizer": optimizer(model.parameters(), lr=0.1, **options)}
    found = first_tolerances(objects, PRESETS[quality], interval, corrected)
    key = "momentum_buffer" if optimizer is torch.optim.SGD else "exp_avg"
    assert found.keys() <= {f"optimizer.state.model.{name}.{key}" for name in ("weight", "bias")}
    assert len(set(found.values())) <= 1
    return next(iter(found.values()), None)


def test_moments_are_dropped_where_checkpoints_are_far_apart_and_kept_where_they_are_close():
    assert [tolerance(interval) for interval in (2, 157, 399, 400, 8000)] == [
        FINEST,
        COARSEST,
        COARSEST,
        DROPPED,
        DROPPED,
    ]
    assert [tolerance(interval, "high") for interval in (5, 12, 392, 999, 1000)] == [
        FINEST_OF_HIGH,
        FINEST_OF_HIGH,
        COARSEST,
        COARSEST,
        DROPPED,
    ]
    assert [tolerance(interval, "small") for interval in (1, 24, 25)] == [FINEST, COARSEST, DROPPED]


def test_kept_moments_are_the_coarser_the_further_checkpoints_are_apart():
    assert [tolerance(interval) for interval in (40, 80, 120)] == pytest.approx([math.sqrt(n) for n in (0.5, 1, 1.5)])
    assert tolerance(100, "high") == pytest.approx(math.sqrt(0.5))
    assert tolerance(20, "high") == pytest.approx(math.sqrt(0.1))


def test_moments_that_remember_longer_are_kept_for_longer_intervals():
    assert [tolerance(interval, beta=0.98) for interval in (1999, 2000)] == [COARSEST, DROPPED]


def test_without_correction_moments_are_kept_for_longer_intervals():
    assert [tolerance(interval, corrected=False) for interval in (799, 800)] == [COARSEST, DROPPED]


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize(("quality", "last"), [("high", 250), ("balanced", 100), ("small", 6)])
def test_momentum_of_sgd_is_kept_finely_where_checkpoints_are_close_and_dropped_elsewhere(quality, last, corrected):
    found = [tolerance(n, quality, corrected=corrected, optimizer=torch.optim.SGD) for n in (1, last, last + 1, 1000)]
    assert found == [OF_SGD, OF_SGD, DROPPED, DROPPED]


@pytest.mark.parametrize(("momentum", "wanted"), [(0.5, OF_SGD), (0.9, OF_SGD), (0.95, 0.354), (0.99, 0.158)])
def test_momentum_of_sgd_that_remembers_longer_is_kept_more_finely(momentum, wanted):
    model = nn.Linear(4, 3, bias=False)
    objects = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum)}
    assert list(first_tolerances(objects, PRESETS["balanced"], 10, True).values()) == [pytest.approx(wanted, abs=1e-3)]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
@pytest.mark.parametrize("interval", [None, 1, 1000])
def test_momentum_of_muon_is_kept_unless_size_comes_first(interval):
    model = nn.Linear(4, 3, bias=False)
    objects = {"model": model, "optimizer": torch.optim.Muon(model.parameters())}
    found = {}
    for quality in ("high", "balanced", "small"):
        ((name, found[quality]),) = first_tolerances(objects, PRESETS[quality], interval, True).items()
        assert name == "optimizer.state.model.weight.momentum_buffer"
    assert found["high"] < found["balanced"] < found["small"] == DROPPED


def test_unknown_intervals_and_optimizers_leave_it_to_the_preset():
    assert tolerance(None) is None
    model = nn.Linear(2, 2)
    for optimizer in (torch.optim.RMSprop, torch.optim.Adagrad):
        assert (
            first_tolerances({"model": model, "optimizer": optimizer(model.parameters())}, PRESETS["high"], 9, True)
            == {}
        )

    class Own(torch.optim.AdamW):
        pass

    own = {"model": model, "optimizer": Own(model.parameters())}
    found = [first_tolerances(own, PRESETS["balanced"], interval, True) for interval in (40, 799, 800)]
    assert [set(each.values()) == {DROPPED} for each in found] == [False, False, True]  # the update is not known
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert first_tolerances({"model": model, "optimizer": plain}, PRESETS["high"], 9, True) == {}


@pytest.mark.parametrize(("every", "kept"), [(5, True), (400, False)])
def test_a_checkpointer_keeps_first_moments_where_checkpoints_are_close(tmp_path, every, kept):
    model = nn.Linear(64, 48)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 64)
    with dq.Checkpointer(tmp_path, model, optimizer, every=every) as ckpt:
        for step in range(1, every + 1):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if ckpt.due(step):
                ckpt.save(step)
    run = Run(tmp_path)
    stored = run.load(run.file(every))["optimizer.state.model.weight.exp_avg"]
    assert isinstance(stored, ScaledMoment)
    assert bool(torch.any(dq.load(tmp_path)["optimizer"]["state"]["model.weight"]["exp_avg"] != 0)) == kept


@pytest.mark.parametrize(("limit", "search"), [(0.5, "scale"), (1e-9, "lossless")])
def test_beside_exact_weights_moments_are_finer(tmp_path, limit, search):
    torch.manual_seed(0)
    model = nn.Linear(64, 48)
    optimizer = torch.optim.AdamW(model.parameters())
    x, wanted = torch.randn(256, 64), torch.randn(256, 48)
    quality = dq.Quality("balanced", max_degradation=limit, training_budget=None)
    with dq.Checkpointer(
        tmp_path, model, optimizer, every=40, quality=quality, evaluate=lambda m: (m(x) - wanted).square().mean()
    ) as ckpt:
        for _ in range(40):
            batch = torch.randint(256, (16,))
            (model(x[batch]) - wanted[batch]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert ckpt.save(40).result().search == search
    exact = optimizer.state[model.weight]
    stored = dq.load(tmp_path)["optimizer"]["state"]["model.weight"]
    first, second = exact["exp_avg"], exact["exp_avg_sq"]
    of_second = (second / stored["exp_avg_sq"]).sqrt().sub(1).square().mean().sqrt()
    update, again = first / second.sqrt(), stored["exp_avg"] / stored["exp_avg_sq"].sqrt()
    of_first = (again - update).norm() / update.norm()
    assert (of_second < 0.05) == (search == "lossless")
    assert (of_first < 0.4) == (search == "lossless")


def test_moments_that_are_dropped_are_dropped_beside_exact_weights_too():
    finer = MomentTolerances(DROPPED, 0.2, {"a": DROPPED, "b": 0.3, "c": 1.4}).beside_exact_weights()
    assert finer.first == DROPPED
    assert finer.firsts == {"a": DROPPED, "b": 0.3, "c": FIRST_BESIDE_EXACT}
    assert finer.second == SECOND_BESIDE_EXACT
