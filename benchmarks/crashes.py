"""Trainings that crash and go on from the checkpoints of one method, and the same trainings left alone.

A crash throws away model, optimizer and all that a method has in memory but what its decoder would know, some steps
after a checkpoint; everything is built anew, restored, and those steps are done again. Every training is kept in a
cache folder under a name that its settings and the code behind it decide, so a benchmark that was stopped goes on.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any

import checkpointers
import options
import torch
import workloads
from checkpointers import Saved
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from workloads import WORKLOADS, Uninterrupted, key_of, uninterrupted

from dynaquant.search.quality import degradation

SEED = 0
"""Of the training that crashes."""


@dataclass(frozen=True)
class Settings:
    """What is run. lost: steps from a checkpoint to the crash. seeds: trainings left alone.

    threads: PyTorch's; one, so that results do not depend on how many cores there are.
    """

    workload: str
    max_degradation: float
    restores: int
    steps: int = 1600
    every: int = 80
    lost: int = 10
    seeds: int = 3
    threads: int = 1

    @property
    def name(self) -> str:
        return f"{self.workload}-{self.max_degradation:g}-{self.restores}"

    def command(self, script: str) -> str:
        """How to run a script of this folder again."""
        given = [
            f"--{field.name.replace('_', '-')} {getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return " ".join([f".venv/bin/python benchmarks/{script} --data DIR", *given])

    @property
    def restore_points(self) -> list[int]:
        """The checkpoints nearest to evenly spaced points of the training."""
        parts = self.restores + 1
        return [int(k * self.steps / parts / self.every + 0.5) * self.every for k in range(1, parts)]

    def alone(self, data: Path, cache: Path) -> list[Uninterrupted]:
        """The same training without crashes, with each of the seeds; the first is that of the training with them."""
        torch.set_num_threads(self.threads)
        return [uninterrupted(self.workload, data, cache, self.steps, self.every, seed) for seed in self.alone_seeds]

    @property
    def alone_seeds(self) -> range:
        """Of the trainings left alone."""
        return range(SEED, SEED + self.seeds)


def of_size(workload: str, max_degradation: float, restores: int, quick: bool) -> Settings:
    """What the tables of several methods are made with; quick: only to see that everything works."""
    if quick:
        return Settings(workload, max_degradation, min(restores, 1), steps=4, every=2, lost=1, seeds=1)
    return Settings(workload, max_degradation, restores, steps=800, every={"gpt": 40, "resnet": 32}[workload])


@dataclass(frozen=True)
class Training:
    """One training with crashes. final: the metric at the end, on more data. seconds: of training alone."""

    method: str
    settings: Settings
    saved: list[Saved]
    final: float
    higher_is_better: bool
    seconds: float

    @property
    def weights(self) -> float | None:
        """How many times smaller the weights of all checkpoints are, None where they are not stored apart."""
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
        """Checkpoints of which nothing in the method's space was good enough."""
        return sum(not saved.degradation <= self.settings.max_degradation for saved in self.saved)

    @property
    def evaluations(self) -> float:
        """Settings that the metric judged, for each checkpoint."""
        return sum(saved.evaluations for saved in self.saved) / len(self.saved)

    @property
    def blocked(self) -> float:
        """Seconds for which a checkpoint keeps training waiting, in the mean."""
        return sum(saved.blocked for saved in self.saved) / len(self.saved)

    def worse_than(self, alone: list[Uninterrupted]) -> float:
        """How much worse it ends than the training of the same seed that was left alone."""
        return degradation(alone[0].final, self.final, self.higher_is_better)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Training:
        """The inverse of ``asdict``."""
        saved = [Saved.from_json(one) for one in stored["saved"]]
        return cls(**{**stored, "settings": Settings(**stored["settings"]), "saved": saved})


def spread(alone: list[Uninterrupted]) -> float:
    """How far apart the seeds end, relative to their mean."""
    finals = [one.final for one in alone]
    return (max(finals) - min(finals)) / abs(sum(finals) / len(finals))


@lru_cache
def _code(method: str) -> str:
    """What the sources behind a method say, less comments and layout."""
    files = [Path(checkpointers.__file__), Path(workloads.__file__), *checkpointers.sources(method)]
    return key_of([ast.dump(ast.parse(file.read_text())) for file in files])


def _file(method: str, settings: Settings, cache: Path) -> Path:
    """Where a training is kept."""
    key = key_of(method, settings, _code(method), torch.__version__)
    return cache / f"training-{settings.workload}-{method.replace(', ', '-')}-{key}.json"


def train(method: str, settings: Settings, data: Path, cache: Path, tell: Callable[[int], None]) -> Training:
    """Trains with crashes. tell: is given the number of steps done so far."""
    torch.set_num_threads(settings.threads)
    points = settings.restore_points
    saved: list[Saved] = []
    seconds, done = 0.0, 0
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        checkpoints = checkpointers.checkpoints_by(method, Path(folder), settings.max_degradation, settings.every)
        for begin, end in zip([0, *points], [*(p + settings.lost for p in points), settings.steps], strict=True):
            work = WORKLOADS[settings.workload](data, cache, settings.steps, SEED)
            restored = checkpoints.attach(work)
            assert restored == begin, f"restored step {restored} instead of {begin}"
            for step in range(begin + 1, end + 1):
                start = perf_counter()
                work.train_step()
                seconds += perf_counter() - start
                if step % settings.every == 0:
                    saved.append(checkpoints.save(step))
                done += 1
                tell(done)
        checkpoints.close()
    final = work.final_quality(work.model)
    return Training(method, settings, saved, final, work.higher_is_better, seconds)


def trainings(jobs: Sequence[tuple[str, Settings]], data: Path, cache: Path, workers: int) -> list[Training]:
    """The training of each method and settings, ``workers`` at a time, from the cache where they are in it.

    The trainings left alone that they are compared with are in the cache afterwards, too.
    """
    alone = {(s.workload, s.steps, s.every, seed, s.threads) for _, s in jobs for seed in s.alone_seeds}
    missing = [job for job in jobs if not _file(*job, cache).exists()]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    spawn = multiprocessing.get_context("spawn")
    with (
        spawn.Manager() as manager,
        ProcessPoolExecutor(workers, spawn) as pool,
        Progress(*columns, TimeRemainingColumn()) as progress,
    ):
        total = sum(job.steps + job.restores * job.lost for _, job in missing) + sum(one[1] for one in alone)
        task = progress.add_task(f"steps of {len(missing) + len(alone)} trainings", total=total)
        steps = manager.dict()
        running = {pool.submit(_alone, *one, data, cache, steps) for one in sorted(alone)}
        running |= {pool.submit(_train_and_keep, *job, data, cache, steps) for job in missing}
        while running:
            done, running = wait(running, timeout=1)
            for future in done:
                future.result()
            progress.update(task, completed=sum(steps.values()))
    return [Training.from_json(json.loads(_file(*job, cache).read_text())) for job in jobs]


def _alone(workload: str, steps: int, every: int, seed: int, threads: int, data: Path, cache: Path, done: Any) -> None:
    torch.set_num_threads(threads)
    uninterrupted(workload, data, cache, steps, every, seed, quiet=True)
    done[f"{workload} {seed}"] = steps


def _train_and_keep(method: str, settings: Settings, data: Path, cache: Path, steps: Any) -> None:
    file = _file(method, settings, cache)
    found = train(method, settings, data, cache, lambda done: steps.__setitem__(file.name, done))
    file.write_text(json.dumps(asdict(found), indent=1) + "\n")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Of a report, with how many trainings run at a time."""
    made = options.parser(description, data="shakespeare.txt and cifar10.zip")
    made.add_argument("--workers", type=int, default=os.cpu_count(), help="trainings at a time")
    return made


def times(ratio: float | None) -> str:
    """A ratio for a table."""
    return "–" if ratio is None else f"{ratio:.1f}×"


def parse(description: str | None) -> tuple[Settings, argparse.Namespace]:
    """The settings of one training on the command line, and the folders ``data``, ``cache`` and ``out``, both made."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds shakespeare.txt or cifar10.zip")
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--max-degradation", type=float, required=True)
    parser.add_argument("--restores", type=int, required=True)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--every", type=int, default=Settings.every)
    parser.add_argument("--lost", type=int, default=Settings.lost, help="steps from a checkpoint to the crash")
    parser.add_argument("--seeds", type=int, default=Settings.seeds, help="trainings that are left alone")
    parser.add_argument("--threads", type=int, default=Settings.threads, help="PyTorch's")
    parser.add_argument("--cache", type=Path, default=Path("build/benchmarks"), help="where those are kept")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the results")
    arguments = parser.parse_args()
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})
    if not 0 <= settings.restores < settings.steps // settings.every or not 0 <= settings.lost < settings.every:
        parser.error("every restore needs a checkpoint of its own before the last, and a crash before the next one")
    torch.set_num_threads(settings.threads)
    for folder in (arguments.cache, arguments.out):
        folder.mkdir(parents=True, exist_ok=True)
    return settings, arguments
