"""The record of a save: sizes by role, quality, configuration, time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from dynaquant.engine.quantize.knobs import Knobs, knobs_from_json, knobs_to_json
from dynaquant.errors import CheckpointError
from dynaquant.search.scores import MeasuredQuality, Trial, number_from_json, number_to_json
from dynaquant.store.catalogue import Listed, bytes_by_role
from dynaquant.store.container import CheckpointFile
from dynaquant.store.entry import Entry

if TYPE_CHECKING:  # it imports PyTorch, and reading a record does not need it
    from dynaquant.search.decision import Decision


@dataclass(frozen=True)
class Size:
    """Bytes of tensors: ``raw`` in memory, ``stored`` in the checkpoint."""

    raw: int = 0
    stored: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.raw + other.raw, self.stored + other.stored)

    @property
    def ratio(self) -> float:
        """``raw / stored``: infinite if nothing is stored, 1 if there are no tensors."""
        if self.raw == 0:
            return 1.0
        return self.raw / self.stored if self.stored else float("inf")


@dataclass(frozen=True)
class Record:
    """The record of a save. ``Checkpointer.save`` returns it, and the run keeps it.

    - ``parent``: step of the parent; None for a keyframe.
    - ``roles``: sizes of tensors by role.
    - ``total``: raw bytes of all tensors, and the size of the file.
    - ``configuration``: of the quantizer; None if the weights are stored exactly.
    - ``search``: how the configuration was found: ``"scale"``, ``"exhaustive"``, ``"neighbourhood"``, ``"more bins"``,
      ``"fixed"`` (the user gave it), or ``"lossless"``.
    - ``judged_by``: how its degradation was determined: ``"evaluate"``, or an estimate (``"fisher distortion"``,
      ``"distortion"``); None if it was not.
    - ``limit``: the degradation that was allowed. It can be below ``max_degradation``. It contains one step of a metric
      that moves in steps too coarse to tell.
    - ``quality``: of the weights as restored (a ``MeasuredQuality``); None without ``evaluate``, and where ``search``
      is ``lossless``.
    - ``progress``: the share of the weights' displacement since the last restore that the stored weights
      keep; None if nothing was restored, if that no longer matters, or if weights are exact.
    - ``predicted``: expected bytes of the weights. The actual ones are ``roles["weight"].stored``.
    - ``trials``: all configurations that were tried.
    - ``equivalents``: what the search has cost, in evaluations of the metric on all its batches: those of the weights
      in training and of all candidates, an evaluation on some of the batches as their share. 0 without ``evaluate``;
      None in records of earlier versions.
    - ``interval``: planned steps to the next checkpoint. With ``Moved``, the steps since the last one.
    - ``seconds``: wall time by stage. ``wait`` (for the write before), ``capture`` and ``search`` block training;
      ``write`` does not. ``write`` is only in the record that ``save`` returns, as it is not known while the file is
      written.
    - ``moments_corrected``: the number of first moments that the last restore set to zero, and whose bias is or was
      corrected since then (``correct_moments``).
    - ``budget_spent``: the part of ``training_budget`` that restores have used so far, as predicted for the end of the
      training. None without a budget.
    - ``budget_assumes``: what that prediction assumes: that errors heal, or that restores add up. None without a
      budget, and in records of earlier versions.
    - ``restores_felt``: what restores have left until now, as predicted. A checkpoint may lose so much less. None
      without a budget, and in records of earlier versions.
    - ``saved_at``: when the state was captured and ready to be written, in seconds since 1970. Re-coding keeps it. None
      in records of earlier versions, and of ``torch.distributed.checkpoint``.
    - ``averages``: the quality of averages of weights, by the name of the extra, with ``evaluate_average``.
    - ``notes``: texts about anything unusual.

    Ranks other than 0 write no file and do not know its size. Their records have an empty identity, no roles, no bytes
    in total, a ``ratio`` of NaN and a ``keyframe`` of None. ``Checkpointer.records`` reads the run, so it has the sizes
    on every rank.
    """

    step: int
    identity: str
    parent: int | None
    roles: dict[str, Size]
    total: Size
    configuration: Knobs | None
    search: str | None
    judged_by: str | None
    limit: float | None
    quality: MeasuredQuality | None
    progress: float | None
    predicted: float | None
    trials: list[Trial]
    equivalents: float | None
    interval: int | None
    seconds: dict[str, float]
    notes: list[str]
    moments_corrected: int = 0
    budget_spent: float | None = None
    restores_felt: float | None = None
    budget_assumes: str | None = None
    saved_at: float | None = None
    averages: dict[str, MeasuredQuality] = field(default_factory=dict)

    @property
    def evaluations(self) -> int:
        """The number of configurations that were scored, also those on some of the batches only."""
        return sum(trial.degradation is not None for trial in self.trials)

    @property
    def degradation(self) -> float | None:
        """What the metric has lost; None without a metric, or if an estimate decided since the metric sees nothing."""
        estimated = self.judged_by not in ("evaluate", None)
        return None if self.quality is None or estimated else self.quality.degradation

    @property
    def keyframe(self) -> bool | None:
        """Whether the checkpoint is a keyframe; None on ranks other than 0."""
        return self.parent is None if self.identity else None

    @property
    def ratio(self) -> float:
        """The compression ratio: bytes of the tensors, divided by the size of the file. NaN on ranks other than 0."""
        return self.total.ratio if self.identity else math.nan

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON values. NaN and infinities become strings."""
        trials = [trial.to_json() for trial in self.trials]
        return {key: _plain(value) for key, value in (asdict(self) | {"trials": trials}).items()}


def _plain(value: Any) -> Any:
    """Return a JSON value with strings for NaN and infinities at any depth."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return number_to_json(value) if isinstance(value, float) else value


def json_of(decision: Decision, interval: int | None, seconds: dict[str, float], notes: list[str]) -> dict[str, Any]:
    """Return the record as a checkpoint's header keeps it."""
    return {
        "configuration": knobs_to_json(decision.configuration),
        "quality": decision.quality and _plain(asdict(decision.quality)),
        "averages": {name: _plain(asdict(quality)) for name, quality in decision.averages.items()},
        "search": {
            "kind": decision.search,
            "judged_by": decision.judged_by,
            "limit": number_to_json(decision.limit),
            "estimated": number_to_json(decision.estimated),
            "predicted": decision.predicted,
            "progress": decision.progress,
            "trials": [trial.to_json() for trial in decision.trials],
            "equivalents": decision.equivalents,
            **decision.memory.to_json(),
        },
        "interval": interval,
        "saved_at": time.time(),
        "seconds": seconds,
        "notes": [*notes, *decision.notes],
    }


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the wall time of the block to ``seconds[stage]``."""
    start = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start


def sizes_by_role(entries: Iterable[Entry]) -> dict[str, Size]:
    """Return the bytes of tensors by role, without tensors whose values are not in the checkpoint."""
    return _sizes(bytes_by_role(entries))


def _sizes(roles: Mapping[str, tuple[int, int]]) -> dict[str, Size]:
    return {role: Size(raw, stored) for role, (raw, stored) in roles.items()}


def record_of(
    file: CheckpointFile | Listed, seconds: dict[str, float] | None = None, notes: list[str] | None = None
) -> Record:
    """Return the record of a checkpoint. seconds, notes: added to those in the file.

    Raises CheckpointError if the stored record is malformed.
    """
    found = Listed.of(file) if isinstance(file, CheckpointFile) else file
    summary, record = found.summary, found.record
    roles = _sizes(found.roles)
    total = Size(sum(size.raw for size in roles.values()), found.size)
    try:
        return _record(
            summary.step,
            summary.identity,
            summary.parent.step if summary.parent else None,
            roles,
            total,
            {
                **record,
                "seconds": {**record.get("seconds", {}), **(seconds or {})},
                "notes": [*record.get("notes", []), *(notes or [])],
            },
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(f"{found.path}: its record of the save cannot be understood ({error})") from None


def record_without_file(step: int, record: Mapping[str, Any]) -> Record:
    """Return the record of a save that another rank writes."""
    return _record(step, "", None, {}, Size(), record)


def _record(
    step: int, identity: str, parent: int | None, roles: dict[str, Size], total: Size, record: Mapping[str, Any]
) -> Record:
    quality, search, configuration = record.get("quality"), record.get("search") or {}, record.get("configuration")
    budget = record.get("training_budget") or {}
    return Record(
        step=step,
        identity=identity,
        parent=parent,
        roles=roles,
        total=total,
        configuration=knobs_from_json(configuration) if configuration else None,
        search=search.get("kind"),
        judged_by=search.get("judged_by"),
        limit=number_from_json(search.get("limit")),
        quality=_quality(quality) if quality else None,
        progress=number_from_json(search.get("progress")),
        predicted=search.get("predicted"),
        trials=[Trial.from_json(trial) for trial in search.get("trials", [])],
        equivalents=number_from_json(search.get("equivalents")),
        interval=record.get("interval"),
        seconds={stage: float(seconds) for stage, seconds in record.get("seconds", {}).items()},
        notes=list(record.get("notes", [])),
        moments_corrected=int(record.get("moments_corrected", 0)),
        budget_spent=float(budget["spent"]) if budget else None,
        restores_felt=float(budget["felt"]) if "felt" in budget else None,
        budget_assumes=str(budget["assumed"]) if "assumed" in budget else None,
        saved_at=number_from_json(record.get("saved_at")),
        averages={name: _quality(found) for name, found in record.get("averages", {}).items()},
    )


def _quality(found: Mapping[str, Any]) -> MeasuredQuality:
    return MeasuredQuality(**{each.name: float(found[each.name]) for each in fields(MeasuredQuality)})


def degradation_of(record: Mapping[str, Any]) -> float:
    """Return what a restore of a checkpoint counts as: the measured degradation, or else what was allowed.

    0 if neither is known. What a metric that was too coarse to tell has measured does not count.
    """
    quality, search = record.get("quality"), record.get("search")
    judged = isinstance(search, Mapping) and search.get("judged_by") == "evaluate" and not search.get("estimated")
    value = quality.get("degradation") if judged and isinstance(quality, Mapping) else limit_of(record)
    return value if isinstance(value, float) else 0.0


def limit_of(record: Mapping[str, Any]) -> float | None:
    """Return the degradation that a checkpoint was allowed; None if its weights are exact or the record is invalid.

    One step of a metric that was too coarse does not count.
    """
    search = record.get("search")
    if not isinstance(search, Mapping) or record.get("configuration") is None:
        return None
    value = search.get("estimated") or search.get("limit")
    return value if isinstance(value, float) else None
