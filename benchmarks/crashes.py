"""What the benchmarks with crashes have in common: their settings, their command line, the trainings left alone."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from workloads import WORKLOADS, Uninterrupted, uninterrupted

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
        seeds = range(SEED, SEED + self.seeds)
        return [uninterrupted(self.workload, data, cache, self.steps, self.every, seed) for seed in seeds]


def parse(description: str | None) -> tuple[Settings, argparse.Namespace]:
    """The settings on the command line, and the folders ``data``, ``cache`` (made) and ``out`` (made)."""
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
