"""Reads and writes safetensors, one tensor at a time: single files, or shards with an index (Hugging Face)."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dynaquant.engine.tensors.dtypes import bytes_of, dtype_name
from dynaquant.engine.tensors.lazy_mapping import LazyMapping
from dynaquant.errors import CheckpointError
from dynaquant.interop.whole_state import WholeState
from dynaquant.state.tree import state_dict_tree
from dynaquant.store.container import reject_constant
from dynaquant.store.files import is_file_name

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5_000_000_000
"""Largest size of a shard, the same as Hugging Face's default."""

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    **{
        getattr(torch, name): code  # only recent versions of PyTorch have these
        for name, code in (
            ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
            ("float8_e5m2fnuz", "F8_E5M2FNUZ"),
            ("float8_e8m0fnu", "F8_E8M0"),
            ("float4_e2m1fn_x2", "F4"),
        )
        if hasattr(torch, name)
    },
}
_METADATA = "__metadata__"
_INDEX_BYTES = 1 << 30
"""Largest size of an index, which is read into memory. It has a line for each tensor."""
_ALIGNMENT = 8


def read(path: Path) -> WholeState:
    """Read a file. Raises CheckpointError if it is damaged."""
    tensors, metadata = _open(path)
    return WholeState("safetensors", state_dict_tree(tensors), tensors, {"metadata": metadata})


@dataclass(frozen=True)
class ModelFiles:
    """A model in several files of a folder. details: what is needed to write them again, as JSON values."""

    tensors: Mapping[str, Tensor]
    details: dict[str, Any]

    @property
    def files(self) -> set[str]:
        """The names of its files, including the index."""
        index = self.details["index"]
        return {*self.details["shards"], *([index] if index is not None else [])}


def read_indexed(folder: Path, index: str, names: Collection[str]) -> ModelFiles:
    """Read the model that an index describes.

    names: the files in the folder. Raises CheckpointError if a file or a tensor is missing.
    """
    content = _read_index(folder / index)
    files = sorted(set(content["weight_map"].values()))
    if missing := [file for file in files if file not in names]:
        raise CheckpointError(f"{folder}: {missing[0]} is missing, but {index} names it")
    model = read_files(folder, files)
    if unknown := sorted(content["weight_map"].keys() - model.tensors.keys()):
        raise CheckpointError(f"{folder}: {unknown[0]} is in no file, but {index} names it")
    return ModelFiles(model.tensors, {**model.details, "index": index, "metadata": content.get("metadata")})


def read_files(folder: Path, files: Iterable[str]) -> ModelFiles:
    """Read a model from several files of a folder.

    Raises CheckpointError if a file is damaged, or if two files have a tensor of the same name.
    """
    shards: dict[str, Any] = {}
    found: dict[str, Mapping[str, Tensor]] = {}
    for file in files:
        tensors, metadata = _open(folder / file)
        if twice := sorted(tensors.keys() & found.keys()):
            raise CheckpointError(f"{folder}: {twice[0]} is in two files")
        found.update(dict.fromkeys(tensors, tensors))
        shards[file] = {"metadata": metadata, "tensors": list(tensors)}
    details = {"index": None, "metadata": None, "shards": shards}
    return ModelFiles(LazyMapping(found, lambda name: found[name][name]), details)


def _read_index(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _INDEX_BYTES:
            raise ValueError(f"it has more than {_INDEX_BYTES:,} bytes")
        index = json.loads(path.read_text(), parse_constant=reject_constant)
        names, files = set(index["weight_map"].keys()), set(index["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not the index of a model ({error!r})") from None
    if not all(type(text) is str for text in names | files) or not all(map(is_file_name, files)):
        raise CheckpointError(f"{path}: its weight_map does not map tensor names to file names in this folder")
    return dict(index)


def _open(path: Path) -> tuple[LazyMapping[Tensor], dict[str, str] | None]:
    try:
        file = safe_open(path, "pt")
        names, metadata = list(file.keys()), file.metadata()  # type: ignore[no-untyped-call]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a complete safetensors file ({error})") from None

    def tensor(name: str) -> Tensor:
        try:
            found: Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError, AttributeError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read ({error})") from None
        return found

    return LazyMapping(names, tensor), metadata


def write(file: BinaryIO, tensors: Mapping[str, Tensor], shapes: Mapping[str, Tensor], metadata: Any) -> None:
    """Write a file. Accesses one tensor at a time.

    shapes: meta tensors with the same names, dtypes and shapes. metadata: a dictionary of strings, or None. Raises
    CheckpointError for a dtype or a name that the format does not allow.
    """
    header: dict[str, Any] = {} if metadata is None else {_METADATA: metadata}
    # Tensors with large items come first, so that each tensor is aligned.
    names = sorted(shapes, key=lambda name: -shapes[name].dtype.itemsize)
    offset = 0
    for name in names:
        like = shapes[name]
        if like.dtype not in _TYPES:
            raise CheckpointError(
                f"safetensors cannot store {name}, which is {dtype_name(like.dtype)}; export to torch instead"
            )
        if name == _METADATA or not _is_unicode(name):
            raise CheckpointError(f"safetensors does not allow the name {name!r} for a tensor; export to torch instead")
        size = like.numel() * like.dtype.itemsize
        shape = list(like.shape)
        if _TYPES[like.dtype] == "F4":  # safetensors counts values, PyTorch pairs of values
            shape[-1] *= 2
        header[name] = {"dtype": _TYPES[like.dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            "safetensors cannot store metadata that is not Unicode text; export to torch instead"
        ) from None
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in names:
        file.write(bytes_of(tensors[name]).data)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def divide_into_shards(shapes: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Divide tensors among the files of a Hugging Face folder. Returns the tensors' names by file."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, like in shapes.items():
        bytes_ = like.numel() * like.dtype.itemsize
        if parts[-1] and size + bytes_ > SHARD_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += bytes_
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def index_text(shards: Mapping[str, Iterable[str]], metadata: Any, total: int) -> str:
    """Return the JSON text of an index. metadata: of the original index, or None. total: bytes of all tensors."""
    weight_map = {name: file for file, names in shards.items() for name in names}
    return json.dumps({"metadata": metadata or {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
