"""Reads and writes files of ``torch.save``. Reads only tensors and plain values: no code in a file is ever run."""

from __future__ import annotations

import pickle
import re
import struct
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile, is_zipfile

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from dynaquant.errors import CheckpointError, StateError
from dynaquant.formatting import in_bytes
from dynaquant.interop.whole_state import WholeState
from dynaquant.state.flatten import flatten
from dynaquant.state.plain import plain_part
from dynaquant.store.files import underlying_os_error

SAFE_VERSION = (2, 10)
"""The first version of PyTorch whose ``weights_only`` is safe."""
FIRST_BYTES = (b"PK\x03\x04", b"\x80")
"""The first bytes of these files: those of a zip archive, or of a bare pickle."""
REPEATED_BYTES = 1 << 30
"""Largest size of a tensor that repeats its values (``expand``) and so takes more bytes than the file stores for it."""
UNPICKLING_ERRORS = (
    *(pickle.UnpicklingError, struct.error, EOFError, RuntimeError, OSError, ImportError, MemoryError, BadZipFile),
    *(ValueError, KeyError, IndexError, TypeError, AttributeError, AssertionError, OverflowError, RecursionError),
    SafetensorError,  # torch.load raises it for some file names
)
"""Errors that unpickling a damaged or unsafe file may raise."""
_APPENDED_TO = re.compile(r"Can only (?:append to|extend) lists, but got <class '([^']+)'>")
_NAMES_CODE = re.compile(r"(?:GLOBAL |^)([\w.]+)(?: was not an allowed global| whose module|$)", re.MULTILINE)


def read(path: Path, skip_objects: bool = False) -> WholeState:
    """Read a file.

    skip_objects: leave out objects, classes and functions; a note says which. By default they are an error, as no
    code of a file is run. Names that no checkpoint has, such as ``os.system``, are an error in any case.

    Raises CheckpointError if it is damaged or holds objects other than tensors and plain values, StateError if a
    checkpoint cannot store one of the values.
    """
    namespaces: list[str] = []
    state = load(path, skip_objects, "" if skip_objects else "; or leave it out: --skip-objects", namespaces)
    left_out: list[str] = []
    if skip_objects:
        state, left_out = plain_part(state)
    tree, tensors = flatten_file(path, state)
    notes = []
    if namespaces:
        notes.append(f"an argparse.Namespace is stored as the dictionary of its values: {', '.join(namespaces)}")
    if left_out:
        notes.append(f"left out, as they are not tensors or plain values: {', '.join(left_out)}")
    return WholeState("torch", tree, tensors, {}, notes=tuple(notes))


def load(
    path: Path, skip_objects: bool = False, advice: str = "", namespaces: list[str] | None = None
) -> dict[Any, Any]:
    """Return the dictionary in a file, with memory-mapped tensors. Raises CheckpointError as ``read`` does.

    An ``argparse.Namespace``, the arguments of many training scripts, comes back as the dictionary of its values.

    skip_objects: objects come back as instances of empty classes that have the same names. advice: added to an
    error about such an object. namespaces: the places of Namespaces are added to it.
    """
    check_torch_is_safe(path)
    try:
        state = _unpickled(path, skip_objects)
        state = _without_namespaces(state, "", [] if namespaces is None else namespaces, set())
    except UNPICKLING_ERRORS as error:
        why = _newer_protocol(path, error) or why_not_unpickled(error, "a complete file of torch.save")
        raise CheckpointError(f"{path}: {why}{advice if _names_code(error) else ''}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: it holds a {type(state).__name__}, not a dictionary such as a state dict")
    return state


def _unpickled(path: Path, skip_objects: bool) -> Any:
    """Return what a file holds. PyTorch appends to lists alone, so objects that it appends to are found one by one."""
    lists: set[str] = set()
    while True:
        # Unpickling a Namespace sets its attributes and runs no code of its own.
        known = _placeholders(path, lists) if skip_objects else []
        try:
            # PyTorch warns of other pickle protocols; reading shows whether it can read them.
            with warnings.catch_warnings(action="ignore"), safe_globals([Namespace, *known]):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
        except pickle.UnpicklingError as error:
            found = _APPENDED_TO.search(str(error))
            if not skip_objects or found is None or found[1] in lists:
                raise
            lists.add(found[1])


def _newer_protocol(path: Path, error: BaseException) -> str:
    """Return what to do about a file of a newer pickle protocol, if that is why it could not be unpickled; else empty.

    PyTorch's safe unpickler lacks most instructions of protocols after 2, the one that ``torch.save`` uses by default.
    """
    if not isinstance(error, pickle.UnpicklingError) or "Unsupported operand" not in str(error):
        return ""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as file:
                start = file.read(2)
    except (OSError, BadZipFile, StopIteration, RuntimeError, NotImplementedError, ValueError):
        return ""
    if len(start) < 2 or start[0] != pickle.PROTO[0] or not 2 < start[1] <= pickle.HIGHEST_PROTOCOL:
        return ""
    return (
        f"it was saved with pickle protocol {start[1]}, which PyTorch cannot read without running code that a file "
        "names. If you trust it, load it with torch.load(…, weights_only=False), and save it with the default "
        "protocol: torch.save without pickle_protocol"
    )


class _MayHaveItems(type):
    """The class of placeholders. PyTorch sets items only of objects whose class equals ``dict``."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is dict

    __hash__ = type.__hash__


class _Placeholder(metaclass=_MayHaveItems):
    """Stands for an object of a file. Its subclasses have the names of the objects' classes."""

    _appended_to = False
    """Whether the file appends to such objects."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Ignore the arguments of the object's class. A list that holds a placeholder is left out like one."""
        made = super().__new__(cls)
        return [made] if cls._appended_to else made

    def __setitem__(self, *_: Any) -> None:
        """Ignore an item of the object."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        """Ignore the object's state."""


def _placeholders(path: Path, lists: Collection[str]) -> list[Any]:
    """Return placeholders, for ``safe_globals``, of whatever a file names and weights_only does not know.

    lists: names of classes to whose objects the file appends.
    """
    classes: list[Any] = []
    for name in get_unsafe_globals_in_checkpoint(path):
        module, _, own = name.rpartition(".")
        if name != "argparse.Namespace":
            content = {"__module__": module, "_appended_to": name in lists}
            classes.append((_MayHaveItems(own, (_Placeholder,), content), name))
    return classes


def _without_namespaces(value: Any, place: str, found: list[str], inside: set[int]) -> Any:
    """Return a value with dictionaries in place of Namespaces, and add the places of these to ``found``.

    Changes dictionaries and lists in place. inside: the ids of the containers around the value.
    """
    if id(value) in inside:  # it contains itself, which ``flatten`` refuses
        return value
    if isinstance(value, Namespace):
        found.append(place)
        value = vars(value)
    around = inside | {id(value)}
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _without_namespaces(item, f"{place}.{key}" if place else str(key), found, around)
    elif isinstance(value, list):
        value[:] = [_without_namespaces(item, f"{place}.{i}", found, around) for i, item in enumerate(value)]
    elif type(value) is tuple:
        return tuple(_without_namespaces(item, f"{place}.{i}", found, around) for i, item in enumerate(value))
    return value


def flatten_file(path: Path, state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return ``flatten`` of a state that was read from a file or folder; errors name that path.

    Raises CheckpointError if a tensor repeats stored values so often that it would take far more memory than the file.
    """
    try:
        tree, tensors = flatten(state)
    except StateError as error:
        raise StateError(f"{path}: {error}") from None
    except (MemoryError, RuntimeError) as error:  # ``flatten`` copies some views
        raise CheckpointError(f"{path}: a tensor in it needs more memory than is available ({error})") from None
    for name, tensor in tensors.items():
        size, held = tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes()
        if size > max(held, REPEATED_BYTES):
            raise CheckpointError(
                f"{path}: {name} claims {in_bytes(size)}, but repeats {in_bytes(held)} of stored values; save "
                "only the values that it repeats"
            )
    return tree, tensors


def check_torch_is_safe(path: Path) -> None:
    """Raise CheckpointError if this PyTorch's weights_only is vulnerable (CVE-2025-32434, CVE-2026-24747)."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < SAFE_VERSION:
        raise CheckpointError(
            f"{path}: a file like this can make PyTorch {torch.__version__} run code, even with weights_only; "
            f"install PyTorch {'.'.join(map(str, SAFE_VERSION))} or newer, or give a safetensors file"
        )


def _names_code(error: BaseException) -> str:
    """Return the name of the code that a file would run; empty if the error is another one."""
    found = _NAMES_CODE.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    return found[1] if found else ""


def why_not_unpickled(error: BaseException, expected: str) -> str:
    """Return why a file could not be unpickled: it names code, or it is not what was expected.

    PyTorch's own message often recommends to run that code.
    """
    if name := _names_code(error):
        return (
            f"refused, as reading it would run code that it names ({name}). If you trust it, load it with "
            "torch.load(…, weights_only=False) and save only its state_dict()s"
        )
    lines = str(error).strip().split("\n")
    said = lines[0] if not isinstance(error, pickle.UnpicklingError) else "its pickle is damaged"
    return f"not {expected} ({said.split('. ')[0] or type(error).__name__})"


def write(file: BinaryIO, state: Any) -> None:
    """Write a state with ``torch.save``. Raises OSError if the file cannot be written."""
    try:
        torch.save(state, file)
    except RuntimeError as error:  # PyTorch wraps an OSError in it
        if cause := underlying_os_error(error):
            raise OSError(cause.errno, cause.strerror) from error
        raise OSError(f"torch.save failed ({error})") from error
