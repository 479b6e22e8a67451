"""The runs of ``promise.py``: one training with crashes or without, by one variant and seed, kept in a cache folder.

The name of a cached run depends on its settings and on the code that it ran, so runs can be stopped and continued, and
run again only after a change that matters.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import checkpointers
import crashes
import torch
import workloads
from checkpointers import METHODS, Checkpoints, Ours, Saved, Theirs
from crashes import Job, key_of_code, run_all, train_with
from peers.peer import Peer
from promise_trainings import TRAININGS, Plan
from workloads import Uninterrupted, Workload, key_of

import dynaquant as dq
from dynaquant.demo import models
from dynaquant.search.evaluation import Evaluate, degradation

MAX_DEGRADATION = 0.01
"""The limit for peers. It is also dynaquant's default."""
IRRELEVANT = {"cli", "demo", "interop", "report"}
"""Rooms of dynaquant that no checkpoint of a training passes through."""
DISTURBANCE = 1e-5
"""Relative standard deviation of the noise that is added once to the weights of a control, ..."""
DISTURBED_AT = 1 / 16
"""... and after which share of its steps."""
STEP_SECONDS = {**dict.fromkeys(TRAININGS, 0.025), "words": 0.05, "clicks": 0.008, "minilm": 0.5}
"""What a training step takes on one core, roughly, for the estimate before a sweep."""
SAVE_IN_STEPS = 20
"""What a save takes, in training steps."""


@dataclass(frozen=True)
class Variant:
    """A way to store checkpoints. method: for the legend. arguments: of dynaquant's Checkpointer; None for ExCP.

    seeds: how many are trained. plan: what differs from the training's plan, by field. coarse: whether the metric is
    rounded to bfloat16, so that it moves in steps.
    """

    method: str = "default"
    arguments: Mapping[str, Any] | None = field(default_factory=dict)
    plan: Mapping[str, int] = field(default_factory=dict)
    seeds: int = 3
    coarse: bool = False

    def plan_of(self, training: str) -> Plan:
        """Return when a training saves and crashes."""
        return replace(TRAININGS[training].plan, **self.plan)

    def checkpoints(self, folder: Path, every: int) -> Checkpoints:
        """Return the checkpoints of a training. folder: an empty one."""
        if self.arguments is None:
            peer = METHODS["ExCP"]
            assert isinstance(peer, Peer)
            return Theirs(peer, MAX_DEGRADATION)
        return Ours(folder, **{"every": every, **self.arguments})

    @property
    def sources(self) -> list[Path]:
        """The Python files that decide what a checkpoint holds."""
        if self.arguments is None:
            return checkpointers.sources("ExCP")
        root = Path(dq.__file__).parent
        return sorted(file for file in root.rglob("*.py") if file.relative_to(root).parts[0] not in IRRELEVANT)


CENTRE = "default"
VARIANTS = {
    CENTRE: Variant(seeds=6),
    "0 restores": Variant(plan={"restores": 0}),
    "20 restores": Variant(plan={"restores": 20}),
    "high": Variant("high", {"quality": "high"}, seeds=6),
    "small": Variant("small", {"quality": "small"}),
    "lossless": Variant("lossless", {"quality": "lossless"}, seeds=1),
    "published": Variant("published", {"quality": dq.Quality(method="published")}),
    "ExCP": Variant("ExCP", None),
    "coarse metric": Variant("coarse metric", coarse=True),
}
"""Variants by name: the centre, and what differs from it in one thing."""
QUICK_VARIANTS = [CENTRE, "ExCP"]
QUICK = {"restores": 2, "every": 2, "steps": 8, "lost": 1}


@dataclass(frozen=True)
class Run:
    """One training with crashes. final: the loss at its end. seconds: of one core, everything included."""

    training: str
    variant: str
    seed: int
    final: float
    saved: list[Saved]
    seconds: float

    @property
    def state(self) -> float:
        """How many times smaller all checkpoints are."""
        return sum(saved.state[0] for saved in self.saved) / sum(saved.state[1] for saved in self.saved)

    @property
    def weights(self) -> float | None:
        """How many times smaller the weights of all checkpoints are; None if they are not stored separately."""
        sizes = [saved.weights for saved in self.saved if saved.weights is not None]
        return sum(raw for raw, _ in sizes) / sum(stored for _, stored in sizes) if sizes else None

    @property
    def worst(self) -> float:
        """The largest degradation of a checkpoint."""
        return max(saved.degradation for saved in self.saved)

    def worse_than(self, alone: Uninterrupted) -> float:
        """Return how much worse it ends than undisturbed, relative; negative if better."""
        return degradation(alone.final, self.final, higher_is_better=False)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Run:
        """Return the inverse of ``asdict``."""
        return cls(**{**stored, "saved": [Saved.from_json(one) for one in stored["saved"]]})


def equivalents(runs: Sequence[Run]) -> float:
    """Return the median over all saves: evaluations, with those of the weights in training."""
    return median(saved.equivalents for run in runs for saved in run.saved)


@dataclass(frozen=True)
class Sweep:
    """Trainings, variants and seeds to run, and the folders of data and cache. seeds: None for each variant's own."""

    data: Path
    cache: Path
    trainings: Sequence[str]
    variants: Mapping[str, Variant]
    seeds: Sequence[int] | None = None

    def seeds_of(self, variant: str) -> Sequence[int]:
        """Return the seeds of a variant."""
        return range(self.variants[variant].seeds) if self.seeds is None else self.seeds

    @property
    def undisturbed(self) -> list[tuple[str, int, int]]:
        """Training, seed and steps of every run without checkpoints."""
        return sorted(
            {
                (training, seed, variant.plan_of(training).steps)
                for training in self.trainings
                for name, variant in self.variants.items()
                for seed in self.seeds_of(name)
            }
        )

    @property
    def controls(self) -> list[tuple[str, int, int]]:
        """Training, seed and steps of every control: a run without checkpoints whose weights change a little once."""
        centre = [name for name in self.variants if name == CENTRE]
        return sorted(
            (training, seed, self.variants[name].plan_of(training).steps)
            for name in centre
            for training in self.trainings
            for seed in self.seeds_of(name)
        )

    @property
    def disturbed(self) -> list[tuple[str, str, int]]:
        """Training, variant and seed of every run with checkpoints, the centre and the first seeds first."""
        return [
            (training, variant, seed)
            for variant in self.variants
            for training in self.trainings
            for seed in self.seeds_of(variant)
        ]

    def file(self, training: str, variant: str, seed: int) -> Path:
        """Return the file that keeps a run with checkpoints."""
        found = self.variants[variant]
        code = _code_of_training(training), _code(tuple(found.sources))
        settings = found.plan_of(training), found.arguments, found.coarse, *code
        return self.cache / f"promise-{training}-{variant.replace(' ', '-')}-{seed}-{key_of(*settings)}.json"

    def undisturbed_file(self, training: str, seed: int, steps: int) -> Path:
        """Return the file that keeps a run without checkpoints."""
        return self.cache / f"promise-{training}-undisturbed-{seed}-{key_of(steps, _code_of_training(training))}.json"

    def control_file(self, training: str, seed: int, steps: int) -> Path:
        """Return the file that keeps a control."""
        settings = steps, DISTURBANCE, DISTURBED_AT, _code_of_training(training)
        return self.cache / f"promise-{training}-control-{seed}-{key_of(*settings)}.json"

    def missing(self) -> list[Job]:
        """Return the runs that the cache does not have."""
        alone = {self.undisturbed_file(*one): (*one, 0.0) for one in self.undisturbed}
        alone |= {self.control_file(*one): (*one, DISTURBANCE) for one in self.controls}
        # The names are made before the runs: they must be those of the code that the runs import.
        jobs = [Job(one[2], _keep_alone, (file, self, *one)) for file, one in alone.items() if not file.exists()]
        for one in self.disturbed:
            file, plan = self.file(*one), self.variants[one[1]].plan_of(one[0])
            if not file.exists():
                steps = plan.steps + plan.lost * len(plan.restore_points)
                jobs.append(Job(steps, _keep_disturbed, (file, self, *one)))
        return jobs

    def estimate(self, jobs: Sequence[Job]) -> float:
        """Return about how many seconds of one core these runs take."""
        seconds = 0.0
        for job in jobs:
            training = job.arguments[2]
            step = STEP_SECONDS[training]
            seconds += job.steps * step
            if job.function is _keep_disturbed:
                plan = self.variants[job.arguments[3]].plan_of(training)
                seconds += plan.steps // plan.every * SAVE_IN_STEPS * step
        return seconds

    def run(self, workers: int) -> None:
        """Run what is missing, ``workers`` runs at a time."""
        for training in self.trainings:  # two workers must not decode the images at the same time
            TRAININGS[training].new(self.data, self.cache, 1, 0)
        run_all(self.missing(), workers)

    def alone(self, training: str) -> dict[int, Uninterrupted]:
        """Return the runs of a training without checkpoints by seed, those that are there."""
        return _alone(
            {seed: self.undisturbed_file(name, seed, n) for name, seed, n in self.undisturbed if name == training}
        )

    def controls_of(self, training: str) -> dict[int, Uninterrupted]:
        """Return the controls of a training by seed, those that are there."""
        return _alone({seed: self.control_file(name, seed, n) for name, seed, n in self.controls if name == training})

    def runs(self, training: str, variant: str) -> list[Run]:
        """Return the runs of a training and variant, those that are there."""
        files = [self.file(training, variant, seed) for seed in self.seeds_of(variant)]
        return [Run.from_json(json.loads(file.read_text())) for file in files if file.exists()]


@lru_cache
def _code_of_training(name: str) -> str:
    """Return a key of the code that trains, and of PyTorch."""
    shared = [Path(module.__file__ or "") for module in (workloads, models)]
    return key_of(key_of_code([*shared, *TRAININGS[name].sources]), torch.__version__)


@lru_cache
def _code(files: tuple[Path, ...]) -> str:
    """Return a key of the code that makes checkpoints and crashes, and of the native sources."""
    native = sorted((Path(dq.__file__).parents[2] / "native").glob("*.?pp"))
    modules = (checkpointers, crashes)
    return key_of(
        key_of_code([*files, *(Path(module.__file__ or "") for module in modules)]),
        [file.read_bytes() for file in native],
    )


def _alone(files: Mapping[int, Path]) -> dict[int, Uninterrupted]:
    return {
        seed: Uninterrupted.from_json(json.loads(file.read_text())) for seed, file in files.items() if file.exists()
    }


def _keep_alone(
    file: Path, sweep: Sweep, training: str, seed: int, steps: int, disturbance: float, tell: Callable[[int], None]
) -> None:
    """Train without checkpoints. disturbance: relative standard deviation of noise on the weights, once."""
    torch.set_num_threads(1)
    began = process_time()
    work = TRAININGS[training].new(sweep.data, sweep.cache, steps, seed)
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        work.train_step()
        if disturbance and step == max(int(DISTURBED_AT * steps), 1):
            with torch.no_grad():
                for parameter in work.model.parameters():
                    parameter.mul_(1 + disturbance * torch.randn(parameter.shape, generator=generator))
        tell(step)
    found = Uninterrupted({}, work.final_quality(work.model), process_time() - began, 0.0)
    _keep(file, found)


def _keep_disturbed(
    file: Path, sweep: Sweep, training: str, variant: str, seed: int, tell: Callable[[int], None]
) -> None:
    _keep(file, disturbed(sweep, training, variant, seed, tell))


def disturbed(sweep: Sweep, training: str, variant: str, seed: int, tell: Callable[[int], None]) -> Run:
    """Train with crashes. tell: called with the number of steps that are done."""
    torch.set_num_threads(1)
    began = process_time()
    found = sweep.variants[variant]
    plan = found.plan_of(training)

    def new_work() -> Workload:
        work = TRAININGS[training].new(sweep.data, sweep.cache, plan.steps, seed)
        return replace(work, search_loss=_in_bfloat16(work.search_loss)) if found.coarse else work

    with tempfile.TemporaryDirectory(dir=sweep.cache) as folder:
        checkpoints = found.checkpoints(Path(folder), plan.every)
        work, saved, _ = train_with(checkpoints, new_work, plan, tell)
        checkpoints.close()
    return Run(training, variant, seed, work.final_quality(work.model), saved, process_time() - began)


def _in_bfloat16(metric: Evaluate) -> Evaluate:
    """Return a metric rounded to bfloat16, which moves in steps of 0.4 to 0.8 %."""
    return lambda model: torch.tensor(metric(model)).bfloat16().item()


def _keep(file: Path, found: Run | Uninterrupted) -> None:
    """Write a result so that a run that is stopped leaves no half a file."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(found), indent=1) + "\n")
    unfinished.replace(file)
