"""Runs the demo's training process to its end, killing it on the way as often as asked."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SAVING_SHARE = 0.4
"""Share of the crashes that are put into a save; of those at random moments hardly any would hit one."""


@dataclass
class Story:
    """What happened to a training until its end."""

    quality: float = 0.0
    """The metric at the end."""
    qualities: dict[int, float] = field(default_factory=dict)
    """The metric on the way, by step, of a training without checkpoints."""
    crashes: list[int] = field(default_factory=list)
    """The steps at which the process was killed."""
    crashes_in_save: int = 0
    """How many of them came while a checkpoint was being captured, scored or written."""
    resumed: list[int] = field(default_factory=list)
    """The steps from which it went on after each crash."""
    seconds: float = 0.0
    """Time spent in the training loop, of all processes."""
    saving: float = 0.0
    """The part of it that ``save`` took."""


def run_training(
    arguments: list[str], steps: int, crashes: int, seed: int, progress: Callable[[int, Story], None]
) -> Story:
    """Runs ``dynaquant.demo.train`` with these arguments until it ends; kills it (SIGKILL) ``crashes`` times.

    Each crash comes at a random step of its share of the training. progress is called with the current step. Raises
    RuntimeError with the process's own words when it fails by itself.
    """
    chance = random.Random(f"{seed} {arguments[0]}")
    targets = [int(steps * (number + chance.random()) / crashes) for number in range(crashes)]
    in_save = set(chance.sample(range(crashes), round(SAVING_SHARE * crashes)))
    story = Story()
    while True:
        target = targets[len(story.crashes)] if len(story.crashes) < crashes else None
        wanted = "saving" if target is not None and len(story.crashes) in in_save else "step"
        if _run_once(arguments, story, target, wanted, chance, progress):
            return story


def _run_once(
    arguments: list[str],
    story: Story,
    target: int | None,
    wanted: str,
    chance: random.Random,
    progress: Callable[[int, Story], None],
) -> bool:
    """Runs the process until it ends (True) or reaches the target step and is killed (False)."""
    seconds = saving = 0.0
    ended = killed = False
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "dynaquant.demo.train", *arguments], stdout=subprocess.PIPE, stderr=errors
        )
        for event in _until_end(process):
            kind, step = event["event"], event.get("step", 0)
            if kind == "start" and story.crashes:
                story.resumed.append(step)
            elif kind == "quality":
                story.qualities[step] = event["quality"]
            elif kind == "step":
                seconds, saving = event["seconds"], event["saving"]
                progress(step, story)
            elif kind == "end":
                story.quality, ended = event["quality"], True
            if kind == wanted and target is not None and step >= target:
                time.sleep(chance.uniform(0, 0.25))  # about the time that a save takes
                process.kill()
                killed = True
                story.crashes.append(step)
                break
        rest, _ = process.communicate()
        if killed and wanted == "saving":
            later = [json.loads(line) for line in rest.splitlines() if line.endswith(b"}")]
            story.crashes_in_save += not any(event["event"] == "committed" for event in later)
        errors.seek(0)
        if not ended and not killed:
            raise RuntimeError(f"the training process failed:\n{errors.read().decode(errors='replace')}")
    story.seconds += seconds
    story.saving += saving
    return ended


def _until_end(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    try:
        for line in process.stdout:
            yield json.loads(line)
    except BaseException:
        process.kill()  # Ctrl-C must not leave it behind
        raise


def arguments_for(
    workload: str, steps: int, every: int, max_degradation: float, seed: int, run: Path | None
) -> list[str]:
    """The command line of the training process."""
    numbers = [f"--steps={steps}", f"--every={every}", f"--max-degradation={max_degradation}", f"--seed={seed}"]
    return [workload, *numbers, *(["--run", str(run)] if run else [])]
