"""What a checkpoint's header says about one tensor, checked on reading (docs/format.md, "Tensor entries")."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, cast, get_args

import torch

from dynaquant.coding.rearrange import Arrangement
from dynaquant.errors import CheckpointError
from dynaquant.quantized import MAX_BINS
from dynaquant.roles import Label, Role
from dynaquant.sketch import SKETCHED
from dynaquant.state import DTYPES, dtype_name

MAX_EXPANSION = 131_072
"""A stream that stands alone decodes to at most this many times its own size (docs/format.md, "Limits").

No coder can exceed it: zstd spends 4 bytes on at most 128 KiB, coded levels 5 bytes on at most 65,536 values.
"""


@dataclass(frozen=True)
class Raw:
    """The tensor's bytes as they are."""


@dataclass(frozen=True)
class Planes:
    """Byte planes + zstd (``coding.planes``)."""


@dataclass(frozen=True)
class Reference:
    """No stream: the tensor is the parent's tensor of the same name."""


@dataclass(frozen=True)
class Quantized:
    """Centres, protected values, coded levels (``coding.rearrange``)."""

    bins: int
    protected: int
    protected_size: int
    arrangement: Arrangement


Coding = Raw | Planes | Reference | Quantized
_KINDS: dict[str, type[Coding]] = {"raw": Raw, "planes": Planes, "reference": Reference, "quantized": Quantized}
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint: what it is, the hash of its values, and how its stream of ``size`` bytes is coded."""

    name: str
    label: Label
    dtype: torch.dtype
    shape: torch.Size
    hash: str
    size: int
    coding: Coding

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def raw_size(self) -> int:
        """Bytes of the decoded tensor."""
        return self.elements * self.dtype.itemsize

    @property
    def needs_parent(self) -> bool:
        """Whether the parent's tensor of the same name is needed to decode this one."""
        return isinstance(self.coding, Reference) or (
            isinstance(self.coding, Quantized) and self.coding.arrangement != "alone"
        )

    def to_json(self) -> dict[str, Any]:
        """The entry as it stands in the header."""
        return {
            "name": self.name,
            "role": self.label.role,
            "layer_type": self.label.layer_type,
            "dtype": dtype_name(self.dtype),
            "shape": list(self.shape),
            "hash": self.hash,
            "size": self.size,
            "coding": {"kind": _NAMES[type(self.coding)], **asdict(self.coding)},
        }

    @classmethod
    def from_json(cls, data: Any) -> Entry:
        """The inverse of ``to_json``. Raises CheckpointError for anything that ``to_json`` would not have written."""
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
        raise TypeError("it is no object")
    coding = dict(_typed(data, "coding", dict))
    kind = _KINDS[_typed(coding, "kind", str)]
    del coding["kind"]
    for key, value in coding.items():
        if type(value) is not (str if key == "arrangement" else int):
            raise TypeError(f"{key} is {value!r}")
    shape = _typed(data, "shape", list)
    if not all(type(n) is int and 0 <= n < 2**62 for n in shape):
        raise ValueError(f"shape is {shape!r}")
    return Entry(
        name=_typed(data, "name", str),
        label=Label(cast(Role, _typed(data, "role", str)), _typed(data, "layer_type", str)),
        dtype=DTYPES[_typed(data, "dtype", str)],
        shape=torch.Size(shape),
        hash=_typed(data, "hash", str),
        size=_typed(data, "size", int),
        coding=kind(**coding),
    )


def _check(entry: Entry) -> None:
    coding = entry.coding
    if entry.label.role not in get_args(Role):
        raise ValueError(f"its role is {entry.label.role!r}")
    if len(entry.hash) != 64 or not set(entry.hash) <= set("0123456789abcdef"):
        raise ValueError(f"its hash is {entry.hash!r}")
    if entry.raw_size >= 2**62:
        raise ValueError("it is larger than any tensor")
    if entry.size < 0 or (isinstance(coding, Reference) and entry.size != 0):
        raise ValueError(f"its size is {entry.size}")
    if isinstance(coding, Raw) and entry.size != entry.raw_size:
        raise ValueError("its stream has another size than its values")
    if isinstance(coding, Quantized):
        if entry.dtype not in SKETCHED:
            raise ValueError(f"{dtype_name(entry.dtype)} cannot be quantized")
        if not 0 <= coding.bins <= MAX_BINS or coding.arrangement not in get_args(Arrangement):
            raise ValueError(f"its coding is {coding}")
        if not 0 <= coding.protected <= entry.elements:
            raise ValueError("it has more protected values than values")
        if not 0 <= coding.protected_size <= entry.size - 4 * coding.bins:
            raise ValueError("its protected values do not fit its stream")
    if math.prod(max(n, 1) for n in entry.shape) >= 2**62 or len(entry.shape) > 64:
        raise ValueError("it has a shape that no tensor has")
    if not entry.needs_parent and entry.raw_size > MAX_EXPANSION * entry.size:
        raise ValueError("its stream is too small for its shape")
