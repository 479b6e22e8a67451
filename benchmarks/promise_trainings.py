"""The trainings of ``promise.py`` by name, and when each of them saves and crashes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import promise_large_tables
import promise_small
import promise_tuning
from workloads import Workload


@dataclass(frozen=True)
class Plan:
    """When a training saves and crashes, in steps. lost: from a checkpoint to the crash."""

    restores: int = 10
    every: int = 40
    steps: int = 840
    lost: int = 13

    @property
    def restore_points(self) -> list[int]:
        """Steps of distinct checkpoints, evenly spread; all checkpoints before the end if there are not more."""
        usable = range(self.every, self.steps - self.lost + 1, self.every)
        count = min(self.restores, len(usable))
        return [usable[int((k + 0.5) * len(usable) / count)] for k in range(count)]


@dataclass(frozen=True)
class Kind:
    """A kind of training.

    new: makes a training from data folder, cache folder, number of steps and seed. described: model, optimizer,
    schedule and data, for the page. plan: when it saves and crashes at the centre.
    """

    new: Callable[[Path, Path, int, int], Workload]
    described: tuple[str, str, str, str]
    plan: Plan = Plan()

    @property
    def sources(self) -> list[Path]:
        """The Python files that define it."""
        return sorted({Path(promise_small.__file__), Path(inspect.getfile(self.new))})


TRAININGS: dict[str, Kind] = {
    "gpt": Kind(promise_small.gpt, ("GPT, 0.6 M weights", "AdamW", "one cycle", "Shakespeare")),
    "resnet": Kind(
        promise_small.resnet, ("ResNet with BatchNorm, 0.4 M", "SGD with momentum", "one cycle", "CIFAR-10")
    ),
    "gru": Kind(promise_small.gru, ("two GRU layers, 0.4 M", "Adam", "step decay", "Shakespeare")),
    "vit": Kind(promise_small.vit, ("vision transformer, 0.3 M", "NAdam", "linear warm-up, linear decay", "CIFAR-10")),
    "mixer": Kind(promise_small.mixer, ("MLP-Mixer, 0.2 M", "Muon and AdamW", "warm-up, constant, decay", "CIFAR-10")),
    "words": Kind(
        promise_large_tables.words,
        ("transformer, 1.2 M, 12,000 words tied to its head", "AdamW", "warm-up, constant, decay", "Shakespeare"),
    ),
    "clicks": Kind(
        promise_large_tables.clicks,
        ("recommender, four embedding tables, 0.6 M", "Adagrad", "constant", "which word follows, Shakespeare"),
    ),
    "minilm": Kind(
        promise_tuning.minilm,
        ("MiniLM, 22 M pretrained weights and a new head", "AdamW", "warm-up, linear decay", "which sentences follow"),
        Plan(restores=4, every=20, steps=160),
    ),
}
"""Kinds of training by name."""
