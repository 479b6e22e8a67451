"""``load``: a stored state as plain dictionaries and CPU tensors, without the training that made it."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from dynaquant.restore.stored_checkpoint import StoredCheckpoint


def load(
    path: str | os.PathLike[str], step: int | str | None = None, *, keys: Collection[str] | None = None
) -> dict[str, Any]:
    """Return a stored state as plain dictionaries and CPU tensors.

    - ``path``: the folder of a run, or a checkpoint file.
    - ``step``: the step or the tag of a checkpoint of the run. By default, the newest is loaded.
    - ``keys``: names in the model's state dict. Only these tensors are decoded, and returned by these names.

    The state of a training has the keys ``"model"`` and ``"optimizer"`` (a dictionary by name if there are several),
    the names of the extras, ``"rng"``, ``"classes"`` and ``"parameters"``. An optimizer's state is keyed by the names
    of its parameters; ``Optimizer.load_state_dict`` accepts it. A checkpoint that was compressed or packed from another
    program's file is returned in the structure of that file, e.g. weights as a state dict. If the checkpoint has a
    lossless copy (``exact="latest"``), that is loaded.

    Raises CheckpointError if the checkpoint is missing or damaged, KeyError for an unknown name in ``keys``.
    """
    stored = StoredCheckpoint(path, step)

    def some(keys: Collection[str]) -> dict[str, Any]:
        names = stored.state_dict
        if missing := [key for key in keys if key not in names]:
            raise KeyError(f"{stored.file.path}: there is no tensor {missing[0]!r}; there are {_first_names(names)}")
        return {key: stored.tensors[names[key]] for key in keys}

    return stored.with_retries(stored.state if keys is None else lambda: some(keys))


def _first_names(names: Collection[str]) -> str:
    shown = list(names)[:3]
    return ", ".join(map(repr, shown)) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
