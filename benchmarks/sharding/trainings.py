"""The trainings of ``sharded.py``: undisturbed, crashed again and again, and the same changes of ranks by PyTorch."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sharding.gpt import Training
from sharding.launching import launch, random_kills

from dynaquant.saving.record import record_of
from dynaquant.store.run import Run

LAYOUTS = (4, 2, 1)
"""Ranks by turns, beginning again after the last."""


@dataclass(frozen=True)
class Attempt:
    """What one launch did. after: the step that it began from. until: the last step that it took."""

    ranks: int
    after: int
    until: int


@dataclass(frozen=True)
class Trained:
    """One training to its end. losses: by step, of the launches that counted. ratio: of all its checkpoints."""

    final: float
    losses: list[float]
    attempts: list[Attempt]
    ratio: float | None = None

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Trained:
        """Return the inverse of ``asdict``."""
        return cls(**{**stored, "attempts": [Attempt(**one) for one in stored["attempts"]]})

    def counted(self) -> list[Attempt]:
        """Return the attempts, each until the step from which the next one began."""
        ends = [following.after for following in self.attempts[1:]] + [self.attempts[-1].until]
        return [Attempt(one.ranks, one.after, end) for one, end in zip(self.attempts, ends, strict=True)]


def undisturbed(training: Training, ranks: int, scratch: Path) -> Trained:
    """Train without checkpoints."""
    with TemporaryDirectory(dir=scratch) as folder:
        told = launch(Path(folder), ranks, {"action": "train", "training": asdict(training), "quality": None})
    return _trained([(ranks, told)])


def crashed(training: Training, quality: str, every: int, crashes: int, scratch: Path) -> Trained:
    """Train, with a random rank killed at random moments, and resume on another number of ranks each time."""
    draw = random.Random(training.seed)
    layouts = [LAYOUTS[k % len(LAYOUTS)] for k in range(crashes + 1)]
    kills = random_kills(training.steps, every, crashes, layouts, draw)
    orders = {"action": "train", "training": asdict(training), "quality": quality, "every": every}
    with TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        told = [
            (ranks, launch(folder, ranks, orders, kill)) for ranks, kill in zip(layouts, [*kills, None], strict=True)
        ]
        records = [record_of(file) for file in Run(folder / "run").files()[0]]
    ratio = sum(record.total.raw for record in records) / sum(record.total.stored for record in records)
    return _trained(told, ratio)


def replayed(training: Training, like: Trained, scratch: Path) -> Trained:
    """Train on the same ranks at the same steps as another training, between checkpoints of PyTorch."""
    told = []
    with TemporaryDirectory(dir=scratch) as name:
        for one in like.counted():
            if one.until > one.after:
                orders = {"action": "replay", "training": asdict(training), "after": one.after, "until": one.until}
                told.append((one.ranks, launch(Path(name), one.ranks, orders)))
                shutil.rmtree(Path(name) / f"dcp-{one.after}", ignore_errors=True)
    return _trained(told)


def _trained(told: Sequence[tuple[int, list[dict[str, float]]]], ratio: float | None = None) -> Trained:
    attempts: list[Attempt] = []
    losses: dict[int, float] = {}
    for ranks, lines in told:
        steps = {int(line["step"]): line["loss"] for line in lines if "step" in line}
        after = next((int(line["restored"]) for line in lines if "restored" in line), 0)
        attempts.append(Attempt(ranks, after, max(steps, default=after)))
        losses |= steps
    final = next(line["final"] for line in told[-1][1] if "final" in line)
    return Trained(final, [losses[step] for step in sorted(losses)], attempts, ratio)


def kept(file: Path, run: Callable[[], Trained]) -> Trained:
    """Return what a file keeps of a training; trains first if there is no such file."""
    if not file.exists():
        found = run()
        file.with_suffix(".new").write_text(json.dumps(asdict(found)))
        file.with_suffix(".new").rename(file)
    return Trained.from_json(json.loads(file.read_text()))
