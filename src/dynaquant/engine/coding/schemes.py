"""Schemes: how the stream of one tensor is coded, as stated in a header (docs/format.md, "Tensor entries").

In a header a scheme is the JSON object ``coding``. The attribute ``needs_parent`` says whether decoding needs the
parent's tensor.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

from dynaquant.engine.tensors.codebook import HIGHEST_RUNG, LOWEST_RUNG, MAX_BINS

Arrangement = Literal["alone", "delta", "rearranged"]
"""How levels are coded: without the parent; as deltas in the order of elements; as deltas grouped by parent level."""
CodebookKind = Literal["centres", "grid", "log_grid"]
MAX_PACE = 64
MAX_EXPANSION = 131_072
"""A stream that needs no other tensor decodes to at most this many times its own size (docs/format.md, "Limits").

No coder can exceed it: zstd takes at least 4 bytes for 128 KiB, coded levels take at least 5 bytes for 65,536 values.
"""


@dataclass(frozen=True)
class Raw:
    """The tensor's bytes, unchanged."""

    needs_parent = False


@dataclass(frozen=True)
class BytePlanes:
    """Exact values as byte planes, by zstd (``coding.byte_planes``)."""

    needs_parent = False


@dataclass(frozen=True)
class Lossless:
    """Exact values, conditioned on the parent's if that helps (``coding.lossless``)."""

    needs_parent: bool


@dataclass(frozen=True)
class Reference:
    """No stream: the tensor is the same as the parent's tensor of this name."""

    needs_parent = True


@dataclass(frozen=True)
class Frozen:
    """No stream: the values are in a file of frozen parameters in the same folder, under the same name.

    file: the identity of that file.
    """

    file: str
    needs_parent = False


@dataclass(frozen=True)
class Omitted:
    """No stream and no values: only the hash of the tensor is stored."""

    needs_parent = False


@dataclass(frozen=True)
class Sharded:
    """No stream: the values are in the parts of the checkpoint, as boxes (``store.parts``).

    layout: index in the header's list of layouts. stored: bytes of the streams in all parts. second: the name of the
    tensor that must be decoded first; empty if there is none. needs_parent: whether any box does.
    """

    layout: int
    stored: int
    second: str
    needs_parent: bool


@dataclass(frozen=True)
class RoundedFromMaster:
    """No stream: a half-precision weight, rounded from its master weight. of: the master weight's name."""

    of: str
    needs_parent = False


@dataclass(frozen=True)
class Rearranged:
    """Centres, outliers, coded levels (``coding.rearrange``).

    bins: number of centres. protected: number of outliers. protected_size: their bytes in the stream.
    """

    bins: int
    protected: int
    protected_size: int
    arrangement: Arrangement

    @property
    def needs_parent(self) -> bool:
        """Whether the levels are conditioned on the parent's."""
        return self.arrangement != "alone"


@dataclass(frozen=True)
class Conditional:
    """A codebook, outliers, coded levels (``coding.conditional``).

    codebook: its kind; only centres are in the stream. first: the rung of a grid's step, or the first bin of a
    logarithmic grid. pace: rungs between two levels of a logarithmic grid. protected: number of outliers.
    protected_size: their bytes in the stream. size: bytes of this stream; a rank-one tensor has two.
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
    """A rank-one tensor: the stream of its rows, the stream of its columns, and maybe zeros."""

    rows: Conditional
    columns: Conditional

    @property
    def needs_parent(self) -> bool:
        """Whether the rows or the columns are conditioned on the parent's."""
        return self.rows.needs_parent or self.columns.needs_parent


@dataclass(frozen=True)
class SecondMomentUnits:
    """A first moment in units of the root of its second moment. second: the name of the second moment."""

    units: Conditional
    second: str

    @property
    def needs_parent(self) -> bool:
        """Whether the units are conditioned on the parent's."""
        return self.units.needs_parent


@dataclass(frozen=True)
class Bounded:
    """Positions of exact values, the exact values, and coded levels on a grid of any step (``coding.bounded``).

    bound: the largest error; for information. width: bytes of a coded level. axes: along how many of the last axes the
    levels are differences. exact: number of exact values. positions_size, exact_size: bytes in the stream.
    """

    step: float
    bound: float
    width: int
    axes: int
    exact: int
    positions_size: int
    exact_size: int
    needs_parent: bool


Scheme = (
    Raw
    | BytePlanes
    | Lossless
    | Reference
    | Frozen
    | Omitted
    | Sharded
    | RoundedFromMaster
    | Rearranged
    | Conditional
    | RankOneFactors
    | SecondMomentUnits
    | Bounded
)
KINDS: dict[str, type[Scheme]] = {
    "raw": Raw,
    "planes": BytePlanes,
    "exact": Lossless,
    "reference": Reference,
    "frozen": Frozen,
    "omitted": Omitted,
    "sharded": Sharded,
    "rounding": RoundedFromMaster,
    "quantized": Rearranged,
    "conditional": Conditional,
    "rank_one": RankOneFactors,
    "units": SecondMomentUnits,
    "bounded": Bounded,
}
_NAMES = {kind: name for name, kind in KINDS.items()}


def kind_of(scheme: Scheme) -> str:
    """Return the kind of a scheme in a header, e.g. ``"conditional"``."""
    return _NAMES[type(scheme)]


def depends_on(scheme: Scheme) -> str | None:
    """Return the name of the other tensor of the checkpoint that must be decoded first, or None."""
    if isinstance(scheme, SecondMomentUnits):
        return scheme.second
    if isinstance(scheme, Sharded):
        return scheme.second or None
    return scheme.of if isinstance(scheme, RoundedFromMaster) else None


def parse(data: dict[str, Any]) -> Scheme:
    """Return the scheme that a header describes. Raises KeyError, TypeError or ValueError if it is not valid."""
    rest = dict(data)
    scheme: Scheme = _parse(KINDS[rest.pop("kind")], rest)
    return scheme


@cache
def _types(kind: type) -> dict[str, type]:
    """Return the JSON type of every field of a scheme. The type of a ``Literal`` is str."""
    return {key: wanted if isinstance(wanted, type) else str for key, wanted in get_type_hints(kind).items()}


def _parse(kind: type, data: dict[str, Any]) -> Any:
    wanted = _types(kind)
    if data.keys() != wanted.keys():
        raise TypeError(f"its scheme has the keys {sorted(data)} instead of {sorted(wanted)}")
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
"""Schemes of tensors whose values are not in the checkpoint."""
_WITHOUT_STREAM = (Reference, RoundedFromMaster, Sharded, *EXTERNAL)
_IDENTITY = re.compile("[0-9a-f]{64}")
_ARRANGEMENTS, _CODEBOOKS = get_args(Arrangement), get_args(CodebookKind)


def check(scheme: Scheme, shape: tuple[int, ...], elements: int, size: int) -> None:
    """Raise ValueError if no tensor of this shape has a stream of this scheme and size.

    elements: of the tensor. size: bytes of the stream.
    """
    if isinstance(scheme, _WITHOUT_STREAM) and size != 0:
        raise ValueError(f"its size is {size}")
    if isinstance(scheme, Sharded) and min(scheme.layout, scheme.stored) < 0:
        raise ValueError(f"its scheme is not valid: {scheme}")
    if isinstance(scheme, Frozen) and not _IDENTITY.fullmatch(scheme.file):
        raise ValueError(f"its file is {scheme.file!r}")
    if isinstance(scheme, Rearranged):
        if scheme.arrangement not in _ARRANGEMENTS:
            raise ValueError(f"its scheme is not valid: {scheme}")
        _check_levels(scheme, elements, size, 4 * scheme.bins)
    elif isinstance(scheme, Conditional):
        _check_conditional(scheme, elements, size)
    elif isinstance(scheme, SecondMomentUnits):
        _check_conditional(scheme.units, elements, size)
    elif isinstance(scheme, Bounded):
        _check_bounded(scheme, elements, size)
    elif isinstance(scheme, RankOneFactors):
        if len(shape) < 2:
            raise ValueError("it has no rows and columns")
        rows = shape[0]
        _check_conditional(scheme.rows, rows, scheme.rows.size)
        _check_conditional(scheme.columns, elements // max(rows, 1), scheme.columns.size)
        if scheme.rows.size + scheme.columns.size > size:
            raise ValueError("its rows and columns do not fit its stream")


def _check_conditional(scheme: Conditional, elements: int, size: int) -> None:
    if scheme.codebook not in _CODEBOOKS or scheme.size != size:
        raise ValueError(f"its scheme is not valid: {scheme}")
    if scheme.codebook == "log_grid":
        rungs = (scheme.first * scheme.pace, (scheme.first + scheme.bins) * scheme.pace)
        if not 1 <= scheme.pace <= MAX_PACE:
            raise ValueError(f"its pace is {scheme.pace}")
    else:
        rungs = (scheme.first, scheme.first)
    if not all(LOWEST_RUNG - MAX_PACE <= rung <= HIGHEST_RUNG + MAX_PACE for rung in rungs):
        raise ValueError("its codebook has values outside the range of float32")
    _check_levels(scheme, elements, size, 4 * scheme.bins if scheme.codebook == "centres" else 0)


def _check_bounded(scheme: Bounded, elements: int, size: int) -> None:
    if not (0 < scheme.step < math.inf and scheme.width in (1, 2, 4, 8) and 0 <= scheme.axes <= 3):
        raise ValueError(f"its scheme is not valid: {scheme}")
    if not 0 <= scheme.exact <= elements:
        raise ValueError("it has more exact values than elements")
    sizes = scheme.positions_size, scheme.exact_size
    if min(sizes) < 0 or sum(sizes) > size or (scheme.exact == 0 and any(sizes)):
        raise ValueError("its exact values do not fit its stream")


def _check_levels(scheme: Rearranged | Conditional, elements: int, size: int, codebook_size: int) -> None:
    """codebook_size: bytes of the codebook in the stream."""
    if not 0 <= scheme.bins <= MAX_BINS:
        raise ValueError(f"its scheme is not valid: {scheme}")
    if not 0 <= scheme.protected <= elements:
        raise ValueError("it has more protected values than elements")
    if not 0 <= scheme.protected_size <= size - codebook_size:
        raise ValueError("its protected values do not fit its stream")
