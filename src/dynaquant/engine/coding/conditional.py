"""Levels to bytes and back: entropy coding conditioned on the parent's levels (method 2.2).

The coder uses the parent's level of the same element, and nothing else. Two tables describe the use of parent levels:
the levels sorted by their distance from the parent's value, and a context for each parent level. So the coder itself
needs no floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from dynaquant import _native
from dynaquant.cached import cached_property
from dynaquant.engine.tensors.codebook import FIRST_BIN, PROTECTED, Centres, Codebook, Grid, LogGrid

_LONGEST_BLOCK = 1 << 21
_MAX_RUNG_DIFFERENCE = 80
"""The largest difference in rungs between two grids that has its own tables: a factor of a million. Larger differences
use the tables of this one."""
_NOTHING = np.zeros(0, dtype=np.uint8)
Table = NDArray[np.uint8]


class Quantized(Protocol):
    """A tensor with levels, flat in C order, and the codebook that turns them into values."""

    @property
    def levels(self) -> NDArray[np.uint8]:
        """The levels."""

    @property
    def codebook(self) -> Codebook:
        """The codebook."""


def encode(quantized: Quantized, parent: Quantized | None) -> bytes:
    """Return the coded levels of a tensor. parent: the parent's tensor, of the same size; None: use no parent."""
    return cast(bytes, encode_if_shorter(quantized, parent, None))


def encode_if_shorter(quantized: Quantized, parent: Quantized | None, least_gain: float | None) -> bytes | None:
    """Return what ``encode`` does; None if the parent saves less than this share of the bits."""
    tables = _tables(quantized.codebook, parent.codebook if parent else None)
    sources = _NOTHING if parent is None else parent.levels
    return _native.encode_conditional(
        quantized.levels, sources, tables.symbol_of, tables.context_of, tables.contexts, least_gain
    )


def decode(
    stream: bytes, size: int, codebook: Codebook, parent: Quantized | None, out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """Return the ``size`` levels of a stream that ``encode`` made, with the same codebooks.

    out: memory for the levels, uint8[size]. It may be the parent's levels, which then are overwritten, as when the
    links of a chain are decoded one after another.

    Raises ValueError if the stream is damaged. Then ``out`` may hold some of the levels.
    """
    if size > _LONGEST_BLOCK * (len(stream) // 4):  # a block takes at least four bytes, its length; checked first
        raise ValueError("the coded levels end too early")
    tables = _tables(codebook, parent.codebook if parent else None)
    sources = _NOTHING if parent is None else parent.levels
    values = np.empty(size, dtype=np.uint8) if out is None else out
    _native.decode_conditional(
        stream, sources, tables.level_of, tables.context_of, tables.contexts, tables.symbols, values
    )
    return values


@dataclass(frozen=True, eq=False)
class _Tables:
    """The tables of the native coder.

    level_of: for every parent level, the level of each symbol, uint8[256 · 256]. symbols: how many there are.
    context_of: the context of every parent level, uint8[256].
    """

    level_of: Table
    symbols: int
    context_of: Table

    @cached_property
    def contexts(self) -> int:
        """Number of contexts."""
        return int(self.context_of.max()) + 1

    @cached_property
    def symbol_of(self) -> Table:
        """For every parent level, the symbol of each level: the inverse of ``level_of``."""
        inverse = np.empty(256 * 256, dtype=np.uint8)
        _native.symbols_of_levels(self.level_of, self.symbols, inverse)
        return inverse


def comparable(codebook: Codebook, parent: Codebook) -> bool:
    """Whether levels of ``codebook`` can be conditioned on levels of ``parent``."""
    return isinstance(codebook, LogGrid) == isinstance(parent, LogGrid)


def _tables(codebook: Codebook, parent: Codebook | None) -> _Tables:
    """Return the tables for two codebooks. Of two grids only the ratio matters, so many tensors share one table."""
    if isinstance(codebook, Grid) and isinstance(parent, Grid):
        ratio = min(max(codebook.rung - parent.rung, -_MAX_RUNG_DIFFERENCE), _MAX_RUNG_DIFFERENCE)
        return _shared_tables(Grid(ratio, codebook.bins), Grid(0, parent.bins))
    if isinstance(codebook, Centres) or isinstance(parent, Centres):
        return _make_tables(codebook, parent)  # centres differ from tensor to tensor, so a cache would not help
    return _shared_tables(codebook, parent)


def _make_tables(codebook: Codebook, parent: Codebook | None) -> _Tables:
    symbols = FIRST_BIN + codebook.bins
    positions = _positions(codebook)
    sources = np.zeros(1) if parent is None else _positions(parent)
    # The nearest level comes first; of two equally near ones, the one nearer to zero. So a move towards zero has the
    # same symbol on both sides of zero. The protected level comes last, because it stands for no value. But if the
    # parent's level is protected, it comes first, because the value probably is protected again.
    levels = np.empty(256 * 256, dtype=np.uint8)
    _native.nearest_levels(positions, sources, parent is not None, levels)
    contexts = np.zeros(256, dtype=np.uint8)
    by_magnitude = np.lexsort((sources, np.abs(sources)))  # a value and its negative become neighbours
    contexts[by_magnitude] = np.arange(len(sources))
    if parent is not None:  # the protected level is like no other: its context comes last
        contexts[contexts > contexts[PROTECTED]] -= 1
        contexts[PROTECTED] = len(sources) - 1
    return _Tables(levels, symbols, contexts)


_shared_tables = lru_cache(maxsize=256)(_make_tables)


def _positions(codebook: Codebook) -> NDArray[np.float64]:
    """Return the positions of the levels on a line: their values; for a logarithmic grid their rungs, zero lowest."""
    if isinstance(codebook, LogGrid):
        rungs = (codebook.first + np.arange(codebook.bins, dtype=np.float64)) * codebook.pace
        return np.concatenate(([codebook.first * codebook.pace - 1.0] * FIRST_BIN, rungs))
    values = codebook.values
    finite = np.where(np.isfinite(values), values, np.float32(0))
    return np.concatenate((np.zeros(FIRST_BIN), finite.astype(np.float64)))
