"""Sends the records of saves to the log, to TensorBoard or to a function, during training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from dynaquant.engine.quantize.knobs import GridConfiguration
from dynaquant.formatting import in_bytes, in_seconds, percent, times
from dynaquant.saving.record import Record


class ScalarWriter(Protocol):
    """The interface of ``torch.utils.tensorboard.SummaryWriter`` and similar writers."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Add a point to a curve."""


LogTo = ScalarWriter | Callable[[Record], Any]
"""A TensorBoard writer (any object with ``add_scalar``), or a function of a ``Record``."""


def logger_of(log_to: LogTo) -> Callable[[Record], Any]:
    """Return the function to call with each record. Raises TypeError unless ``log_to`` is a function or a writer."""
    add_scalar = getattr(log_to, "add_scalar", None)
    if callable(add_scalar):

        def log(record: Record) -> None:
            for name, value in scalars(record).items():
                add_scalar(f"dynaquant/{name}", value, record.step)

        return log
    if not callable(log_to):
        raise TypeError(f"log_to must be a function of a record, or have add_scalar, not a {type(log_to).__name__}")
    return log_to


def scalars(record: Record) -> dict[str, float]:
    """Return the finite numbers of a record, each a point of a curve, by the curve's name."""
    found: dict[str, float | None] = {
        "bytes": record.total.stored,
        "ratio": record.ratio,
        "evaluations": record.evaluations,
        "equivalents": record.equivalents,
        "allowed": record.limit,
        "progress": record.progress,
        **{f"{role}/ratio": size.ratio for role, size in record.roles.items()},
        **{f"seconds/{stage}": seconds for stage, seconds in record.seconds.items()},
        **({f"quality/{name}": value for name, value in asdict(record.quality).items()} if record.quality else {}),
    }
    if isinstance(record.configuration, GridConfiguration):
        found["scale"] = record.configuration.scale
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def in_one_line(record: Record) -> str:
    """Return the record of a committed checkpoint as a line for the log: step, size, ratio, quality, seconds."""
    kind = "keyframe" if record.parent is None else f"delta of step {record.parent}"
    if record.degradation is not None:
        quality = f"degradation {percent(record.degradation, sign=True)}"
    else:
        quality = "weights exact" if record.configuration is None else "quality not measured"
    waited = sum(seconds for stage, seconds in record.seconds.items() if stage != "write")
    return (
        f"saved step {record.step}: {in_bytes(record.total.stored)} ({times(record.ratio, 1)} smaller), {kind}, "
        f"{quality}; training waited {in_seconds(waited)}, writing took {in_seconds(record.seconds['write'])}"
    )
