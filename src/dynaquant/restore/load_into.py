"""``load_into``: the stored weights and buffers of a model, put into a model."""

from __future__ import annotations

import os

from dynaquant.errors import CheckpointError
from dynaquant.restore.model_tensors import Models, expanded_error, targets_in
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
from dynaquant.training.expanded import can_hold, copy_into
from dynaquant.training.hash_cache import HashCache


def load_into(
    model: Models,
    path: str | os.PathLike[str],
    step: int | str | None = None,
    *,
    strict: bool = True,
) -> list[str]:
    """Load stored weights and buffers into a model, cast to the model's dtypes.

    - ``model``: a module, which may be wrapped; or a dictionary of modules by name, if the checkpoint holds several.
    - ``path``, ``step``: as for ``load``. Names may be those of a model that ``torch.compile`` or DDP has wrapped.
    - ``strict``: False leaves out tensors that do not fit.

    Returns what was left out, and why. All tensors are compared, decoded and checked before the model is changed, one
    at a time, so memory for one more tensor is enough.

    Raises StateError, with a list of differences, if names or shapes differ from the model's state dict; with
    ``strict=False``, only if no tensor fits. Raises CheckpointError if the checkpoint is missing or damaged. On an
    error the model is unchanged, unless the disk fails after the check: then a note of the error says how many tensors
    were loaded.
    """
    stored = StoredCheckpoint(path, step)
    return stored.with_retries(lambda: _fill_model(stored, model, strict))


def _fill_model(stored: StoredCheckpoint, model: Models, strict: bool) -> list[str]:
    targets, problems = targets_in(model, stored.file, strict, HashCache())
    stored.check(dict.fromkeys(name for name, _ in targets))
    for (name, _), target in targets.items():
        if not target.is_contiguous() and not can_hold(target, stored.tensors[name]):
            raise expanded_error(name)
    changed = 0
    try:
        for (name, _), target in targets.items():
            copy_into(target, stored.tensors[name])
            changed += 1
    except CheckpointError as error:
        error.add_note(f"{changed} tensors before it were loaded into the model")
        raise
    return problems
