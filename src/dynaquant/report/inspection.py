"""What one can learn of a run from its files, without the training that made it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynaquant.coding import schemes
from dynaquant.coding.schemes import Conditional, Rearranged, Scheme, SecondMomentUnits
from dynaquant.errors import CheckpointError
from dynaquant.save.record import Size, sizes_by_role
from dynaquant.store import frozen
from dynaquant.store.chain import noticing_moves
from dynaquant.store.container import CheckpointFile
from dynaquant.store.entry import Entry
from dynaquant.store.listing import paths
from dynaquant.store.memory import memory_for
from dynaquant.store.reading import load_tensor, needed_entries
from dynaquant.store.run import Run
from dynaquant.tensors.dequantize import values_of
from dynaquant.tensors.dtypes import dtype_name
from dynaquant.tensors.stored import FIRST_BIN, PROTECTED, PRUNED, QuantizedTensor, StoredTensor


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint as its file has it.

    coding: as the header names it (docs/format.md), ``reference`` for the parent's, unchanged. bins: of the codebook,
    None where there is none. size: bytes of its values and of its stream.
    """

    name: str
    role: str
    layer_type: str
    dtype: str
    shape: tuple[int, ...]
    scheme: str
    bins: int | None
    size: Size

    @property
    def elements(self) -> int:
        """Number of values."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def bits(self) -> float:
        """Bits stored per value; 0 for an empty tensor."""
        return 8 * self.size.stored / self.elements if self.elements else 0.0

    def to_json(self) -> dict[str, Any]:
        """The tensor as plain JSON values."""
        return {**asdict(self), "bits": self.bits}


def tensors_of(file: CheckpointFile) -> list[TensorInfo]:
    """The tensors of a checkpoint, in the order of its streams."""
    return [_info(entry) for entry in file.header.entries]


def _info(entry: Entry) -> TensorInfo:
    return TensorInfo(
        entry.name,
        entry.label.role,
        entry.label.layer_type,
        dtype_name(entry.dtype),
        tuple(entry.shape),
        schemes.kind_of(entry.scheme),
        _bins(entry.scheme),
        Size(0 if entry.external else entry.raw_size, entry.size),
    )


def _bins(scheme: Scheme) -> int | None:
    if isinstance(scheme, SecondMomentUnits):
        scheme = scheme.units
    return scheme.bins if isinstance(scheme, Rearranged | Conditional) else None


@dataclass(frozen=True)
class RestoreCost:
    """What has to be read to restore a checkpoint: so many files, its own and what it builds on, and bytes of them."""

    files: int
    size: int


def restore_cost(chain: list[CheckpointFile]) -> RestoreCost:
    """By the headers alone: every file's own, and the streams that the first file's tensors need.

    chain: ``Run.chain`` of the checkpoint. Raises CheckpointError when a tensor that is needed is in none of them.
    """
    headers = sum(file.size - sum(entry.size for entry in file.header.entries) for file in chain)
    needed = needed_entries(chain, [entry.name for entry in chain[0].header.entries])
    held = [frozen.opened(chain[0], identity).size for identity in chain[0].header.frozen]
    streams = sum(entry.size for entries in needed for entry in entries)
    return RestoreCost(len(chain) + len(held), headers + streams + sum(held))


@dataclass(frozen=True)
class LevelCount:
    """A level of a quantized tensor: the value that it stands for, None for protected ones, and how often it occurs."""

    level: str
    value: float | None
    count: int


def level_counts(quantized: QuantizedTensor) -> list[LevelCount]:
    """Pruned, protected, then the bins from the lowest value to the highest; what does not occur is left out."""
    counts = np.bincount(quantized.levels, minlength=FIRST_BIN + len(quantized.centres))
    special = [LevelCount("pruned", 0.0, int(counts[PRUNED])), LevelCount("protected", None, int(counts[PROTECTED]))]
    bins = [
        LevelCount(f"bin {i}", float(quantized.centres[i]), int(counts[FIRST_BIN + i]))
        for i in np.argsort(quantized.centres, kind="stable")
    ]
    return [found for found in (*special, *bins) if found.count]


@dataclass(frozen=True)
class Change:
    """How a tensor differs between two checkpoints.

    kind: ``same``, ``changed``, ``added``, ``removed`` or ``reshaped`` (another shape or dtype). moved: the norm of the
    difference over the norm of the first; changed: the share of values that differ; migrated: the share of values on
    another level, where both are quantized to as many bins. All None where they cannot be told: a move away from zero,
    or to or from infinities and NaNs, has no relative size.
    """

    name: str
    kind: str
    moved: float | None = None
    changed: float | None = None
    migrated: float | None = None


def changes(run: Run, before: CheckpointFile, after: CheckpointFile) -> Iterator[Change]:
    """How the tensors of two checkpoints of a run differ, in the order of the later one; removed ones come last.

    Raises CheckpointError when a tensor that differs cannot be decoded, MovedOnError where a writer has deleted what it
    was to be decoded from.
    """
    old, new = before.header.by_name, after.header.by_name
    chains: list[list[CheckpointFile]] = []  # read when the first tensor differs
    for name, entry in new.items():
        known = old.get(name)
        if known is None:
            yield Change(name, "added")
        elif known.hash == entry.hash:
            yield Change(name, "same", 0.0, 0.0)
        elif known.omitted or entry.omitted:
            yield Change(name, "changed")  # there are no values to compare
        elif (known.shape, known.dtype) != (entry.shape, entry.dtype):
            yield Change(name, "reshaped")
        else:
            chains = chains or [run.chain(before), run.chain(after)]
            with noticing_moves([file for chain in chains for file in chain]):
                stored = [load_tensor(chain, name) for chain in chains]
            with memory_for(after, entry):
                change = _change(name, *stored)
            yield change
    yield from (Change(name, "removed") for name in old if name not in new)


def _change(name: str, before: StoredTensor, after: StoredTensor) -> Change:
    one, other = values_of(before), values_of(after)
    wide = torch.complex128 if one.is_complex() else torch.float64
    try:
        a, b = one.to(wide).reshape(-1), other.to(wide).reshape(-1)
        changed = float((one != other).double().mean())
    except NotImplementedError:  # of dtypes that PyTorch cannot count with
        return Change(name, "changed")
    distance, norm = float(torch.linalg.vector_norm(b - a)), float(torch.linalg.vector_norm(a))
    moved = distance / norm if norm else (0.0 if distance == 0 else math.inf)
    migrated = None
    if (
        isinstance(before, QuantizedTensor)
        and isinstance(after, QuantizedTensor)
        and before.codebook.bins == after.codebook.bins
    ):
        migrated = float(np.mean(before.levels != after.levels))
    return Change(name, "changed", moved if math.isfinite(moved) else None, changed, migrated)


@dataclass(frozen=True)
class Use:
    """A part of what a run takes on the disk. files: None for parts of files. size: as tensors, and on the disk."""

    what: str
    files: int | None
    size: Size


def disk_use(run: Run, files: list[CheckpointFile]) -> list[Use]:
    """What a run takes: by kind of file, in all, and of the checkpoints by role. files: its sound checkpoints."""
    exact = [file for path in run.lossless_copy_paths() if (file := _sound(path)) is not None]
    held = [file for path in paths(run.folder, frozen.PREFIX) if (file := _sound(path)) is not None]
    known = {file.path for file in [*files, *exact, *held]}
    others = [size for path in run.folder.rglob("*") if path not in known and (size := _size_of(path)) is not None]
    kinds = [
        _use("keyframes", [file for file in files if file.header.parent is None]),
        _use("deltas", [file for file in files if file.header.parent is not None]),
        _use("exact copies", exact),
        _use("frozen parameters", held),
        Use("other files", len(others), Size(0, sum(others))),
    ]
    roles = sizes_by_role(entry for file in files for entry in file.header.entries)
    streams = sum(size.stored for size in roles.values())
    headers = Size(0, sum(file.size for file in files) - streams)
    return [
        *(use for use in kinds if use.files),
        Use("all", sum(use.files or 0 for use in kinds), sum((use.size for use in kinds), Size())),
        *(Use(f"  {role}", None, size) for role, size in roles.items()),
        Use("  headers", None, headers),
    ]


def _sound(path: Path) -> CheckpointFile | None:
    """A file that can be opened; others count as what they are, files."""
    try:
        return CheckpointFile(path)
    except CheckpointError:
        return None


def _size_of(path: Path) -> int | None:
    """The size of a file, None for anything else and for a file that has been deleted since it was listed."""
    try:
        return path.stat().st_size if path.is_file() else None
    except FileNotFoundError:
        return None


def _use(what: str, files: list[CheckpointFile]) -> Use:
    raw = sum(size.raw for size in sizes_by_role(entry for file in files for entry in file.header.entries).values())
    return Use(what, len(files), Size(raw, sum(file.size for file in files)))
