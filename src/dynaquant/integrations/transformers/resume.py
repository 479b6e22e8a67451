"""Finds the checkpoint that ``resume_from_checkpoint`` asks for."""

from __future__ import annotations

import logging
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
from dynaquant.integrations.transformers.trainer_extra import beside_in, ordinary_checkpoint, state_in
from dynaquant.store.pointers import RUN_FOLDER
from dynaquant.store.run import Run
from dynaquant.store.tags import open_step_or_tag

log = logging.getLogger("dynaquant")


@dataclass(frozen=True)
class Asked:
    """The checkpoint of a run to resume from: a step or a tag; None for the newest that verifies."""

    step: int | str | None


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return what to resume from: the run in this ``output_dir``, or the last checkpoint that Transformers wrote.

    None if there is nothing yet. A script that calls ``trainer.train(resume_from_checkpoint=get_last_checkpoint(out))``
    can be started again and again.

    Raises ValueError if there are both, and Transformers wrote one with a higher step after the newest of the run.
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

    Raises ValueError for another run, or for True if Transformers wrote a checkpoint with a higher step after the
    newest of the run; CheckpointError if there is no such step or tag.
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


def _refuse_newer_beside(run: Path) -> None:
    """Raise ValueError if Transformers has written a checkpoint of a higher step since the run's newest was saved."""
    order, ordinary = Run(run).steps(), ordinary_checkpoint(run.parent)
    if not order or ordinary is None or ordinary.step <= order[-1]:
        return
    seen = beside_in(Run(run).file(order[-1]))
    if seen is not None and seen == ordinary.fingerprint:  # the run has gone on in spite of it, and goes on again
        log.warning(
            "going on from step %d of %s, which was saved when %s was there already; to go on from that one, give its "
            "path as resume_from_checkpoint",
            order[-1],
            run,
            ordinary.path,
        )
        return
    raise ValueError(
        f"{ordinary.path}, which Transformers wrote, has a higher step than the newest checkpoint of the run {run}, "
        f"step {order[-1]}. Choose one: resume_from_checkpoint={str(ordinary.path)!r} or {str(run)!r}; or move the "
        "other away. After the next save, True goes on with the one that you chose"
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
