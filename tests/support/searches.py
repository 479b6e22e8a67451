"""Trainings whose saves search for a configuration, and noisy metrics."""

import random
from collections.abc import Callable

import pytest
import torch
from movement import Movement
from torch import nn
from training import train

import dynaquant as dq


def model_of() -> nn.Module:
    return nn.Sequential(nn.Embedding(40, 24), nn.Linear(24, 40))


BOTH_METHODS = pytest.mark.parametrize("method", ["grid", "published"])
LATER_SEARCH = {"grid": "scale", "published": "neighbourhood"}


def training_of(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = model_of()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def checkpointer(folder, model: nn.Module, optimizer=None, **options) -> dq.Checkpointer:
    """A Checkpointer of the published method, unless ``quality`` says otherwise."""
    return dq.Checkpointer(folder, model, optimizer, **{"quality": dq.Quality(method="published")} | options)


def loss(model: nn.Module) -> float:
    return nn.functional.cross_entropy(model.eval()(torch.arange(40)), torch.arange(40)).item()


def run(folder, evaluate, saves: int, steps: int = 5, **options) -> list[dq.Record]:
    """Train, and save every few steps. Returns the records."""
    model, optimizer = training_of()
    if isinstance(evaluate, int | float):
        evaluate = Movement(model, evaluate)
    records = []
    with checkpointer(folder, model, optimizer, evaluate=evaluate, **options) as ckpt:
        for step in range(1, saves + 1):
            train(model, optimizer, steps)
            if isinstance(evaluate, Movement):
                evaluate.remember()
            records.append(ckpt.save(step).result())
    return records


def gauss(sigma: float, value: float = 2.0, seed: int = 0) -> Callable[[], float]:
    """Return a metric with Gaussian noise. sigma: relative standard deviation."""
    draw = random.Random(seed)
    return lambda: value * (1 + sigma * draw.gauss(0, 1))
