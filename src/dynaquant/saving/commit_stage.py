"""Writes checkpoints to a run in the background: chooses the parent, commits, prunes, reports. Runs on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from dynaquant.saving.background import BackgroundWriter
from dynaquant.saving.log_to import in_one_line
from dynaquant.saving.record import Record, record_of
from dynaquant.saving.timing import timed
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import CheckpointFile
from dynaquant.store.retention import Retention, can_be_parent, prepare_replacement, prune
from dynaquant.store.writing import Base

log = logging.getLogger("dynaquant")


class CommitStage:
    """Writes the checkpoints of one training, one at a time, in a thread of its own.

    damaged: steps whose files do not decode; a restore adds to this set. log_to: called after every commit.
    release_run: called in the thread after the last write.
    """

    def __init__(
        self,
        run: WritableRun,
        retention: Retention,
        damaged: set[int],
        log_to: Callable[[Record], Any] | None,
        release_run: Callable[[], Any],
    ) -> None:
        self._run, self._retention = run, retention
        self._damaged, self._log_to = damaged, log_to
        self.base: Base | None = None
        """The checkpoint that was written or restored last. The next delta is conditioned on it."""
        self.size_factor = 1.0
        """Bytes that the weights of deltas take, relative to their predicted size."""
        self.thread = BackgroundWriter[Record](self, release_run)

    def begin(self, checkpoint: Any, predicted: float | None) -> Future[Record]:
        """Begin to write a checkpoint. The previous write must be done. predicted: bytes of its weights."""
        return self.thread.hand_over(partial(self._write, checkpoint, predicted))

    def _write(self, checkpoint: Any, predicted: float | None) -> Record:
        seconds: dict[str, float] = {}
        with timed(seconds, "write"):
            file, notes = self._commit(checkpoint)
        record = self._record(checkpoint, file, seconds, notes)
        if predicted and not record.keyframe and "weight" in record.roles:
            self.size_factor *= (record.roles["weight"].stored or predicted) / predicted
        if file is not None:  # this rank has written the checkpoint, or the file that refers to all parts
            log.info(in_one_line(record))
            self._report(record)
        return record

    def _commit(self, checkpoint: Any) -> tuple[CheckpointFile | None, list[str]]:
        """Commit a checkpoint and delete what is not kept. Returns its file, and notes for the record."""
        parent = self._parent_for(checkpoint.step)
        notes = self._make_room(checkpoint.step)
        file, self.base = self._run.commit(checkpoint, parent)
        self._damaged.discard(checkpoint.step)
        return file, notes + self._prune(checkpoint.step)

    def _record(
        self,
        checkpoint: Any,  # noqa: ARG002
        file: CheckpointFile | None,
        seconds: dict[str, float],
        notes: list[str],
    ) -> Record:
        assert file is not None
        return record_of(file, seconds, notes)

    def _make_room(self, step: int) -> list[str]:
        """Re-code what depends on a checkpoint that is to be replaced, and keep it if it is named. Returns notes."""
        return prepare_replacement(self._run, step, self._retention) if self._run.path(step).exists() else []

    def _parent_for(self, step: int) -> Base | None:
        """Return the last checkpoint if it can be the parent; None if the next checkpoint must be a keyframe."""
        if self.base is None:
            return None
        fits = can_be_parent(self._run, self.base, step, self._retention, self._damaged)
        return self.base if fits else None

    def _prune(self, step: int) -> list[str]:
        try:
            return prune(self._run, self._retention, self._damaged)
        except Exception as error:
            error.add_note(f"step {step} is saved, but deleting older checkpoints failed")
            raise

    def _report(self, record: Record) -> None:
        if self._log_to is not None:
            try:
                self._log_to(record)
            except Exception as error:
                log.warning("step %d is saved, but log_to failed: %r", record.step, error)
