"""Small ordinary trainings: a perceptron, a GPT, a convolutional net, an embedding; and their metrics."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynaquant.demo.models import GPT, ConvNet

torch.manual_seed(0)
INPUTS = torch.randn(512, 16)
TARGETS = (INPUTS @ torch.randn(16, 8)).argmax(1)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))


def small_mlp() -> tuple[nn.Module, Tensor, Tensor]:
    return mlp(), INPUTS, TARGETS


def small_gpt() -> tuple[nn.Module, Tensor, Tensor]:
    text = torch.randint(0, 8, (64, 17), generator=torch.Generator().manual_seed(1)).cumsum(1) % 32
    return GPT(vocabulary=32, context=16, width=32, layers=2, heads=2), text[:, :-1], text[:, 1:]


def small_convnet() -> tuple[nn.Module, Tensor, Tensor]:
    images = torch.randn(128, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return ConvNet(classes=10, width=8), images, images.flatten(1)[:, :10].argmax(1)


def embedding() -> tuple[nn.Module, Tensor, Tensor]:
    tokens = torch.arange(256) % 40
    return nn.Sequential(nn.Embedding(40, 24), nn.LayerNorm(24), nn.Linear(24, 40)), tokens, (tokens * 7 + 1) % 40


TRAININGS = pytest.mark.parametrize("training_of", [small_mlp, small_gpt, small_convnet, embedding])
OPTIMIZERS = pytest.mark.parametrize(
    "optimizer_of", [partial(torch.optim.AdamW, lr=3e-3), partial(torch.optim.SGD, lr=0.05)], ids=["AdamW", "SGD"]
)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, count: int, inputs: Tensor = INPUTS, targets: Tensor = TARGETS
) -> None:
    model.train()
    for _ in range(count):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
        optimizer.step()


def loss_on(inputs: Tensor, targets: Tensor) -> Callable[[nn.Module], float]:
    @torch.no_grad()
    def loss(model: nn.Module) -> float:
        return F.cross_entropy(model.eval()(inputs).flatten(0, -2), targets.flatten()).item()

    return loss


def accuracy_on(inputs: Tensor, targets: Tensor) -> Callable[[nn.Module], float]:
    @torch.no_grad()
    def accuracy(model: nn.Module) -> float:
        return (model.eval()(inputs).flatten(0, -2).argmax(1) == targets.flatten()).float().mean().item()

    return accuracy
