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
