"""``load_into``: the stored weights and buffers of a model, put into a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dynaquant.errors import CheckpointError, StateError
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
from dynaquant.state.wrappers import bare, state_dict
from dynaquant.tensors.hashing import tensor_hash
from dynaquant.training.expanded import can_hold, copy_into


def load_into(
    model: nn.Module | Mapping[str, nn.Module],
    path: str | os.PathLike[str],
    step: int | str | None = None,
    *,
    strict: bool = True,
) -> list[str]:
    """Load stored weights and buffers into a model, cast to the model's dtypes.

    - ``model``: a module, which may be wrapped; or a dictionary of modules by name, if the checkpoint holds several.
    - ``path``, ``step``: as for ``load``.
    - ``strict``: False leaves out tensors that do not fit.

    Returns what was left out, and why. All tensors are compared, decoded and checked before the model is changed, one
    at a time, so memory for one more tensor is enough.

    Raises StateError, with a list of differences, if names or shapes differ from the model's state dict; with
    ``strict=False``, only if no tensor fits. Raises CheckpointError if the checkpoint is missing or damaged. On an
    error the model is unchanged, unless the disk fails after the check: then a note of the error says how many tensors
    were loaded.
    """
    stored = StoredCheckpoint(path, step)
    own = _state_dict_of(model)
    return stored.with_retries(lambda: _fill_model(stored, own, strict))


def _fill_model(stored: StoredCheckpoint, own: Mapping[str, Any], strict: bool) -> list[str]:
    names, shapes = stored.state_dict, stored.shapes
    wrong = {name: what for name in own if name not in names and (what := _missing(stored, name, own[name]))}
    wrong |= {name: f"{name} is in the checkpoint, but not in the model" for name in names if name not in own}
    for name in own.keys() & names.keys():
        if not isinstance(own[name], Tensor):
            wrong[name] = f"{name} of the model is a {type(own[name]).__name__}, not a tensor"
        elif own[name].is_nested:
            wrong[name] = f"{name} of the model is a nested tensor, which cannot be stored"
        elif own[name].is_meta:
            wrong[name] = f"{name} of the model is on the meta device; give it memory with model.to_empty(device=…)"
        elif own[name].shape != (shape := shapes[names[name]].shape):
            wrong[name] = f"{name} is {list(shape)} in the checkpoint and {list(own[name].shape)} in the model"
    problems = sorted(wrong.values())
    own = {name: target for name, target in own.items() if name in names and name not in wrong}
    if problems and (strict or not own):
        shown = "\n  ".join(problems[:10] + ([f"… and {len(problems) - 10} more"] if problems[10:] else []))
        raise StateError(f"{stored.file.path} does not fit the model:\n  {shown}\nNothing was changed.")
    # Tied tensors are decoded once.
    targets = {(names[name], target.data_ptr()): target for name, target in own.items()}
    stored.check(dict.fromkeys(name for name, _ in targets))
    for (name, _), target in targets.items():
        if not target.is_contiguous() and not can_hold(target, stored.tensors[name]):
            raise StateError(
                f"{name} has elements that share memory (expand) and need different values: build it with clone()"
            )
    changed = 0
    try:
        for (name, _), target in targets.items():
            copy_into(target, stored.tensors[name])
            changed += 1
    except CheckpointError as error:
        error.add_note(f"{changed} tensors before it were loaded into the model")
        raise
    return problems


def _missing(stored: StoredCheckpoint, name: str, own: Any) -> str | None:
    """Return the problem with a model's tensor whose values are not stored; None if its hash equals the stored one."""
    entry = stored.file.header.by_name.get(f"model.{name}")
    if entry is None or not entry.omitted:
        return f"{name} is not in the checkpoint"
    if isinstance(own, Tensor) and not own.is_meta and tensor_hash(own) == entry.hash:
        return None
    return f"{name} is not stored (role 'omit'), and its values in the model differ; load the same base model first"


def _state_dict_of(model: nn.Module | Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the model's own tensors by their names in the bare model, or models."""
    if isinstance(model, nn.Module):
        return dict(state_dict(bare(model), keep_vars=True))
    return {f"{key}.{name}": tensor for key, each in model.items() for name, tensor in _state_dict_of(each).items()}
