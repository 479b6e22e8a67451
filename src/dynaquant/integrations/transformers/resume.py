"""Finds the checkpoint that ``resume_from_checkpoint`` asks for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import trainer_utils
from transformers.trainer import TRAINER_STATE_NAME

from dynaquant.errors import CheckpointError
from dynaquant.integrations.transformers.progress import state_in
from dynaquant.store.pointers import RUN_FOLDER
from dynaquant.store.run import Run
from dynaquant.store.tags import open_step_or_tag


@dataclass(frozen=True)
class Asked:
    """The checkpoint of a run to resume from: a step or a tag; None for the newest that verifies."""

    step: int | str | None


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return what to resume from: the run in this ``output_dir``, or the last checkpoint that Transformers wrote.

    None if there is nothing yet. A script that calls ``trainer.train(resume_from_checkpoint=get_last_checkpoint(out))``
    can be started again and again.

    Raises ValueError if there are both, and the one of Transformers has the higher step.
    """
    run = Path(folder) / RUN_FOLDER
    if has_checkpoints(run):
        _refuse_newer_beside(run)
        return str(run)
    found: str | None = trainer_utils.get_last_checkpoint(folder) if os.path.isdir(folder) else None
    return found


def has_checkpoints(folder: Path) -> bool:
    """Whether a folder is a run with checkpoints, readable or not."""
    summaries, broken = Run(folder).summaries() if folder.is_dir() else ([], [])
    return bool(summaries or broken)


def asked_for(resume_from_checkpoint: Any, run: Path) -> Asked | None:
    """Return the checkpoint of the Trainer's run that is asked for; None if it is not one of the run.

    resume_from_checkpoint: True or the run's folder for the newest, a step, or a tag. Anything else that is there is
    left to Transformers.

    Raises ValueError for another run, or for True beside a checkpoint of Transformers with a higher step;
    CheckpointError if there is no such step or tag.
    """
    given = resume_from_checkpoint
    if given is None or given is False:
        return None
    if given is True:
        if not has_checkpoints(run):
            return None
        _refuse_newer_beside(run)
        return Asked(None)
    if isinstance(given, int):
        return Asked(given)
    path = Path(given)
    if path.is_dir():
        if run.is_dir() and path.samefile(run):
            return Asked(None)
        if has_checkpoints(path):
            raise ValueError(
                f"{path} is another run; the run of this Trainer is {run}. Give the output_dir of the other run, or "
                f"begin with its checkpoint: dynaquant branch {path} STEP {run}"
            )
        return None
    if path.exists() or path.name != os.fspath(given):
        return None
    return Asked(int(given) if given.isdecimal() else given)


def ordinary_checkpoint(folder: Path) -> tuple[int, Path] | None:
    """Return the step and the folder of the last checkpoint that Transformers wrote in a folder; None without one."""
    prefix = f"{trainer_utils.PREFIX_CHECKPOINT_DIR}-"
    found = [path.parent for path in folder.glob(f"{prefix}*/{TRAINER_STATE_NAME}")]
    steps = {int(number): path for path in found if (number := path.name.removeprefix(prefix)).isdecimal()}
    return max(steps.items(), default=None)


def _refuse_newer_beside(run: Path) -> None:
    """Raise ValueError if a checkpoint that Transformers wrote beside a run has a higher step than the run's newest.

    Nobody but the user knows which training is to go on.
    """
    order, ordinary = Run(run).steps(), ordinary_checkpoint(run.parent)
    if order and ordinary is not None and ordinary[0] > order[-1]:
        raise ValueError(
            f"{ordinary[1]}, which Transformers wrote, has a higher step than the newest checkpoint of the run {run}, "
            f"step {order[-1]}. Choose one: resume_from_checkpoint={str(ordinary[1])!r} or {str(run)!r}; or move the "
            "other away"
        )


@contextmanager
def trainer_state(run: Path, asked: Asked) -> Iterator[tuple[int, str]]:
    """Yield the step of a checkpoint, and a temporary folder with its ``TrainerState``, which Transformers reads there.

    Raises CheckpointError if there is no such checkpoint, or no Trainer has saved it.
    """
    opened = Run(run)
    file = opened.newest() if asked.step is None else open_step_or_tag(opened, asked.step)
    step, state = file.header.step, state_in(file)
    if state is None:
        raise CheckpointError(f"{run}: step {step} was not saved by a Trainer of dynaquant.integrations.transformers")
    with tempfile.TemporaryDirectory(prefix=f"checkpoint-{step}-") as folder:
        (Path(folder) / TRAINER_STATE_NAME).write_text(state)
        yield step, folder
