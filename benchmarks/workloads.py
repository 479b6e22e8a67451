"""Trainings that benchmarks measure, and their snapshots in a cache folder.

A snapshot holds what a ``torch.save`` checkpoint would (model, optimizer), and the moving average of gradients that
sensitivity needs. So every benchmark uses the same real checkpoints without training again.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from dynaquant import LossOn
from dynaquant.demo.models import GPT
from dynaquant.training.gradients import GradientRecorder

Evaluate = Callable[[nn.Module], float]

CONTEXT, BATCH = 128, 16
"""Characters in a window of the GPT, windows in a batch."""
IMAGES, PADDING = 64, 4
"""Images in a batch of the ResNet, black pixels around an image before it is cropped."""
TRIAL_STEPS = 10
"""A training of at most so many steps only shows that a benchmark works. Its metrics take a tenth of the data."""
CIFAR_MEAN = torch.tensor([0.491, 0.482, 0.447]).view(3, 1, 1)
CIFAR_DEVIATION = torch.tensor([0.247, 0.243, 0.262]).view(3, 1, 1)


@dataclass(frozen=True)
class Workload:
    """A training at its first step.

    optimizers, schedulers: one scheduler for each optimizer. generator: draws the order of the data. next_loss: draws a
    batch and returns the model's loss on it. evaluate: a quick metric. final_quality: the same metric on more data.
    search_loss: the metric of searches; lower is better.
    """

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    schedulers: tuple[torch.optim.lr_scheduler.LRScheduler, ...]
    generator: torch.Generator
    next_loss: Callable[[], Tensor]
    evaluate: Evaluate
    final_quality: Evaluate
    higher_is_better: bool
    search_loss: Evaluate

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of a training that has only one."""
        (only,) = self.optimizers
        return only

    def train_step(self) -> None:
        """Train for one step."""
        self.model.train()
        self.next_loss().backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in self.schedulers:
            scheduler.step()


@dataclass(frozen=True)
class Uninterrupted:
    """Results of a training without checkpoints. qualities: metric by step. final: metric at the end, on more data."""

    qualities: dict[int, float]
    final: float
    training_seconds: float
    evaluation_seconds: float

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Uninterrupted:
        """Return the inverse of ``asdict`` and JSON. JSON has only strings as keys."""
        return cls(**{**stored, "qualities": {int(step): quality for step, quality in stored["qualities"].items()}})


def shakespeare(data: Path) -> tuple[Tensor, Tensor, int]:
    """Return the text as token ids: training part (90 %), validation part (10 %); and the number of characters."""
    text = np.frombuffer(text_of(data).encode(), dtype=np.uint8)
    alphabet, ids = np.unique(text, return_inverse=True)
    tokens = torch.from_numpy(ids.astype(np.int64))
    split = int(0.9 * len(tokens))
    return tokens[:split], tokens[split:], len(alphabet)


def text_of(data: Path) -> str:
    """Return the text that trainings read."""
    return _file(data, "shakespeare.txt").read_text(encoding="ascii")


def _file(data: Path, name: str) -> Path:
    file = data / name
    if not file.exists():
        raise SystemExit(f"{file} not found: --data must name a folder that holds {name}")
    return file


def batch(tokens: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a random batch of windows and the same windows one token later, each (BATCH, CONTEXT)."""
    starts = torch.randint(len(tokens) - CONTEXT - 1, (BATCH, 1), generator=generator)
    window = tokens[starts + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, 1:]


def gpt_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def gpt_validation(data: Path, batches: int = 20) -> LossOn:
    """Return ``evaluate`` for the GPT: its loss on fixed validation batches, lower is better."""
    _, held_out, _ = shakespeare(data)
    generator = torch.Generator().manual_seed(1)
    fixed = [batch(held_out, generator) for _ in range(batches)]
    return LossOn(fixed, lambda model, pair: gpt_loss(model, *pair))


def new_gpt(vocabulary: int) -> GPT:
    """Return a GPT of 3.2 M weights, that of the results."""
    return GPT(vocabulary, CONTEXT, width=256, layers=4, heads=8)


def gpt(data: Path, cache: Path, steps: int, seed: int) -> Workload:  # noqa: ARG001
    """Return the training of the GPT with AdamW on Shakespeare."""
    train, _, vocabulary = shakespeare(data)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = new_gpt(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.99))
    batches, final_batches = (1, 5) if steps <= TRIAL_STEPS else (6, 50)
    return Workload(
        model,
        (optimizer,),
        (torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1),),
        generator,
        lambda: gpt_loss(model, *batch(train, generator)),
        gpt_validation(data, batches),
        gpt_validation(data, final_batches),
        higher_is_better=False,
        search_loss=gpt_validation(data, batches),
    )


class Residual(nn.Module):
    """Two 3×3 convolutions with batch norm, and a shortcut. It is a 1×1 convolution if shapes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, height, width) to (batch, outputs, height / stride, width / stride)."""
        return F.relu(self.shortcut(x) + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    """A stem that halves the image, three stages of two residual blocks, global average pooling, a classifier."""

    def __init__(self, classes: int, widths: tuple[int, int, int] = (32, 64, 128)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        blocks: list[nn.Module] = []
        for before, width in zip((widths[0], *widths), widths, strict=False):
            blocks += [Residual(before, width, 1 if before == width else 2), Residual(width, width, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Map images, float32 (batch, 3, height, width), to logits (batch, classes)."""
        logits: Tensor = self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))
        return logits


def cifar10(data: Path, cache: Path) -> dict[str, Tensor]:
    """Return images, uint8 (count, 3, 32, 32), and labels: ``train``, ``train_labels``, ``test``, ``test_labels``."""
    file = cache / "cifar10.npz"
    if not file.exists():
        arrays: dict[str, Any] = {}
        with zipfile.ZipFile(_file(data, "cifar10.zip")) as archive:
            names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
            classes = sorted({name.split("/")[1] for name in names})
            for part in ("train", "test"):
                members = [name for name in names if name.startswith(part)]
                images = [
                    np.asarray(Image.open(io.BytesIO(archive.read(name))).convert("RGB"))
                    for name in track(members, description=f"decoding the {part} images")
                ]
                arrays[part] = np.stack(images).transpose(0, 3, 1, 2)
                arrays[f"{part}_labels"] = np.array([classes.index(name.split("/")[1]) for name in members])
        cache.mkdir(parents=True, exist_ok=True)
        np.savez(file, **arrays)
    with np.load(file) as stored:
        return {name: torch.from_numpy(stored[name]) for name in stored.files}


def normalized(images: Tensor) -> Tensor:
    """Return uint8 images as float32 with mean 0 and standard deviation 1 per channel."""
    return (images / 255 - CIFAR_MEAN) / CIFAR_DEVIATION


def augmented(padded: Tensor, generator: torch.Generator) -> Tensor:
    """Crop each padded image at a random place, and mirror half of them."""
    count, channels, side, _ = padded.shape
    at = torch.randint(2 * PADDING + 1, (2, count, 1), generator=generator) + torch.arange(side - 2 * PADDING)
    mirrored = torch.randint(2, (count, 1), generator=generator).bool()
    rows, columns = at[0], torch.where(mirrored, at[1].flip(1), at[1])
    image, channel = torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1)
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def _batches(images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(normalized(x), y) for x, y in zip(torch.split(images, 100), torch.split(labels, 100), strict=True)]


def accuracy(images: Tensor, labels: Tensor) -> Evaluate:
    """Return ``evaluate`` for the ResNet: its accuracy on these images, higher is better."""
    batches = _batches(images, labels)

    def evaluate(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            return sum(int((model(x).argmax(1) == y).sum()) for x, y in batches) / len(images)

    return evaluate


def resnet(data: Path, cache: Path, steps: int, seed: int) -> Workload:
    """Return the training of a ResNet of 0.7 M weights with SGD on 20,000 images of CIFAR-10."""
    images = cifar10(data, cache)
    padded, labels = F.pad(images["train"], [PADDING] * 4), images["train_labels"]
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = ResNet(classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    held_out, held_out_labels = images["test"], images["test_labels"]
    if steps <= TRIAL_STEPS:
        held_out, held_out_labels = held_out[::10], held_out_labels[::10]

    def next_loss() -> Tensor:
        drawn = torch.randint(len(padded), (IMAGES,), generator=generator)
        return F.cross_entropy(model(normalized(augmented(padded[drawn], generator))), labels[drawn])

    return Workload(
        model,
        (optimizer,),
        (
            torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.1, total_steps=steps, pct_start=0.2, div_factor=10, cycle_momentum=False
            ),
        ),
        generator,
        next_loss,
        accuracy(held_out[::4], held_out_labels[::4]),
        accuracy(held_out, held_out_labels),
        higher_is_better=True,
        # The accuracy on few images moves in steps of 0.1 %, and by chance. The loss shows finer differences.
        search_loss=LossOn(
            _batches(held_out[::4], held_out_labels[::4]),
            lambda net, pair: F.cross_entropy(net(pair[0]), pair[1]),
        ),
    )


WORKLOADS: dict[str, Callable[[Path, Path, int, int], Workload]] = {"gpt": gpt, "resnet": resnet}
"""Functions by name that make a workload from data folder, cache folder, number of steps and seed."""


def gpt_snapshots(cache: Path) -> list[Path]:
    """Return the files that ``snapshots`` has left of a GPT, oldest first. Of several trainings, takes the longest."""
    steps = {file: int(file.stem.rpartition("-")[2]) for file in cache.glob("gpt-*-*.pt")}
    if not steps:
        return []
    longest = max(steps, key=lambda file: (steps[file], file.name))
    key = longest.stem.rpartition("-")[0]
    return sorted((file for file in steps if file.stem.rpartition("-")[0] == key), key=steps.__getitem__)


def snapshots(name: str, data: Path, cache: Path, steps: int, every: int, seed: int = 0) -> list[dict[str, Any]]:
    """Train a workload and return its snapshots, oldest first.

    Each is ``{"step", "model", "optimizer", "gradients"}``. Takes them from ``cache`` if they are there. Otherwise 1600
    steps take 18 minutes on one core for the GPT, and four minutes for the ResNet.
    """
    shape = {"gpt": (CONTEXT, BATCH), "resnet": (IMAGES, PADDING)}[name]
    key = key_of(steps, every, seed, *shape, torch.__version__)
    files = [cache / f"{name}-{key}-{step}.pt" for step in range(every, steps + 1, every)]
    if not all(file.exists() for file in files):
        cache.mkdir(parents=True, exist_ok=True)
        work = WORKLOADS[name](data, cache, steps, seed)
        parameters = {f"model.{name}": parameter for name, parameter in work.model.named_parameters()}
        recorder = GradientRecorder(parameters, work.optimizer, window=50, interval=every)
        for step in track(range(1, steps + 1), description=f"training the {name}"):
            work.train_step()
            if step % every == 0:
                snapshot = {
                    "step": step,
                    "model": work.model.state_dict(),
                    "optimizer": work.optimizer.state_dict(),
                    "gradients": recorder.collect(),
                }
                torch.save(snapshot, files[step // every - 1])
    return [torch.load(file, weights_only=True) for file in files]


def uninterrupted(
    name: str, data: Path, cache: Path, steps: int, every: int, seed: int, quiet: bool = False
) -> Uninterrupted:
    """Train a workload without checkpoints and evaluate it every ``every`` steps, or take the result from ``cache``."""
    work = WORKLOADS[name](data, cache, steps, seed)
    setup = work.schedulers[0].state_dict(), work.optimizer, work.model
    file = (
        cache / f"uninterrupted-{name}-{key_of(*setup, steps, seed, torch.get_num_threads(), torch.__version__)}.json"
    )
    wanted = range(every, steps + 1, every)
    if file.exists():
        known = Uninterrupted.from_json(json.loads(file.read_text()))
        if known.qualities.keys() >= set(wanted):
            return known
    qualities: dict[int, float] = {}
    evaluating = 0.0
    began = perf_counter()
    for step in track(range(1, steps + 1), f"training the {name}, seed {seed}, uninterrupted", disable=quiet):
        work.train_step()
        if step in wanted:
            start = perf_counter()
            qualities[step] = work.evaluate(work.model)
            evaluating += perf_counter() - start
    training = perf_counter() - began - evaluating
    result = Uninterrupted(qualities, work.final_quality(work.model), training, evaluating)
    cache.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(result), indent=1) + "\n")
    return result


def key_of(*settings: Any) -> str:
    """Return a short name that depends on these settings."""
    return hashlib.blake2s(repr(settings).encode()).hexdigest()[:12]
