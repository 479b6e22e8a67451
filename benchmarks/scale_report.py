"""The page, tables and picture of ``scale.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from results import Table, sentence
from scale_models import LAYOUTS

LIMIT = 10_000_000
"""Bytes of a header that should be in pieces."""


@dataclass(frozen=True)
class Row:
    """Figures of one model, layout and number of ranks.

    division, commit, generators: what one rank gets, or rank 0 gets, in bytes. plan_seconds: of a rank that is not
    rank 0, of all it plans. rank_0_seconds: of rank 0, with the header. header, part_header: bytes of them as stored.
    places: boxes that the header lists. needed: parts that one rank opens at a restore on as many ranks.
    """

    model: str
    layout: str
    ranks: int
    division: int
    commit: int
    generators: int
    plan_seconds: float
    rank_0_seconds: float
    header: int
    plain_header: int
    part_header: int
    write_seconds: float
    read_seconds: float
    layouts: int
    files: int
    needed: int
    find_seconds: float


def kilobytes(size: float) -> str:
    return f"{size / 1e3:,.0f} kB" if size < 1e6 else f"{size / 1e6:,.1f} MB"


def table(rows: Sequence[Row], model: str) -> Table:
    """Return the figures of one model."""
    columns = [
        "layout, ranks",
        "shards, to each rank",
        "hashes and sizes, to rank 0",
        "generators, to rank 0",
        "planning, a rank",
        "planning, rank 0",
        "header",
        "before compression",
        "write, read it",
        "header of a part",
        "files",
        "parts that a rank opens",
    ]
    cells = [
        [
            f"{row.layout}, {row.ranks:,}",
            kilobytes(row.division),
            kilobytes(row.commit),
            kilobytes(row.generators),
            f"{row.plan_seconds:.2f} s",
            f"{row.rank_0_seconds:.2f} s",
            kilobytes(row.header),
            kilobytes(row.plain_header),
            f"{row.write_seconds:.2f}, {row.read_seconds:.2f} s",
            kilobytes(row.part_header),
            f"{row.files:,}",
            f"{row.needed:,}",
        ]
        for row in rows
        if row.model == model
    ]
    return Table(f"Llama {model} with Adam", columns, cells)


def extrapolated(rows: Sequence[Row], ranks: int) -> Table:
    """Return what the two largest numbers of ranks say about more ranks, on a straight line."""
    found = []
    for model, layout in dict.fromkeys((row.model, row.layout) for row in rows):
        own = sorted((r for r in rows if (r.model, r.layout) == (model, layout)), key=lambda row: row.ranks)[-2:]
        if len(own) < 2 or own[0].ranks == 1:
            continue

        def line(key: str, own: Sequence[Row] = own) -> tuple[float, float]:
            first, last = (getattr(row, key) for row in own)
            slope = (last - first) / (own[1].ranks - own[0].ranks)
            return last + slope * (ranks - own[1].ranks), slope

        plain, slope = line("plain_header")
        limit = own[1].ranks + (LIMIT - own[1].plain_header) / slope
        found.append(
            [
                f"{model}, {layout}",
                kilobytes(line("division")[0]),
                kilobytes(line("commit")[0]),
                kilobytes(line("generators")[0]),
                f"{line('plan_seconds')[0]:.0f} s",
                f"{line('rank_0_seconds')[0]:.0f} s",
                kilobytes(line("header")[0]),
                kilobytes(plain),
                f"{limit:,.0f}",
            ]
        )
    columns = [
        "model, layout",
        "shards, to each rank",
        "hashes and sizes, to rank 0",
        "generators, to rank 0",
        "planning, a rank",
        "planning, rank 0",
        "header",
        "before compression",
        "ranks at which that is 10 MB",
    ]
    return Table(f"Extrapolated to {ranks:,} ranks", columns, found)


def reductions(moments: Sequence[tuple[str, int, int, int, float]]) -> Table:
    """Return what quantizing moments reduces."""
    cells = [
        [f"{model}, {ranks:,}", f"{count:,}", kilobytes(got), f"{seconds:.1f} s"]
        for model, ranks, count, got, seconds in moments
    ]
    return Table(
        "Moments of one rank of FSDP2", ["model, ranks", "reductions", "numbers", "quantizing, with them"], cells
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw what grows with the ranks, for FSDP2."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model and row.layout == LAYOUTS[0].name and row.ranks > 1]
        ranks = [row.ranks for row in own]
        axes[0].plot(ranks, [row.commit / 1e6 for row in own], marker="o", label=f"{model}, hashes and sizes")
        axes[0].plot(ranks, [row.division / 1e6 for row in own], marker="s", ls="--", label=f"{model}, shards")
        axes[1].plot(ranks, [row.rank_0_seconds for row in own], marker="o", label=f"{model}, rank 0")
        axes[1].plot(ranks, [row.plan_seconds for row in own], marker="s", ls="--", label=f"{model}, another rank")
        axes[2].plot(ranks, [row.plain_header / 1e6 for row in own], marker="o", label=f"{model}, before compression")
        axes[2].plot(ranks, [row.header / 1e6 for row in own], marker="s", ls="--", label=f"{model}, stored")
    for axis, title in zip(axes, ("gathered, MB", "planning, s", "header, MB"), strict=True):
        axis.set(xscale="log", yscale="log", title=title, xlabel="ranks")
        axis.set_xticks([8, 64, 256, 1024], ["8", "64", "256", "1,024"])
        axis.minorticks_off()
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def report(rows: Sequence[Row], moments: Sequence[tuple[str, int, int, int, float]], described: Any) -> str:
    """Return the page."""
    tables = [table(rows, model) for model in dict.fromkeys(row.model for row in rows)]
    largest = max(rows, key=lambda row: row.plain_header)
    size = f"{kilobytes(largest.header)}, {kilobytes(largest.plain_header)} before compression"
    return PAGE.format(
        machine=sentence(described),
        tables="\n\n".join(each.in_markdown() for each in tables),
        reductions=reductions(moments).in_markdown(),
        extrapolated=extrapolated(rows, 10_000).in_markdown(),
        largest=f"{largest.model}, {largest.layout}, on {largest.ranks:,} ranks ({size})",
    )


PAGE = """# Scale: what grows with the number of ranks

```
.venv/bin/python benchmarks/scale.py
```

{machine}

**What is measured, and what is simulated.** No thousand processes ran. One process acts as one rank after another,
with PyTorch's fake process group. It runs the package's own planning and writes and reads real headers. Names and
shapes are those of Llama models with Adam; the tensors have no values. What the other ranks hold is computed. It is
compared with PyTorch's DTensors for rank 0 and the last rank of every row. Hashes of boxes are random numbers.
Seconds are processor time of one core, once; Python's garbage collector adds up to 0.3 s to some. Time on a network
is not measured, so the page gives bytes and the number of reductions instead.

![bytes, seconds and headers by ranks](scale.png)

{tables}

- **Shards, to each rank**: what each rank holds of the tensors that are divided in different ways. Once per save.
- **Hashes and sizes, to rank 0**: 41 bytes for each box of each part. Gathered by the writing threads.
- **Generators, to rank 0**: states of random number generators. They are one tensor of the checkpoint.
- **Planning**: who writes what, the layouts, and the order of boxes. Rank 0 also hashes all boxes' hashes.
- **Header**: of the checkpoint's own file, which every rank reads at a restore, as well as the headers of the parts
  that it needs. On as many ranks, these are its own part, those that hold what it has a copy of, and rank 0's for
  what is not divided. The generators of all ranks are in rank 0's part, so each rank reads them, too.
- One rank writes one file, without parts.

## Does the header need pieces?

No. Of the headers here, that of {largest}, is the largest. Pieces would be needed from 10 MB on. The last column
below says how many ranks that takes. A header before compression grows by one line for each rank and layout, and by
one for each part.

{extrapolated}

Extrapolated figures lie on the straight line through the two largest numbers of ranks. Nothing was run at that size.
At 10,000 ranks the hashes are what is too much for one rank: several ranks should then hash the boxes of some tensors
each, and rank 0 should gather the results.

## Reductions

{reductions}

One rank quantized moments of real size: random numbers, with scales for rows and columns. The reductions gave what
they give if all ranks hold the same. Tensors are quantized together as far as a rank's memory allows, so the number
of reductions falls with the number of ranks. The numbers are mostly sums of rows and columns: they depend on the
model, not on the ranks.
"""
