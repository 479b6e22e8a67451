"""Writes a checkpoint's model, or its whole state, as files that other programs read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from dynaquant.errors import CheckpointError
from dynaquant.interop import safetensors, torchfile
from dynaquant.interop.targets import Target
from dynaquant.restore.stored_checkpoint import StoredCheckpoint, state_from
from dynaquant.state.tree import dict_items, objects_in, tensor_name, tensor_names_in
from dynaquant.store.atomic_files import atomic_file, atomic_folder
from dynaquant.store.files import is_file_name
from dynaquant.tensors.dtypes import bytes_of
from dynaquant.tensors.lazy_mapping import LazyMapping

_OF_FORMAT = {
    "safetensors": Target.SAFETENSORS,
    "huggingface": Target.HF,
    "torch": Target.TORCH_STATE,
    "dcp": Target.DCP,
}
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def model_target(out: Path) -> Target:
    """Return the target for an output path that is to hold a model, from its suffix.

    Raises CheckpointError if the suffix does not tell.
    """
    if out.suffix == ".safetensors":
        return Target.SAFETENSORS
    if out.suffix in _TORCH_SUFFIXES:
        return Target.TORCH
    raise CheckpointError(
        f"{out}: the name does not tell the format; let it end in .safetensors, {', '.join(_TORCH_SUFFIXES)}, or give "
        f"--to {', '.join(Target)}"
    )


def target_for(stored: StoredCheckpoint, out: Path) -> Target:
    """Return the target for an output path: from its suffix, else from the original format, else safetensors."""
    if out.suffix == ".safetensors":
        return Target.SAFETENSORS
    if out.suffix in _TORCH_SUFFIXES:
        return Target.TORCH_STATE
    return _OF_FORMAT.get(str(_source(stored).get("format")), Target.SAFETENSORS)


def export(
    stored: StoredCheckpoint, target: Target, out: Path, tell: Callable[[str], None] = lambda _text: None
) -> None:
    """Write a checkpoint to ``out``, a file or a folder. Atomic: after an error there is no output.

    Only one tensor of a model is in memory at a time, except for ``torch.save``. safetensors has no shared tensors: a
    tensor with several names is written under the first one, and the file's metadata maps the other names to it, as
    ``safetensors.torch.save_model`` does. If the checkpoint's lossless copy is damaged, everything is written again
    from the quantized checkpoint. tell: called with a text that reports progress.

    Raises CheckpointError if the checkpoint cannot be decoded or the format cannot hold it, OSError if ``out`` cannot
    be written.
    """
    stored.with_retries(lambda: _write(stored, target, out, tell))


def _write(stored: StoredCheckpoint, target: Target, out: Path, tell: Callable[[str], None]) -> None:
    if target in (Target.HF, Target.DCP):
        with atomic_folder(out) as folder:
            if target is Target.HF:
                _write_folder(stored, folder, tell)
            else:
                from dynaquant.interop import dcp_folder  # noqa: PLC0415 (PyTorch's DCP takes seconds to import)

                other_files = _other_files(stored)
                dcp_folder.write(folder, _state(stored, tell))
                if _source(stored).get("format") == "dcp":
                    _write_raw_files(stored, folder, other_files)
        return
    with atomic_file(out) as file:
        if target is Target.SAFETENSORS:
            names, ties = _untied(stored.state_dict)
            _write_safetensors(stored, file, names, _metadata(stored) | ties, tell)
        elif target is Target.TORCH:
            torchfile.write(file, stored.model_state(_with_progress(stored.tensors, tell)))
        else:
            torchfile.write(file, _state(stored, tell))


def _state(stored: StoredCheckpoint, tell: Callable[[str], None]) -> Any:
    if (found := next(objects_in(stored.file.header.tree), None)) is not None:
        kind = found["object"] if "object" in found else found["enum"][0]
        raise CheckpointError(
            f"{stored.file.path}: its optimizer keeps an object of the class {kind}, which only a Checkpointer "
            "restores; export the model alone (--to torch, or --to safetensors)"
        )
    return state_from(stored.file, _tensors_of(stored, stored.file.header.tree, tell))


def _tensors_of(stored: StoredCheckpoint, node: Any, tell: Callable[[str], None]) -> dict[str, Tensor]:
    """Return the decoded tensors that a node of the tree names."""
    names = [name for name in dict.fromkeys(tensor_names_in(node)) if name in stored.tensors]
    return dict(_with_progress(LazyMapping(names, stored.tensors.__getitem__), tell))


def _source(stored: StoredCheckpoint) -> dict[str, Any]:
    source = stored.file.header.record.get("source")
    return source if isinstance(source, dict) else {}


def _metadata(stored: StoredCheckpoint) -> dict[str, str]:
    """Return the metadata for a safetensors file: the original's if that was safetensors, else what readers expect."""
    source = _source(stored)
    if source.get("format") == "safetensors":
        return _strings_in(source.get("metadata"))
    return {"format": "pt"} if source else {"format": "pt", "step": str(stored.file.header.step)}


def _strings_in(metadata: Any) -> dict[str, str]:
    """Return the entries that can be metadata of a safetensors file: strings by string."""
    pairs = metadata.items() if isinstance(metadata, dict) else ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _untied(state_dict: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the tensors of a state dict by their first key, and metadata that maps their other keys to it."""
    first_names: dict[str, str] = {}
    names: dict[str, str] = {}
    metadata: dict[str, str] = {}
    for key, name in state_dict.items():
        first = first_names.setdefault(name, key)
        if first == key:
            names[key] = name
        else:
            metadata[key] = first
    return names, metadata


def _write_safetensors(
    stored: StoredCheckpoint, file: BinaryIO, names: Mapping[str, str], metadata: Any, tell: Callable[[str], None]
) -> None:
    shapes = stored.shapes
    tensors = LazyMapping(names, lambda key: stored.tensors[names[key]])
    like = {key: shapes[name] for key, name in names.items()}
    safetensors.write(file, _with_progress(tensors, tell), like, metadata or None)


@dataclass(frozen=True)
class _OtherFiles:
    """What a compressed folder held besides its main model.

    model: whether there is a main model. models: further state dicts, each with the record's entry on its files.
    states: nodes of the tree, by their file of ``torch.save``. raw_files: by file name, the name of the tensor that
    holds the file's bytes.
    """

    model: bool
    models: list[tuple[dict[str, str], dict[str, Any]]]
    states: dict[str, Any]
    raw_files: dict[str, str]


def _other_files(stored: StoredCheckpoint) -> _OtherFiles:
    """Read the record, which may be malformed. Raises CheckpointError if it does not match the checkpoint."""
    source, entries = _source(stored), stored.file.header.by_name
    nodes = {key: node for key, node in dict_items(stored.file.header.tree) if type(key) is str}
    try:
        more, files = {**source.get("more", {})}, {**source.get("torch", {})}
        raw_files: dict[str, str] = {**source.get("files", {})}
        models = [
            ({key: entries[tensor_name(node) or ""].name for key, node in dict_items(nodes[name])}, dict(more[name]))
            for name in more
        ]
        states = {file: nodes[key] for file, key in files.items()}
        kinds = {(entries[name].dtype, len(entries[name].shape)) for name in raw_files.values()}
        sound = all(map(is_file_name, (*states, *raw_files))) and kinds <= {(torch.uint8, 1)}
    except (AttributeError, KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise CheckpointError(
            f"{stored.file.path}: its record of the original folder's files is malformed; export the model alone, "
            "e.g. to safetensors"
        )
    return _OtherFiles(bool(nodes.keys() - more.keys() - set(files.values())), models, states, raw_files)


def _write_folder(stored: StoredCheckpoint, folder: Path, tell: Callable[[str], None]) -> None:
    """Write the model as a Hugging Face folder, and all other files if a folder was compressed."""
    other_files = _other_files(stored)
    try:
        if other_files.model:
            _write_shards(stored, stored.state_dict, _source(stored), folder, tell)
        for state_dict, source in other_files.models:
            _write_shards(stored, state_dict, source, folder, tell)
        for file, node in other_files.states.items():
            with (folder / file).open("xb") as out:
                torchfile.write(out, stored.state_part(node, _tensors_of(stored, node, tell)))
        _write_raw_files(stored, folder, other_files)
    except FileExistsError as error:
        raise CheckpointError(f"{stored.file.path}: its record names the file {error.filename} twice") from None


def _write_raw_files(stored: StoredCheckpoint, folder: Path, other_files: _OtherFiles) -> None:
    for file, name in other_files.raw_files.items():
        try:
            with (folder / file).open("xb") as out:
                out.write(bytes_of(stored.tensors[name]).data)
        except FileExistsError:
            raise CheckpointError(f"{stored.file.path}: its record names the file {file} twice") from None


def _write_shards(
    stored: StoredCheckpoint,
    state_dict: Mapping[str, str],
    source: Mapping[str, Any],
    folder: Path,
    tell: Callable[[str], None],
) -> None:
    """Write a state dict into files like those that it was read from. source: the record's entry on these."""
    names, ties = _untied(state_dict)
    shapes = stored.shapes
    index = source.get("index")
    try:
        known = {file: (list(shard["tensors"]), shard["metadata"]) for file, shard in source.get("shards", {}).items()}
    except (AttributeError, KeyError, TypeError):
        known = {}
    # The record may be malformed. Its files must lie in this folder and hold each tensor once.
    listed = [key for keys, _ in known.values() for key in keys]
    files = [*known, index] if index is not None else list(known)
    if (
        all(type(key) is str for key in listed)
        and sorted(listed) == sorted(names)
        and all(map(is_file_name, files))
        and len(set(files)) == len(files)
    ):
        shards = {file: keys for file, (keys, _) in known.items()}
        metadata = {file: _strings_in(entries) for file, (_, entries) in known.items()}
    else:
        shards = safetensors.divide_into_shards({key: shapes[name] for key, name in names.items()})
        metadata = {file: {"format": "pt", **ties} for file in shards}
        index = safetensors.INDEX if len(shards) > 1 else None
    for file, keys in shards.items():
        with (folder / file).open("xb") as out:
            _write_safetensors(stored, out, {key: names[key] for key in keys}, metadata[file], tell)
    if index is not None:
        total = sum(shapes[name].numel() * shapes[name].dtype.itemsize for name in names.values())
        (folder / index).write_text(safetensors.index_text(shards, source.get("metadata"), total))


def _with_progress(tensors: Mapping[str, Tensor], tell: Callable[[str], None]) -> Mapping[str, Tensor]:
    """Return the tensors; each access is reported."""
    order = {name: i for i, name in enumerate(tensors, 1)}

    def tensor(name: str) -> Tensor:
        tell(f"decoding and writing: tensor {order[name]} of {len(order)}")
        return tensors[name]

    return LazyMapping(tensors, tensor)
