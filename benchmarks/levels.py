"""Measure the coder of levels: levels per second on one core, beside a copy of as many bytes in the same run.

    python benchmarks/levels.py

Weights are normal; a grid step decides how many levels they have. A parent holds the same weights before they moved, so
little that the given share of levels changes. All cases and all sets of instructions take turns, and the shortest time
of each counts. Every stream is decoded and compared.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from time import process_time

import numpy as np
import options
from cores import on_cores
from numpy.typing import NDArray
from results import Table, machine, publish, sentence, show

from dynaquant import _native
from dynaquant.engine.coding import conditional
from dynaquant.engine.tensors.codebook import Codebook, Grid

LEVELS, TURNS = 4_000_000, 9
ENCODE, DECODE = 300e6, 500e6
"""Levels per second that are wanted, with vectors."""
KEYFRAMES = {"keyframe, 0.5 steps": 0.5, "keyframe, 1 step": 1, "keyframe, 2 steps": 2, "keyframe, 30 steps": 30}
"""The standard deviation of weights in grid steps."""
DELTAS = {"unchanged": 0, "0.05 % changed": 0.0005, "0.5 % changed": 0.005, "5 % changed": 0.05, "30 % changed": 0.3}
"""The share of levels that change; the standard deviation of weights is two grid steps."""
THREE_VALUES = "11 % changed, three values"
"""Nearly all weights are pruned or one of two values, as the default often stores them without a metric."""
Array = NDArray[np.uint8]


@dataclass(frozen=True)
class Quantized:
    """Levels and their codebook."""

    levels: Array
    codebook: Codebook


@dataclass
class Row:
    """Results of a case with a set of instructions: coded bytes, and the seconds of the fastest turns."""

    case: str
    instructions: str
    levels: int
    coded: int = 0
    encoding: float = float("inf")
    decoding: float = float("inf")
    copy: float = float("inf")

    @property
    def cells(self) -> list[str]:
        speeds = [f"{1e-6 * self.levels / seconds:,.0f}" for seconds in (self.encoding, self.decoding)]
        ratios = [f"{seconds / self.copy:.1f}×" for seconds in (self.encoding, self.decoding)]
        return [self.case, self.instructions, f"{8 * self.coded / self.levels:.4f}", *speeds, *ratios]


def on_grid(steps: NDArray[np.float64]) -> Quantized:
    """Return the levels of weights in units of the grid step."""
    multiples = np.clip(np.rint(steps), -127, 127).astype(int)
    levels = np.where(multiples > 0, 2 * multiples, np.where(multiples < 0, 1 - 2 * multiples, 0)).astype(np.uint8)
    return Quantized(levels, Grid(-26, max(0, int(levels.max()) - 1)))


def cases(size: int) -> dict[str, tuple[Quantized, Quantized | None]]:
    """Return for each case a tensor and its parent."""
    random = np.random.default_rng(0)
    made: dict[str, tuple[Quantized, Quantized | None]] = {}
    for name, spread in KEYFRAMES.items():
        made[name] = on_grid(random.normal(0, spread, size)), None
    before = random.normal(0, 2, size)
    for name, share in DELTAS.items():
        moved = share * (np.pi / 2) ** 0.5 * (1 + share / 2)  # so far that about this share of the levels changes
        made[name] = on_grid(before + random.normal(0, 1, size) * moved), on_grid(before)
    before = random.normal(0, 0.4, size)
    made[THREE_VALUES] = on_grid(before + random.normal(0, 0.15, size)), on_grid(before)
    return made


def measure(size: int, turns: int) -> list[Row]:
    work = cases(size)
    sets = _native.instructions()
    rows = {(name, one): Row(name, one, size) for name in work for one in sets}
    found = np.empty(size, dtype=np.uint8)
    for _ in range(turns):
        for (name, one), row in rows.items():
            tensor, parent = work[name]
            _native.limit_instructions(one)
            times = [process_time()]
            stream = conditional.encode(tensor, parent)
            times.append(process_time())
            conditional.decode(stream, size, tensor.codebook, parent, out=found)
            times.append(process_time())
            assert np.array_equal(found, tensor.levels), f"{name} does not decode"
            times.append(process_time())
            np.copyto(found, tensor.levels)
            times.append(process_time())
            row.coded = len(stream)
            row.encoding, row.decoding = min(row.encoding, times[1] - times[0]), min(row.decoding, times[2] - times[1])
            row.copy = min(row.copy, times[4] - times[3])
    return list(rows.values())


def verdicts(rows: list[Row]) -> list[str]:
    """Return whether the wanted speeds are reached by every case, with each set of instructions but the plain one."""
    found = []
    for one in dict.fromkeys(row.instructions for row in rows if row.instructions != "plain"):
        of = [row for row in rows if row.instructions == one]
        encode = min(row.levels / row.encoding for row in of)
        decode = min(row.levels / row.decoding for row in of)
        said = "passed" if encode >= ENCODE and decode >= DECODE else "MISSED"
        found.append(
            f"{said}: {one}: at least {1e-6 * encode:,.0f} M levels/s encoded and {1e-6 * decode:,.0f} decoded, "
            f"{1e-6 * ENCODE:.0f} and {1e-6 * DECODE:.0f} wanted"
        )
    return found


NOTES = """\
- *Bits* are those of a level, tables and states included. They are the same with all instructions, as are the bytes.
- *Of a copy*: the time beside that of `numpy.copyto` of the levels, one byte each, in the same run.
- Levels are decoded into memory that was used before.
- *plain* is what processors without AVX2 and NEON use. Tensors of at most 131,072 levels have few states and use it
  everywhere.
"""


def main() -> None:
    arguments = options.parse(options.parser(__doc__, data=None))
    levels, turns = (LEVELS // 100, 2) if arguments.quick else (LEVELS, TURNS)
    rows = on_cores({max(os.sched_getaffinity(0))}, measure, levels, turns)
    columns = ["levels", "instructions", "bits", "encoded, M/s", "decoded, M/s", "encoding, of a copy", "decoding"]
    shown = Table(f"{levels:,} levels, one core", columns, [row.cells for row in rows])
    bars, described = verdicts(rows), machine("numpy")
    show(shown, *bars, width=120)
    numbers = {"machine": described, "bars": bars, "rows": [asdict(row) for row in rows]}
    parts = [
        "# Levels per second",
        "```\n.venv/bin/python benchmarks/levels.py\n```",
        sentence(described),
        shown.in_markdown(),
        "\n".join(f"- {bar}" for bar in bars),
        "## How to read it",
        NOTES.rstrip(),
    ]
    publish(arguments.out, "levels", numbers, None, "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
