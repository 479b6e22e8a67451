"""How the stream of one tensor is coded, as a checkpoint's header says it (docs/format.md, "Tensor entries")."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

from dynaquant.coding.rearrange import Arrangement
from dynaquant.tensors.codebook import HIGHEST_RUNG, LOWEST_RUNG
from dynaquant.tensors.stored import MAX_BINS

CodebookKind = Literal["centres", "grid", "log_grid"]
MAX_PACE = 64
MAX_EXPANSION = 131_072
"""A stream that stands alone decodes to at most this many times its own size (docs/format.md, "Limits").

No coder can exceed it: zstd spends 4 bytes on at most 128 KiB, coded levels 5 bytes on at most 65,536 values.
"""


@dataclass(frozen=True)
class Raw:
    """The tensor's bytes as they are."""

    needs_parent = False


@dataclass(frozen=True)
class BytePlanes:
    """Byte planes + zstd (``coding.byte_planes``)."""

    needs_parent = False


@dataclass(frozen=True)
class Lossless:
    """Exact values, given the parent's where that helps (``coding.exact``)."""

    needs_parent: bool


@dataclass(frozen=True)
class Reference:
    """No stream: the tensor is the parent's tensor of the same name."""

    needs_parent = True


@dataclass(frozen=True)
class Frozen:
    """No stream: the values are those of the tensor of this name in ``file``, the identity of a file of frozen
    parameters in the same folder."""

    file: str
    needs_parent = False


@dataclass(frozen=True)
class Omitted:
    """No stream and no values: only the hash of the tensor is stored."""

    needs_parent = False


@dataclass(frozen=True)
class RoundedFromMaster:
    """No stream: the values of ``of``, another tensor of the checkpoint, rounded to this one's dtype."""

    of: str
    needs_parent = False


@dataclass(frozen=True)
class Rearranged:
    """Centres, protected values, coded levels (``coding.rearrange``)."""

    bins: int
    protected: int
    protected_size: int
    arrangement: Arrangement

    @property
    def needs_parent(self) -> bool:
        """Whether the levels are coded given the parent's."""
        return self.arrangement != "alone"


@dataclass(frozen=True)
class Conditional:
    """A codebook, protected values, coded levels (``coding.conditional``).

    codebook: centres are in the stream. first: the rung of a grid's step, the first bin of a logarithmic grid. pace: of
    a logarithmic grid. size: of the stream, which may be a part of a tensor's.
    """

    codebook: CodebookKind
    bins: int
    first: int
    pace: int
    protected: int
    protected_size: int
    needs_parent: bool
    size: int


@dataclass(frozen=True)
class RankOneFactors:
    """The rows, then the columns of a rank-one tensor; zeros may follow."""

    rows: Conditional
    columns: Conditional

    @property
    def needs_parent(self) -> bool:
        """Whether one of them is coded given the parent's."""
        return self.rows.needs_parent or self.columns.needs_parent


@dataclass(frozen=True)
class SecondMomentUnits:
    """A tensor in units of the root of ``second``, another tensor of the checkpoint."""

    units: Conditional
    second: str

    @property
    def needs_parent(self) -> bool:
        """Whether the units are coded given the parent's."""
        return self.units.needs_parent


Scheme = (
    Raw
    | BytePlanes
    | Lossless
    | Reference
    | Frozen
    | Omitted
    | RoundedFromMaster
    | Rearranged
    | Conditional
    | RankOneFactors
    | SecondMomentUnits
)
KINDS: dict[str, type[Scheme]] = {
    "raw": Raw,
    "planes": BytePlanes,
    "exact": Lossless,
    "reference": Reference,
    "frozen": Frozen,
    "omitted": Omitted,
    "rounding": RoundedFromMaster,
    "quantized": Rearranged,
    "conditional": Conditional,
    "rank_one": RankOneFactors,
    "units": SecondMomentUnits,
}
_NAMES = {kind: name for name, kind in KINDS.items()}


def kind_of(scheme: Scheme) -> str:
    """The coding's name in a header."""
    return _NAMES[type(scheme)]


def depends_on(scheme: Scheme) -> str | None:
    """The name of the tensor of the same checkpoint that has to be decoded before one that is coded like this."""
    if isinstance(scheme, SecondMomentUnits):
        return scheme.second
    return scheme.of if isinstance(scheme, RoundedFromMaster) else None


def parse(data: dict[str, Any]) -> Scheme:
    """A coding from what a header says of it. Raises KeyError, TypeError or ValueError for anything else."""
    rest = dict(data)
    scheme: Scheme = _parse(KINDS[rest.pop("kind")], rest)
    return scheme


@cache
def _types(kind: type) -> dict[str, type]:
    """The type of every field of a coding; what is one of several words is a string."""
    return {key: wanted if isinstance(wanted, type) else str for key, wanted in get_type_hints(kind).items()}


def _parse(kind: type, data: dict[str, Any]) -> Any:
    wanted = _types(kind)
    if data.keys() != wanted.keys():
        raise TypeError(f"its coding has the keys {sorted(data)}")
    values = {}
    for key, value in data.items():
        if wanted[key] is Conditional:
            if type(value) is not dict:
                raise TypeError(f"{key} is {value!r}")
            values[key] = _parse(Conditional, value)
        elif type(value) is not wanted[key]:
            raise TypeError(f"{key} is {value!r}")
        else:
            values[key] = value
    return kind(**values)


EXTERNAL = (Frozen, Omitted)
"""Codings of tensors whose values are not in the checkpoint (``external``)."""
_WITHOUT_STREAM = (Reference, RoundedFromMaster, *EXTERNAL)
_IDENTITY = re.compile("[0-9a-f]{64}")
_ARRANGEMENTS, _CODEBOOKS = get_args(Arrangement), get_args(CodebookKind)


def check(scheme: Scheme, shape: tuple[int, ...], elements: int, size: int) -> None:
    """Raises ValueError for a coding that no tensor of that shape has in a stream of that size."""
    if isinstance(scheme, _WITHOUT_STREAM) and size != 0:
        raise ValueError(f"its size is {size}")
    if isinstance(scheme, Frozen) and not _IDENTITY.fullmatch(scheme.file):
        raise ValueError(f"its file is {scheme.file!r}")
    if isinstance(scheme, Rearranged):
        if scheme.arrangement not in _ARRANGEMENTS:
            raise ValueError(f"its coding is {scheme}")
        _check_levels(scheme, elements, size, 4 * scheme.bins)
    elif isinstance(scheme, Conditional):
        _check_part(scheme, elements, size)
    elif isinstance(scheme, SecondMomentUnits):
        _check_part(scheme.units, elements, size)
    elif isinstance(scheme, RankOneFactors):
        if len(shape) < 2:
            raise ValueError("it has no rows and columns")
        rows = shape[0]
        _check_part(scheme.rows, rows, scheme.rows.size)
        _check_part(scheme.columns, elements // max(rows, 1), scheme.columns.size)
        if scheme.rows.size + scheme.columns.size > size:
            raise ValueError("its rows and columns do not fit its stream")


def _check_part(part: Conditional, elements: int, size: int) -> None:
    if part.codebook not in _CODEBOOKS or part.size != size:
        raise ValueError(f"its coding is {part}")
    if part.codebook == "log_grid":
        rungs = (part.first * part.pace, (part.first + part.bins) * part.pace)
        if not 1 <= part.pace <= MAX_PACE:
            raise ValueError(f"its pace is {part.pace}")
    else:
        rungs = (part.first, part.first)
    if not all(LOWEST_RUNG - MAX_PACE <= rung <= HIGHEST_RUNG + MAX_PACE for rung in rungs):
        raise ValueError("its codebook holds numbers that float32 does not have")
    _check_levels(part, elements, size, 4 * part.bins if part.codebook == "centres" else 0)


def _check_levels(scheme: Rearranged | Conditional, elements: int, size: int, codebook_size: int) -> None:
    if not 0 <= scheme.bins <= MAX_BINS:
        raise ValueError(f"its coding is {scheme}")
    if not 0 <= scheme.protected <= elements:
        raise ValueError("it has more protected values than values")
    if not 0 <= scheme.protected_size <= size - codebook_size:
        raise ValueError("its protected values do not fit its stream")
