"""Batch norms are evaluated by the statistics of the batches, as training does, and nothing is left behind."""

import pytest
import torch
from torch import nn
from training import bits

import dynaquant as dq
from dynaquant.search.live_model import score

BATCHES = [torch.randn(16, 6, generator=torch.Generator().manual_seed(i)) * 3 + 1 for i in range(5)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch), (batch.sum(1) > 6).long())


@torch.no_grad()
def expected(model, frozen=False):
    """The loss with the statistics of each batch, without dropout, from the definition."""
    linear, norm, _, _, head = model
    losses = []
    for batch in BATCHES:
        x = linear(batch)
        mean, variance = (norm.running_mean, norm.running_var) if frozen else (x.mean(0), x.var(0, unbiased=False))
        x = (x - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias
        losses.append(float(nn.functional.cross_entropy(head(x.relu()), (batch.sum(1) > 6).long())))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("training", [True, False])
def test_the_loss_is_that_of_the_batch_statistics(training):
    model = network().train(training)
    assert dq.LossOn(BATCHES, loss)(model) == pytest.approx(expected(model), rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_a_save_uses_batch_statistics_in_either_mode(training):
    model = network().train(training)
    assert score(model, {}, dq.LossOn(BATCHES, loss)) == pytest.approx(expected(model), rel=1e-5)


def test_running_statistics_momentum_and_modes_stay_as_they_are():
    model = network()
    model[3].eval()
    before, modes = bits(model.state_dict()), [module.training for module in model.modules()]
    dq.LossOn(BATCHES, loss)(model)
    assert bits(model.state_dict()) == before
    assert [module.training for module in model.modules()] == modes
    assert model[1].momentum == 0.1


def test_layers_that_training_keeps_in_evaluation_mode_use_running_statistics():
    model = network()
    model[1].eval()
    assert dq.LossOn(BATCHES, loss)(model) == pytest.approx(expected(model, frozen=True), rel=1e-5)
    model = network().eval()
    model[1].requires_grad_(False)
    assert dq.LossOn(BATCHES, loss)(model) == pytest.approx(expected(model, frozen=True), rel=1e-5)


def test_on_request_all_layers_use_running_statistics():
    model = network()
    assert dq.LossOn(BATCHES, loss, batch_statistics=False)(model) == pytest.approx(expected(model, True), rel=1e-5)


def test_a_batch_of_one_sample_uses_running_statistics():
    model, one = network(), BATCHES[0][:1]
    with torch.no_grad():
        alone = float(loss(model.eval(), one))
    model.train()
    both = dq.LossOn([one, BATCHES[1]], loss)
    assert both(model) == pytest.approx((alone + dq.LossOn([BATCHES[1]], loss)(model)) / 2)

    def broken(model, batch):
        raise ValueError(f"broken: {type(model)}, {batch.shape}")

    with pytest.raises(ValueError, match="broken"):
        dq.LossOn([one], broken)(model)


def test_synchronized_batch_norms_use_running_statistics():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(network())
    assert dq.LossOn(BATCHES, loss)(model) == pytest.approx(expected(model, frozen=True), rel=1e-5)


@pytest.mark.parametrize("several", [False, True])
def test_the_record_says_that_running_statistics_are_not_judged(tmp_path, several):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    metric = dq.LossOn(BATCHES, (lambda models, batch: loss(models["a"], batch)) if several else loss)
    with dq.Checkpointer(tmp_path, {"a": model} if several else model, optimizer, evaluate=metric) as ckpt:
        before = bits(model.state_dict())
        notes = ckpt.save(1).result().notes
        assert bits(model.state_dict()) == before
    assert sum("batch norms were evaluated by the statistics of the batches" in note for note in notes) == 1


def test_a_model_without_batch_norm_has_no_such_note(tmp_path):
    model = nn.Linear(6, 3)
    with dq.Checkpointer(tmp_path, model, evaluate=dq.LossOn(BATCHES, loss)) as ckpt:
        assert not any("batch norm" in note for note in ckpt.save(1).result().notes)
