"""Everything that ``sharded.py`` trains and measures, kept in a cache folder by its settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from sharding.gpt import Training
from sharding.launching import launch
from sharding.trainings import Trained, crashed, kept, replayed, undisturbed
from workloads import key_of

RANKS = (1, 2, 4)
BY_MMAP = "balanced (mmap)"
"""Memory with a malloc that takes large blocks from the system, and returns them as soon as they are free."""
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "262144"}
"""For glibc. By default it raises the threshold up to 32 MB, and keeps freed blocks."""


@dataclass(frozen=True)
class Plan:
    """What is run. training: of the first seed. every: steps between checkpoints. sized, large: for sizes, for memory.

    keep: the steps of the training ``sized`` whose states are saved by turns. repeats: deltas that are measured.
    """

    training: Training
    sized: Training
    large: Training
    seeds: int = 3
    every: int = 20
    crashes: int = 10
    keep: tuple[int, int] = (60, 80)
    repeats: int = 4


def plan_of(data: Path, quick: bool) -> Plan:
    """Return what to run. quick: only to see that it works."""
    folder = str(data.absolute())
    if quick:
        tiny = Training(folder, 0, 12, width=32, layers=1, final=32, search=2)
        return Plan(tiny, tiny, tiny, seeds=1, every=2, crashes=1, keep=(4, 6), repeats=1)
    return Plan(
        Training(folder, 0, 440),
        Training(folder, 0, 100, width=512, layers=2, heads=8),
        Training(folder, 0, 100, width=2048, layers=3, heads=8),
    )


@dataclass(frozen=True)
class Ends:
    """The trainings of one seed. single, whole: undisturbed, on one rank and on four."""

    single: Trained
    whole: Trained
    crashed: Trained


@dataclass(frozen=True)
class Found:
    """All results. lossless, replayed: of the first seed. sizes: by number of ranks. memory: by quality and ranks."""

    ends: list[Ends]
    lossless: Trained
    replayed: Trained
    sizes: dict[int, dict[str, Any]]
    memory: dict[str, dict[int, list[dict[str, float]]]]


@dataclass(frozen=True)
class Sweep:
    """What to run, and where its results and its temporary files are. tell: called before each run."""

    plan: Plan
    cache: Path
    tell: Callable[[str], None]

    def ends(self, seed: int) -> Ends:
        """Return the trainings of a seed."""
        training = replace(self.plan.training, seed=seed)
        return Ends(
            self._kept(f"1-rank-{seed}", partial(undisturbed, training, 1, self.cache)),
            self._kept(f"4-ranks-{seed}", partial(undisturbed, training, 4, self.cache)),
            self._crashed("balanced", seed),
        )

    def lossless(self) -> tuple[Trained, Trained]:
        """Return a training that is restored from lossless checkpoints, and the same one with PyTorch's."""
        ours = self._crashed("lossless", 0)
        return ours, self._kept("replayed-0", partial(replayed, self.plan.training, ours, self.cache))

    def _crashed(self, quality: str, seed: int) -> Trained:
        plan = self.plan
        training = replace(plan.training, seed=seed)
        return self._kept(
            f"{quality}-{seed}", partial(crashed, training, quality, plan.every, plan.crashes, self.cache)
        )

    def _kept(self, name: str, run: Callable[[], Trained]) -> Trained:
        self.tell(name)
        return kept(self._file(name), run)

    def sizes(self) -> dict[int, dict[str, Any]]:
        """Return sizes and CPU seconds of saves of one trained state, by number of ranks."""
        plan = self.plan
        names = {count: self._file(f"sizes-{count}") for count in RANKS}
        orders: dict[str, Any] = {"training": asdict(plan.sized), "keep": plan.keep, "repeats": plan.repeats}
        if not all(file.exists() for file in names.values()):
            with TemporaryDirectory(dir=self.cache) as name:
                folder = Path(name)
                self.tell("state to measure")
                launch(folder, 1, {**orders, "action": "prepare"})
                orders["configuration"] = json.loads((folder / "prepared.json").read_text())
                for count, file in names.items():
                    self.tell(f"sizes, ranks: {count}")
                    launch(folder, count, {**orders, "action": "measure"})
                    file.write_text((folder / f"measured-{count}.json").read_text())
        return {count: json.loads(file.read_text()) for count, file in names.items()}

    def memory(self, quality: str) -> dict[int, list[dict[str, float]]]:
        """Return the peak memory of every rank, by number of ranks."""
        found = {}
        for count in RANKS:
            file = self._file(f"memory-{quality.replace(' ', '-')}-{count}")
            if not file.exists():
                self.tell(f"memory, {quality}, ranks: {count}")
                with TemporaryDirectory(dir=self.cache) as folder:
                    preset = quality.split(maxsplit=1)[0]
                    orders = {
                        "action": "memory",
                        "training": asdict(self.plan.large),
                        "quality": preset,
                    }
                    launch(Path(folder), count, orders, environment=MAPPED if quality == BY_MMAP else None)
                    file.write_text((Path(folder) / f"memory-{count}.json").read_text())
            found[count] = json.loads(file.read_text())
        return found

    def run(self) -> Found:
        """Run what the cache does not have, and return everything."""
        sizes, memory = self.sizes(), {quality: self.memory(quality) for quality in ("balanced", BY_MMAP, "lossless")}
        ends = [self.ends(seed) for seed in range(self.plan.seeds)]
        lossless, replay = self.lossless()
        return Found(ends, lossless, replay, sizes, memory)

    def _file(self, name: str) -> Path:
        plan = replace(
            self.plan,
            training=replace(self.plan.training, data=""),
            sized=replace(self.plan.sized, data=""),
            large=replace(self.plan.large, data=""),
        )
        settings: Any
        if name.startswith("sizes"):
            settings = plan.sized, plan.keep, plan.repeats
        elif name.startswith("memory"):
            settings = plan.large
        else:
            settings = plan.training, plan.every, plan.crashes
        return self.cache / f"sharded-{name}-{key_of(str(settings), torch.__version__)}.json"
