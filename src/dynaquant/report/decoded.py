"""How the decoded tensors of two checkpoints differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.forms.stored import form_of, in_one, values_of
from dynaquant.store.chain import detect_run_changes
from dynaquant.store.container import CheckpointFile
from dynaquant.store.decoding import explain_out_of_memory
from dynaquant.store.reading import load_tensor
from dynaquant.store.run import Run


@dataclass(frozen=True)
class Change:
    """How a tensor differs between two checkpoints.

    kind: ``same``, ``changed``, ``added``, ``removed``, ``reshaped`` or ``another dtype``. moved: norm of the
    difference relative to the norm of the first, of floating-point and complex tensors. changed: share of the values
    that differ. migrated: share of the values on another level, if both tensors are on the same grid, or have the same
    number of clusters. Each is None if it is not defined: a change from zero, or from or to infinities and NaNs, has no
    relative size.
    """

    name: str
    kind: str
    moved: float | None = None
    changed: float | None = None
    migrated: float | None = None


def changes(run: Run, before: CheckpointFile, after: CheckpointFile) -> Iterator[Change]:
    """Compare the tensors of two checkpoints of a run, in the order of ``after``; removed tensors come last.

    Raises CheckpointError if a tensor that differs cannot be decoded, RunChangedError if a writer has deleted a file
    that it depends on.
    """
    old, new = before.header.by_name, after.header.by_name
    chains: list[list[CheckpointFile]] = []  # opened at the first tensor that differs
    for name, entry in new.items():
        known = old.get(name)
        if known is None:
            yield Change(name, "added")
        elif known.hash == entry.hash:
            yield Change(name, "same", 0.0, 0.0)
        elif known.omitted or entry.omitted:
            yield Change(name, "changed")  # there are no values to compare
        elif known.shape != entry.shape:
            yield Change(name, "reshaped")
        elif known.dtype != entry.dtype:
            yield Change(name, "another dtype")
        else:
            chains = chains or [run.chain(before), run.chain(after)]
            with detect_run_changes([file for chain in chains for file in chain]):
                before_it, after_it = (in_one(load_tensor(chain, name)) for chain in chains)
            with explain_out_of_memory(after, entry):
                change = _change(name, before_it, after_it)
            yield change
    yield from (Change(name, "removed") for name in old if name not in new)


def _change(name: str, before: StoredTensor, after: StoredTensor) -> Change:
    one, other = values_of(before), values_of(after)
    wide = torch.complex128 if one.is_complex() else torch.float64
    try:
        a, b = one.to(wide).reshape(-1), other.to(wide).reshape(-1)
        changed = float((one != other).double().mean())
    except NotImplementedError:  # PyTorch has no arithmetic for this dtype
        return Change(name, "changed")
    migrated = form_of(before).migrated(after)
    if not (one.is_floating_point() or one.is_complex()):  # a distance between integers, such as bytes, means nothing
        return Change(name, "changed", None, changed, migrated)
    distance, norm = float(torch.linalg.vector_norm(b - a)), float(torch.linalg.vector_norm(a))
    moved = distance / norm if norm else (0.0 if distance == 0 else math.inf)
    return Change(name, "changed", moved if math.isfinite(moved) else None, changed, migrated)
