"""The runs of ``real_size.py``, each in processes of its own, killed or not, and kept in a cache folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from real_size_training import BY_TORCH, Training
from workloads import key_of

HERE = Path(__file__).parent
UNDISTURBED, ANOTHER, DEFAULT, FINE = "undisturbed", "another seed", "balanced", "high"
"""The names of the runs. Of two of them, the name is the quality of their checkpoints."""

Line = dict[str, Any]
"""What a process has told, see ``real_size_training.py``."""


@dataclass(frozen=True)
class Restore:
    """A training that goes on after a kill. until: the last step before it. step: the one from which it goes on."""

    until: int
    step: int
    seconds: float
    cpu: float

    @property
    def repeated(self) -> int:
        """The steps that were trained twice."""
        return self.until - self.step


@dataclass(frozen=True)
class Run:
    """What the processes of a training have told, in order.

    loaded: what a load by PyTorch took; None if the training did not save by it.
    """

    attempts: list[list[Line]]
    loaded: Line | None = None

    def of(self, kind: str) -> list[Line]:
        """Return the lines of one kind of all processes."""
        return [line for attempt in self.attempts for line in attempt if kind in line]

    @cached_property
    def losses(self) -> list[float]:
        """The loss of each step's batch. A repeated step counts as it was the last time."""
        found = {int(line["step"]): float(line["loss"]) for line in self.of("step")}
        return [found[step] for step in sorted(found)]

    @property
    def final(self) -> float:
        """The loss at the end on the whole held-out part."""
        return float(self.of("final")[-1]["final"])

    @property
    def records(self) -> list[Line]:
        """What dynaquant keeps of its saves, one record for each checkpoint."""
        return list(self.of("final")[-1]["records"])

    @property
    def restores(self) -> list[Restore]:
        """What happened after each kill."""
        found = []
        for before, after in zip(self.attempts, self.attempts[1:], strict=False):
            until = max(int(line["step"]) for line in before if "step" in line)
            restored = next(line for line in after if "restored" in line)
            found.append(Restore(until, restored["restored"], restored["seconds"], restored["cpu"]))
        return found

    @property
    def stored(self) -> int:
        """The bytes of all checkpoints."""
        return sum(one["stored"] for one in self.records) or sum(line["bytes"] for line in self.of("save"))

    @property
    def first_save(self) -> int:
        """The step of the first save; the last step if there is none."""
        return min((int(line["save"]) for line in self.of("save")), default=len(self.losses))

    def files_of(self, step: int) -> int:
        """Return how many files a restore of a checkpoint reads: its own, its parent's, and so on; 0 for step 0."""
        parents, count, at = {one["step"]: one["parent"] for one in self.records}, 0, step or None
        while at is not None:
            count, at = count + 1, parents[at]
        return count

    def means(self, every: int) -> list[float]:
        """Return the mean loss of each ``every`` steps."""
        return [fmean(self.losses[at : at + every]) for at in range(0, len(self.losses), every)]


@dataclass(frozen=True)
class Plan:
    """What is run. training: that of all runs, but for the seed. kills: of each training that is killed."""

    training: Training
    kills: int = 3

    @property
    def names(self) -> tuple[str, ...]:
        """The runs, the most important first."""
        return UNDISTURBED, DEFAULT, ANOTHER, FINE

    def kills_of(self, name: str) -> list[int]:
        """Return the steps after which a run is killed: none is one of a save. They divide the training evenly."""
        if name in (UNDISTURBED, ANOTHER):
            return []
        every, parts = self.training.every, self.kills + 1
        saves = self.training.steps // every
        return [saves * part // parts * every + every * (2 * part + 1) // (2 * parts) for part in range(1, parts)]


def plan_of(data: Path, steps: int, quick: bool) -> Plan:
    """Return what to run. quick: only to see that it works."""
    folder = str(data.absolute())
    if quick:
        tiny = Training(folder, 24, every=4, vocabulary=512, context=32, batch=2, width=32, layers=1, heads=2, metric=2)
        return Plan(tiny, kills=1)
    return Plan(Training(folder, steps))


def lines_of(orders: dict[str, Any], log: Path, killed: bool) -> Iterator[Line]:
    """Run a process of ``real_size_training.py`` and yield what it tells.

    killed: whether it must end with SIGKILL. Raises RuntimeError if it ends otherwise.
    """
    threads = {"OMP_NUM_THREADS": "1", "DYNAQUANT_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(HERE / "real_size_training.py"), json.dumps(orders)]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, env=os.environ | threads, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield from (json.loads(line) for line in process.stdout)
        finally:
            if process.poll() is None and sys.exc_info()[0] is not None:
                process.kill()
    if process.returncode != (-signal.SIGKILL if killed else 0):
        raise RuntimeError(f"the training ended with {process.returncode}:\n{log.read_text()[-3000:]}")


@dataclass(frozen=True)
class Sweep:
    """The runs of a plan. cache: the folder that keeps them. tell: called with a text about what happens."""

    plan: Plan
    cache: Path
    tell: Callable[[str], None]

    def run(self, name: str) -> Run:
        """Return a run; train first if the cache does not have it."""
        file = self.file(name)
        if not file.exists():
            with TemporaryDirectory(dir=self.cache) as folder:
                found = self._trained(name, Path(folder))
            unfinished = file.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(asdict(found)) + "\n")
            unfinished.replace(file)
        return Run(**json.loads(file.read_text()))

    def file(self, name: str) -> Path:
        """Return the path of a run. It depends on the settings and on PyTorch."""
        settings = replace(self.plan.training, data=""), self.plan.kills_of(name), torch.__version__
        return self.cache / f"real_size-{name.replace(' ', '-')}-{key_of(*settings)}.json"

    def _trained(self, name: str, folder: Path) -> Run:
        training = replace(self.plan.training, seed=int(name == ANOTHER))
        saving = {UNDISTURBED: BY_TORCH, ANOTHER: None}.get(name, name)
        orders = {
            "action": "train",
            "training": asdict(training),
            "cache": str(self.cache.absolute()),
            "folder": str(folder.absolute()),
            "saving": saving,
        }
        attempts = []
        for kill in [*self.plan.kills_of(name), None]:
            lines = []
            for line in lines_of(orders | {"kill": kill}, folder / "log.txt", killed=kill is not None):
                lines.append(line)
                if "step" not in line or line["step"] % training.every == 0:
                    self.tell(f"{name}: {_brief(line)}")
            attempts.append(lines)
        loaded = None
        if saving == BY_TORCH:
            (loaded,) = lines_of(orders | {"action": "load"}, folder / "log.txt", killed=False)
        return Run(attempts, loaded)


def _brief(line: Line) -> str:
    return ", ".join(
        f"{name} {value:.4g}" for name, value in line.items() if isinstance(value, int | float) and name != "peak"
    )
