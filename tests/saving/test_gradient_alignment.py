"""Whether gradients are strong where weights are large, and what the estimate does where they are not."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaquant as dq
from dynaquant.engine.shards import WHOLE
from dynaquant.saving import training_source
from dynaquant.saving.gradient_alignment import NOTE, gradient_alignment
from dynaquant.saving.moment_tolerances import SECOND_BESIDE_EXACT

UNITS = {"equal": [1.0] * 8, "other": [30, 0.03, 10, 0.1, 1, 1, 30, 0.03]}


class Fit:
    """A regression on features of given units, whose first weights are in the inverse units."""

    def __init__(self, units: list[float]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        units = torch.tensor(units)
        with torch.no_grad():
            self.model[0].weight /= units
        first, *others = self.model.parameters()
        self.optimizer = torch.optim.Adam([{"params": [first]}, {"params": others}], lr=2e-3)
        self.units = units

    def loss(self, model: nn.Module, size: int) -> Tensor:
        features = torch.randn(size, 8)
        wanted = torch.sin(2 * features[:, :1]) * features[:, 1:2] + features[:, 2:3] * (features[:, 3:4] > 0)
        return (model(features * self.units) - wanted).square().mean()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss(self.model, 64).backward()
            self.optimizer.step()

    @torch.no_grad()
    def held_out(self, model: nn.Module) -> float:
        torch.manual_seed(1)
        return float(self.loss(model, 4096))


@pytest.mark.parametrize(("units", "aligned"), [("equal", True), ("other", False)])
def test_weights_of_features_in_other_units_are_not_aligned(units, aligned):
    fit = Fit(UNITS[units])
    fit.train(50)
    parameters = {f"model.{name}": parameter for name, parameter in fit.model.named_parameters()}
    found = gradient_alignment(parameters, [fit.optimizer], WHOLE)
    matrices = [p for p in fit.model.parameters() if p.ndim == 2 and p.shape[0] > 1]
    pairs = [(p.detach() ** 2, fit.optimizer.state[p]["exp_avg_sq"]) for p in matrices]
    together = sum(float((w * v).sum()) for w, v in pairs)
    assumed = sum(float(w.sum() * v.mean()) for w, v in pairs)
    assert (together / assumed > 0.5) == aligned
    assert found == (1.0 if aligned else pytest.approx(2 * together / assumed))


def test_a_mask_among_trained_values_does_not_count():
    torch.manual_seed(0)
    masked, other = (nn.Parameter(torch.randn(16, 16)) for _ in range(2))
    forbidden = torch.ones(16, 16).triu(1).bool()
    masked.data[forbidden] = -1e4
    optimizer = torch.optim.Adam([masked, other], lr=1e-3)
    for _ in range(5):
        masked.grad, other.grad = torch.randn(16, 16).masked_fill(forbidden, 0), torch.randn(16, 16)
        optimizer.step()
    assert gradient_alignment({"model.masked": masked, "model.other": other}, [optimizer], WHOLE) == 1.0


def test_without_usable_second_moments_all_counts_as_aligned():
    model = nn.Linear(4, 4)
    parameters = {"model.weight": model.weight, "model.bias": model.bias}
    assert gradient_alignment(parameters, [], WHOLE) == 1.0
    optimizer = torch.optim.Adam(model.parameters())
    assert gradient_alignment(parameters, [optimizer], WHOLE) == 1.0
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg_sq"][0] = math.inf
    assert gradient_alignment(parameters, [optimizer], WHOLE) == 1.0


@pytest.mark.parametrize("units", UNITS)
def test_a_checkpoint_without_a_metric_loses_little_in_any_units(tmp_path, units):
    fit = Fit(UNITS[units])
    with dq.Checkpointer(tmp_path, fit.model, fit.optimizer) as ckpt:
        fit.train(400)
        record = ckpt.save(400).result()
    assert (NOTE in record.notes) == (units == "other")
    restored = Fit(UNITS[units]).model
    dq.load_into(restored, tmp_path)
    assert fit.held_out(restored) < 1.02 * fit.held_out(fit.model)


def test_features_of_other_units_do_not_make_moments_finer(tmp_path):
    fit = Fit(UNITS["other"])
    fit.train(50)
    with dq.Checkpointer(tmp_path, fit.model, fit.optimizer, evaluate=fit.held_out, every=50) as ckpt:
        ckpt.save(50)
    second = fit.optimizer.state[fit.model[0].weight]["exp_avg_sq"]
    stored = dq.load(tmp_path)["optimizer"]["state"]["model.0.weight"]["exp_avg_sq"]
    change = ((second / stored).sqrt() - 1).square().mean().sqrt()
    assert SECOND_BESIDE_EXACT < float(change) <= 0.2


@pytest.mark.parametrize("sees", [True, False])
def test_it_is_measured_only_where_the_estimate_decides(tmp_path, monkeypatch, sees):
    measured = []

    def noted(*arguments: Any) -> float:
        measured.append(gradient_alignment(*arguments))
        return measured[-1]

    monkeypatch.setattr(training_source, "gradient_alignment", noted)
    fit = Fit(UNITS["other"])
    fit.train(50)
    with dq.Checkpointer(tmp_path, fit.model, fit.optimizer, evaluate=fit.held_out if sees else lambda _: 1.0) as ckpt:
        record = ckpt.save(50).result()
    assert len(measured) == (0 if sees else 1)
    assert (NOTE in record.notes) == (not sees)
