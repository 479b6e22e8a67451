"""Reads and writes folders of ``torch.distributed.checkpoint`` (DCP) in one process.

DCP pickles its metadata and all values that are not tensors. The unpicklers here accept only tensors, plain values and
DCP's own classes. Import this module only where it is used: DCP takes seconds to import.
"""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dynaquant.errors import CheckpointError
from dynaquant.interop.torchfile import UNPICKLING_ERRORS, check_torch_is_safe, flatten_file, why_not_unpickled
from dynaquant.interop.whole_state import DCP_METADATA, WholeState
from dynaquant.store.files import non_file_kind, underlying_os_error

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}

_PythonUnpickler: Any = pickle._Unpickler


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    """Unpickles metadata. Based on the pure-Python unpickler: the C one cannot be prevented from changing classes."""

    dispatch: ClassVar[dict[int, Any]] = dict(_PythonUnpickler.dispatch)

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type) or callable(self.stack[-2]):
            raise pickle.UnpicklingError("attributes of a class or a function")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return PurePosixPath  # the folder's path when it was written; a Windows path could not be made here
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        found = super().find_class(module, name) if module in (_METADATA_MODULE, "torch") else None
        own = isinstance(found, type) and found.__module__ == _METADATA_MODULE
        if own or isinstance(found, torch.dtype | torch.layout | torch.memory_format):
            return found
        raise pickle.UnpicklingError(f"{module}.{name}")


class _FolderReader(FileSystemReader):
    """Reads tensors with metadata that was unpickled safely."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """Unpickles plain values safely."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


def read(folder: Path) -> tuple[WholeState, set[str]]:
    """Read a folder. Returns its content and the names of the files that belong to DCP.

    Raises CheckpointError if the folder is not complete, or holds objects other than tensors and plain values.
    """
    check_torch_is_safe(folder)
    path = folder / DCP_METADATA
    used = {DCP_METADATA}
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path}: not the metadata of torch.distributed.checkpoint")
        for stored in metadata.storage_data.values():
            if PurePosixPath(stored.relative_path).name != stored.relative_path:
                raise CheckpointError(f"{path}: it names {stored.relative_path!r}, which is not a file in this folder")
            used.add(stored.relative_path)
        for name in used:
            if (kind := non_file_kind(folder / name)) is not None:
                raise CheckpointError(f"{folder / name} is {kind}, not a file")
        flat = {name: _destination_of(entry) for name, entry in metadata.state_dict_metadata.items()}
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings(action="ignore"):  # of running without other processes, which is intended
            load(flat, storage_reader=_FolderReader(folder, metadata), planner=planner, no_dist=True)
        state = nested(flat, metadata.planner_data or {})
    except (CheckpointException, *UNPICKLING_ERRORS) as error:
        what = why_not_unpickled(_first_cause(error), "a complete folder of torch.distributed.checkpoint")
        raise CheckpointError(f"{folder}: {what}") from None
    tree, tensors = flatten_file(folder, state)
    return WholeState("dcp", tree, tensors, {}), used


def _first_cause(error: BaseException) -> BaseException:
    causes = error.failures.values() if isinstance(error, CheckpointException) else []
    return next((cause[0] for cause in causes), error)


def _destination_of(entry: TensorStorageMetadata | BytesStorageMetadata) -> Any:
    """Return an empty tensor or byte stream for DCP to fill. Raises ValueError if parts of a tensor are missing."""
    if isinstance(entry, TensorStorageMetadata):
        if sum(chunk.sizes.numel() for chunk in entry.chunks) < entry.size.numel():
            raise ValueError("parts of a tensor are missing")  # DCP would leave uninitialized memory in their place
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    return io.BytesIO()


def nested(flat: dict[str, Any], paths: dict[str, tuple[str | int, ...]]) -> Any:
    """Undo DCP's flattening of a state. paths: where each entry was in it, by name; integers are list indices."""
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        *inner, last = paths.get(name, (name,))
        node = root
        for key in inner:
            node = node.setdefault(key, {})
        node[last] = value

    def lists(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        values = {key: lists(value) for key, value in node.items()}
        if values and all(type(key) is int for key in values) and sorted(values) == list(range(len(values))):
            return [values[i] for i in range(len(values))]
        return values

    return {key: lists(value) for key, value in root.items()}


def write(folder: Path, state: dict[str, Any]) -> None:
    """Write a state into a new or empty folder. Raises OSError if it cannot be written."""
    try:
        with warnings.catch_warnings(action="ignore"):
            save(state, checkpoint_id=folder, no_dist=True)
    except CheckpointException as error:
        if cause := underlying_os_error(_first_cause(error)):
            raise OSError(cause.errno, cause.strerror, str(folder)) from error
        raise OSError(f"torch.distributed.checkpoint could not write to {folder} ({_first_cause(error)})") from error
