"""The numbers of a report, from the headers of a run's files. Nothing is decoded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from dynaquant.errors import CheckpointError, MovedOnError
from dynaquant.report.inspection import RestoreCost, TensorInfo, restore_cost, tensors_of
from dynaquant.report.prices import S3_STANDARD
from dynaquant.save.record import Record, Size, record_of
from dynaquant.store.container import CheckpointFile, Parent
from dynaquant.store.run import Run


@dataclass(frozen=True)
class Row:
    """One checkpoint.

    restore: None where a checkpoint that it builds on is missing. weights: by name, in the order of the model.
    """

    record: Record
    restore: RestoreCost | None
    weights: dict[str, TensorInfo]


@dataclass(frozen=True)
class Numbers:
    """Of a whole run.

    rows: in the order of ``dynaquant log``, from the oldest to the newest. passed_over: what is wrong with which file,
    in sentences. exact: bytes of the exact copy of the newest checkpoint, 0 where none is kept. price: USD per GB
    (10⁹ bytes) and month.
    """

    name: str
    rows: tuple[Row, ...]
    passed_over: tuple[str, ...]
    exact: int
    price: float

    @cached_property
    def by_step(self) -> list[Row]:
        """The rows in the order of their steps, which differs from theirs once training has gone back."""
        return sorted(self.rows, key=lambda row: row.record.step)

    @property
    def whole(self) -> Size:
        """Of all checkpoints."""
        return sum((row.record.total for row in self.rows), Size())

    @property
    def weights(self) -> Size:
        """Of the weights of all checkpoints."""
        return sum((row.record.roles.get("weight", Size()) for row in self.rows), Size())

    @property
    def worst(self) -> float | None:
        """The largest measured loss of quality; None where nothing was measured."""
        measured = [row.record.quality.degradation for row in self.rows if row.record.quality]
        return max((loss for loss in measured if not math.isnan(loss)), default=None)

    @property
    def seconds(self) -> dict[str, float]:
        """That saving has kept training waiting, by stage."""
        total: dict[str, float] = {}
        for row in self.rows:
            for stage, seconds in row.record.seconds.items():
                total[stage] = total.get(stage, 0.0) + seconds
        return total

    @property
    def tensors(self) -> list[str]:
        """All weights of the run: those of the newest checkpoint in the order of the model, then older ones."""
        return list(dict.fromkeys(name for row in reversed(self.rows) for name in row.weights))

    def cost(self, size: int) -> float:
        """USD for keeping so many bytes for a month."""
        return self.price * size / 1e9


def numbers_of(
    run: Run, files: Iterable[CheckpointFile], broken: Iterable[CheckpointError], price: float = S3_STANDARD
) -> Numbers:
    """The numbers of a run, whose sound files come parents first, as ``Run.summaries`` lists them.

    broken: what is wrong with the others. A file that cannot be understood, or that cannot be restored, adds to that.

    Raises CheckpointError when no record can be understood, MovedOnError where a writer has deleted what others of the
    files build on.
    """
    passed_over = [str(error) for error in broken]
    chains: dict[Parent, list[CheckpointFile]] = {}
    without_chain: dict[Parent, str] = {}
    rows: list[Row] = []
    exact = 0
    for file in files:
        header = file.header
        itself = Parent(header.step, header.identity)
        above = [] if header.parent is None else chains.get(header.parent)
        restore = None
        try:
            if header.parent in without_chain:
                raise CheckpointError(without_chain[header.parent])
            # Where the parent is not known, Run.chain says what is wrong with it.
            chains[itself] = run.chain(file) if above is None else [file, *above]
            restore = restore_cost(chains[itself])
        except MovedOnError:
            raise
        except CheckpointError as error:
            if itself not in chains:
                without_chain[itself] = str(error)
            passed_over.append(f"step {header.step} is listed, but cannot be restored: {error}")
        try:
            if (twin := run.lossless_copy(file)) is not None:
                exact, restore = twin.size, restore_cost([twin])
        except CheckpointError as error:
            passed_over.append(str(error))
        weights = {info.name: info for info in tensors_of(file) if info.role == "weight"}
        try:
            rows.append(Row(record_of(file), restore, weights))
        except CheckpointError as error:
            passed_over.append(str(error))
    if not rows:
        raise CheckpointError(f"{run.folder}: no checkpoint of this run has a record that can be understood")
    return Numbers(run.folder.resolve().name, tuple(rows), tuple(passed_over), exact, price)
