"""Saving does not change the training."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from small_runs import WITH_EXACT_MOMENTS, training_of, weights_of
from torch import Tensor, nn
from training import bits, named_state, train

import dynaquant as dq
from dynaquant.training.collect import collect


@WITH_EXACT_MOMENTS
def test_training_may_continue_during_the_background_write(tmp_path, way):
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer, **way) as ckpt:
        for step in range(1, 6):
            train(model, optimizer)
            wanted = bits(named_state(optimizer, model=model)), bits(weights_of(model)["2.weight"])
            future = ckpt.save(step)
            with torch.no_grad():
                for tensor in [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]:
                    tensor.add_(1.0)
            future.result()
            state = dq.load(tmp_path, step)
            assert (bits(state["optimizer"]), bits(state["model"]["2.weight"])) == wanted


def trained_with_randomness(folder=None) -> tuple[list[float], tuple, list[dq.Record]]:
    """Train with random numbers from every generator. Returns losses, the final state, and the records."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    things = {"model": model, "optimizer": optimizer, "order": torch.Generator().manual_seed(5)}

    def loss(model: nn.Module, generator: torch.Generator | None = None) -> Tensor:
        inputs = torch.randn(16, 6, generator=generator) + random.random() * torch.from_numpy(np.random.randn(16, 6))
        return (model(inputs.float()) - inputs.float().flip(1)).square().mean()

    def evaluate(model: nn.Module) -> float:
        model.train()  # dropout draws random numbers, and batch norm updates its statistics
        random.gauss(0, 1)
        return loss(model).item()

    losses, saves = [], []
    ckpt = folder and dq.Checkpointer(
        folder, model, optimizer, extras={"order": things["order"]}, evaluate=evaluate, every=2
    )
    for step in range(1, 13):
        optimizer.zero_grad(set_to_none=step % 3 == 0)
        found = loss(model, things["order"])
        found.backward()
        if ckpt and ckpt.due(step):  # gradients exist here, and must stay
            saves.append(ckpt.save(step))
        optimizer.step()
        losses.append(found.item())
        if ckpt and step == 7:
            saves.append(ckpt.save(step))
    if ckpt:
        ckpt.close()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    return losses, bits((collect(things), gradients, modes)), [save.result() for save in saves]


def test_training_takes_bit_identical_steps_with_and_without_checkpoints(tmp_path):
    with_saves, without = trained_with_randomness(tmp_path), trained_with_randomness()
    assert [record.step for record in with_saves[2]] == [2, 4, 6, 7, 8, 10, 12]
    assert all(record.trials and record.judged_by == "evaluate" for record in with_saves[2])
    assert with_saves[0] == without[0]
    assert with_saves[1] == without[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from PyTorch itself
def test_a_compiled_step_is_compiled_as_without_a_checkpointer(tmp_path):
    graphs = []
    for with_checkpointer in (False, True):
        torch._dynamo.reset()
        model, compiled = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))

        def backend(graph, _, compiled=compiled):
            compiled.append(graph)
            return graph

        with dq.Checkpointer(tmp_path, model, optimizer, every=5) if with_checkpointer else nullcontext():
            step = torch.compile(optimizer.step, backend=backend)
            for _ in range(6):
                model(torch.ones(2, 4)).sum().backward()
                step()
        graphs.append(len(compiled))
    assert graphs[0] == graphs[1]


class KeepsWhatItComputes(nn.Module):
    """A layer with a bias that it computes from a weight. While it is evaluated, it keeps what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 16))
        self.known: dict[str, Tensor] = {}

    def bias(self) -> Tensor:
        return self.weight.square().mean(1)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight.t() - self.kept_bias()

    def kept_bias(self) -> Tensor:
        raise NotImplementedError


class UntilTrained(KeepsWhatItComputes):
    """In a dictionary that ``train`` empties, as LeViT does."""

    def train(self, mode: bool = True) -> nn.Module:
        if mode:
            self.known.clear()
        return super().train(mode)

    def kept_bias(self) -> Tensor:
        if self.training:
            return self.bias()
        if "bias" not in self.known:
            self.known["bias"] = self.bias()
        return self.known["bias"]


class UntilWritten(KeepsWhatItComputes):
    """In an attribute, until PyTorch counts another write to the weight."""

    mark, last = (0, 0), None

    def kept_bias(self) -> Tensor:
        mark = self.weight.data_ptr(), self.weight._version
        if self.training or self.mark != mark or self.last is None:
            self.mark, self.last = mark, self.bias()
        return self.last


@pytest.mark.parametrize("kind", [UntilTrained, UntilWritten])
def test_what_a_layer_keeps_of_one_candidate_reaches_neither_another_one_nor_training(tmp_path, kind):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(kind(), nn.ReLU(), nn.Linear(64, 1)), torch.randn(128, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def evaluate(model: nn.Module) -> float:
        model.eval()
        return (model(inputs) - inputs[:, :1].sin()).square().mean().item()

    for _ in range(20):
        (model.train()(inputs) - inputs[:, :1].sin()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = set(vars(model[0]))
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=evaluate, quality="small") as ckpt:
        quality = ckpt.save(20).result().quality
        assert set(vars(model[0])) == before
        assert not model[0].known
    other = nn.Sequential(kind(), nn.ReLU(), nn.Linear(64, 1))
    dq.load_into(other, tmp_path)
    assert evaluate(other) == pytest.approx(quality.restored, rel=1e-6)
    assert quality.restored != quality.original


def test_a_layer_that_initializes_itself_from_its_first_batch_does_so_in_training(tmp_path):
    class FromFirstBatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.is_ready = False

        def forward(self, inputs: Tensor) -> Tensor:
            if not self.is_ready:
                self.scale.data.copy_(1 / inputs.std(0))
                self.is_ready = True
            return inputs * self.scale

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), FromFirstBatch())
    inputs = 5 * torch.randn(64, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=lambda m: m(inputs).square().mean().item()) as ckpt:
        ckpt.save(0).result()
        assert torch.equal(model[1].scale, torch.ones(8))
        model(inputs)
        assert not torch.equal(model[1].scale, torch.ones(8))
