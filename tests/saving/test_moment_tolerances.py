"""How coarse first moments may be, by interval, optimizer and preset."""

import math

import pytest
import torch
from torch import nn

import dynaquant as dq
from dynaquant.engine.forms.units import ScaledMoment
from dynaquant.engine.shards import WHOLE
from dynaquant.saving.moment_tolerances import (
    FIRST_BESIDE_EXACT,
    SECOND_BESIDE_EXACT,
    MomentTolerances,
    bounded_by_weights,
    by_unused_rows,
    tolerances_of,
    weights_of,
)
from dynaquant.saving.presets import DROPPED, PRESETS
from dynaquant.store.run import Run
from dynaquant.training.collect import parameter_names
from dynaquant.training.first_moments import windows_of

FINEST, COARSEST = 0.25, 1.4
OF_SGD = 0.5


def first_tolerances(objects, preset, interval, corrected):
    return tolerances_of(windows_of(objects, parameter_names(objects), corrected), preset, interval)


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
        FINEST,
        FINEST,
        COARSEST,
        COARSEST,
        DROPPED,
    ]
    assert [tolerance(interval, "small") for interval in (24, 25)] == [COARSEST, DROPPED]


def test_kept_moments_are_the_coarser_the_further_checkpoints_are_apart():
    assert [tolerance(interval) for interval in (10, 40, 120)] == pytest.approx(
        [math.sqrt(n / 80) for n in (10, 40, 120)]
    )
    assert tolerance(100, "high") == pytest.approx(math.sqrt(0.5))
    assert tolerance(20, "high") == pytest.approx(math.sqrt(0.1))


def test_moments_of_embeddings_are_finer_unless_another_layer_uses_them():
    model = nn.ModuleDict({"table": nn.Embedding(9, 4), "tied": nn.Embedding(9, 4), "head": nn.Linear(4, 9)})
    model["head"].weight = model["tied"].weight
    objects = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    found = first_tolerances(objects, PRESETS["balanced"], 120, True)
    shares = {name.split(".")[3]: tolerance / math.sqrt(120 / 80) for name, tolerance in found.items()}
    assert shares == pytest.approx({"table": 0.5, "tied": 1, "head": 1})


@pytest.mark.parametrize("used", [True, False])
def test_moments_of_an_embedding_whose_rows_are_all_in_use_are_as_those_of_other_matrices(used):
    torch.manual_seed(0)
    model = nn.Embedding(40, 4)
    objects = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    for _ in range(80):
        objects["optimizer"].zero_grad()
        model(torch.arange(40 if used else 36)).square().sum().backward()
        objects["optimizer"].step()
    state = {
        f"optimizer.state.model.weight.{key}": value for key, value in objects["optimizer"].state[model.weight].items()
    }
    windows = windows_of(objects, parameter_names(objects), True)
    (window,) = by_unused_rows(windows, state, WHOLE).values()
    assert [each.by_row for each in windows.values()] == [True]
    assert window.by_row is not used
    assert by_unused_rows(windows, {}, WHOLE) == windows  # before the first step


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
    assert (of_second < 0.04) == (search == "lossless")
    assert (of_first < 0.4) == (search == "lossless")


def test_moments_that_are_dropped_are_dropped_beside_exact_weights_too():
    finer = MomentTolerances(DROPPED, 0.2, {"a": DROPPED, "b": 0.3, "c": 1.4}).beside_exact_weights()
    assert finer.first == DROPPED
    assert finer.firsts == {"a": DROPPED, "b": 0.3, "c": FIRST_BESIDE_EXACT}
    assert finer.second == SECOND_BESIDE_EXACT


def test_noise_in_the_momentum_of_sgd_displaces_no_weight_further_than_a_grid_may():
    def tolerance_with(lr, momentum=0.9, size=1.0):
        torch.manual_seed(0)
        weight = nn.Parameter(0.05 * torch.randn(64, 64))
        model = nn.ParameterDict({"w": weight})
        optimizer = torch.optim.SGD(model.parameters(), lr, momentum=momentum)
        objects = {"model": model, "optimizer": optimizer}
        tensors = {"model.w": weight.detach(), "optimizer.state.model.w.momentum_buffer": size * torch.randn(64, 64)}
        windows, preset = windows_of(objects, parameter_names(objects), True), PRESETS["balanced"]
        tolerances, weights = tolerances_of(windows, preset, 10), weights_of(windows)
        found = bounded_by_weights(tolerances, windows, weights, tensors, preset.step_limits, WHOLE)
        return found["optimizer.state.model.w.momentum_buffer"]

    assert tolerance_with(1e-4) == OF_SGD
    step = 0.05 * PRESETS["balanced"].step_limits.moved
    wanted = 0.25 * step / math.sqrt(12) / (0.1 / (1 - 0.9))
    assert tolerance_with(0.1) == pytest.approx(wanted, rel=0.1)
    assert tolerance_with(0.1, size=0.1) == pytest.approx(10 * wanted, rel=0.1)
    assert tolerance_with(0.1, momentum=0.8) == pytest.approx(2 * wanted, rel=0.1)


def test_an_early_restore_of_sgd_does_not_ruin_a_deep_linear_network(tmp_path):
    """Three small matrices learn a product. Early on, the momentum moves them by as much as they are large."""
    torch.manual_seed(1)
    target = torch.randn(32, 6) @ torch.diag(torch.tensor([4.0, 3, 2, 1.5, 1, 0.7])) @ torch.randn(6, 16) / 8

    def new():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in ((32, 64), (64, 64), (64, 16))))
        for layer in model:
            nn.init.normal_(layer.weight, std=0.02)
        return model, torch.optim.SGD(model.parameters(), 0.04, momentum=0.9)

    def train(model, optimizer, begin, end):
        for step in range(begin, end):
            inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (model(inputs) - inputs @ target).square().mean().backward()
            optimizer.step()

    def loss(model):
        with torch.no_grad():
            return float((model(torch.eye(32)) - target).square().mean())

    undisturbed, optimizer = new()
    train(undisturbed, optimizer, 0, 800)
    model, optimizer = new()
    with dq.Checkpointer(tmp_path, model, optimizer, every=40) as ckpt:
        train(model, optimizer, 0, 40)
        ckpt.save(40).result()
    model, optimizer = new()
    with dq.Checkpointer(tmp_path, model, optimizer, every=40) as ckpt:
        assert ckpt.restore() == 40
        train(model, optimizer, 40, 800)
    assert loss(model) < 1.5 * loss(undisturbed)
