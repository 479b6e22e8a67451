"""``load``: a stored state as plain dictionaries and tensors. ``load_into``: stored weights into a model."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch

from dynaquant.errors import CheckpointError
from dynaquant.restore.model_tensors import Models, expanded_error, targets_in
from dynaquant.restore.stored_checkpoint import Parents, PathOrFile, StoredCheckpoint
from dynaquant.training.expanded import can_hold, copy_into
from dynaquant.training.hash_cache import HashCache


def load(
    path: PathOrFile,
    step: int | str | None = None,
    *,
    keys: Collection[str] | None = None,
    part: str | None = None,
    map_location: str | torch.device | None = None,
    parent: Parents | None = None,
) -> Any:
    """Return a stored state as plain dictionaries and tensors.

    - ``path``: the folder of a run, a checkpoint file, or a binary file object with the content of one. Also what
      stands for them in a framework's folder: a file ``….ckpt`` of Lightning, a folder of Accelerate's ``save_state``,
      the ``output_dir`` of Transformers.
    - ``step``: the step or the tag of a checkpoint of the run. By default, the newest is loaded. Files of the run whose
      headers cannot be read are skipped, with a warning for each.
    - ``keys``: names in the model's state dict. Only these tensors are decoded, and returned by these names.
    - ``part``: the path of a part of the state, e.g. ``"model"`` or ``"optimizer/param_groups/0"``: keys and indices,
      joined by ``/``. Only the tensors of this part are decoded.
    - ``map_location``: the device of the tensors. By default, all are on the CPU, wherever they were.
    - ``parent``: the file that this one was coded against (``save(…, parent=…)``), if it is no longer where it was, or
      if either is a file object. If the parent has a parent too, which it cannot find: a list of all of them.

    The state of a training has the keys ``"model"`` and ``"optimizer"`` (a dictionary by name if there are several),
    the names of the extras, ``"rng"``, ``"classes"`` and ``"parameters"``. An optimizer's state is keyed by the names
    of its parameters; ``Optimizer.load_state_dict`` accepts it. A state that was saved with ``save``, or compressed or
    packed from another program's file, is returned in the structure that it had, e.g. weights as a state dict. If the
    checkpoint has a lossless copy (``Keep(lossless_copy=True)``), that is loaded.

    Raises CheckpointError if the checkpoint or its parent is missing or damaged, KeyError for an unknown name in
    ``keys`` or an unknown part, ValueError for arguments that exclude each other, TypeError if ``keys`` is a text.
    """
    if keys is not None and part is not None:
        raise ValueError("keys and part exclude each other: keys are names in the model's state dict")
    if isinstance(keys, str):
        raise TypeError(f"keys is a list of names, e.g. [{keys!r}], not one name")
    device = None if map_location is None else _device_of(map_location)
    stored = StoredCheckpoint(path, step, () if parent is None else parent)

    def some(keys: Collection[str]) -> dict[str, Any]:
        names = stored.state_dict
        if missing := [key for key in keys if key not in names]:
            raise KeyError(f"{stored.file.path}: there is no tensor {missing[0]!r}; there are {_first_names(names)}")
        found = {key: stored.tensors[names[key]] for key in keys}
        return found if device is None else {key: tensor.to(device) for key, tensor in found.items()}

    return stored.with_retries(lambda: stored.state(part, device) if keys is None else some(keys))


def _device_of(map_location: Any) -> torch.device:
    try:
        return torch.device(map_location)
    except TypeError:
        raise TypeError(
            f"map_location is a device or the name of one, not a {type(map_location).__qualname__}"
        ) from None


def _first_names(names: Collection[str]) -> str:
    shown = list(names)[:3]
    return ", ".join(map(repr, shown)) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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
