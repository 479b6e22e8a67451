"""Runs the demo's training process to its end and kills it on the way as often as asked."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

SAVING_SHARE = 0.4
"""Share of the crashes that are aimed at a save. Crashes at random moments would hardly ever hit one."""


@dataclass
class Outcome:
    """What happened to a training until its end."""

    quality: float = 0.0
    """The metric at the end."""
    qualities: dict[int, float] = field(default_factory=dict)
    """The metric on the way, by step; only of a training without checkpoints."""
    crashes: list[int] = field(default_factory=list)
    """The steps at which the process was killed."""
    crashes_in_save: int = 0
    """How many of the crashes came while a checkpoint was captured, scored or written."""
    resumed: list[int] = field(default_factory=list)
    """The step from which training resumed after each crash."""
    seconds: float = 0.0
    """Time in the training loop, summed over all processes."""
    saving: float = 0.0
    """The part of ``seconds`` spent in ``save``."""


async def run_training(
    arguments: list[str], steps: int, crashes: int, seed: int, threads: int, progress: Callable[[int, Outcome], None]
) -> Outcome:
    """Run ``dynaquant.demo.train`` with these arguments until it ends; kill it (SIGKILL) ``crashes`` times.

    The training is divided into as many equal parts as there are crashes; each part has one, at a random step.
    threads: threads of the training process. progress: called with the current step.

    Raises RuntimeError with the error output of the process if it fails by itself.
    """
    chance = random.Random(f"{seed} {arguments[0]}")
    targets = [int(steps * (number + chance.random()) / crashes) for number in range(crashes)]
    in_save = set(chance.sample(range(crashes), round(SAVING_SHARE * crashes)))
    outcome = Outcome()
    for number, target in enumerate(targets):
        crash = _Crash(target, "saving" if number in in_save else "step", chance)
        if await _run_once(arguments, outcome, crash, threads, progress):
            return outcome
    await _run_once(arguments, outcome, None, threads, progress)
    return outcome


@dataclass(frozen=True)
class _Crash:
    """When to kill the process: shortly after the first event of this kind at or after a step."""

    step: int
    kind: str
    chance: random.Random


async def _run_once(
    arguments: list[str],
    outcome: Outcome,
    crash: _Crash | None,
    threads: int,
    progress: Callable[[int, Outcome], None],
) -> bool:
    """Run the process until it ends (True) or is killed (False)."""
    command = [sys.executable, "-m", "dynaquant.demo.train", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "DYNAQUANT_THREADS": str(threads)}
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=errors, env=environment
        )
        try:
            how = await _follow(process, outcome, crash, progress)
        finally:  # Ctrl-C must not leave the process behind
            if process.returncode is None:
                process.kill()
                await process.wait()
        if how is None:
            errors.seek(0)
            raise RuntimeError(f"the training process failed:\n{errors.read().decode(errors='replace')}")
    return how == "ended"


async def _follow(
    process: asyncio.subprocess.Process,
    outcome: Outcome,
    crash: _Crash | None,
    progress: Callable[[int, Outcome], None],
) -> Literal["ended", "killed"] | None:
    """Record the reports of the process in ``outcome``. Return None if the process stops before the training ends."""
    assert process.stdout is not None
    seconds = saving = 0.0
    how: Literal["ended", "killed"] | None = None
    async for line in process.stdout:
        event = json.loads(line)
        kind, step = event["event"], event.get("step", 0)
        if kind == "start" and outcome.crashes:
            outcome.resumed.append(step)
        elif kind == "quality":
            outcome.qualities[step] = event["quality"]
        elif kind == "step":
            seconds, saving = event["seconds"], event["saving"]
            progress(step, outcome)
        elif kind == "end":
            outcome.quality, how = event["quality"], "ended"
        if crash is not None and kind == crash.kind and step >= crash.step:
            await asyncio.sleep(crash.chance.uniform(0, 0.25))  # about as long as a save takes
            if process.returncode is None:
                process.kill()
            outcome.crashes.append(step)
            how = "killed"
            break
    rest = await process.stdout.read()
    await process.wait()
    if crash is not None and how == "killed" and crash.kind == "saving":
        later = [json.loads(line) for line in rest.splitlines() if line.endswith(b"}")]
        outcome.crashes_in_save += not any(event["event"] == "committed" for event in later)
    outcome.seconds += seconds
    outcome.saving += saving
    return how


def arguments_for(
    workload: str, steps: int, every: int, max_degradation: float | None, seed: int, run: Path | None
) -> list[str]:
    """Return the command line of the training process."""
    numbers = [f"--steps={steps}", f"--every={every}", f"--seed={seed}"]
    if max_degradation is not None:
        numbers.append(f"--max-degradation={max_degradation}")
    return [workload, *numbers, *(["--run", str(run)] if run else [])]
