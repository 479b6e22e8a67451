"""Reads a trainer's checkpoint folder: weights, optimizer states, and the other files in it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynaquant.engine.tensors.lazy_mapping import LazyMapping
from dynaquant.errors import CheckpointError, StateError
from dynaquant.formatting import in_bytes
from dynaquant.interop import safetensors, torchfile
from dynaquant.interop.inferred_roles import optimizers_in
from dynaquant.interop.safetensors import ModelFiles
from dynaquant.interop.whole_state import DCP_METADATA, WholeState
from dynaquant.state.flatten import flatten
from dynaquant.state.tree import dict_items, state_dict_tree, tensor_names_in
from dynaquant.store.container import MAGIC
from dynaquant.store.files import is_file_name, non_file_kind

MAX_RAW_FILE_BYTES = 64 << 20
"""Largest size of a file that is stored byte for byte."""
READ_FROM_BYTES = 64 << 10
"""Files of ``torch.save`` of at least this size are read; smaller ones if they hold weights or an optimizer."""
MODEL = "model"
_WEIGHTS = re.compile(r"(pytorch|adapter)_model.*\.bin")
"""File names of weights that ``torch.save`` wrote, in older folders."""


def read(folder: Path) -> WholeState:
    """Read a folder of DCP, or one with a model's weights, and the other files in it.

    If the folder holds only weights, the state is their state dict. Otherwise it is a dictionary: the state dict under
    ``"model"``, and each file of ``torch.save`` under its name without suffix, e.g. ``"optimizer"``.

    Files that cannot be read, and small files, are stored byte for byte. Sub-folders, special files, links out of the
    folder, and files of more than 64 MiB that cannot be read are left out; ``notes`` names them.

    Raises CheckpointError if the folder has no weights, or they cannot be read.
    """
    names, left_out = _files_in(folder)
    if DCP_METADATA in names:
        from dynaquant.interop import dcp_folder  # noqa: PLC0415 (PyTorch's DCP takes seconds to import)

        whole, used = dcp_folder.read(folder)
        return _with_raw_files(folder, whole, [name for name in names if name not in used], left_out, {})
    models = _models(folder, names)
    used = {file for model in models.values() for file in model.files}
    others = [name for name in names if name not in used]
    states: dict[str, Any] = {}
    files: dict[str, str] = {}  # for each file of torch.save, the key of its state
    reasons: dict[str, str] = {}
    for name in others:
        if name in left_out or (state := _state_in(folder / name, reasons)) is None:
            continue
        only = not models and MODEL not in states and _WEIGHTS.fullmatch(name)
        files[name] = MODEL if only else _key(name, {*models, *states})
        states[files[name]] = state
    weights = {key for name, key in files.items() if _WEIGHTS.fullmatch(name)}
    if not models and not weights:
        raise CheckpointError(f"{folder}: there is no *.safetensors file in it, and no .metadata of a DCP folder")
    whole = _put_together(models, states, weights, files)
    return _with_raw_files(folder, whole, [name for name in others if name not in files], left_out, reasons)


def _files_in(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the names of the files in a folder, and everything that is left out, with the reason."""
    here = folder.resolve()
    hub = here.parent.parent / "blobs"  # in the cache of the Hugging Face hub, a snapshot's files are links to here
    inside = (here, hub) if here.parent.name == "snapshots" else (here,)
    names: list[str] = []
    left_out: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        kind = non_file_kind(path) if path.exists() else "a link to nothing"
        if kind is not None:
            left_out[path.name] = kind
            continue
        names.append(path.name)
        if path.resolve().parent not in inside:
            left_out[path.name] = "a link out of the folder"
        elif not is_file_name(path.name):
            left_out[path.name] = "its name cannot be written back"
        elif _start(path).startswith(MAGIC):
            left_out[path.name] = "a checkpoint of dynaquant"
    return names, left_out


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(MAGIC))


def _models(folder: Path, names: list[str]) -> dict[str, ModelFiles]:
    """Return the models in safetensors, by their keys in the state.

    Without an index, all files are shards of one model, unless two of them have a tensor of the same name. Otherwise
    each file that no index names is a model of its own.
    """
    indices = [name for name in names if name.endswith(safetensors.INDEX_SUFFIX)]
    if len(indices) > 1:
        raise CheckpointError(f"{folder} has several indices ({', '.join(indices)}); give one file")
    models = {MODEL: safetensors.read_indexed(folder, indices[0], names)} if indices else {}
    named = {file for model in models.values() for file in model.files}
    loose = [name for name in names if name.endswith(safetensors.SUFFIX) and name not in named]
    alone = {name: safetensors.read_files(folder, [name]) for name in loose}
    tensors = [tensor for model in alone.values() for tensor in model.tensors]
    if loose and not indices and len(set(tensors)) == len(tensors):
        return {MODEL: safetensors.read_files(folder, loose)}
    for name, model in alone.items():
        models[_key(name, models)] = model
    return models


def _state_in(path: Path, reasons: dict[str, str]) -> Any:
    """Return the state of a file that holds weights, an optimizer, or at least 64 KiB; otherwise None.

    Adds to ``reasons`` why a large file cannot be read.
    """
    if not _start(path).startswith(torchfile.FIRST_BYTES):
        return None
    large = path.stat().st_size >= READ_FROM_BYTES
    try:
        state = torchfile.load(path)
        tree, tensors = torchfile.flatten_file(path, state)
    except (CheckpointError, StateError) as error:
        if large:
            reasons[path.name] = str(error).removeprefix(f"{path}: ")
        return None
    wanted = large or optimizers_in(tree) or _WEIGHTS.fullmatch(path.name)
    return state if tensors and wanted else None


def _put_together(
    models: Mapping[str, ModelFiles], states: dict[str, Any], weights: Collection[str], files: dict[str, str]
) -> WholeState:
    """Put everything that was read into one state.

    weights: keys of the states that are weights. files: the key of each file's state, by name of the file.
    """
    main = models.get(MODEL)
    if main is not None and len(models) == 1 and not states:
        return WholeState("huggingface", state_dict_tree(main.tensors), main.tensors, main.details, in_order=False)
    tree, tensors = flatten(states)
    found: dict[str, tuple[Mapping[str, Tensor], str]] = {name: (tensors, name) for name in tensors}
    can_be_weights = {name for key, node in dict_items(tree) if key in weights for name in tensor_names_in(node)}
    pairs = []
    for key, shards in models.items():
        names = {own: _unused(f"{key}.{own}", found) for own in shards.tensors}
        found.update({name: (shards.tensors, own) for own, name in names.items()})
        can_be_weights.update(names.values())
        pairs.append([key, {"dict": [[own, {"tensor": name}] for own, name in names.items()]}])
    tree = {"dict": [*pairs, *tree["dict"]]}
    details = {
        **(main.details if main is not None else {"index": None, "metadata": None, "shards": {}}),
        "more": {key: shards.details for key, shards in models.items() if key != MODEL},
        "torch": files,
    }
    order = [name for name in found if name not in tensors] + list(tensors)
    lazy = LazyMapping(order, lambda name: found[name][0][found[name][1]])
    return WholeState("huggingface", tree, lazy, details, frozenset(can_be_weights), in_order=not models)


def _with_raw_files(
    folder: Path, whole: WholeState, names: list[str], left_out: dict[str, str], reasons: dict[str, str]
) -> WholeState:
    """Add files to a state byte for byte, as further tensors.

    names: of the files. left_out: files that are not stored, with the reason. reasons: why files of ``torch.save`` were
    not read.
    """
    files: dict[str, str] = {}
    notes = []
    missing = {name: why for name, why in left_out.items() if name in names or not (folder / name).is_file()}
    for name in names:
        size = (folder / name).stat().st_size
        if name in left_out:
            continue
        if size > MAX_RAW_FILE_BYTES:
            missing[name] = f"{in_bytes(size)}; {reasons.get(name, f'more than {in_bytes(MAX_RAW_FILE_BYTES)}')}"
        else:
            files[name] = _unused(f"files.{name}", {*whole.tensors, *files.values()})
            notes += [f"{name} is stored byte for byte: {reasons[name]}"] if name in reasons else []
    notes = [f"left out: {name} ({why})" for name, why in sorted(missing.items())] + notes
    by_tensor = {tensor: folder / name for name, tensor in files.items()}

    def tensor(name: str) -> Tensor:
        return _bytes_of(by_tensor[name]) if name in by_tensor else whole.tensors[name]

    tensors = LazyMapping([*whole.tensors, *by_tensor], tensor)
    return replace(whole, tensors=tensors, details={**whole.details, "files": files}, notes=tuple(notes))


def _bytes_of(path: Path) -> Tensor:
    try:
        return torch.from_numpy(np.fromfile(path, dtype=np.uint8))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def _key(name: str, taken: Collection[str]) -> str:
    """Return the key of a file's state: the file's name without suffix, or with it if the first is taken."""
    stem = Path(name).stem
    return stem if stem not in taken else _unused(name, taken)


def _unused(name: str, taken: Collection[str]) -> str:
    numbered = (f"{name}~{number}" for number in itertools.count(2))
    return name if name not in taken else next(other for other in numbered if other not in taken)
