"""What is known of a save: sizes by role, quality, configuration, time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dynaquant.container import CheckpointFile
from dynaquant.errors import CheckpointError


@dataclass(frozen=True)
class Size:
    """Bytes of tensors before and after; a plain copy of their memory is ``raw``."""

    raw: int = 0
    stored: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.raw + other.raw, self.stored + other.stored)

    @property
    def ratio(self) -> float:
        """How many times smaller, infinite for tensors that cost nothing, 1 when there are none."""
        if self.raw == 0:
            return 1.0
        return self.raw / self.stored if self.stored else float("inf")


@dataclass(frozen=True)
class Record:
    """A save, as ``Checkpointer.save`` reports it and as the run keeps it.

    parent: step of the parent, None for a keyframe. roles: tensor sizes by role. total: raw bytes of all tensors, and
    the size of the file. quality: of the weights as restored (``search.quality.Quality``), None without ``evaluate``.
    seconds: wall time by stage. ``wait`` (for the write before), ``capture``, ``quantize`` and ``evaluate`` block
    training; ``write`` does not, and is only in the record that ``save`` hands out, as the file cannot know it.
    notes: what was out of the ordinary.
    """

    step: int
    identity: str
    parent: int | None
    roles: dict[str, Size]
    total: Size
    configuration: dict[str, Any]
    quality: dict[str, float] | None
    seconds: dict[str, float]
    notes: list[str]

    @property
    def keyframe(self) -> bool:
        """Whether the checkpoint stands alone."""
        return self.parent is None

    @property
    def ratio(self) -> float:
        """How many times smaller than its tensors the file is."""
        return self.total.ratio

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values, for logs."""
        return asdict(self)


def record_of(file: CheckpointFile, seconds: dict[str, float] | None = None, notes: list[str] | None = None) -> Record:
    """The record of a checkpoint file, with what is known beyond the file added to it."""
    header = file.header
    roles: dict[str, Size] = {}
    for entry in header.entries:
        role = entry.label.role
        roles[role] = roles.get(role, Size()) + Size(entry.raw_size, entry.size)
    try:
        return _record(file, roles, seconds or {}, notes or [])
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file.path}: its record of the save cannot be understood ({error})") from None


def _record(file: CheckpointFile, roles: dict[str, Size], seconds: dict[str, float], notes: list[str]) -> Record:
    header = file.header
    quality = header.record.get("quality")
    return Record(
        step=header.step,
        identity=header.identity,
        parent=header.parent.step if header.parent else None,
        roles=roles,
        total=Size(sum(size.raw for size in roles.values()), file.size),
        configuration=header.record.get("configuration", {}),
        quality=quality and {key: float(value) for key, value in quality.items()},
        seconds={**header.record.get("seconds", {}), **seconds},
        notes=[*header.record.get("notes", []), *notes],
    )
