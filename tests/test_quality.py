"""Quality of decoded weights: measured on the user's metric, and no trace of it left on training."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from dynaquant.search.quality import measure


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(16) % 3


def loss(model):
    return F.cross_entropy(model(INPUTS), TARGETS).item()


def evaluation_loss(model):
    model.eval()
    return loss(model)


def zeros(model):
    return {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}


def snapshot(model):
    """Everything a measurement must leave alone: which objects the tensors are, their values, modes, and randomness."""
    return (
        {name: (id(p), p.requires_grad, p.grad, p.detach().clone()) for name, p in model.named_parameters()},
        {name: (id(b), b.clone()) for name, b in model.named_buffers()},
        [module.training for module in model.modules()],
        (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
    )


def check_same(before, after):
    for a, b in zip(before[:2], after[:2], strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name][:-1] == b[name][:-1]
            assert torch.equal(a[name][-1], b[name][-1])
    assert before[2:] == after[2:]


def meddle(model):
    """An evaluation that changes all there is to change."""
    score = loss(model.train())  # moves the statistics of the batch norm, draws for dropout
    model[1].running_mean.fill_(7.0)
    model[1].running_var = torch.full((8,), 3.0)
    model[0].eval()
    random.random()
    np.random.rand()
    return score


def fail(model):
    meddle(model)
    raise ZeroDivisionError


def test_the_model_and_the_generators_are_as_before():
    model = model_of()
    model[3].eval()
    model[0].weight.requires_grad_(False)
    before = snapshot(model)
    measure(model, zeros(model), meddle, False)
    check_same(before, snapshot(model))


def test_the_model_and_the_generators_are_as_before_when_evaluating_fails():
    model = model_of()
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError):
        measure(model, zeros(model), fail, False)
    check_same(before, snapshot(model))


def test_failing_on_the_restored_weights_leaves_no_trace_either():
    model = model_of()
    before = snapshot(model)

    def fail_on_zeros(model):
        return loss(model) if model[0].weight.any() else fail(model)

    with pytest.raises(ZeroDivisionError):
        measure(model, zeros(model), fail_on_zeros, False)
    check_same(before, snapshot(model))


def test_training_takes_the_same_steps_with_and_without_measurements():
    def weights(measured):
        model = model_of()
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(model(INPUTS + torch.randn_like(INPUTS)), TARGETS).backward()
            if measured:
                measure(model, zeros(model), meddle, False)
            optimizer.step()
            if measured:
                measure(model, {"0.weight": torch.ones(8, 4)}, evaluation_loss, True)
        return [tensor.clone() for tensor in model.state_dict().values()]

    assert all(map(torch.equal, weights(measured=True), weights(measured=False)))


def test_the_two_scores_are_those_of_the_model_and_of_the_model_with_the_values():
    model = model_of()
    other = copy.deepcopy(model)
    values = {"0.weight": torch.randn(8, 4), "3.weight": torch.randn(3, 8)}
    other.load_state_dict(values, strict=False)
    quality = measure(model, values, evaluation_loss, False)
    assert quality.original == evaluation_loss(model)
    assert quality.restored == evaluation_loss(other)
    assert quality.degradation == (quality.restored - quality.original) / quality.original


def test_both_scores_see_the_same_random_numbers_and_statistics():
    model = model_of()
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert measure(model, own, meddle, False).degradation == 0
    assert measure(model, {}, lambda _: random.random() + np.random.rand(), False).degradation == 0


def test_a_tied_weight_is_replaced_wherever_it_is_used():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    seen = []

    def look(model):
        assert model[0].weight is model[1].weight
        seen.append(float(model(torch.arange(6)).sum()))
        return 1.0

    measure(model, {"0.weight": torch.ones(6, 4)}, look, False)
    assert seen[1] == 6 * 6 * 4
    assert seen[0] != seen[1]


@pytest.mark.parametrize("make", [nn.RNN, nn.LSTM, nn.GRU])
def test_the_weights_of_recurrent_layers_are_replaced(make):
    layer = make(4, 5)
    values = zeros(layer)
    other = copy.deepcopy(layer)
    other.load_state_dict(values)

    def size(layer):
        return layer(INPUTS)[0].abs().sum().item()

    quality = measure(layer, values, size, True)
    assert (quality.original, quality.restored) == (size(layer), size(other))
    assert quality.original != quality.restored


def test_a_module_that_is_used_twice_is_replaced_and_put_back_once():
    layer = nn.Linear(3, 3, bias=False)
    model = nn.Sequential(layer, layer)
    before = snapshot(model)
    quality = measure(model, {"0.weight": 2 * torch.eye(3)}, lambda m: float(m(torch.ones(3)).sum()), False)
    assert quality.restored == 12
    check_same(before, snapshot(model))


def test_a_buffer_that_two_modules_share_stays_shared_while_evaluating():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model[1].running_mean = model[0].running_mean

    def look(model):
        return float(model[0].running_mean is model[1].running_mean)

    assert measure(model, {}, look, True).original == 1
    assert model[0].running_mean is model[1].running_mean


def test_gradients_are_off_while_evaluating():
    model = model_of()
    measure(model, {}, lambda m: float(m(INPUTS).requires_grad or torch.is_grad_enabled()) or 1.0, False)
    assert measure(model, {}, lambda m: float(m(INPUTS).requires_grad), False).original == 0
    assert torch.is_grad_enabled()


def test_tensors_and_numpy_numbers_are_scores_too():
    for score in (torch.tensor(2.0), np.float32(2.0), 2):
        assert measure(model_of(), {}, lambda _, score=score: score, False).original == 2.0


def degradation(original, restored, higher_is_better=False):
    model = nn.Linear(1, 1, bias=False)
    values = {"weight": torch.full((1, 1), float("nan"))}
    scores = measure(model, values, lambda m: restored if m.weight.isnan().any() else original, higher_is_better)
    assert repr((scores.original, scores.restored)) == repr((original, restored))
    return scores.degradation


@pytest.mark.parametrize(
    ("original", "restored", "worse"),
    [(2.0, 2.5, 0.25), (2.0, 1.5, -0.25), (-2.0, -1.5, 0.25), (-2.0, -2.5, -0.25), (3.0, 3.0, 0.0), (4.0, 0.0, -1.0)],
)
def test_degradation_is_relative_and_positive_for_worse(original, restored, worse):
    assert degradation(original, restored) == worse
    assert degradation(original, restored, higher_is_better=True) == -worse


def test_degradation_from_zero_is_infinite_or_nothing():
    assert degradation(0.0, 0.0) == degradation(0.0, 0.0, higher_is_better=True) == 0
    assert degradation(0.0, 1e-9) == degradation(0.0, -1e-9, higher_is_better=True) == math.inf
    assert degradation(0.0, -1e-9) == -math.inf
    assert degradation(1.0, math.inf) == math.inf


@pytest.mark.parametrize(("original", "restored"), [(math.nan, 1.0), (1.0, math.nan), (0.0, math.nan), (math.nan,) * 2])
def test_degradation_of_nan_is_nan(original, restored):
    assert math.isnan(degradation(original, restored))
    assert math.isnan(degradation(original, restored, higher_is_better=True))
