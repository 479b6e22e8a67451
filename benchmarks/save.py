"""Compare saving a whole Adam state to one file: ``torch.save``, safetensors, and ``dq.save`` with each quality.

    python benchmarks/save.py [--threads 2]

The methods take turns. The state is synthetic (``synthetic.py``): weights and both moments of Adam in float32, in the
shapes of a transformer, 280 MB.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any, get_args

import options
import torch
from results import Table, machine, publish, sentence, show
from rich.progress import track
from safetensors.torch import save_file
from synthetic import adam_state, named_tensors

import dynaquant as dq
from dynaquant.options import QualityName

VALUES, ROUNDS = 70_000_000, 7
"""Weights and moments together, and turns of every method that count."""
SEED = 0
BASE, SYNCED = "torch.save", "torch.save + fsync"


@dataclass
class Row:
    """A method's size in bytes, and the seconds of each of its turns: of the clock, and of all processors together."""

    method: str
    stored: int = 0
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def synced(save: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a method that also waits until the file is on the disk."""

    def save_and_sync(path: Path) -> None:
        save(path)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    return save_and_sync


def methods_for(state: dict[str, Any], flat: dict[str, torch.Tensor]) -> dict[str, Callable[[Path], object]]:
    """Return a function for each method that saves the state to a path."""

    def with_torch(path: Path) -> None:
        torch.save(state, path)

    def with_safetensors(path: Path) -> None:
        save_file(flat, path)

    found: dict[str, Callable[[Path], object]] = {
        BASE: with_torch,
        SYNCED: synced(with_torch),
        "safetensors": with_safetensors,
        "safetensors + fsync": synced(with_safetensors),
    }
    for quality in get_args(QualityName):
        found[f"dq.save, {quality}"] = partial(dq.save, state, quality=quality)
    return found


def measured(values: int, rounds: int, scratch: Path) -> tuple[list[Row], int]:
    """Return a row for each method, and the bytes of the tensors. The first turn of each does not count."""
    model, optimizer = adam_state(values, torch.Generator().manual_seed(SEED))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    flat = named_tensors(model, optimizer)
    methods = methods_for(state, flat)
    rows = {name: Row(name) for name in methods}
    with TemporaryDirectory(dir=scratch) as folder:
        for turn in track(range(rounds + 1), description="measuring"):
            for name, save in methods.items():
                path = Path(folder) / "state"
                start, start_cpu = perf_counter(), process_time()
                save(path)
                seconds, cpu = perf_counter() - start, process_time() - start_cpu
                rows[name].stored = path.stat().st_size
                path.unlink()
                if turn:
                    rows[name].seconds.append(seconds)
                    rows[name].cpu.append(cpu)
    return list(rows.values()), sum(tensor.nbytes for tensor in flat.values())


def table(rows: list[Row], raw: int) -> Table:
    """Return the table: sizes, the fastest and the median turn, and how they compare with ``torch.save``."""
    by_name = {row.method: row for row in rows}
    columns = ["method", "ratio", "fastest", "median", "fastest / torch.save", "fastest / torch.save + fsync", "CPU"]
    lines = [
        [
            row.method,
            f"{raw / row.stored:.1f}×",
            f"{min(row.seconds):.2f} s",
            f"{median(row.seconds):.2f} s",
            *(f"{min(row.seconds) / min(by_name[other].seconds):.1f}×" for other in (BASE, SYNCED)),
            f"{min(row.cpu):.2f} s",
        ]
        for row in rows
    ]
    return Table(f"A state of {raw / 1e6:.0f} MB", columns, lines)


NOTES = """\
- *ratio*: bytes of the tensors over bytes of the file. The state is synthetic: in a real training, the ratios of
  quantized states are lower ([measured](failure_recovery.md)). There is no metric, so no time of evaluations.
- The methods took turns, each with its own file. *fastest* is the fastest turn of each, *median* the median of all.
  If other programs run meanwhile, they slow all methods, so the fastest turns compare best.
- *CPU*: seconds of all cores together, in the turn that took the fewest.
- `torch.save` and safetensors return once the system has the file in its cache. `dq.save` waits until it is on the disk
  (fsync), reads it back, decodes it and compares every tensor before the file has its name. So there are rows of the
  others with an fsync, which still do not read back.
"""


def page(shown: Table, described: dict[str, str | int], command: str) -> str:
    """Return the page with the results."""
    base = dict(zip(shown.columns, next(row for row in shown.rows if row[0] == BASE), strict=True))
    own = f"`torch.save` itself takes {base['fastest']}: that is a copy of the state into the system's cache of files."
    parts = ["# Saving one file", f"```\nmake benchmark-setup\n{command}\n```", sentence(described), own]
    return "\n\n".join([*parts, shown.in_markdown(), "## How to read it", NOTES.rstrip()]) + "\n"


def main() -> None:
    parser = options.parser(__doc__, data=None)
    parser.add_argument("--threads", type=int, default=2, help="cores and threads of every method")
    arguments = options.parse(parser)
    values, rounds = (700_000, 1) if arguments.quick else (VALUES, ROUNDS)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    torch.set_num_threads(arguments.threads)
    rows, raw = measured(values, rounds, arguments.cache)
    shown, described = table(rows, raw), machine("torch", "safetensors")
    show(shown, width=110)
    results = {"machine": described, "threads": arguments.threads, "raw": raw, "rows": [asdict(row) for row in rows]}
    command = f".venv/bin/python benchmarks/save.py --threads {arguments.threads}"
    publish(arguments.out, "save", results, None, page(shown, described, command))


if __name__ == "__main__":
    main()
