"""Compare the bytes of all levels in a run's checkpoints with their conditional entropy (method 2.2).

    python benchmarks/entropy.py

It is the entropy of a tensor's levels conditioned on the level of the same element in the parent, by the counts of this
tensor. In keyframes it is that of the levels alone. A decoder would need the counts as well, so no coder reaches it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import options
from numpy.typing import NDArray
from results import Table, publish, show

from dynaquant.engine.coding import conditional
from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.forms.rank_one import RankOne
from dynaquant.engine.forms.scheme import Scheme
from dynaquant.engine.forms.schemes import Conditional, RankOneFactors, SecondMomentUnits
from dynaquant.engine.forms.units import ScaledMoment
from dynaquant.store.run import Run

RUNS = ("transformer", "convnet")
"""Of the demo, by the default method."""
LARGE = 65_536
"""A tensor with this many values is large: its tables take a negligible share."""


@dataclass(frozen=True)
class Row:
    """Tensors of one kind in all keyframes or all deltas of a run. coded, entropy: bytes of their levels."""

    run: str
    checkpoints: str
    kind: str
    tensors: int
    values: int
    coded: int
    entropy: float


def parts(scheme: Scheme, stored: StoredTensor) -> Iterator[tuple[Conditional, QuantizedTensor]]:
    """Yield the conditionally coded parts of a tensor: itself, its rows and columns, or its units."""
    if isinstance(scheme, Conditional) and isinstance(stored, QuantizedTensor):
        yield scheme, stored
    elif isinstance(scheme, RankOneFactors) and isinstance(stored, RankOne):
        yield from ((scheme.rows, stored.rows), (scheme.columns, stored.columns))
    elif isinstance(scheme, SecondMomentUnits) and isinstance(stored, ScaledMoment):
        yield scheme.units, stored.units


def levels_of(stored: StoredTensor | None) -> list[QuantizedTensor]:
    """Return the levels that a child's levels can be conditioned on, in the order of ``parts``."""
    if isinstance(stored, RankOne):
        return [stored.rows, stored.columns]
    if isinstance(stored, ScaledMoment):
        return [stored.units]
    return [stored] if isinstance(stored, QuantizedTensor) else []


def conditional_entropy(levels: NDArray[np.uint8], parent: NDArray[np.uint8] | None) -> float:
    """Return the entropy of all levels together, in bytes."""
    before = np.zeros_like(levels) if parent is None else parent
    counts = np.bincount(before.astype(np.int64) * 256 + levels, minlength=65_536).reshape(256, 256).astype(np.float64)
    occurring = counts > 0
    shares = (counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))[occurring]
    return float(-(counts[occurring] * np.log2(shares)).sum() / 8)


def measure(folder: Path) -> list[Row]:
    """Return the rows of all checkpoints of a run."""
    run = Run(folder)
    sums: dict[tuple[str, str], list[float]] = {}
    before: dict[str, StoredTensor] = {}
    for summary in run.summaries()[0]:
        file = run.file(summary.step)
        tensors = run.load(file)
        checkpoints = "keyframes" if summary.parent is None else "deltas"
        for entry in file.header.entries:
            parents = levels_of(before.get(entry.name))
            for i, (scheme, quantized) in enumerate(parts(entry.scheme, tensors[entry.name])):
                parent = parents[i] if scheme.needs_parent else None
                kind = entry.label.role.replace("_", " ") + (
                    "s" if quantized.levels.size >= LARGE else "s, small tensors"
                )
                coded = len(conditional.encode(quantized, parent))
                entropy = conditional_entropy(quantized.levels, None if parent is None else parent.levels)
                for key in ((checkpoints, kind), (checkpoints, "all")):
                    so_far = sums.setdefault(key, [0, 0, 0, 0])
                    sums[key] = [a + b for a, b in zip(so_far, (1, quantized.levels.size, coded, entropy), strict=True)]
        before = dict(tensors.items())
    return [
        Row(folder.name, checkpoints, kind, int(tensors), int(values), int(coded), entropy)
        for (checkpoints, kind), (tensors, values, coded, entropy) in sorted(sums.items(), reverse=True)
        if entropy > 0  # first moments are all zero
    ]


def table(rows: list[Row]) -> Table:
    columns = ["run", "checkpoints", "levels of", "tensors", "values", "bytes", "entropy, bytes", "above it"]
    cells = [
        [row.run, row.checkpoints, row.kind]
        + [f"{number:,.0f}" for number in (row.tensors, row.values, row.coded, row.entropy)]
        + [f"{row.coded / row.entropy - 1:+.1%}"]
        for row in rows
    ]
    return Table("Levels against their conditional entropy", columns, cells)


def page(rows: list[Row]) -> str:
    return f"""\
# Entropy

```
make benchmark-setup
.venv/bin/python benchmarks/entropy.py
```

The runs are those of `dynaquant demo`. The table has the bytes of all levels in whole checkpoints, tables included,
beside the entropy of the levels conditioned on the parent's. In keyframes it is the entropy of the levels alone. The
entropy comes from the counts of each tensor itself.

{table(rows).in_markdown()}

*Small tensors* have fewer than {LARGE:,} values. There, the tables of the coder weigh. The entropy leaves them out: a
decoder would have to know the counts.
"""


def main() -> None:
    arguments = options.parse(options.parser(__doc__, data=None))
    with tempfile.TemporaryDirectory(dir=arguments.cache) as folder:
        demo = [sys.executable, "-m", "dynaquant.cli", "demo", "--out", folder]
        subprocess.run([*demo, "--quick"] if arguments.quick else demo, check=True)
        rows = [row for run in RUNS for row in measure(Path(folder) / run)]
    show(table(rows), width=130)
    publish(arguments.out, "entropy", [asdict(row) for row in rows], None, page(rows))


if __name__ == "__main__":
    main()
