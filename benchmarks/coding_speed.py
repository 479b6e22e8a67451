"""Compare the coding of levels: dynaquant's two coders against general and entropy coders.

    python benchmarks/coding_speed.py [--values 20000000] [--quick]

The levels are those of the published quantizer with its default configuration. Each tensor is coded by its own call,
alone and conditioned on the previous checkpoint. Every stream is decoded and compared. All methods take turns, and the
shortest time of each counts. Everything runs twice: in a process on one core, and in one on all cores.

Peers and their input:

- zstd at levels 1, 3 and 19: a byte for each level, or with a parent for each difference to the parent's level.
- ZipNN: the same bytes, as float8_e4m3fn. With other data types it shifts bits across bytes before it codes them, which
  makes the differences of a GPT up to 30 % larger. It gets the number of cores.
- constriction's ANS coder: the same bytes with one categorical model for a tensor. *by parent's level* has a model for
  each level of the parent, and codes the levels sorted by it. That is conditional coding as its Python interface allows
  it. The counts behind the models are part of the stream, compressed by zstd.

In the peers' favour, their preparation by NumPy is not timed: differences, sorting, counting, and the conversion to the
32-bit integers of constriction. dynaquant is timed from levels to bytes to levels.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import constriction
import numpy as np
import torch
import zstandard
from cores import by_cores, on_cores, page
from delta_ablation import load_quantized
from kernel_speed import synthetic, verdict
from matplotlib.figure import Figure
from numpy.typing import NDArray
from options import parse, parser
from results import Table, machine, publish, show
from rich.console import Console
from rich.progress import track
from workloads import gpt_snapshots, new_gpt
from zipnn import ZipNN

from dynaquant.engine.coding import conditional, rearrange
from dynaquant.engine.coding.rearrange import Arrangement
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.kmeans_weights import kmeans_weights, quantize_weights
from dynaquant.engine.quantize.knobs import Configuration

REPEATS, ENOUGH = 7, 2.0
"""Turns of every method. A method that has taken ENOUGH seconds gets no further turn."""
TENSOR = 1_000_000
"""Values in a synthetic tensor."""
MOVED = 0.15
"""How far synthetic values move from the parent, in standard deviations of their tensor. About half of the levels
change, as on average over the GPT's training (docs/results/delta_ablation.md)."""
ENCODE_BAR, DECODE_BAR = 0.125, 0.2
"""GB/s of levels: they stand for 0.5 and 0.8 GB/s of float32."""
VALUES, QUICK_VALUES = 20_000_000, 1_000_000
PEERS = ("numpy", "torch", "zstandard", "zipnn", "constriction")
CONDITIONAL, PUBLISHED = "dynaquant, conditional", "dynaquant, run length + Huffman"
BY_LEVEL = "constriction, by parent's level"
ALONE, GIVEN = "alone", "given the parent"

AnsCoder, Categorical = constriction.stream.stack.AnsCoder, constriction.stream.model.Categorical
Symbols = NDArray[Any]
Source = int | tuple[Path, Path]
"""A number of synthetic values, or two consecutive snapshots."""


@dataclass(frozen=True)
class Pair:
    """A tensor, and the same tensor in the previous checkpoint; None if levels are coded alone."""

    tensor: QuantizedTensor
    parent: QuantizedTensor | None

    @property
    def symbols(self) -> Symbols:
        """The input of a coder that has no parents: levels, or differences to the parent modulo 256. uint8."""
        return self.tensor.levels if self.parent is None else self.tensor.levels - self.parent.levels


@dataclass(frozen=True)
class Counted:
    """Symbols, int32, group after group; and how often each occurs, (groups, 256)."""

    symbols: Symbols
    counts: NDArray[np.uint32]


@dataclass(frozen=True)
class Method:
    """A coder.

    prepared: returns its input. encode: input to stream. decode: stream and input to symbols. expected: input to the
    symbols that must be decoded.
    """

    name: str
    prepared: Callable[[Pair], Any]
    encode: Callable[[Any], list[bytes]]
    decode: Callable[[list[bytes], Any], Symbols]
    expected: Callable[[Any], Symbols]


@dataclass
class Row:
    """Results of a method on all levels: their number, coded bytes, and the seconds of the fastest turns."""

    given: str
    method: str
    levels: int
    coded: int = 0
    encoding: float = float("inf")
    decoding: float = float("inf")

    @property
    def bits(self) -> float:
        """Bits for each level."""
        return 8 * self.coded / self.levels

    @property
    def speeds(self) -> tuple[float, float]:
        """Gigabytes of levels encoded and decoded per second."""
        return 1e-9 * self.levels / self.encoding, 1e-9 * self.levels / self.decoding


def conditional_method() -> Method:
    return Method(
        CONDITIONAL,
        lambda pair: pair,
        lambda pair: [conditional.encode(pair.tensor, pair.parent)],
        lambda stream, pair: conditional.decode(stream[0], pair.tensor.levels.size, pair.tensor.codebook, pair.parent),
        lambda pair: pair.tensor.levels,
    )


def published_method() -> Method:
    def arguments(pair: Pair) -> tuple[Arrangement, Any]:
        return ("rearranged", pair.parent.parent_levels) if pair.parent else ("alone", None)

    def encode(pair: Pair) -> list[bytes]:
        arrangement, parent = arguments(pair)
        return [rearrange.encode_as(arrangement, pair.tensor.parent_levels, parent)]

    def decode(stream: list[bytes], pair: Pair) -> Symbols:
        levels = pair.tensor.parent_levels
        return rearrange.decode(stream[0], levels.values.size, levels.count, *arguments(pair)).values

    return Method(PUBLISHED, lambda pair: pair, encode, decode, lambda pair: pair.tensor.levels)


def bytes_method(name: str, compress: Callable[[Any], bytes], decompress: Callable[[bytes], Any]) -> Method:
    return Method(
        name,
        lambda pair: pair.symbols,
        lambda symbols: [compress(symbols.data)],
        lambda stream, _: np.frombuffer(decompress(stream[0]), dtype=np.uint8),
        lambda symbols: symbols,
    )


def zstd_method(level: int) -> Method:
    compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    return bytes_method(f"zstd -{level}", compressor.compress, decompressor.decompress)


def zipnn_method() -> Method:
    zipped = ZipNN(input_format="byte", bytearray_dtype="float8_e4m3fn", threads=len(os.sched_getaffinity(0)))
    # ``compress`` changes its input in place, so it needs a copy.
    return bytes_method("ZipNN", lambda symbols: zipped.compress(bytearray(symbols)), zipped.decompress)


def constriction_method(by_level: bool) -> Method:
    def prepared(pair: Pair) -> Counted:
        if not by_level or pair.parent is None:
            counts = np.bincount(pair.symbols, minlength=256)
            return Counted(pair.symbols.astype(np.int32), counts.astype(np.uint32)[None])
        levels, sources = pair.tensor.levels, pair.parent.levels
        counts = np.bincount(256 * sources.astype(np.intp) + levels, minlength=256 * 256)
        order = np.argsort(sources, kind="stable")
        return Counted(levels[order].astype(np.int32), counts.astype(np.uint32).reshape(256, 256))

    def models(counts: NDArray[np.uint32]) -> list[tuple[int, Any]]:
        """Return the number of symbols and the model of each group that has symbols."""
        occurring = counts[counts.any(axis=1)]
        return [(int(c.sum()), Categorical((c / c.sum()).astype(np.float32), perfect=False)) for c in occurring]

    def encode(prepared: Counted) -> list[bytes]:
        coder, end = AnsCoder(), prepared.symbols.size
        for count, model in reversed(models(prepared.counts)):  # the last one encoded is decoded first
            coder.encode_reverse(prepared.symbols[end - count : end], model)
            end -= count
        return [zstandard.compress(prepared.counts.data), coder.get_compressed().tobytes()]

    def decode(stream: list[bytes], _: Counted) -> Symbols:
        counts = np.frombuffer(zstandard.decompress(stream[0]), dtype=np.uint32).reshape(-1, 256)
        coder = AnsCoder(np.frombuffer(stream[1], dtype=np.uint32))
        return np.concatenate([coder.decode(model, count) for count, model in models(counts)])

    name = BY_LEVEL if by_level else "constriction"
    return Method(name, prepared, encode, decode, lambda prepared: prepared.symbols)


def methods(given: str) -> list[Method]:
    return [
        conditional_method(),
        published_method(),
        *(zstd_method(level) for level in (1, 3, 19)),
        zipnn_method(),
        constriction_method(by_level=False),
        *([constriction_method(by_level=True)] if given == GIVEN else []),
    ]


def synthetic_pairs(size: int) -> list[Pair]:
    random = np.random.default_rng(1)
    parents = np.array_split(synthetic(size, TENSOR), -(-size // TENSOR))
    moved = [x + MOVED * x.std() * random.standard_normal(x.size, dtype=np.float32) for x in parents]
    before, after = ({str(i): torch.from_numpy(x) for i, x in enumerate(xs)} for xs in (parents, moved))
    label_of = dict.fromkeys(before, Label("weight", "linear"))
    first, second = (quantize_weights(kmeans_weights(x, label_of, {}), Configuration()) for x in (before, after))
    return [Pair(second[name], first[name]) for name in first]


def trained_pairs(before: Path, after: Path) -> list[Pair]:
    snapshots = [torch.load(file, weights_only=True) for file in (before, after)]
    model = new_gpt(len(snapshots[0]["model"]["tokens.weight"]))
    first, second = (load_quantized(snapshot, model, Configuration()) for snapshot in snapshots)
    return [Pair(second[name], first[name]) for name in first]


def take_turn(method: Method, inputs: list[Any], row: Row) -> float:
    """Code all tensors once. Lowers the times of ``row`` if it was faster. Returns the seconds it took."""
    start = perf_counter()
    streams = [method.encode(prepared) for prepared in inputs]
    encoded = perf_counter()
    found = [method.decode(stream, prepared) for stream, prepared in zip(streams, inputs, strict=True)]
    decoded = perf_counter()
    for symbols, prepared in zip(found, inputs, strict=True):
        assert np.array_equal(symbols, method.expected(prepared)), f"{method.name} does not decode"
    row.coded = sum(len(part) for stream in streams for part in stream)
    row.encoding, row.decoding = min(row.encoding, encoded - start), min(row.decoding, decoded - encoded)
    return decoded - start


def measure(source: Source, turns: int) -> tuple[list[Row], float]:
    """Measure all methods on all levels. Returns also the share of levels that differ from the parent's."""
    pairs = synthetic_pairs(source) if isinstance(source, int) else trained_pairs(*source)
    size = sum(pair.tensor.levels.size for pair in pairs)
    cores = len(os.sched_getaffinity(0))
    rows = []
    for given in (ALONE, GIVEN):
        some = pairs if given == GIVEN else [Pair(pair.tensor, None) for pair in pairs]
        coders = methods(given)
        found, spent = [Row(given, coder.name, size) for coder in coders], [0.0] * len(coders)
        told = f"{size:,} levels {given}, {cores} core{'s' * (cores > 1)}"
        for _ in track(range(turns), told, console=Console(stderr=True)):
            for i, coder in enumerate(coders):
                if spent[i] < ENOUGH:
                    spent[i] += take_turn(coder, [coder.prepared(pair) for pair in some], found[i])
        rows += found
    return rows, sum(np.count_nonzero(pair.symbols) for pair in pairs) / size


def table(title: str, one: list[Row], every: list[Row], cores: int) -> Table:
    rows = []
    for a, b in zip(one, every, strict=True):
        speeds = [f"{speed:.2g}" for speed in (*a.speeds, *b.speeds)]
        rows.append([a.given if a.method == one[0].method else "", a.method, f"{a.bits:.3f}", *speeds])
    timed = [f"{way}, {n} core{'s' * (n > 1)}" for n in (1, cores) for way in ("encode", "decode")]
    return Table(title, ["levels", "method", "bits per level", *timed], rows)


def verdicts(rows: list[Row]) -> list[str]:
    """Return whether the bars were reached, on one core with synthetic values."""
    found = {row.method: row for row in rows if row.given == GIVEN}
    ours, by_level = found[CONDITIONAL], found[BY_LEVEL]
    smallest = min(row.bits for row in found.values() if not row.method.startswith("dynaquant"))
    (encode, decode), (their_encode, their_decode) = ours.speeds, by_level.speeds
    return [
        verdict("size given the parent against the smallest peer", smallest / ours.bits, 1, "×"),
        verdict(f"encoding given the parent against {BY_LEVEL}", encode / their_encode, 1, "×"),
        verdict(f"decoding given the parent against {BY_LEVEL}", decode / their_decode, 1, "×"),
        verdict("encoding given the parent", encode, ENCODE_BAR, " GB/s per core"),
        verdict("decoding given the parent", decode, DECODE_BAR, " GB/s per core"),
    ]


def plot(title: str, rows: list[Row], file: Path) -> None:
    """Draw size against speed."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    names = list(dict.fromkeys(row.method for row in rows))
    for way, axes in enumerate(figure.subplots(1, 2, sharey=True)):
        for row in rows:
            color = f"C{names.index(row.method)}"
            filled = color if row.given == GIVEN else "none"
            label = row.method if way == 0 and row.given == (GIVEN if row.method == BY_LEVEL else ALONE) else None
            marker = "s" if row.method.startswith("dynaquant") else "o"
            axes.scatter(
                row.speeds[way], row.bits, 60, filled, marker=marker, edgecolors=color, linewidths=2, label=label
            )
        axes.set(xscale="log", xlabel=f"GB/s of levels {('encoded', 'decoded')[way]}, 1 core", ylim=(0, None))
        axes.grid(alpha=0.3, which="both")
        axes.set_axisbelow(True)
    figure.axes[0].set(ylabel="bits per level")
    figure.suptitle(f"{title}: alone (hollow) and given the parent (filled)")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(file, dpi=130)


NOTES = f"""\
- Speeds are GB/s of levels, one byte each, the best of up to {REPEATS} turns. A level stands for a weight,
  which is four bytes of float32. Every tensor is coded by its own call, as in a checkpoint. Every stream was decoded
  and compared.
- The levels are those of the published quantizer with its default configuration, {Configuration().bins} bins. Synthetic
  tensors of {TENSOR:,} values are Laplace, and have moved from the parent by {MOVED} standard deviations.
- *given the parent* means conditioned on the parent. *{CONDITIONAL}*, the default, codes each level with the
  statistics of the parent's level. *{PUBLISHED}* rearranges deltas by it, as published. zstd, ZipNN and constriction
  get the differences to the parent's levels, except *{BY_LEVEL}*, which has a model for each level of the parent. ZipNN
  takes the differences as 8-bit floats, with which it is smallest. zstd and constriction code a tensor on one core.
- In the peers' favour, differences, sorting by the parent's level, counting, and the conversion to and from
  constriction's 32-bit integers are not timed. dynaquant's times are from levels to bytes to levels. The lookup tables
  of constriction's library, for faster decoding, are not in its Python interface.
- The snapshots of a GPT are two from the middle of its training. They are measured if
  `benchmarks/delta_ablation.py --data DIR` has been run before.
"""


def main() -> None:
    made = parser(__doc__, data=None)
    made.add_argument("--values", type=int, help=f"synthetic values: {VALUES:,}; quick: {QUICK_VALUES:,}")
    arguments = parse(made)
    values = arguments.values or (QUICK_VALUES if arguments.quick else VALUES)
    turns = 1 if arguments.quick else REPEATS

    sources: dict[str, Source] = {f"{values:,} synthetic values": values}
    if len(snapshots := gpt_snapshots(arguments.cache)) > 1:
        before, after = (snapshots[len(snapshots) // 2 + i] for i in (-1, 0))
        sources[f"A GPT, {before.stem.split('-')[-1]} to {after.stem.split('-')[-1]} steps"] = before, after
    cores = os.sched_getaffinity(0)
    described = machine(*PEERS)
    results = {}
    for name, source in sources.items():
        (one, changed), (every, _) = (on_cores(some, measure, source, turns) for some in ({min(cores)}, cores))
        results[f"{name}, {changed:.0%} of the levels changed"] = one, every
    tables = [table(name, *rows, len(cores)) for name, rows in results.items()]
    bars = verdicts(next(iter(results.values()))[0])

    show(*tables, *bars, width=150)
    title, (one, _) = list(results.items())[-1]
    written = page(
        "Speed of coding",
        "coding_speed",
        "coding_speed.py",
        "bits per level against speed, by method",
        described,
        tables,
        bars,
        NOTES,
    )
    numbers = {"machine": described, "bars": bars, "results": by_cores(results)}
    publish(arguments.out, "coding_speed", numbers, lambda file: plot(title, one, file), written)


if __name__ == "__main__":
    main()
