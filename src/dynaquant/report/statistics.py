"""The statistics of a run, read from the headers of its files. No tensor is decoded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dynaquant.cached import cached_property
from dynaquant.errors import CheckpointError, RunChangedError
from dynaquant.report.inspection import RestoreCost, TensorInfo, restore_cost, tensors_of
from dynaquant.saving.record import Record, Size, record_of
from dynaquant.store.container import CheckpointFile, Parent
from dynaquant.store.run import Run
from dynaquant.store.tags import tags_of


@dataclass(frozen=True)
class Row:
    """One checkpoint.

    restore: None if a checkpoint that this one depends on is missing. weights: by name, in the order of the model.
    tags: its names.
    """

    record: Record
    restore: RestoreCost | None
    weights: dict[str, TensorInfo]
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Statistics:
    """The statistics of a whole run.

    rows: in the order of ``dynaquant log``, from the oldest to the newest. skipped: one sentence for each problem of a
    file. lossless_copy: bytes of the lossless copy of the newest checkpoint, 0 if the run keeps none.
    """

    name: str
    rows: tuple[Row, ...]
    skipped: tuple[str, ...]
    lossless_copy: int

    @cached_property
    def by_step(self) -> list[Row]:
        """The rows sorted by step. ``rows`` has another order if training went back to an older checkpoint."""
        return sorted(self.rows, key=lambda row: row.record.step)

    @property
    def whole(self) -> Size:
        """Size of all checkpoints together."""
        return sum((row.record.total for row in self.rows), Size())

    @property
    def weights(self) -> Size:
        """Size of the weights of all checkpoints together."""
        return sum((row.record.roles.get("weight", Size()) for row in self.rows), Size())

    @property
    def worst(self) -> float | None:
        """The largest measured degradation; None if nothing was measured."""
        measured = [lost for row in self.rows if (lost := row.record.degradation) is not None]
        return max((loss for loss in measured if not math.isnan(loss)), default=None)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that training waited for all saves together, by stage of a save."""
        total: dict[str, float] = {}
        for row in self.rows:
            for stage, seconds in row.record.seconds.items():
                total[stage] = total.get(stage, 0.0) + seconds
        return total

    @property
    def tensors(self) -> list[str]:
        """Names of all weights: those of the newest checkpoint in the order of the model, then those of older ones."""
        return list(dict.fromkeys(name for row in reversed(self.rows) for name in row.weights))


def statistics_of(run: Run, files: Iterable[CheckpointFile], broken: Iterable[CheckpointError]) -> Statistics:
    """Return the statistics of a run.

    files: the readable files of the run, parents first, as ``Run.summaries`` lists them. broken: the errors of the
    other files. Problems found here are added: a record with invalid fields, a checkpoint that cannot be restored.

    Raises CheckpointError if no record is valid, RunChangedError if a writer has deleted a file that others depend on.
    """
    skipped = [str(error) for error in broken]
    chains: dict[Parent, list[CheckpointFile]] = {}
    without_chain: dict[Parent, str] = {}
    rows: list[Row] = []
    lossless_copy = 0
    try:
        tags = tags_of(run)
    except CheckpointError as error:
        tags, skipped = [], [*skipped, str(error)]
    for file in files:
        header = file.header
        itself = Parent(header.step, header.identity)
        above = [] if header.parent is None else chains.get(header.parent)
        restore = None
        try:
            if header.parent in without_chain:
                raise CheckpointError(without_chain[header.parent])
            # If the chain of the parent is not known, Run.chain raises its error.
            chains[itself] = run.chain(file) if above is None else [file, *above]
            restore = restore_cost(chains[itself])
        except RunChangedError:
            raise
        except CheckpointError as error:
            if itself not in chains:
                without_chain[itself] = str(error)
            skipped.append(f"step {header.step} is listed, but cannot be restored: {error}")
        try:
            if (copy := run.lossless_copy(file)) is not None:
                lossless_copy, restore = copy.size, restore_cost([copy])
        except CheckpointError as error:
            skipped.append(str(error))
        weights = {info.name: info for info in tensors_of(file) if info.role == "weight"}
        try:
            own = tuple(tag.name for tag in tags if tag.refers_to(header))
            rows.append(Row(record_of(file), restore, weights, own))
        except CheckpointError as error:
            skipped.append(str(error))
    if not rows:
        raise CheckpointError(f"{run.folder}: no checkpoint of this run has a valid record")
    return Statistics(run.folder.resolve().name, tuple(rows), tuple(skipped), lossless_copy)
