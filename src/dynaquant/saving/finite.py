"""Notices weights that have become infinite or NaN: the training has diverged, and needs an earlier checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection

from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.tensors.dtypes import QUANTIZABLE_DTYPES
from dynaquant.ranks.group import Group
from dynaquant.saving.capture import Captured
from dynaquant.store.run import Run

log = logging.getLogger("dynaquant")


def not_finite(captured: Captured, quantized: Collection[str], group: Group) -> list[str]:
    """Return the names of the weights that have an infinite or NaN value on any rank. Collective.

    quantized: names of the weights that are stored as levels. All their values are finite, so they are not read again.
    """
    names = [name for name, label in captured.labels.items() if label.role == "weight" and name not in quantized]
    tensors = {name: captured.small_on_host[name] for name in names if name in captured.small_on_host}
    weights = {name: each for name, each in tensors.items() if each.dtype in QUANTIZABLE_DTYPES and each.numel()}
    found = group.all_gather(group.run_on_all_ranks(lambda: _not_finite(weights)))
    return sorted({name for names in found for name in names})


def _not_finite(weights: dict[str, Tensor]) -> list[str]:
    return [name for name, both in kernels.all_extremes(weights).items() if not all(map(math.isfinite, both))]


def said_of(names: list[str], run: Run) -> str:
    """Return what a checkpoint with such weights means, and which one is better."""
    more = f" and {len(names) - 1} other weights have" if len(names) > 1 else " has"
    return f"{names[0]}{more} infinite or NaN values: unless they are meant, training has diverged. {_advice(run)}"


def warn_of_restored(step: int, run: Run) -> None:
    """Warn that the weights of a checkpoint that was restored are not finite."""
    log.warning(
        "step %d has infinite or NaN weights: unless they are meant, training had diverged. %s", step, _advice(run)
    )


def _advice(run: Run) -> str:
    finite = [summary.step for summary in run.summaries()[0] if summary.finite]
    if not finite:
        return "The run has no checkpoint with finite weights"
    return f"The newest checkpoint with finite weights is step {finite[-1]}: restore(step={finite[-1]})"
