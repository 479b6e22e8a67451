"""Writes a model's state dict as safetensors: one file, or shards with an index. Says what a run did not store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from dynaquant.engine.tensors.lazy_mapping import LazyMapping
from dynaquant.formatting import plural
from dynaquant.interop import safetensors
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
from dynaquant.store.files import is_file_name

Tell = Callable[[str], None]
"""Is called with a text that reports progress."""


def of_omitted(stored: StoredCheckpoint) -> list[str]:
    """Return a note on the tensors that the run does not store, if there are any."""
    names = [entry.name for entry in stored.file.header.entries if entry.omitted]
    if not names:
        return []
    return [f"left out, as the run does not store them (role omit): {plural(len(names), 'tensor')}, such as {names[0]}"]


def untied(state_dict: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
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


def write_safetensors(
    stored: StoredCheckpoint, file: BinaryIO, names: Mapping[str, str], metadata: Any, tell: Tell
) -> None:
    """Write tensors to a file, one by one. names: the stored name of each tensor of the file."""
    shapes = stored.shapes
    tensors = LazyMapping(names, lambda key: stored.tensors[names[key]])
    like = {key: shapes[name] for key, name in names.items()}
    safetensors.write(file, reported(tensors, tell), like, metadata or None)


def write_shards(
    stored: StoredCheckpoint,
    state_dict: Mapping[str, str],
    source: Mapping[str, Any],
    folder: Path,
    tell: Tell,
) -> None:
    """Write a state dict into files like those that it was read from. source: the record's entry on these."""
    names, ties = untied(state_dict)
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
        metadata = {file: strings_in(entries) for file, (_, entries) in known.items()}
    else:
        shards = safetensors.divide_into_shards({key: shapes[name] for key, name in names.items()})
        metadata = {file: {"format": "pt", **ties} for file in shards}
        index = safetensors.INDEX if len(shards) > 1 else None
    for file, keys in shards.items():
        with (folder / file).open("xb") as out:
            write_safetensors(stored, out, {key: names[key] for key in keys}, metadata[file], tell)
    if index is not None:
        total = sum(shapes[name].numel() * shapes[name].dtype.itemsize for name in names.values())
        (folder / index).write_text(safetensors.index_text(shards, source.get("metadata"), total))


def strings_in(metadata: Any) -> dict[str, str]:
    """Return the entries that can be metadata of a safetensors file: strings by string."""
    pairs = metadata.items() if isinstance(metadata, dict) else ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def reported(tensors: Mapping[str, Tensor], tell: Tell) -> Mapping[str, Tensor]:
    """Return the tensors; each access is reported."""
    order = {name: i for i, name in enumerate(tensors, 1)}

    def tensor(name: str) -> Tensor:
        tell(f"decoding and writing: tensor {order[name]} of {len(order)}")
        return tensors[name]

    return LazyMapping(tensors, tensor)
