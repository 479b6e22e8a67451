"""Levels of quantized tensors, for the second decoder: written from docs/format.md alone."""

import re
import struct
from dataclasses import dataclass, field

import numpy as np
from format_streams import BLOCK, LONGEST_CODE, Bits, block_sizes, check, rans, slots_of

RUN_CLASSES = 34
CONDITIONAL_TOTAL_BITS = 12
NARROW, WIDE = 131_072, 1_048_576  # elements of a block
FEW = 8_192  # narrow blocks of fewer elements have one state


@dataclass
class Codebook:
    kind: str
    bins: int
    first: int = 0
    pace: int = 0
    centres: np.ndarray | None = None

    def values(self):
        """Return the values of all bins, as float32."""
        if self.kind == "centres":
            return self.centres
        if self.kind == "grid":
            return grid(self.first, self.bins)
        check(self.kind == "log_grid", "a known codebook")
        return np.array([rung((self.first + i) * self.pace) for i in range(self.bins)], "<f4")

    def positions(self):
        """Return the positions of all levels, as float64."""
        if self.kind == "log_grid":
            below = self.first * self.pace - 1
            return np.array([below, below, *((self.first + i) * self.pace for i in range(self.bins))], "f8")
        return positions_at(self.values())


@dataclass
class Levels:
    """Levels of all elements and their codebook, on which a part is conditioned."""

    levels: np.ndarray
    codebook: Codebook


@dataclass
class Tensor:
    dtype: str
    shape: list[int]
    values: bytes  # in C order
    parts: dict[str, Levels] = field(default_factory=dict)  # of a quantized tensor
    boxes: list = field(default_factory=list)  # of a sharded tensor: offsets, sizes, tensor


def element_size(dtype):
    """Return bytes per element. The number in a dtype's name is its bits, as in float16 and float8_e5m2."""
    return 1 if dtype == "bool" else max(1, int(re.search(r"\d+", dtype)[0]) // 8)


def rung(k):
    """Return 2^(k/4) as float32."""
    return np.ldexp(np.float32(2 ** (k % 4 / 4)), k // 4)


def grid(first, bins):
    multiples = [(i // 2 + 1) * (-1) ** i for i in range(bins)]
    return (np.array(multiples, "<f4") * rung(first)).astype("<f4")


def positions_at(values):
    return np.concatenate([np.zeros(2), np.where(np.isfinite(values), values, 0)]).astype("f8")


def coded_levels(stream, arrangement, elements, bins, parent):
    """Return the levels of a tensor of the published method. parent: the Levels of its parent, if it has any."""
    check(arrangement in ("alone", "delta", "rearranged"), "a known arrangement")
    modulus, groups, source = 2 + bins, 1, np.zeros(elements, np.int64)
    if arrangement != "alone":
        check(parent is not None, "a quantized parent")
        check(len(parent.levels) == elements, "as many elements as the parent")
        modulus, source = 2 + max(bins, parent.codebook.bins), parent.levels
    if arrangement == "rearranged":
        groups = 2 + parent.codebook.bins

    (tables_size,) = struct.unpack_from("<I", stream)
    sizes, at = block_sizes(stream, 4, elements, BLOCK)
    check(at + tables_size + sum(sizes) == len(stream), "the sizes of tables and blocks")
    bits = Bits(stream[at : at + tables_size])
    tables = [huffman_table(bits, modulus + RUN_CLASSES) for _ in range(groups)]
    bits.finish()
    at += tables_size

    levels = np.empty(elements, np.int64)
    for size, first in zip(sizes, range(0, elements, BLOCK), strict=True):
        sources = source[first : first + BLOCK]
        group_of = sources if arrangement == "rearranged" else np.zeros(len(sources), np.int64)
        bits = Bits(stream[at : at + size])
        deltas = np.empty(len(sources), np.int64)
        for group, table in enumerate(tables):
            places = np.flatnonzero(group_of == group)
            deltas[places] = coded_group(bits, table, modulus, len(places))
        bits.finish()
        at += size
        levels[first : first + BLOCK] = (sources - deltas) % modulus
    check(elements == 0 or levels.max() < 2 + bins, "levels below 2 + bins")
    return levels


def huffman_table(bits, symbols):
    """Return (symbol, length of its code) for every value of the next 12 bits."""
    lengths = []
    while len(lengths) < symbols:
        lengths.append(bits.number(4))
        if lengths[-1] == 0:
            lengths += [0] * (bits.zeros(len(lengths) - 1, symbols) - 1)
    check(max(lengths) <= LONGEST_CODE, "code lengths")
    used = sorted((length, symbol) for symbol, length in enumerate(lengths) if length)
    check(sum(2.0**-length for length, _ in used) == 1 or [length for length, _ in used] in ([], [1]), "a prefix code")
    table, code, previous = {}, 0, 0
    for length, symbol in used:
        code <<= length - previous
        reversed_code = int(f"{code:0{length}b}"[::-1], 2)
        for rest in range(1 << (LONGEST_CODE - length)):
            table[reversed_code | rest << length] = symbol, length
        code, previous = code + 1, length
    return table


def coded_group(bits, table, modulus, elements):
    deltas = []
    while len(deltas) < elements:
        symbol = bits.symbol(table)
        if symbol < modulus:
            deltas.append(symbol)
            may_repeat = True
            continue
        check(deltas and may_repeat, "a run after a delta")
        k, e = symbol - modulus, 2 + (symbol - modulus - 8) // 2
        occurrences = k + 2 if k < 8 else (2 + k % 2) * 2**e + bits.number(e) + 2
        deltas += [deltas[-1]] * (occurrences - 1)
        may_repeat = False
    check(len(deltas) == elements, "no run beyond the end of its group")
    return deltas


def conditional_levels(stream, elements, codebook, parent):
    """Return the levels of a part. parent: the Levels that it is conditioned on, or None."""
    blocks, sizes, at = conditional_blocks(stream, elements)
    check(at + sum(sizes) <= len(stream), "the sizes of blocks")
    begin = len(stream) - sum(sizes)
    positions, positions_above = codebook.positions(), np.zeros(1)
    above = np.zeros(elements, np.int64)
    if parent is not None:
        check(len(parent.levels) == elements, "as many elements as the parent")
        check((codebook.kind == "log_grid") == (parent.codebook.kind == "log_grid"), "a log_grid given a log_grid")
        above, positions_above = parent.levels, parent.codebook.positions()
        if codebook.kind == parent.codebook.kind == "grid":
            shift = max(-80, min(80, codebook.first - parent.codebook.first))
            positions = positions_at(grid(shift, codebook.bins))
            positions_above = positions_at(grid(0, parent.codebook.bins))

    contexts = sorted(
        range(len(positions_above)), key=lambda s: (s == 1, abs(positions_above[s]), positions_above[s], s)
    )
    level_of = np.array([symbols_of(positions, positions_above[s], parent is not None and s == 1) for s in contexts])
    place_of = np.argsort(contexts)[above]

    bits = Bits(stream[at:begin])
    firsts, tables = [], []
    for group in range(bits.number(8) + 1):
        firsts.append(bits.number(8) if group else 0)
        if elements:
            tables.append(slots_of(conditional_frequencies(bits, len(positions)), CONDITIONAL_TOTAL_BITS))
    bits.finish()
    check(firsts == sorted(set(firsts)) and firsts[-1] < len(contexts), "rising groups of contexts")
    group_of = (np.searchsorted(firsts, place_of, "right") - 1).tolist()

    symbols = []
    for size, (first, count, states) in zip(sizes, blocks, strict=True):
        groups = group_of[first : first + count]
        block, used = rans(
            stream[begin : begin + size],
            count,
            states,
            16,
            CONDITIONAL_TOTAL_BITS,
            lambda i, _, groups=groups: tables[groups[i]],
        )
        check(used == size, "a block's size")
        symbols += block
        begin += size
    return level_of[place_of, np.array(symbols, np.int64)]


def conditional_blocks(stream, elements):
    """Return (first element, elements, states) of all blocks, their sizes, and where the sizes end."""
    wide = elements > 0 and stream[3] > 0
    check(not wide or (stream[3] == 1 and elements > NARROW), "a known layout")
    if wide:
        count = max(1, elements // WIDE)
        ends = [WIDE * (i + 1) for i in range(count - 1)] + [elements]
    else:
        ends = [min(first + NARROW, elements) for first in range(0, elements, NARROW)]
    sizes = list(struct.unpack_from(f"<{len(ends)}I", stream))
    if wide:
        sizes[0] -= 1 << 24
    blocks = []
    for first, end in zip([0, *ends], ends, strict=False):
        if wide:
            states = 8 if elements <= 3 * NARROW else 16 if elements <= 6 * NARROW else 32
        else:
            states = 1 if end - first < FEW else 4
        blocks.append((first, end - first, states))
    return blocks, sizes, 4 * len(ends)


def symbols_of(positions, position, protected_first):
    """Return the level of each symbol. position: the position of the parent's level."""
    numbers = np.arange(len(positions))
    last = numbers != 1 if protected_first else numbers == 1
    return np.lexsort((numbers, np.abs(positions), np.abs(positions - position), last))


def conditional_frequencies(bits, symbols):
    rest, n = bits.number(8), bits.number(9)
    check(rest < symbols and n <= symbols, "symbols that there are")
    frequencies = [0] * symbols
    symbol = 0
    while symbol < n:
        if symbol == rest:
            symbol += 1
            continue
        width = bits.number(4)
        if width == 0:
            zeros = bits.zeros(symbol, n)
            check(not symbol <= rest < symbol + zeros, "zeros without the rest")
            symbol += zeros
            continue
        check(width <= 12, "the width of a frequency")
        stored = min(width - 1, 4)
        frequencies[symbol] = (1 << stored | bits.number(stored)) << (width - 1 - stored)
        symbol += 1
    frequencies[rest] = (1 << CONDITIONAL_TOTAL_BITS) - sum(frequencies)
    check(frequencies[rest] >= 1, "a rest")
    return frequencies
