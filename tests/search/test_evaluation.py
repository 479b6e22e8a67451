"""Evaluating the user's metric on other weights: the right score, and no effect on training."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import dynaquant as dq
from dynaquant.errors import EvaluateError
from dynaquant.search.evaluation import degradation
from dynaquant.search.failures import raise_on_every_rank
from dynaquant.search.live_model import score


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
    """Returns all that an evaluation must not change: tensor objects and values, modes, random number generators."""
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


def change_everything(model):
    """An evaluation that changes all that it can change."""
    found = loss(model.train())  # updates the statistics of the batch norm, and draws for dropout
    model[1].running_mean.fill_(7.0)
    model[1].running_var = torch.full((8,), 3.0)
    model[0].eval()
    random.random()
    np.random.rand()
    return found


def fail(model):
    change_everything(model)
    raise ZeroDivisionError


def test_an_evaluation_leaves_model_and_generators_unchanged():
    model = model_of()
    model[3].eval()
    model[0].weight.requires_grad_(False)
    before = snapshot(model)
    for values in (zeros(model), {}):
        score(model, values, change_everything)
    check_same(before, snapshot(model))


def test_an_evaluation_that_fails_leaves_model_and_generators_unchanged():
    model = model_of()
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError):
        score(model, {}, fail)
    with pytest.raises(ZeroDivisionError):
        score(model, zeros(model), fail)
    check_same(before, snapshot(model))


def test_training_takes_the_same_steps_with_and_without_evaluations():
    def weights(evaluated):
        model = model_of()
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(model(INPUTS + torch.randn_like(INPUTS)), TARGETS).backward()
            if evaluated:
                score(model, zeros(model), change_everything)
            optimizer.step()
            if evaluated:
                score(model, {"0.weight": torch.ones(8, 4)}, evaluation_loss)
        return [tensor.clone() for tensor in model.state_dict().values()]

    assert all(map(torch.equal, weights(evaluated=True), weights(evaluated=False)))


def test_the_score_is_that_of_a_model_with_the_given_values():
    model = model_of()
    other = copy.deepcopy(model)
    values = {"0.weight": torch.randn(8, 4), "3.weight": torch.randn(3, 8)}
    other.load_state_dict(values, strict=False)
    with_values, without = score(model, values, evaluation_loss), score(model, {}, evaluation_loss)
    assert with_values == evaluation_loss(other)
    assert without == evaluation_loss(model)
    assert with_values != without


def test_all_scores_see_the_same_random_numbers_and_statistics():
    model = model_of()
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first = score(model, own, change_everything)
    assert score(model, zeros(model), change_everything) != first
    assert score(model, own, change_everything) == score(model, {}, change_everything) == first

    def draw(_):
        return random.random() + np.random.rand() + float(torch.rand(()))

    assert score(model, {}, draw) == score(model, {}, draw)


def test_a_tied_weight_is_replaced_wherever_it_is_used():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight

    def look(model):
        assert model[0].weight is model[1].weight
        return float(model(torch.arange(6)).sum())

    assert score(model, {"0.weight": torch.ones(6, 4)}, look) == 6 * 6 * 4
    assert score(model, {}, look) != 6 * 6 * 4
    assert model[0].weight is model[1].weight


@pytest.mark.parametrize("make", [nn.RNN, nn.LSTM, nn.GRU])
def test_the_weights_of_recurrent_layers_are_replaced(make):
    layer = make(4, 5)
    values = zeros(layer)
    other = copy.deepcopy(layer)
    other.load_state_dict(values)

    def size(layer):
        return layer(INPUTS)[0].abs().sum().item()

    assert score(layer, values, size) == size(other)
    assert score(layer, {}, size) == size(layer) != size(other)


def test_the_weights_of_a_module_that_is_used_twice_are_replaced_and_put_back_once():
    layer = nn.Linear(3, 3, bias=False)
    model = nn.Sequential(layer, layer)
    before = snapshot(model)
    assert score(model, {"0.weight": 2 * torch.eye(3)}, lambda m: float(m(torch.ones(3)).sum())) == 12
    check_same(before, snapshot(model))


def test_a_buffer_shared_by_two_modules_stays_shared_in_evaluate():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model[1].running_mean = model[0].running_mean

    def look(model):
        return float(model[0].running_mean is model[1].running_mean)

    assert score(model, {}, look) == 1
    assert model[0].running_mean is model[1].running_mean


def test_gradients_are_off_in_evaluate():
    model = model_of()
    assert score(model, {}, lambda m: float(m(INPUTS).requires_grad or torch.is_grad_enabled())) == 0
    assert torch.is_grad_enabled()


def backward(model):
    """Returns the norm of the loss's gradient with respect to the inputs. Also computes those of all weights."""
    model.requires_grad_(True)
    inputs = INPUTS.clone().requires_grad_()
    with torch.enable_grad():
        F.cross_entropy(model(inputs), TARGETS).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return float(inputs.grad.norm())


@pytest.mark.parametrize(
    "names", [[], ["0.weight"], ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]]
)
def test_a_backward_pass_in_evaluate_does_not_reach_the_gradients_of_training(names):
    model = model_of()
    model[0].weight.requires_grad_(False)
    model[1].weight.grad = torch.full((8,), 5.0)
    model[3].weight.grad = torch.randn(3, 8)
    before = snapshot(model)
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    assert score(model, {name: values for name, values in zeros(model).items() if name in names}, backward) >= 0
    check_same(before, snapshot(model))
    for name, parameter in model.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, gradients[name])


def test_attributes_of_parameters_and_buffers_are_there_in_evaluate():
    model = model_of()
    model[0].weight.width_mult, model[1].running_mean.unit = 8.0, "m"

    def evaluate(model):
        assert model[1].running_mean.unit == "m"
        return model[0].weight.width_mult

    assert score(model, zeros(model), evaluate) == 8.0


def test_tensors_that_consist_of_others_share_none_with_their_copies():
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(TwoTensor(torch.zeros(2, 2), torch.zeros(2, 2)))
    model.register_buffer("pair", TwoTensor(torch.zeros(2), torch.zeros(2)))
    own = [model.weight.a, model.weight.b, model.pair.a, model.pair.b]

    def evaluate(model):
        for each in (model.weight.a, model.weight.b, model.pair.a, model.pair.b):
            each.add_(1)
        return 0.0

    score(model, {}, evaluate)
    assert not any(bool(each.any()) for each in own)


def test_a_metric_may_differentiate_by_the_weights():
    model = model_of().eval()
    model[3].bias.requires_grad_(False)

    def adapted(model):
        with torch.enable_grad():
            fast = copy.deepcopy(model)
            optimizer = optim.SGD([each for each in fast.parameters() if each.requires_grad], 0.1)
            F.cross_entropy(fast(INPUTS), TARGETS).backward()
            optimizer.step()
        assert not fast[3].bias.requires_grad
        return loss(fast)

    before = snapshot(model)
    assert score(model, {}, adapted) == adapted(model) < loss(model)
    check_same(before, snapshot(model))


class Merging(nn.Linear):
    """Merges another matrix into its frozen weight when it is evaluated, as layers of loralib do."""

    def __init__(self):
        super().__init__(4, 4, bias=False)
        self.weight.requires_grad_(False)
        self.other = nn.Parameter(torch.ones(4, 4))
        self.merged = False

    def train(self, mode=True):
        if mode == self.merged:
            self.weight.data += -self.other if mode else self.other
            self.merged = not mode
        return super().train(mode)

    def forward(self, inputs):
        return super().forward(inputs) + (0 if self.merged else inputs @ self.other.T)


def test_layers_that_merge_weights_to_be_evaluated_train_on_as_before():
    torch.manual_seed(0)
    model = nn.Sequential(Merging(), nn.Linear(4, 3))
    before, wanted = snapshot(model), loss(model)
    metric = dq.LossOn([INPUTS], lambda model, inputs: F.cross_entropy(model(inputs), TARGETS))
    assert score(model, {}, metric) == pytest.approx(wanted)
    check_same(before, snapshot(model))
    assert not model[0].merged
    assert loss(model) == wanted


@pytest.mark.parametrize("puts_back", [True, False])
def test_a_metric_that_writes_to_the_weights_in_training_is_told_of(tmp_path, caplog, puts_back):
    model = model_of()
    own = model[0].weight

    def evaluate(model):
        with torch.no_grad():
            own.mul_(2)
            if puts_back:
                own.mul_(0.5)
        return evaluation_loss(model)

    with dq.Checkpointer(tmp_path, model, optim.AdamW(model.parameters()), evaluate=evaluate) as checkpointer:
        checkpointer.save(1).result()
    assert len([said for said in caplog.messages if said.startswith("evaluate writes to the weights in training")]) == 1


def test_parameters_and_buffers_that_evaluate_adds_or_removes_are_reset():
    model = model_of()
    before, state = snapshot(model), list(model.state_dict())

    def rebuild(model):
        model.register_buffer("seen", torch.zeros(3))
        model[1].register_buffer("calibration", torch.ones(8), persistent=False)
        model[0].register_parameter("scale", nn.Parameter(torch.ones(1)))
        del model[1].running_var
        model[3].bias = None
        return 1.0

    score(model, zeros(model), rebuild)
    check_same(before, snapshot(model))
    assert list(model.state_dict()) == state
    assert [name for name, _ in model.named_buffers()] == [f"1.{b}" for b in model[1]._buffers]
    with pytest.raises(AttributeError):
        model.seen  # noqa: B018


@pytest.mark.parametrize("number", [torch.tensor(2.0), torch.tensor([2.0]), np.float32(2.0), np.array([2.0]), 2])
def test_tensors_and_numpy_numbers_are_scores_too(number):
    found = score(model_of(), {}, lambda _: number)
    assert (type(found), found) == (float, 2.0)


@pytest.mark.parametrize("no_number", ["bad", "0.123", b"0.123", None, torch.ones(2), np.ones(2), [1.0]], ids=str)
def test_a_result_that_is_not_a_number_is_an_error_that_shows_it(no_number):
    model = model_of()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"evaluate returned .*; it must return one number") as caught:
        score(model, {}, lambda _: no_number)
    assert repr(no_number) in str(caught.value)
    check_same(before, snapshot(model))


@pytest.mark.parametrize(
    ("original", "restored", "worse"),
    [(2.0, 2.5, 0.25), (2.0, 1.5, -0.25), (-2.0, -1.5, 0.25), (-2.0, -2.5, -0.25), (3.0, 3.0, 0.0), (4.0, 0.0, -1.0)],
)
def test_degradation_is_relative_and_positive_for_worse(original, restored, worse):
    assert degradation(original, restored, higher_is_better=False) == worse
    assert degradation(original, restored, higher_is_better=True) == -worse


def test_degradation_relative_to_zero_is_infinite_or_zero():
    assert degradation(0.0, 0.0, False) == degradation(0.0, 0.0, True) == 0
    assert degradation(0.0, 1e-9, False) == degradation(0.0, -1e-9, True) == math.inf
    assert degradation(0.0, -1e-9, False) == -math.inf
    assert degradation(1.0, math.inf, False) == math.inf


@pytest.mark.parametrize(("original", "restored"), [(math.nan, 1.0), (1.0, math.nan), (0.0, math.nan), (math.nan,) * 2])
def test_degradation_of_nan_is_nan(original, restored):
    assert math.isnan(degradation(original, restored, False))
    assert math.isnan(degradation(original, restored, True))


# LossOn


BATCHES = [(INPUTS[:4], TARGETS[:4]), (INPUTS[4:12], TARGETS[4:12]), (INPUTS[12:], TARGETS[12:])]


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def test_loss_on_returns_the_mean_loss_of_the_batches():
    model = model_of().eval()
    model[1].requires_grad_(False)  # so that it uses running statistics
    losses = [cross_entropy(model, batch).item() for batch in BATCHES]
    evaluate = dq.LossOn(BATCHES, cross_entropy)
    assert score(model, {}, evaluate) == pytest.approx(sum(losses) / 3, rel=1e-12)
    assert score(model, {}, evaluate) == score(model, {}, evaluate)
    assert score(model, zeros(model), evaluate) == pytest.approx(math.log(3))
    assert dq.LossOn(((1.0,), (4.0,)), lambda _, batch: batch[0])(model) == 2.5
    assert dq.LossOn([2.0], lambda _, batch: torch.tensor([batch]))(model) == 2.0


def test_loss_on_uses_evaluation_mode_and_resets_the_modes():
    model = model_of()
    model[1].eval()
    before, modes = snapshot(model), []

    def look(model, batch):
        modes.append((any(module.training for module in model.modules()), torch.is_grad_enabled()))
        return cross_entropy(model, batch)

    score(model, zeros(model), dq.LossOn(BATCHES, look))
    assert modes == [(False, False)] * 3
    check_same(before, snapshot(model))
    assert [module.training for module in model] == [True, False, True, True]


def test_loss_on_needs_a_batch():
    with pytest.raises(ValueError, match="at least one batch"):
        dq.LossOn([], cross_entropy)


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter(BATCHES),
        lambda: (batch for batch in BATCHES),
        lambda: torch.utils.data.DataLoader(TARGETS, shuffle=True),
    ],
    ids=["iterator", "generator", "DataLoader"],
)
def test_loss_on_refuses_batches_that_can_be_used_only_once(make):
    with pytest.raises(TypeError, match="give a list"):
        dq.LossOn(make(), cross_entropy)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_has_waited_in_vain_in_evaluate_is_told_what_to_do(ranks):
    errors = ["RuntimeError: Timed out waiting 8000ms for recv operation to complete", None][:ranks]
    with pytest.raises(EvaluateError, match="rank 0: RuntimeError: Timed out") as raised:
        raise_on_every_rank(errors, None)
    assert ("do the same there on all ranks" in str(raised.value)) == (ranks == 2)
