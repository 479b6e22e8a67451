"""Five small trainings: architecture, optimizer and schedule differ. A step takes about 25 ms.

Searches see a few batches of one part of the held-out data. The metric at the end is the loss on the other part. The
data order, the initial weights and so the whole training follow from the seed, if PyTorch runs one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, StepLR
from torch.overrides import TorchFunctionMode
from workloads import PADDING, TRIAL_STEPS, ResNet, Workload, augmented, cifar10, normalized, shakespeare

from dynaquant import LossOn
from dynaquant.demo.models import GPT

CONTEXT = 64
"""Characters in a window of text."""
SEARCH_BATCHES = 8
"""Batches of the search metric. One evaluation costs about as much as three training steps."""
SEARCH_SHARE = 0.2
"""Share of the held-out data that searches may see."""

Batch = tuple[Tensor, Tensor]
Optimizers = tuple[torch.optim.Optimizer, ...]
Schedule = Callable[[torch.optim.Optimizer], LRScheduler]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy in nats. batch: inputs and classes."""
    logits: Tensor = model(batch[0])
    return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


@lru_cache
def _text(data: Path) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return token ids for training, for searches and for the end, and the number of characters."""
    train, held_out, vocabulary = shakespeare(data)
    split = int(SEARCH_SHARE * len(held_out))
    return train, held_out[:split], held_out[split:], vocabulary


@lru_cache
def _images(data: Path, cache: Path) -> tuple[Batch, Batch, Batch]:
    """Return images and labels for training (padded), for searches and for the end; the last two are shuffled."""
    found = cifar10(data, cache)
    order = torch.randperm(len(found["test"]), generator=torch.Generator().manual_seed(1))
    split = int(SEARCH_SHARE * len(order))
    seen, unseen = (
        (normalized(found["test"][part]), found["test_labels"][part]) for part in order.tensor_split([split])
    )
    return (F.pad(found["train"], [PADDING] * 4), found["train_labels"]), seen, unseen


def _windows(tokens: Tensor, count: int | None = None) -> Batch:
    """Return evenly spaced windows and the same one character later, each (count, CONTEXT); by default all."""
    last = len(tokens) - CONTEXT - 1
    starts = torch.arange(0, last, CONTEXT) if count is None else torch.linspace(0, last, count).long()
    window = tokens[starts[:, None] + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, 1:]


def of_loss(
    model: nn.Module,
    optimizers: Optimizers,
    schedules: Sequence[Schedule],
    generator: torch.Generator,
    draw: Callable[[], Batch],
    size: int,
    held_out: tuple[Batch, Batch],
    steps: int,
) -> Workload:
    """Return a training. size: of a batch. held_out: for searches (at least SEARCH_BATCHES batches) and for the end."""
    (seen, seen_targets), unseen = held_out
    every = 10 if steps <= TRIAL_STEPS else 1
    end = [(x, y) for x, y in zip(*(torch.split(part[::every], 4 * size) for part in unseen), strict=True)]

    def final_loss(net: nn.Module) -> float:
        net.eval()
        with torch.no_grad():
            total = sum(float(loss_of(net, batch)) * len(batch[0]) for batch in end)
        return total / sum(len(x) for x, _ in end)

    batches = list(zip(torch.split(seen, size), torch.split(seen_targets, size), strict=True))[:SEARCH_BATCHES]
    return Workload(
        model,
        optimizers,
        tuple(schedule(optimizer) for schedule, optimizer in zip(schedules, optimizers, strict=True)),
        generator,
        lambda: loss_of(model, draw()),
        final_loss,
        final_loss,
        higher_is_better=False,
        search_loss=LossOn(batches, loss_of),
    )


def _of_text(
    new: Callable[[int], nn.Module],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    schedule: Schedule,
    size: int,
    data: Path,
    steps: int,
    seed: int,
) -> Workload:
    train, seen, unseen, vocabulary = _text(data)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = new(vocabulary)

    def draw() -> Batch:
        starts = torch.randint(len(train) - CONTEXT - 1, (size, 1), generator=generator)
        window = train[starts + torch.arange(CONTEXT + 1)]
        return window[:, :-1], window[:, 1:]

    held_out = _windows(seen, SEARCH_BATCHES * size), _windows(unseen)
    return of_loss(model, (optimizer_of(model),), [schedule], generator, draw, size, held_out, steps)


def _of_images(
    new: Callable[[], nn.Module],
    optimizers_of: Callable[[nn.Module], Optimizers],
    schedule: Schedule,
    size: int,
    data: Path,
    cache: Path,
    steps: int,
    seed: int,
) -> Workload:
    (padded, labels), *held_out = _images(data, cache)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = new()
    optimizers = optimizers_of(model)

    def draw() -> Batch:
        drawn = torch.randint(len(padded), (size,), generator=generator)
        return normalized(augmented(padded[drawn], generator)), labels[drawn]

    seen, unseen = held_out
    return of_loss(model, optimizers, [schedule] * len(optimizers), generator, draw, size, (seen, unseen), steps)


def gpt(data: Path, cache: Path, steps: int, seed: int) -> Workload:  # noqa: ARG001
    """Return the training of a GPT of 0.6 M weights with AdamW and one cycle on Shakespeare."""
    return _of_text(
        lambda vocabulary: GPT(vocabulary, CONTEXT, width=128, layers=3, heads=4),
        lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, betas=(0.9, 0.99)),
        lambda optimizer: OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1, cycle_momentum=False),
        8,
        data,
        steps,
        seed,
    )


class CharacterGRU(nn.Module):
    """A character model: embedding, two recurrent layers, a linear layer."""

    def __init__(self, vocabulary: int, embedded: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, embedded)
        self.rnn = nn.GRU(embedded, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids, int64 (batch, length), to logits (batch, length, vocabulary)."""
        logits: Tensor = self.head(self.rnn(self.tokens(ids))[0])
        return logits


def gru(data: Path, cache: Path, steps: int, seed: int) -> Workload:  # noqa: ARG001
    """Return the training of a recurrent model of 0.4 M weights with Adam and step decay on Shakespeare."""
    return _of_text(
        lambda vocabulary: CharacterGRU(vocabulary, 64, 192),
        lambda model: torch.optim.Adam(model.parameters(), lr=4e-3),
        lambda optimizer: StepLR(optimizer, max(steps // 4, 1), gamma=0.4),
        8,
        data,
        steps,
        seed,
    )


def resnet(data: Path, cache: Path, steps: int, seed: int) -> Workload:
    """Return the training of a ResNet of 0.4 M weights (BatchNorm) with SGD and one cycle on CIFAR-10."""
    return _of_images(
        lambda: ResNet(10, (24, 48, 96)),
        lambda model: (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4),),
        lambda optimizer: OneCycleLR(
            optimizer, 0.1, total_steps=steps, pct_start=0.2, div_factor=10, cycle_momentum=False
        ),
        24,
        data,
        cache,
        steps,
        seed,
    )


def _patches(channels: int, width: int) -> nn.Module:
    """Return a module that maps images (batch, channels, 32, 32) to embedded 4×4 patches (batch, 64, width)."""
    return nn.Sequential(nn.Conv2d(channels, width, 4, stride=4), nn.Flatten(2), Transposed())


class Transposed(nn.Module):
    """Swaps the last two dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, a, b) to (batch, b, a)."""
        return x.transpose(1, 2)


class ViT(nn.Module):
    """A vision transformer: patches of 4×4 with learned positions, pre-norm encoder layers, mean over patches."""

    def __init__(self, classes: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches = _patches(3, width)
        self.positions = nn.Parameter(torch.randn(64, width) * 0.02)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
                )
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images, float32 (batch, 3, 32, 32), to logits (batch, classes)."""
        logits: Tensor = self.head(self.norm(self.layers(self.patches(images) + self.positions)).mean(1))
        return logits


def warm_up_and_decay(steps: int, decay_from: float) -> Schedule:
    """Return a schedule: linear warm-up over 5 % of the steps, constant, linear decay from a share of the steps on."""

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / (0.05 * steps), (steps - step) / (steps * (1 - decay_from)))

    return lambda optimizer: LambdaLR(optimizer, factor)


def vit(data: Path, cache: Path, steps: int, seed: int) -> Workload:
    """Return the training of a vision transformer of 0.3 M weights with NAdam, linear warm-up and decay on CIFAR-10."""
    return _of_images(
        lambda: ViT(10, width=96, layers=4, heads=4),
        lambda model: (torch.optim.NAdam(model.parameters(), lr=1e-3),),
        warm_up_and_decay(steps, decay_from=0.05),
        12,
        data,
        cache,
        steps,
        seed,
    )


class MixerBlock(nn.Module):
    """Mixes patches, then channels, each by an MLP with a hidden layer, pre-norm, residual."""

    def __init__(self, patches: int, width: int, hidden: tuple[int, int]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, hidden[0]), nn.GELU(), nn.Linear(hidden[0], patches))
        self.channels = nn.Sequential(nn.Linear(width, hidden[1]), nn.GELU(), nn.Linear(hidden[1], width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, patches, width) to the same shape."""
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.channels(self.norm2(x))
        return out


class Mixer(nn.Module):
    """An MLP-Mixer (Tolstikhin et al., 2021): patches of 4×4, blocks, mean over patches, a linear classifier."""

    def __init__(self, classes: int, width: int, layers: int) -> None:
        super().__init__()
        self.patches = _patches(3, width)
        self.blocks = nn.Sequential(*(MixerBlock(64, width, (64, 2 * width)) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images, float32 (batch, 3, 32, 32), to logits (batch, classes)."""
        logits: Tensor = self.head(self.norm(self.blocks(self.patches(images))).mean(1))
        return logits


class _ProductsInFloat32(TorchFunctionMode):
    """Computes products of bfloat16 matrices in float32 and rounds the result, as hardware with bfloat16 does.

    A CPU without such instructions takes fourteen times longer for a step of Muon.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _PRODUCTS and args[0].dtype == torch.bfloat16:
            return function(*(matrix.float() for matrix in args), **(kwargs or {})).bfloat16()
        return function(*args, **(kwargs or {}))


_PRODUCTS = {torch.addmm, torch.mm, torch.matmul, Tensor.matmul, Tensor.__matmul__}


def _muon_and_adamw(model: nn.Module) -> Optimizers:
    """Return Muon for the matrices of the blocks, and AdamW for everything else."""
    named = dict(model.named_parameters())
    matrices = [name for name, p in named.items() if p.ndim == 2 and name.startswith("blocks")]
    rest = [p for name, p in named.items() if name not in matrices]
    muon = torch.optim.Muon([named[name] for name in matrices], lr=0.02, weight_decay=0.01)
    step = ExitStack()

    def begin(*_: Any) -> None:
        step.enter_context(_ProductsInFloat32())

    def end(*_: Any) -> None:
        step.close()

    muon.register_step_pre_hook(begin)
    muon.register_step_post_hook(end)
    return muon, torch.optim.AdamW(rest, lr=2e-3, weight_decay=0.01)


def mixer(data: Path, cache: Path, steps: int, seed: int) -> Workload:
    """Return the training of a Mixer of 0.2 M weights, Muon and AdamW, warm-up, constant, decay on CIFAR-10."""
    return _of_images(
        lambda: Mixer(10, width=128, layers=3),
        _muon_and_adamw,
        warm_up_and_decay(steps, decay_from=0.8),
        16,
        data,
        cache,
        steps,
        seed,
    )
