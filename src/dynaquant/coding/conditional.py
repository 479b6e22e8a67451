"""Levels <-> bytes given the parent's levels: conditional entropy coding (method 2.2).

What a level is coded by is only what the parent's level of the same element stands for, and that needs no floats but
two tables: the levels ordered by how near they lie to the parent's value, and a context for each parent level.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from dynaquant import _native
from dynaquant.tensors.codebook import Centres, Codebook, Grid, LogGrid
from dynaquant.tensors.stored import FIRST_BIN, PROTECTED, QuantizedTensor

_BLOCK = 131_072
_FARTHEST = 80
"""Rungs beyond which the ratio of two grids makes no difference: a million."""
_NOTHING = np.zeros(0, dtype=np.uint8)
Table = NDArray[np.uint8]


def encode(quantized: QuantizedTensor, parent: QuantizedTensor | None) -> bytes:
    """The coded levels of a tensor. parent: the tensor in the parent, with as many elements; None: they stand alone."""
    tables = _tables(quantized.codebook, parent.codebook if parent else None)
    sources = _NOTHING if parent is None else parent.levels
    return _native.encode_conditional(quantized.levels, sources, tables.symbol_of, tables.context_of, tables.contexts)


def decode(stream: bytes, size: int, codebook: Codebook, parent: QuantizedTensor | None) -> NDArray[np.uint8]:
    """The ``size`` levels that ``encode`` made ``stream`` of, with the same codebooks.

    Raises ValueError when the stream is not that.
    """
    if size > _BLOCK * (len(stream) // 4):  # every block has a length of four bytes: not a byte for what is not there
        raise ValueError("the coded levels end too early")
    tables = _tables(codebook, parent.codebook if parent else None)
    sources = _NOTHING if parent is None else parent.levels
    values = np.empty(size, dtype=np.uint8)
    _native.decode_conditional(
        stream, sources, tables.level_of, tables.context_of, tables.contexts, tables.symbols, values
    )
    return values


@dataclass(frozen=True, eq=False)
class _Tables:
    """level_of: for every parent level the levels by symbol, uint8[256 · 256]. context_of: of every parent level."""

    level_of: Table
    symbols: int
    context_of: Table

    @property
    def contexts(self) -> int:
        """Their number."""
        return int(self.context_of.max()) + 1

    @cached_property
    def symbol_of(self) -> Table:
        """The inverse of ``level_of``."""
        inverse = np.empty(256 * 256, dtype=np.uint8)
        _native.symbols_of_levels(self.level_of, self.symbols, inverse)
        return inverse


def comparable(codebook: Codebook, parent: Codebook) -> bool:
    """Whether a parent with the one codebook says anything about levels with the other."""
    return isinstance(codebook, LogGrid) == isinstance(parent, LogGrid)


def _tables(codebook: Codebook, parent: Codebook | None) -> _Tables:
    """Two grids are compared by their ratio alone, so that all tensors of a checkpoint can share the tables."""
    if isinstance(codebook, Grid) and isinstance(parent, Grid):
        ratio = min(max(codebook.rung - parent.rung, -_FARTHEST), _FARTHEST)
        return _shared_tables(Grid(ratio, codebook.bins), Grid(0, parent.bins))
    if isinstance(codebook, Centres) or isinstance(parent, Centres):
        return _tables_of(codebook, parent)  # no two lists of centres are the same
    return _shared_tables(codebook, parent)


def _tables_of(codebook: Codebook, parent: Codebook | None) -> _Tables:
    symbols = FIRST_BIN + codebook.bins
    positions = _positions(codebook)
    sources = np.zeros(1) if parent is None else _positions(parent)
    # Nearest first, of two equally near ones that nearer to zero: then what moves towards zero and what moves away
    # from it are the same symbols on both sides of zero. A protected value says nothing; it comes last, but what was
    # protected before probably is again.
    levels = np.empty(256 * 256, dtype=np.uint8)
    _native.nearest_levels(positions, sources, parent is not None, levels)
    contexts = np.zeros(256, dtype=np.uint8)
    contexts[np.lexsort((sources, np.abs(sources)))] = np.arange(
        len(sources)
    )  # a value and its negative are neighbours
    if parent is not None:  # the one that is like no other stands at the end
        contexts[contexts > contexts[PROTECTED]] -= 1
        contexts[PROTECTED] = len(sources) - 1
    return _Tables(levels, symbols, contexts)


_shared_tables = lru_cache(maxsize=256)(_tables_of)


def _positions(codebook: Codebook) -> NDArray[np.float64]:
    """Where the levels lie on a line: by their values, those of a logarithmic grid by its rungs, with zero below."""
    if isinstance(codebook, LogGrid):
        rungs = (codebook.first + np.arange(codebook.bins, dtype=np.float64)) * codebook.pace
        return np.concatenate(([codebook.first * codebook.pace - 1.0] * FIRST_BIN, rungs))
    values = codebook.values
    finite = np.where(np.isfinite(values), values, np.float32(0))
    return np.concatenate((np.zeros(FIRST_BIN), finite.astype(np.float64)))
