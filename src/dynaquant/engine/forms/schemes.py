"""The schemes of the built-in forms: how the stream of a tensor is coded, as stated in a header.

They are in one file, apart from the forms, because a header is read without PyTorch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dynaquant.engine.coding.rearrange import Arrangement
from dynaquant.engine.forms.scheme import Scheme, WithoutStream, parsed
from dynaquant.engine.tensors.codebook import HIGHEST_RUNG, LOWEST_RUNG, MAX_BINS

CodebookKind = Literal["centres", "grid", "log_grid"]
MAX_PACE = 64


@dataclass(frozen=True)
class Raw(Scheme):
    """The tensor's bytes, unchanged."""

    kind = "raw"
    of_any_dtype = is_exact = True
    needs_parent = False

    def check(self, shape: tuple[int, ...], size: int, raw_size: int) -> None:  # noqa: ARG002 - whatever its shape
        if size != raw_size:
            raise ValueError("its stream and its values differ in size")


@dataclass(frozen=True)
class BytePlanes(Scheme):
    """Exact values as byte planes, by zstd (``coding.byte_planes``)."""

    kind = "planes"
    of_any_dtype = is_exact = True
    needs_parent = False


@dataclass(frozen=True)
class Lossless(Scheme):
    """Exact values, conditioned on the parent's if that helps (``coding.lossless``)."""

    kind = "exact"
    of_any_dtype = is_exact = True
    needs_parent: bool


@dataclass(frozen=True)
class Reference(WithoutStream):
    """No stream: the tensor is the same as the parent's tensor of this name."""

    kind = "reference"
    is_reference = True
    needs_parent = True


@dataclass(frozen=True)
class Frozen(WithoutStream):
    """No stream: the values are in a file of frozen parameters in the same folder, under the same name.

    file: the identity of that file.
    """

    kind = "frozen"
    external = True
    needs_parent = False
    file: str

    @property
    def frozen_file(self) -> str:
        return self.file

    def _check(self, shape: tuple[int, ...], size: int) -> None:
        super()._check(shape, size)
        if not _IDENTITY.fullmatch(self.file):
            raise ValueError(f"its file is {self.file!r}")


@dataclass(frozen=True)
class Omitted(WithoutStream):
    """No stream and no values: only the hash of the tensor is stored."""

    kind = "omitted"
    external = True
    needs_parent = False


@dataclass(frozen=True)
class Sharded(WithoutStream):
    """No stream: the values are in the parts of the checkpoint, as boxes (``store.reading``).

    layout: index in the header's list of layouts. stored: bytes of the streams in all parts. second: the name of the
    tensor that must be decoded first; empty if there is none. needs_parent: whether any box does.
    """

    kind = "sharded"
    layout: int
    stored: int
    second: str
    needs_parent: bool

    @property
    def depends_on(self) -> str | None:
        return self.second or None

    @property
    def layout_number(self) -> int:
        return self.layout

    def stored_size(self, size: int) -> int:  # noqa: ARG002 - its streams are in the parts
        return self.stored

    def _check(self, shape: tuple[int, ...], size: int) -> None:
        super()._check(shape, size)
        if min(self.layout, self.stored) < 0:
            raise ValueError(f"its scheme is not valid: {self}")


@dataclass(frozen=True)
class RoundedFromMaster(WithoutStream):
    """No stream: a half-precision weight, rounded from its master weight. of: the master weight's name."""

    kind = "rounding"
    needs_parent = False
    of: str

    @property
    def depends_on(self) -> str:
        return self.of


@dataclass(frozen=True)
class Rearranged(Scheme):
    """Centres, outliers, coded levels (``coding.rearrange``).

    bins: number of centres. protected: number of outliers. protected_size: their bytes in the stream.
    """

    kind = "quantized"
    coder = "rearranged"
    bins: int
    protected: int
    protected_size: int
    arrangement: Arrangement

    @property
    def needs_parent(self) -> bool:
        return self.arrangement != "alone"

    @property
    def codebook_bins(self) -> int:
        return self.bins

    def _check(self, shape: tuple[int, ...], size: int) -> None:
        if self.arrangement not in _ARRANGEMENTS:
            raise ValueError(f"its scheme is not valid: {self}")
        _check_levels(self, math.prod(shape), size, 4 * self.bins)


@dataclass(frozen=True)
class Conditional(Scheme):
    """A codebook, outliers, coded levels (``coding.conditional``).

    codebook: its kind; only centres are in the stream. first: the rung of a grid's step, or the first bin of a
    logarithmic grid. pace: rungs between two levels of a logarithmic grid. protected: number of outliers.
    protected_size: their bytes in the stream. size: bytes of this stream; a rank-one tensor has two.
    """

    kind = "conditional"
    codebook: CodebookKind
    bins: int
    first: int
    pace: int
    protected: int
    protected_size: int
    needs_parent: bool
    size: int

    @property
    def codebook_bins(self) -> int:
        return self.bins

    @property
    def is_zero(self) -> bool:
        return self.bins == self.protected == 0

    def _check(self, shape: tuple[int, ...], size: int) -> None:
        if self.codebook not in _CODEBOOKS or self.size != size:
            raise ValueError(f"its scheme is not valid: {self}")
        if self.codebook == "log_grid":
            rungs = (self.first * self.pace, (self.first + self.bins) * self.pace)
            if not 1 <= self.pace <= MAX_PACE:
                raise ValueError(f"its pace is {self.pace}")
        else:
            rungs = (self.first, self.first)
        if not all(LOWEST_RUNG - MAX_PACE <= rung <= HIGHEST_RUNG + MAX_PACE for rung in rungs):
            raise ValueError("its codebook has values outside the range of float32")
        _check_levels(self, math.prod(shape), size, 4 * self.bins if self.codebook == "centres" else 0)


@dataclass(frozen=True)
class RankOneFactors(Scheme):
    """A rank-one tensor: the stream of its rows, the stream of its columns, and maybe zeros."""

    kind = "rank_one"
    rows: Conditional
    columns: Conditional

    @property
    def needs_parent(self) -> bool:
        return self.rows.needs_parent or self.columns.needs_parent

    def _check(self, shape: tuple[int, ...], size: int) -> None:
        if len(shape) < 2:
            raise ValueError("it has no rows and columns")
        rows = shape[0]
        self.rows._check((rows,), self.rows.size)
        self.columns._check((math.prod(shape) // max(rows, 1),), self.columns.size)
        if self.rows.size + self.columns.size > size:
            raise ValueError("its rows and columns do not fit its stream")


@dataclass(frozen=True)
class SecondMomentUnits(Scheme):
    """A first moment in units of the root of its second moment. second: the name of the second moment."""

    kind = "units"
    units: Conditional
    second: str

    @property
    def needs_parent(self) -> bool:
        return self.units.needs_parent

    @property
    def depends_on(self) -> str:
        return self.second

    @property
    def codebook_bins(self) -> int:
        return self.units.bins

    @property
    def is_zero(self) -> bool:
        return self.units.is_zero

    def _check(self, shape: tuple[int, ...], size: int) -> None:
        self.units._check(shape, size)


@dataclass(frozen=True)
class Bounded(Scheme):
    """Positions of exact values, the exact values, and coded levels on a grid of any step (``coding.prediction``).

    bound: the largest error; for information. width: bytes of a coded level. axes: along how many of the last axes the
    levels are differences. exact: number of exact values. positions_size, exact_size: bytes in the stream.
    """

    kind = "bounded"
    step: float
    bound: float
    width: int
    axes: int
    exact: int
    positions_size: int
    exact_size: int
    needs_parent: bool

    def _check(self, shape: tuple[int, ...], size: int) -> None:
        if not (0 < self.step < math.inf and self.width in (1, 2, 4, 8) and 0 <= self.axes <= 3):
            raise ValueError(f"its scheme is not valid: {self}")
        if not 0 <= self.exact <= math.prod(shape):
            raise ValueError("it has more exact values than elements")
        sizes = self.positions_size, self.exact_size
        if min(sizes) < 0 or sum(sizes) > size or (self.exact == 0 and any(sizes)):
            raise ValueError("its exact values do not fit its stream")


def _check_levels(scheme: Rearranged | Conditional, elements: int, size: int, codebook_size: int) -> None:
    """codebook_size: bytes of the codebook in the stream."""
    if not 0 <= scheme.bins <= MAX_BINS:
        raise ValueError(f"its scheme is not valid: {scheme}")
    if not 0 <= scheme.protected <= elements:
        raise ValueError("it has more protected values than elements")
    if not 0 <= scheme.protected_size <= size - codebook_size:
        raise ValueError("its protected values do not fit its stream")


_IDENTITY = re.compile("[0-9a-f]{64}")
_ARRANGEMENTS, _CODEBOOKS = get_args(Arrangement), get_args(CodebookKind)
KINDS: dict[str, type[Scheme]] = {
    scheme.kind: scheme
    for scheme in (
        *(Raw, BytePlanes, Lossless, Reference, Frozen, Omitted, Sharded, RoundedFromMaster),
        *(Rearranged, Conditional, RankOneFactors, SecondMomentUnits, Bounded),
    )
}
"""The schemes by kind. ``registry.register`` adds others."""
OF_VERSION_1 = frozenset(KINDS)
"""The kinds that every reader of format version 1 knows."""


def parse(data: dict[str, Any]) -> Scheme:
    """Return the scheme that a header describes. Raises KeyError, TypeError or ValueError if it is not valid."""
    rest = dict(data)
    return parsed(KINDS[rest.pop("kind")], rest)
