"""The demo's two trainings: a transformer on Python source text, a convolutional net on scikit-learn's digits."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynaquant.demo.models import GPT, ConvNet

CONTEXT = 64
TEXT_BYTES = 4_000_000


@dataclass(frozen=True)
class Workload:
    """A training made from a seed: everything that a step needs, and the metric.

    next_batch draws from ``generator``: once the generator is restored, the order of the data is the same.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    generator: torch.Generator
    next_batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    evaluate: Callable[[nn.Module], float]
    higher_is_better: bool


def transformer(steps: int, seed: int, text: Tensor | None = None) -> Workload:
    """Return a GPT of 0.8 M weights on Python source text; AdamW; validation loss in nats per byte.

    text: other bytes to train on, uint8. The source text differs between versions of Python.
    """
    text = _standard_library() if text is None else text
    split = int(0.95 * len(text))
    generator = torch.Generator().manual_seed(seed)

    def windows(tokens: Tensor, count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(tokens) - CONTEXT, (count, 1), generator=source)
        window = tokens[starts + torch.arange(CONTEXT + 1)].long()
        return window[:, :-1], window[:, 1:]

    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    held_out = windows(text[split:], 128, torch.Generator().manual_seed(1))

    def evaluate(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            return float(loss(model, *held_out))

    torch.manual_seed(seed)
    model = GPT(vocabulary=256, context=CONTEXT, width=128, layers=4, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    return Workload(
        model, optimizer, scheduler, generator, lambda: windows(text[:split], 24, generator), loss, evaluate, False
    )


def convnet(steps: int, seed: int) -> Workload:
    """Return a convolutional net of 0.1 M weights on 8×8 digits; SGD with momentum; accuracy on held-out images."""
    from sklearn.datasets import load_digits  # noqa: PLC0415  (only here: an extra, slow to import)

    digits = load_digits()
    images = torch.from_numpy(digits.images.astype(np.float32) / 16)[:, None]
    labels = torch.from_numpy(digits.target.astype(np.int64))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    train, held_out = order[:1200], order[1200:]
    generator = torch.Generator().manual_seed(seed)

    def next_batch() -> tuple[Tensor, Tensor]:
        chosen = train[torch.randint(len(train), (64,), generator=generator)]
        shift = torch.randint(-1, 2, (2,), generator=generator).tolist()
        return torch.roll(images[chosen], shift, dims=(2, 3)), labels[chosen]

    def evaluate(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            return float((model(images[held_out]).argmax(1) == labels[held_out]).float().mean())

    torch.manual_seed(seed)
    model = ConvNet(classes=10, width=48)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    def loss(net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(net(inputs), targets)

    return Workload(model, optimizer, scheduler, generator, next_batch, loss, evaluate, True)


WORKLOADS: dict[str, Callable[[int, int], Workload]] = {"transformer": transformer, "convnet": convnet}


def _standard_library() -> Tensor:
    """Return the first few MB of the standard library's source text, uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text, size = [], 0
    for file in sorted(folder.glob("*.py")):
        text.append(file.read_bytes())
        size += len(text[-1])
        if size >= TEXT_BYTES:
            break
    return torch.from_numpy(np.frombuffer(b"".join(text), dtype=np.uint8).copy())
