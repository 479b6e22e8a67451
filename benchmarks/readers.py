"""Read a run in all ways, over and over, while a training saves as fast as it can and keeps two checkpoints.

    python benchmarks/readers.py [--seconds 60] [--exact] [--scratch build/benchmarks]

The training saves losslessly, or with ``--exact`` a small form and a lossless copy. Every reader has its own process
and checks what it reads: all biases of the model hold the step, so a mixture of checkpoints would show several steps.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import dynaquant as dq
from dynaquant.cli import app

WIDTH, DEPTH = 64, 8
OPTIONS: dict[bool, dict[str, Any]] = {
    False: {"quality": "lossless"},
    True: {"quality": dq.Quality(configuration=dq.GridConfiguration(scale=-200))},
}
"""Options of the Checkpointer, without and with lossless copies."""


@dataclass(frozen=True)
class Count:
    """How often a task was done, how often it failed, and the first error."""

    done: int
    failed: int
    error: str = ""


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def train(folder: Path, seconds: float, exact: bool) -> Count:
    """Save for this many seconds. Returns the number of checkpoints."""
    torch.set_num_threads(1)
    trained = model()
    step, end = 0, time.monotonic() + seconds
    keep = dq.Keep(last=2, lossless_copy=exact)
    with dq.Checkpointer(folder, trained, keep=keep, roles={"*.bias": "exact"}, **OPTIONS[exact]) as ckpt:
        while time.monotonic() < end:
            step += 1
            with torch.no_grad():
                for layer in trained:
                    assert isinstance(layer, nn.Linear)
                    layer.weight += 0.01 * torch.randn_like(layer.weight)
                    layer.bias.fill_(step)
            ckpt.save(step)
    return Count(step, 0)


def step_in(weights: dict[str, Tensor]) -> int:
    """Return the step that all biases hold. Raises ValueError if they differ."""
    found = {float(value) for name, tensor in weights.items() if name.endswith("bias") for value in tensor}
    if len(found) != 1:
        raise ValueError(f"a mixture of checkpoints: {sorted(found)}")
    return int(found.pop())


def loads(folder: Path, _out: Path) -> None:
    step_in(dq.load(folder)["model"])


def loads_some(folder: Path, _out: Path) -> None:
    step_in(dq.load(folder, keys=[f"{layer}.bias" for layer in range(DEPTH)]))


def loads_into(folder: Path, _out: Path) -> None:
    filled = model()
    dq.load_into(filled, folder)
    step_in(filled.state_dict())


def follows(folder: Path, _out: Path) -> None:
    filled = model()
    next(dq.follow(folder, filled, timeout=0))
    step_in(filled.state_dict())


def calls(*arguments: object) -> str:
    """Return the output of a command. Raises RuntimeError if it fails."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exit_code:
        raise RuntimeError(f"{arguments[0]}: {result.output} {result.exception!r}")
    return result.output


def exports(folder: Path, out: Path) -> None:
    calls("export", folder, "-o", out / "model.safetensors", "--force")
    step_in(load_file(out / "model.safetensors"))


READERS: dict[str, Callable[[Path, Path], object]] = {
    "dq.load": loads,
    "dq.load(keys=…)": loads_some,
    "dq.load_into": loads_into,
    "dq.follow": follows,
    "export": exports,
    "verify": lambda folder, _out: calls("verify", folder),
    "report": lambda folder, out: calls("report", folder, "-o", out / "report.html", "--force"),
    "log": lambda folder, _out: calls("log", folder),
    "du": lambda folder, _out: calls("du", folder),
    "show --tensor": lambda folder, _out: calls("show", folder, "--tensor", "model.0.weight"),
}


def read(reader: str, folder: Path, seconds: float) -> Count:
    """Read over and over for this many seconds."""
    torch.set_num_threads(1)
    done = failed = 0
    error = ""
    with TemporaryDirectory(dir=folder.parent) as out:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                READERS[reader](folder, Path(out))
                done += 1
            except Exception as caught:
                failed += 1
                error = error or str(caught)
    return Count(done, failed, error)


def beside(folder: Path, seconds: float, exact: bool, readers: list[str]) -> dict[str, Count]:
    """Return how often a training saved, and how often each reader read during that time."""
    with multiprocessing.get_context("fork").Pool(len(readers) + 1) as pool:
        counts = {"saves": pool.apply_async(train, (folder, seconds + 1, exact))}
        while not any(folder.glob("step-*.dqc")):
            counts["saves"].wait(0.01)
            assert not counts["saves"].ready(), counts["saves"].get()
        counts |= {reader: pool.apply_async(read, (reader, folder, seconds)) for reader in readers}
        return {what: count.get() for what, count in counts.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--exact", action="store_true", help="small forms with lossless copies")
    options.add_argument("--readers", nargs="*", choices=READERS, default=list(READERS))
    options.add_argument("--scratch", type=Path, default=Path("build/benchmarks"))
    chosen = options.parse_args()
    chosen.scratch.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=chosen.scratch) as scratch:
        found = beside(Path(scratch) / "run", chosen.seconds, chosen.exact, chosen.readers)
    table = Table("", "done", "failed", "first error")
    for what, count in found.items():
        table.add_row(what, f"{count.done:,}", f"{count.failed:,}", count.error)
    Console().print(table)
    if any(count.failed for count in found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
