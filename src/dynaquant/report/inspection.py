"""Inspects the headers of a run's files: tensors, what a restore reads, disk use. No tensor is decoded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynaquant.errors import CheckpointError
from dynaquant.saving.record import Size, sizes_by_role
from dynaquant.store.chain import FROZEN, needed_entries, open_frozen, part_paths
from dynaquant.store.container import CheckpointFile
from dynaquant.store.entry import Entry
from dynaquant.store.run import Run, checkpoint_paths


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, as its file describes it.

    scheme: how the tensor is coded, by its name in the header (docs/format.md); ``reference`` if it is unchanged since
    the parent. bins: of the codebook, None if there is no codebook. size: bytes of the values and of the stream.
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
        """The tensor as plain JSON values. The scheme has the key that it has in a file's header, ``coding``."""
        values = asdict(self)
        scheme = values.pop("scheme")
        return {**values, "coding": scheme, "bits": self.bits}


def tensors_of(file: CheckpointFile) -> list[TensorInfo]:
    """Return the tensors of a checkpoint in the order of their streams."""
    return [_info(entry) for entry in file.header.entries]


def scalars_folded(tensors: list[TensorInfo]) -> list[list[TensorInfo]]:
    """Return the tensors in groups of one, but scalars that are alike but for the middle of their names in one group.

    Such are the counts of steps that an optimizer keeps for each parameter: ``optimizer.….step``. A group is
    where its first scalar was.
    """
    groups: dict[Any, list[TensorInfo]] = {}
    for number, info in enumerate(tensors):
        first, _, rest = info.name.partition(".")
        alike = first, rest.rpartition(".")[2], info.role, info.dtype, info.scheme
        groups.setdefault(number if info.shape else alike, []).append(info)
    return list(groups.values())


def folded_name(group: list[TensorInfo]) -> str:
    """Return the name of a group of ``scalars_folded``: ``optimizer.….step (12 scalars)``."""
    name = group[0].name
    if len(group) == 1:
        return name
    return f"{name.partition('.')[0]}.….{name.rpartition('.')[2]} ({len(group)} scalars)"


def _info(entry: Entry) -> TensorInfo:
    return TensorInfo(
        entry.name,
        entry.label.role,
        entry.label.layer_type,
        entry.dtype,
        tuple(entry.shape),
        entry.scheme.kind,
        entry.scheme.codebook_bins,
        Size(0 if entry.external else entry.raw_size, entry.stored_size),
    )


@dataclass(frozen=True)
class RestoreCost:
    """Number of files and bytes that a restore reads: from its own file and the files that it depends on."""

    files: int
    size: int


def restore_cost(chain: list[CheckpointFile]) -> RestoreCost:
    """Return the cost of a restore: it reads each file's header, and the streams that the first file's tensors need.

    Only headers are read here. chain: ``Run.chain`` of the checkpoint.

    Raises CheckpointError if a tensor that is needed is in none of the files.
    """
    headers = sum(file.total_size - sum(entry.stored_size for entry in file.header.entries) for file in chain)
    needed = needed_entries(chain, [entry.name for entry in chain[0].header.entries])
    held = [open_frozen(chain[0], identity).size for identity in chain[0].header.frozen]
    streams = sum(entry.stored_size for entries in needed for entry in entries)
    return RestoreCost(len(chain) + len(held), headers + streams + sum(held))


@dataclass(frozen=True)
class DiskUse:
    """Disk use of one part of a run.

    what: the kind of file, or a role. files: number of files; None for a role, which is a part of each file.
    size: bytes as tensors (raw) and on the disk (stored).
    """

    what: str
    files: int | None
    size: Size


def disk_use(run: Run, files: list[CheckpointFile]) -> list[DiskUse]:
    """Return the disk use of a run by kind of file and in total, and that of its readable checkpoints by role."""
    copies = [file for path in run.lossless_copy_paths() if (file := _readable(path)) is not None]
    shared = [file for path in checkpoint_paths(run.folder, FROZEN) if (file := _readable(path)) is not None]
    replaced = run.replaced()[0]
    own = [*files, *replaced]
    known = {file.path for file in [*own, *copies, *shared]} | {path for file in own for path in part_paths(file)}
    others = [size for path in run.folder.rglob("*") if path not in known and (size := _size_of(path)) is not None]
    kinds = [
        _use("keyframes", [file for file in files if file.header.parent is None]),
        _use("deltas", [file for file in files if file.header.parent is not None]),
        _use("replaced, but tagged", replaced),
        _use("lossless copies", copies),
        _use("frozen parameters", shared),
        DiskUse("other files", len(others), Size(0, sum(others))),
    ]
    roles = sizes_by_role(entry for file in files for entry in file.header.entries)
    streams = sum(size.stored for size in roles.values())
    headers = Size(0, sum(file.total_size for file in files) - streams)
    return [
        *(use for use in kinds if use.files),
        DiskUse("all", sum(use.files or 0 for use in kinds), sum((use.size for use in kinds), Size())),
        *(DiskUse(f"  {role}", None, size) for role, size in roles.items()),
        DiskUse("  headers", None, headers),
    ]


def _readable(path: Path) -> CheckpointFile | None:
    """Open a checkpoint file; None if it cannot be read (it then counts among the other files)."""
    try:
        return CheckpointFile(path)
    except CheckpointError:
        return None


def _size_of(path: Path) -> int | None:
    """Return the size of a file; None if it is not a regular file, or was deleted since it was listed."""
    try:
        return path.stat().st_size if path.is_file() else None
    except FileNotFoundError:
        return None


def _use(what: str, files: list[CheckpointFile]) -> DiskUse:
    raw = sum(size.raw for size in sizes_by_role(entry for file in files for entry in file.header.entries).values())
    return DiskUse(what, len(files), Size(raw, sum(file.total_size for file in files)))
