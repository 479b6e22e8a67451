"""Folders of ``torch.distributed.checkpoint`` (DCP), read and written by one process.

Their metadata is a pickle, and so are the values in them that are no tensors. They are read by unpicklers that know
tensors, plain values and DCP's own records, and refuse all else.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dynaquant.errors import CheckpointError
from dynaquant.modelfiles.modelfile import ModelFile
from dynaquant.state import flatten

METADATA = ".metadata"
_OWN = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_PLAIN = {("collections", "OrderedDict"), ("torch", "Size"), ("torch.serialization", "_get_layout")}
_PLAIN |= {("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module in (*_OWN, "torch") and "." not in name:
            found = super().find_class(module, name)
            own = isinstance(found, type) and found.__module__ in _OWN and module == found.__module__
            if own or isinstance(found, torch.dtype | torch.layout | torch.memory_format):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


def read(folder: Path) -> ModelFile:
    """A folder. Raises CheckpointError when it holds other objects than tensors and plain values, or is not whole."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path}: not the metadata of torch.distributed.checkpoint")
        flat = {name: _place_of(entry) for name, entry in metadata.state_dict_metadata.items()}
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        _alone(load, flat, storage_reader=_Reader(folder, metadata), planner=planner)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{folder}: refused, as reading it would run code that it names ({error})") from None
    except (CheckpointException, *_BROKEN) as error:
        raise CheckpointError(f"{folder}: not a whole folder of torch.distributed.checkpoint ({error!r})") from None
    tree, tensors = flatten(_nested(flat, metadata.planner_data or {}))
    return ModelFile("dcp", tree, tensors, {})


_BROKEN = (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, IndexError, TypeError, ImportError)


def _place_of(entry: TensorStorageMetadata | BytesStorageMetadata) -> Any:
    if isinstance(entry, TensorStorageMetadata):
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    return io.BytesIO()


def _nested(flat: dict[str, Any], paths: dict[str, tuple[str | int, ...]]) -> Any:
    """The state that DCP has flattened. paths: of what has been, by its name; integers are places in lists."""
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
    """Writes a state into a folder that is new or empty."""
    _alone(save, state, checkpoint_id=folder)


def _alone(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of being one process, which is what is wanted
        function(*args, **kwargs, no_dist=True)
