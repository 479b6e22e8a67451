"""Averages of weights (EMA): found by themselves, small, close to what they were, exact on request."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dynaquant as dq
from dynaquant.engine.quantize.magnitude import magnitudes
from dynaquant.saving.presets import PRESETS

STEPS = (30, 60, 90)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 48))


def averaged(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)


def of_torch_ema(model):
    return pytest.importorskip("torch_ema").ExponentialMovingAverage(model.parameters(), decay=0.95)


def of_ema_pytorch(model):
    settings = {"beta": 0.95, "update_after_step": 0, "update_every": 1, "include_online_model": False}
    return pytest.importorskip("ema_pytorch").EMA(model, **settings)


def of_timm(model):
    return pytest.importorskip("timm.utils.model_ema").ModelEmaV3(model, decay=0.95)


class Mine(AveragedModel):
    """A subclass, as torchvision's reference trainings have one."""


class Copy(nn.Module):
    """A module that looks like an average, and may be anything."""

    def __init__(self, model):
        super().__init__()
        self.module = copy.deepcopy(model)


def update(average, model):
    if isinstance(average, AveragedModel):
        average.update_parameters(model)
    elif not isinstance(average, Copy):
        average.update()


def trained(folder, average_of=averaged, **options):
    """Train and save at STEPS. Return the average of the last step and the records."""
    model = network()
    average = average_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with dq.Checkpointer(folder, model, optimizer, extras={"ema": average}, **options) as ckpt:
        for step in range(1, STEPS[-1] + 1):
            inputs = torch.randn(32, 48)
            (model(inputs) - inputs.roll(1, 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            update(average, model)
            if step in STEPS:
                ckpt.save(step)
        return average, ckpt.records()


def tensors_of(average):
    if isinstance(average, nn.Module):
        return dict(average.named_parameters())
    return dict(enumerate(average.shadow_params))


def restored(folder, average_of=averaged, **options):
    model = network()
    average = average_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with dq.Checkpointer(folder, model, optimizer, extras={"ema": average}, **options) as ckpt:
        assert ckpt.restore() == STEPS[-1]
    return average


@pytest.mark.parametrize("average_of", [averaged, Mine, of_torch_ema, of_ema_pytorch, of_timm])
@pytest.mark.parametrize("quality", ["high", "balanced", "small"])
def test_an_average_is_small_and_within_its_error(tmp_path, average_of, quality):
    average, records = trained(tmp_path, average_of, quality=quality)
    found = tensors_of(restored(tmp_path, average_of, quality=quality))
    for name, tensor in tensors_of(average).items():
        allowed = PRESETS[quality].average_error * magnitudes({"w": tensor})["w"].small
        assert 0 < (found[name] - tensor).abs().max() <= allowed
    assert records[-1].roles["average"].ratio > {"high": 4, "balanced": 4.5, "small": 6}[quality]


@pytest.mark.parametrize("options", [{"quality": "lossless"}, {"roles": {"ema.*": "exact"}}])
def test_an_average_is_exact_without_loss_and_on_request(tmp_path, options):
    average, _ = trained(tmp_path, **options)
    found = restored(tmp_path, **options).state_dict()
    assert all(torch.equal(found[name], value) for name, value in average.state_dict().items())


def test_other_modules_are_exact_unless_a_role_says_otherwise(tmp_path):
    _, records = trained(tmp_path / "a", Copy)
    assert "average" not in records[-1].roles
    _, records = trained(tmp_path / "b", Copy, roles={"ema.*": "average"})
    assert records[-1].roles["average"].raw > 4 * 2 * 48 * 96


def test_a_pattern_applies_to_what_can_have_the_role(tmp_path):
    """An average has a counter beside its weights."""
    _, records = trained(tmp_path, roles={"ema.*": "weight"})
    assert "average" not in records[-1].roles
    assert records[-1].roles["weight"].raw >= 2 * 4 * 2 * 48 * 96


def feeling(weight, calls):
    """A metric that is the worse the further the first layer is from what it was when the save began."""
    exact = []

    def metric(average):
        calls.append(1)
        values = average.module[0].weight.detach().clone()
        if not exact:
            exact.append(values)
        return 1 + weight * float((values - exact[0]).square().mean().sqrt() / exact[0].square().mean().sqrt())

    return metric


def judged(folder, metric, **options):
    model = network()
    average = averaged(model)
    average.update_parameters(model)
    with dq.Checkpointer(folder, model, extras={"ema": average}, evaluate_average={"ema": metric}, **options) as ckpt:
        record = ckpt.save(1).result()
    return average.module[0].weight, dq.load(folder)["ema"]["module.0.weight"], record


@pytest.mark.parametrize(("weight", "halvings"), [(0.01, 0), (4.0, 2), (1e6, None)])
def test_an_average_is_as_fine_as_its_own_metric_needs(tmp_path, weight, halvings):
    calls = []
    weights, found, record = judged(tmp_path, feeling(weight, calls), quality=dq.Quality(max_degradation=0.01))
    error, allowed = (found - weights).abs().max(), magnitudes({"w": weights})["w"].small / 64
    assert record.equivalents == len(calls) == (6 if halvings is None else 2 + halvings)
    if halvings is None:
        assert error == 0
        assert record.averages == {}
    else:
        assert allowed / 2 ** (halvings + 1) < error <= allowed / 2**halvings
        assert record.averages["ema"].degradation <= 0.01
    assert bool(record.notes) == (halvings != 0)
    assert weights.grad is None


def test_an_average_whose_metric_fails_is_exact_and_the_record_says_so(tmp_path):
    def metric(_):
        raise ValueError("no data")

    weights, found, record = judged(tmp_path, metric)
    assert torch.equal(found, weights)
    assert "the average 'ema' is stored exactly: ValueError: no data" in record.notes


def test_a_loss_on_batches_judges_an_average_and_training_goes_on_undisturbed(tmp_path):
    def loss(average, batch):
        return average(batch).square().mean()

    batches = list(torch.randn(3, 32, 48, generator=torch.Generator().manual_seed(1)))
    average, records = trained(tmp_path / "a", evaluate_average={"ema": dq.LossOn(batches, loss)})
    assert 0 < abs(records[-1].averages["ema"].degradation) < 0.01
    assert average.training
    undisturbed, _ = trained(tmp_path / "b")
    assert all(torch.equal(a, b) for a, b in zip(average.parameters(), undisturbed.parameters(), strict=True))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"model": print}, ValueError, "'model', which is no extra that is a module"),
        ({"other": print}, ValueError, r"'other', which is no extra .* extras=\{'other': …\}"),
        (print, TypeError, "must be a dictionary of metrics by the name of the extra"),
        ({"ema": 3}, TypeError, r"evaluate_average\['ema'\] must be a function"),
    ],
)
def test_a_metric_of_what_is_no_average_is_refused(tmp_path, given, error, message):
    model = network()
    with pytest.raises(error, match=message):
        dq.Checkpointer(tmp_path, model, extras={"ema": averaged(model)}, evaluate_average=given)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e38])
def test_an_average_that_no_grid_can_hold_is_exact(tmp_path, value):
    def odd(model):
        average = averaged(model)
        average.update_parameters(model)
        average.update_parameters = lambda _: None  # keeps the odd values
        with torch.no_grad():
            average.module[0].weight.fill_(value) if value == 0.0 else average.module[0].weight[0].fill_(value)
        return average

    average, _ = trained(tmp_path, odd)
    found = restored(tmp_path).module[0].weight
    assert torch.equal(found.nan_to_num(), average.module[0].weight.nan_to_num())
