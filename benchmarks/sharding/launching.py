"""Launches the ranks of ``sharded.py`` by torchrun, watches them, and kills one of them at a chosen moment."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1]
LONGEST = 1800.0
"""Seconds after which a launch counts as hanging."""


@dataclass(frozen=True)
class Kill:
    """When to kill a rank: so many seconds after a step."""

    step: int
    seconds: float
    rank: int


def told_in(folder: Path) -> list[dict[str, float]]:
    """Return what rank 0 has told so far. A line that is not complete yet, or never will be, is left out."""
    file = folder / "told.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def launch(
    folder: Path,
    ranks: int,
    orders: Mapping[str, Any],
    kill: Kill | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, float]]:
    """Run ranks to their end, or until one is killed. Returns what they have told.

    environment: variables that are added to those of this process.

    Raises RuntimeError if they fail by themselves, or hang.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in [folder / "told.jsonl", *folder.glob("rank-*.pid")]:
        old.unlink(missing_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "sharding.ranks", str(folder), json.dumps(orders)]
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = os.environ | dict(environment or {}) | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    log = folder / "log.txt"
    with (
        log.open("w") as out,
        subprocess.Popen(command, env=variables, stdout=out, stderr=out, start_new_session=True) as process,
    ):
        try:
            killed = _watch(process, folder, kill)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if not killed and process.returncode:
        raise RuntimeError(f"{ranks} ranks in {folder} failed with {process.returncode}:\n{log.read_text()[-3000:]}")
    return told_in(folder)


def _watch(process: subprocess.Popen[bytes], folder: Path, kill: Kill | None) -> bool:
    """Wait until the ranks have ended. Returns whether one was killed."""
    began, killed = time.monotonic(), False
    while process.poll() is None:
        time.sleep(0.02)
        if time.monotonic() - began > LONGEST:
            raise RuntimeError(f"the ranks in {folder} take more than {LONGEST:g} seconds")
        if kill is not None and not killed and any(one.get("step", 0) >= kill.step for one in told_in(folder)):
            time.sleep(kill.seconds)
            os.kill(int((folder / f"rank-{kill.rank}.pid").read_text()), signal.SIGKILL)
            killed = True
    return killed


def random_kills(steps: int, every: int, crashes: int, layouts: list[int], draw: random.Random) -> list[Kill]:
    """Return a kill of a random rank for each crash, spread over a training. Each comes after another checkpoint.

    every: steps between checkpoints. layouts: ranks that train until each crash.
    """
    room = steps / (crashes + 1)
    if room < every + 2:
        raise ValueError(f"{crashes} crashes in {steps} steps leave less than {every} + 2 steps between two of them")
    spread = int((room - every - 2) / 2)
    return [
        Kill(int(room * (k + 1)) + draw.randint(-spread, spread), draw.uniform(0, 0.3), draw.randrange(layouts[k]))
        for k in range(crashes)
    ]
