"""The entry of a tensor in a checkpoint's header, checked when it is read (docs/format.md, "Tensor entries").

A feature that is not part of format version 1, such as a kind of coding, has a name. A writer lists those that a file
uses, and a reader that lacks one refuses the file and names it, before it reads anything else of the header.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast, get_args

from dynaquant.engine.forms import schemes
from dynaquant.engine.forms.scheme import MAX_EXPANSION, Scheme
from dynaquant.engine.label import Label, Role
from dynaquant.engine.tensors.element_types import ITEM_SIZES, QUANTIZABLE
from dynaquant.errors import CheckpointError, UnreadableError

# Computed once: a header has hundreds of entries, and a restore reads several headers.
_ROLES = frozenset(get_args(Role))
_HASH = re.compile("[0-9a-f]{64}")
_CODING = "coding "
"""A feature that begins with it is a kind of coding, which follows."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint: name, role, dtype, shape, hash of its values, bytes of its stream, and scheme.

    dtype: by its name (``element_types``), because plain data can be read without PyTorch.
    """

    name: str
    label: Label
    dtype: str
    shape: tuple[int, ...]
    hash: str
    size: int
    scheme: Scheme

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def raw_size(self) -> int:
        """Bytes of the decoded tensor."""
        return self.elements * ITEM_SIZES[self.dtype]

    @property
    def stored_size(self) -> int:
        """Bytes of its stream, or of its streams in all parts of a checkpoint."""
        return self.scheme.stored_size(self.size)

    @property
    def external(self) -> bool:
        """Whether the checkpoint has only the hash of the values: the tensor is frozen or omitted."""
        return self.scheme.external

    @property
    def omitted(self) -> bool:
        """Whether the values are stored nowhere."""
        return self.scheme.external and self.scheme.frozen_file is None

    @property
    def needs_parent(self) -> bool:
        """Whether the parent's tensor of the same name is needed to decode this one."""
        return self.scheme.needs_parent

    def to_json(self) -> dict[str, Any]:
        """Return the entry as it is written to the header."""
        return {
            "name": self.name,
            "role": self.label.role,
            "layer_type": self.label.layer_type,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "hash": self.hash,
            "size": self.size,
            "coding": self.scheme.to_json(),
        }

    @classmethod
    def from_json(cls, data: Any) -> Entry:
        """Read the result of ``to_json``. Raises CheckpointError if a field is missing, mistyped or out of range."""
        name = data.get("name") if isinstance(data, dict) else None
        try:
            entry = _parse(data)
            _check(entry)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the entry of tensor {name!r} is broken ({error})") from None
        return entry


def _typed(data: dict[str, Any], key: str, kind: type) -> Any:
    value = data[key]
    if type(value) is not kind:
        raise TypeError(f"{key} is {value!r}")
    return value


def _parse(data: Any) -> Entry:
    if type(data) is not dict:
        raise TypeError("it is not an object")
    shape = _typed(data, "shape", list)
    if not all(type(n) is int and 0 <= n < 2**62 for n in shape):
        raise ValueError(f"shape is {shape!r}")
    return Entry(
        name=_typed(data, "name", str),
        label=Label(cast(Role, _typed(data, "role", str)), _typed(data, "layer_type", str)),
        dtype=_typed(data, "dtype", str),
        shape=tuple(shape),
        hash=_typed(data, "hash", str),
        size=_typed(data, "size", int),
        scheme=schemes.parse(_typed(data, "coding", dict)),
    )


def _check(entry: Entry) -> None:
    scheme = entry.scheme
    raw_size = entry.raw_size
    if entry.label.role not in _ROLES:
        raise ValueError(f"its role is {entry.label.role!r}")
    if not _HASH.fullmatch(entry.hash):
        raise ValueError(f"its hash is {entry.hash!r}")
    if raw_size >= 2**62:
        raise ValueError("it is larger than any tensor")
    if entry.size < 0:
        raise ValueError(f"its size is {entry.size}")
    if not scheme.of_any_dtype and entry.dtype not in QUANTIZABLE:
        raise ValueError(f"{entry.dtype} cannot be quantized")
    scheme.check(entry.shape, entry.size, raw_size)
    if math.prod(max(n, 1) for n in entry.shape) >= 2**62 or len(entry.shape) > 64:
        raise ValueError("it has a shape that no tensor has")
    if scheme.has_stream and not scheme.needs_parent and raw_size > MAX_EXPANSION * entry.size:
        raise ValueError("its stream is too small for its shape")


def required_features(entries: Iterable[Entry]) -> list[str]:
    """Return the features that a reader of a header with these entries must know, beyond format version 1."""
    kinds = {entry.scheme.kind for entry in entries}
    return sorted(f"{_CODING}{kind}" for kind in kinds - schemes.OF_VERSION_1)


def check_features(required: Any) -> None:
    """Raise UnreadableError if a header requires a feature that this reader lacks; ValueError if it is no list."""
    if not isinstance(required, list) or not all(isinstance(name, str) and name.isprintable() for name in required):
        raise ValueError("what it requires is not a list of names")
    known = {f"{_CODING}{kind}" for kind in schemes.KINDS}
    lacking = [name for name in required if name not in known]
    if lacking:
        raise UnreadableError(f"needs what this dynaquant cannot read: {', '.join(lacking)}; install a newer one")
