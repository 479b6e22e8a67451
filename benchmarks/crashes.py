"""Trainings that crash and resume from the checkpoints of one method, and the same trainings without crashes.

A crash comes some steps after a checkpoint. It discards the model, the optimizer and everything that the method has in
memory except what its decoder would know. Then all objects are built anew and restored, and the lost steps are
repeated. Every training is kept in a cache folder. Its name depends on its settings and on the code behind it, so a
benchmark that was stopped continues where it was.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from operator import setitem
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import checkpointers
import options
import torch
import workloads
from checkpointers import Checkpoints, Saved
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from workloads import WORKLOADS, Uninterrupted, Workload, key_of, uninterrupted

from dynaquant.search.evaluation import degradation

SEED = 0
"""Random seed of the training that crashes."""


@dataclass(frozen=True)
class Settings:
    """Settings of a training. lost: steps from a checkpoint to the crash. seeds: number of trainings without crashes.

    threads: of PyTorch. With one, results do not depend on the number of cores.
    """

    workload: str
    max_degradation: float
    restores: int
    steps: int
    every: int
    lost: int = 10
    seeds: int = 3
    threads: int = 1

    @property
    def restore_points(self) -> list[int]:
        """The steps of the checkpoints nearest to evenly spaced points of the training."""
        parts = self.restores + 1
        return [int(k * self.steps / parts / self.every + 0.5) * self.every for k in range(1, parts)]

    def alone(self, data: Path, cache: Path) -> list[Uninterrupted]:
        """Return the same training without crashes, for each seed; the first is that of the training with crashes."""
        torch.set_num_threads(self.threads)
        return [uninterrupted(self.workload, data, cache, self.steps, self.every, seed) for seed in self.alone_seeds]

    @property
    def alone_seeds(self) -> range:
        """Random seeds of the trainings without crashes."""
        return range(SEED, SEED + self.seeds)


def of_size(workload: str, max_degradation: float, restores: int, quick: bool) -> Settings:
    """Return the settings for the tables of several methods. quick: only to see that everything works."""
    if quick:
        return Settings(workload, max_degradation, min(restores, 1), steps=4, every=2, lost=1, seeds=1)
    steps, every = {"gpt": (480, 24), "resnet": (800, 32)}[workload]
    return Settings(workload, max_degradation, restores, steps, every)


@dataclass(frozen=True)
class Training:
    """One training with crashes. final: the metric at the end, on more data. seconds: spent on training itself."""

    method: str
    settings: Settings
    saved: list[Saved]
    final: float
    higher_is_better: bool
    seconds: float

    @property
    def weights(self) -> float | None:
        """How many times smaller the weights of all checkpoints are; None if they are not stored separately."""
        sizes = [saved.weights for saved in self.saved if saved.weights is not None]
        return sum(raw for raw, _ in sizes) / sum(stored for _, stored in sizes) if sizes else None

    @property
    def state(self) -> float:
        """How many times smaller all checkpoints are."""
        return sum(saved.state[0] for saved in self.saved) / sum(saved.state[1] for saved in self.saved)

    @property
    def worst(self) -> float:
        """The largest degradation of a checkpoint."""
        return max(saved.degradation for saved in self.saved)

    @property
    def failed(self) -> int:
        """Number of checkpoints for which no settings of the method were good enough."""
        return sum(not saved.degradation <= self.settings.max_degradation for saved in self.saved)

    @property
    def evaluations(self) -> float:
        """How many settings the metric scored for a checkpoint, on average."""
        return sum(saved.evaluations for saved in self.saved) / len(self.saved)

    @property
    def blocked(self) -> float:
        """Seconds that training waits for a checkpoint, on average."""
        return sum(saved.blocked for saved in self.saved) / len(self.saved)

    def worse_than(self, alone: list[Uninterrupted]) -> float:
        """Return how much worse it ends than the training with the same seed and no crashes."""
        return degradation(alone[0].final, self.final, self.higher_is_better)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Training:
        """Return the inverse of ``asdict``."""
        saved = [Saved.from_json(one) for one in stored["saved"]]
        return cls(**{**stored, "settings": Settings(**stored["settings"]), "saved": saved})


def spread(alone: list[Uninterrupted]) -> float:
    """How far apart the seeds end, relative to their mean."""
    finals = [one.final for one in alone]
    return (max(finals) - min(finals)) / abs(sum(finals) / len(finals))


@lru_cache
def _code(method: str) -> str:
    return key_of_code([Path(checkpointers.__file__), Path(workloads.__file__), *checkpointers.sources(method)])


def key_of_code(files: Sequence[Path]) -> str:
    """Return a key of Python files. Comments, docstrings and layout do not count."""
    trees = [ast.parse(file.read_text()) for file in files]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [one for one in node.body if not _is_text(one)]
    return key_of([ast.dump(tree) for tree in trees])


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _file(method: str, settings: Settings, cache: Path) -> Path:
    """Return the file that keeps a training."""
    key = key_of(method, settings, _code(method), torch.__version__)
    return cache / f"training-{settings.workload}-{method.replace(', ', '-')}-{key}.json"


def train(method: str, settings: Settings, data: Path, cache: Path, tell: Callable[[int], None]) -> Training:
    """Train with crashes. tell: called with the number of steps that are done."""
    torch.set_num_threads(settings.threads)

    def new_work() -> Workload:
        return WORKLOADS[settings.workload](data, cache, settings.steps, SEED)

    with tempfile.TemporaryDirectory(dir=cache) as folder:
        checkpoints = checkpointers.checkpoints_by(method, Path(folder), settings.max_degradation, settings.every)
        work, saved, seconds = train_with(checkpoints, new_work, settings, tell)
        checkpoints.close()
    return Training(method, settings, saved, work.final_quality(work.model), work.higher_is_better, seconds)


class Plan(Protocol):
    """When a training saves and crashes, in steps. lost: from a checkpoint to the crash."""

    @property
    def steps(self) -> int: ...
    @property
    def every(self) -> int: ...
    @property
    def lost(self) -> int: ...
    @property
    def restore_points(self) -> list[int]: ...


def train_with(
    checkpoints: Checkpoints, new_work: Callable[[], Workload], plan: Plan, tell: Callable[[int], None]
) -> tuple[Workload, list[Saved], float]:
    """Train with crashes. Every restore gets a new training from ``new_work``.

    Returns the training at its end, what was saved, and the seconds of the training steps.
    """
    points = plan.restore_points
    saved: list[Saved] = []
    seconds, done = 0.0, 0
    for begin, end in zip([0, *points], [*(p + plan.lost for p in points), plan.steps], strict=True):
        work = new_work()
        restored = checkpoints.attach(work)
        assert restored == begin, f"restored step {restored} instead of {begin}"
        for step in range(begin + 1, end + 1):
            start = perf_counter()
            work.train_step()
            seconds += perf_counter() - start
            if step % plan.every == 0:
                saved.append(checkpoints.save(step))
            done += 1
            tell(done)
    return work, saved, seconds


def trainings(jobs: Sequence[tuple[str, Settings]], data: Path, cache: Path, workers: int) -> list[Training]:
    """Return the training of each method and settings, from the cache if it is there. Trains ``workers`` at a time.

    Afterwards the cache also has the trainings without crashes.
    """
    alone = {(s.workload, s.steps, s.every, seed, s.threads) for _, s in jobs for seed in s.alone_seeds}
    missing = [job for job in jobs if not _file(*job, cache).exists()]
    run_all(
        [Job(one[1], _alone, (*one, data, cache)) for one in sorted(alone)]
        + [Job(job[1].steps + job[1].restores * job[1].lost, _train_and_keep, (*job, data, cache)) for job in missing],
        workers,
    )
    return [Training.from_json(json.loads(_file(*job, cache).read_text())) for job in jobs]


@dataclass(frozen=True)
class Job:
    """A training to run: ``function(*arguments, tell)``. It calls ``tell`` with the number of steps that are done."""

    steps: int
    function: Callable[..., None]
    arguments: tuple[Any, ...]


def run_all(jobs: Sequence[Job], workers: int) -> None:
    """Run trainings, ``workers`` at a time, each in one of as many processes. Shows the progress."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    spawn = multiprocessing.get_context("spawn")
    with (
        spawn.Manager() as manager,
        ProcessPoolExecutor(workers, spawn) as pool,
        Progress(*columns, TimeRemainingColumn()) as progress,
    ):
        task = progress.add_task(f"steps of {len(jobs)} trainings", total=sum(job.steps for job in jobs))
        steps = manager.dict()
        running = {pool.submit(job.function, *job.arguments, partial(setitem, steps, i)) for i, job in enumerate(jobs)}
        while running:
            done, running = wait(running, timeout=1)
            for future in done:
                future.result()
            progress.update(task, completed=sum(steps.values()))


def _alone(
    workload: str,
    steps: int,
    every: int,
    seed: int,
    threads: int,
    data: Path,
    cache: Path,
    tell: Callable[[int], None],
) -> None:
    torch.set_num_threads(threads)
    uninterrupted(workload, data, cache, steps, every, seed, quiet=True)
    tell(steps)


def _train_and_keep(method: str, settings: Settings, data: Path, cache: Path, tell: Callable[[int], None]) -> None:
    found = train(method, settings, data, cache, tell)
    _file(method, settings, cache).write_text(json.dumps(asdict(found), indent=1) + "\n")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a report, with the number of trainings that run at a time."""
    made = options.parser(description, data="shakespeare.txt and cifar10.zip")
    made.add_argument("--workers", type=int, default=2, help="trainings that run at a time, one core each")
    return made


def times(ratio: float | None) -> str:
    """Return a ratio as text for a table."""
    return "–" if ratio is None else f"{ratio:.1f}×"
