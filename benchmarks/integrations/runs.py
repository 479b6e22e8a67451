"""The runs of ``frameworks.py``: trainings in processes of their own, killed or not, kept in a cache folder."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import memory
from crashes import Job, key_of_code, run_all
from integrations.byte_model import OWN, VALIDATED, Ended, Training
from workloads import key_of

import dynaquant as dq
from dynaquant.options import QualityName

HERE = Path(__file__).parent
FRAMEWORKS = ("transformers", "accelerate", "lightning")
QUALITIES: tuple[QualityName, ...] = get_args(QualityName)
DEFAULT = "balanced"
LONGEST = 1800.0
"""Seconds after which a process counts as hanging."""
LATEST = 0.2
"""A kill comes up to so many seconds after its step, so that some come during a save."""
IRRELEVANT = {"cli", "demo", "report"}
"""Rooms of dynaquant that no checkpoint of these trainings passes through."""


@dataclass(frozen=True)
class Kill:
    """When to kill a training: so many seconds after a step."""

    step: int
    seconds: float


@dataclass(frozen=True)
class Kind:
    """One training. saving: a quality, or OWN or VALIDATED. killed: whether it is killed and resumed."""

    framework: str
    saving: str
    seed: int
    killed: bool = False

    @property
    def name(self) -> str:
        return f"{self.framework}-{self.saving}{'-killed' * self.killed}-{self.seed}"


@dataclass(frozen=True)
class Attempt:
    """A process that trained: its first step and its last; 0 if there was none."""

    first: int
    last: int


@dataclass(frozen=True)
class Run:
    """One training: what it ended with, and its processes."""

    ended: Ended
    attempts: list[Attempt]


@dataclass(frozen=True)
class Plan:
    """What is run. training: of the first seed. kills: of each training that is killed."""

    training: Training
    seeds: int = 4
    kills: int = 3

    def kinds(self) -> Iterator[Kind]:
        """Yield all trainings."""
        for seed in range(self.seeds):
            for framework in FRAMEWORKS:
                yield Kind(framework, OWN, seed)
                is_lightning = framework == "lightning"
                for saving in ("lossless", DEFAULT, *([VALIDATED, "high"] if is_lightning else [])):
                    yield Kind(framework, saving, seed, killed=True)
                if seed == 0:
                    for saving in (*QUALITIES, *([VALIDATED] if is_lightning else [])):
                        yield Kind(framework, saving, seed)

    def kills_of(self, kind: Kind) -> list[Kill]:
        """Return when a training is killed: at random steps after its first save, by framework and seed."""
        draw = random.Random(f"{kind.framework} {kind.seed}")
        steps = draw.sample(range(self.training.every + 1, self.training.steps), self.kills if kind.killed else 0)
        return [Kill(step, draw.uniform(0, LATEST)) for step in sorted(steps)]


def plan_of(data: Path, quick: bool) -> Plan:
    """Return what to run. quick: only to see that it works."""
    training = Training(str(data.absolute()))
    if quick:  # the last loss takes long enough that no kill comes after the end
        return Plan(replace(training, steps=12, every=4, epoch=7, width=32, layers=1, final=2048), seeds=1, kills=1)
    return Plan(training)


def trained(kind: Kind, plan: Plan, scratch: Path, tell: Callable[[int], None] = lambda _: None) -> Run:
    """Train in processes, of which all but the last are killed. tell: called with the number of the last step."""
    training = replace(plan.training, seed=kind.seed)
    attempts = []
    with TemporaryDirectory(dir=scratch) as folder:
        for kill in [*plan.kills_of(kind), None]:
            attempt, ended = launch(kind, training, Path(folder), kill, tell)
            attempts.append(attempt)
    assert ended is not None
    return Run(ended, attempts)


def launch(
    kind: Kind, training: Training, folder: Path, kill: Kill | None, tell: Callable[[int], None]
) -> tuple[Attempt, Ended | None]:
    """Run a process to its end, or until it is killed. folder: of its checkpoints; those that are there are resumed.

    Raises RuntimeError if it fails by itself, or hangs.
    """
    orders = {"training": asdict(training), "folder": str(folder / "training"), "saving": kind.saving}
    command = [sys.executable, "-m", f"integrations.with_{kind.framework}", json.dumps(orders)]
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    log = folder / "log.txt"
    steps, ended = [], None
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        hanging = threading.Timer(LONGEST, process.kill)
        hanging.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                word, _, value = line.partition(" ")
                if word == "ended":
                    ended = Ended(**json.loads(value))
                if word != "step":
                    continue
                steps.append(int(value))
                tell(steps[-1])
                if kill is not None and steps[-1] == max(kill.step, steps[0]):
                    time.sleep(kill.seconds)
                    process.send_signal(signal.SIGKILL)
        except BaseException:
            process.kill()
            raise
        finally:
            hanging.cancel()
    if process.returncode != (0 if kill is None else -signal.SIGKILL) or (ended is None) == (kill is None):
        raise RuntimeError(f"{kind.name} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return Attempt(steps[0] if steps else 0, steps[-1] if steps else 0), ended


@dataclass(frozen=True)
class Sweep:
    """All trainings of a plan, and the folder that keeps their results."""

    plan: Plan
    cache: Path

    def run(self, workers: int) -> None:
        """Run what the cache does not have, ``workers`` trainings at a time."""
        missing = [kind for kind in self.plan.kinds() if not self.file(kind).exists()]
        steps = self.plan.training.steps
        run_all([Job(steps, _keep, (kind, self.plan, self.file(kind))) for kind in missing], workers)

    def found(self) -> dict[Kind, Run]:
        """Return what the cache has."""
        return {kind: _read(self.file(kind)) for kind in self.plan.kinds() if self.file(kind).exists()}

    def file(self, kind: Kind) -> Path:
        """Return the path of a result. It depends on the settings, the code and the versions of packages."""
        settings = replace(self.plan.training, data="", seed=kind.seed), self.plan.kills_of(kind)
        versions = [version(package) for package in ("torch", "transformers", kind.framework)]
        return self.cache / f"frameworks-{kind.name}-{key_of(settings, versions, _code(kind.framework))}.json"


def _keep(kind: Kind, plan: Plan, file: Path, tell: Callable[[int], None]) -> None:
    """Train and write the result, so that a run that is stopped leaves no half a file."""
    run = trained(kind, plan, file.parent, tell)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(run), indent=1) + "\n")
    unfinished.replace(file)


def _read(file: Path) -> Run:
    stored = json.loads(file.read_text())
    return Run(Ended(**stored["ended"]), [Attempt(**one) for one in stored["attempts"]])


@lru_cache
def _code(framework: str) -> str:
    """Return a key of the code that trains with a framework and that makes checkpoints."""
    root = Path(dq.__file__).parent
    library = [file for file in sorted(root.rglob("*.py")) if file.relative_to(root).parts[0] not in IRRELEVANT]
    native = [file.read_bytes() for file in sorted((root.parents[1] / "native").glob("*.?pp"))]
    own = [HERE / "byte_model.py", HERE / f"with_{framework}.py", Path(memory.__file__)]
    return key_of(key_of_code([*library, *own]), native)
