"""Save chains of checkpoints of trainings with AdamW, and load their ends: dynaquant beside ``torch.save``.

    python benchmarks/chain.py [--threads 1] [--quality balanced]
    python benchmarks/chain.py --tensors 360 --width 30 [--links 7]

The model is a stack of residual layers, each with a matrix and a bias. Without a choice, measures four sizes and writes
the page; with one, prints the table only. There is no metric, so the search decides by its estimate. Times are
multiples of ``torch.save`` with fsync, and of ``torch.load``, of the same state in the same run. Every load is the
first of a process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import options
import torch
from memory import memory_now, peak_memory
from results import Table, machine, publish, sentence, show
from torch import Tensor, nn

import dynaquant as dq
from dynaquant.options import QualityName

STEPS = 20
"""Steps between checkpoints, where a size does not say otherwise."""
LARGE = 10_000_000
"""Weights of a model whose memory is worth a row."""
TURNS = 5
"""Loads of each kind."""
TORCH = "torch.load"


@dataclass(frozen=True)
class Size:
    """A model. tensors: layers. width: of a layer. links: checkpoints of the chain, at least 3. steps: between them."""

    tensors: int
    width: int
    links: int = 7
    steps: int = STEPS

    @property
    def weights(self) -> int:
        """The number of weights. A state has three times as many values."""
        return self.tensors * self.width * (self.width + 1)

    @property
    def title(self) -> str:
        """How many tensors and weights."""
        count = f"{self.weights / 1e6:.1f}" if self.weights < 1e7 else f"{self.weights / 1e6:.0f}"
        return f"{2 * self.tensors:,} tensors, {count} M weights"


SIZES = (Size(360, 30), Size(5000, 8, 4, steps=3), Size(148, 916), Size(148, 1500, 4))
"""Many small tensors, very many, GPT-2's weights, and a state of a billion values.

Very many layers learn too fast: after some twenty steps their gradients are so weak that weights are stored exactly.
"""
QUICK_SIZES = (Size(20, 10, 3), Size(4, 60, 3))


class Layer(nn.Linear):
    """A linear layer whose output is added to its input, so that gradients neither vanish nor explode."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, input: Tensor) -> Tensor:
        """Map a batch of vectors to vectors of the same width."""
        return input + 0.1 * super().forward(input)


def seconds(action: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def save_chain(folder: Path, size: Size, quality: QualityName) -> dict[str, float]:
    """Save the chain, and the state by ``torch.save`` before each. Returns medians of all but the first two saves.

    Memory is the peak beyond that of the training, in bytes for each value of the state.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(size.width) for _ in range(size.tensors)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def to_file() -> None:
        with (folder / "state.pt").open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    def train() -> None:
        for _ in range(size.steps):
            optimizer.zero_grad()
            model(torch.randn(16, size.width)).square().mean().backward()
            optimizer.step()

    blocked, whole, reference, ratios = [], [], [], []
    train()
    before = memory_now()
    with dq.Checkpointer(folder / "run", model, optimizer, quality=quality) as checkpointer:
        for link in range(1, size.links + 1):
            train()
            reference.append(seconds(to_file))
            began = time.perf_counter()
            save = checkpointer.save(size.steps * link)
            blocked.append(time.perf_counter() - began)
            ratios.append(save.result().ratio)
            whole.append(time.perf_counter() - began)
    unit = statistics.median(reference)
    return {
        "torch.save": unit,
        "blocks": statistics.median(blocked[2:]) / unit,
        "on disk": statistics.median(whole[2:]) / unit,
        "ratio": ratios[-1],
        "memory": (peak_memory() - before) / (3 * size.weights),
    }


def load_once(folder: Path, what: str) -> dict[str, float]:
    """Load once, as after a crash. Returns the seconds, and the peak of the memory in bytes.

    what: a step, or "torch.load".
    """
    before = memory_now()
    if what == TORCH:
        taken = seconds(lambda: torch.load(folder / "state.pt"))
    else:
        taken = seconds(lambda: dq.load(folder / "run", int(what)))
    return {"seconds": taken, "peak": peak_memory() - before}


def measure(size: Size, threads: int, quality: str) -> dict[str, float]:
    """Save in one process and load in others, each of which loads once. Of loads of one kind, the fastest counts.

    Loads are multiples of ``torch.load``, their memory is in bytes for each value of the state.
    """
    base = [sys.executable, __file__, "--threads", str(threads), "--quality", quality]
    base += ["--tensors", str(size.tensors), "--width", str(size.width)]
    base += ["--links", str(size.links), "--steps", str(size.steps)]
    environment = {**os.environ, "DYNAQUANT_THREADS": str(threads)}  # read when dynaquant is imported

    def child(*role: str) -> dict[str, float]:
        ran = subprocess.run([*base, *role], check=True, stdout=subprocess.PIPE, text=True, env=environment)
        found: dict[str, float] = json.loads(ran.stdout)
        return found

    kinds = {TORCH: TORCH, "keyframe": str(size.steps), "last link": str(size.steps * size.links)}
    with tempfile.TemporaryDirectory() as folder:
        found = child("--save", folder)
        turns = [{kind: child("--load", folder, what) for kind, what in kinds.items()} for _ in range(TURNS)]
    times = {kind: min(turn[kind]["seconds"] for turn in turns) for kind in kinds}
    peaks = {kind: min(turn[kind]["peak"] for turn in turns) / (3 * size.weights) for kind in kinds}
    found[TORCH] = times[TORCH]
    found |= {kind: times[kind] / times[TORCH] for kind in ("keyframe", "last link")}
    return found | {f"{kind}, memory": peak for kind, peak in peaks.items()}


def table(sizes: list[Size], found: list[dict[str, float]], quality: str) -> Table:
    """Return the measurements, a column for each size."""

    def row(name: str, cell: Callable[[dict[str, float]], str]) -> list[str]:
        return [name, *map(cell, found)]

    def memory(name: str, key: str) -> list[str]:
        # What the process itself needs would be most of it in a small model.
        return [name, *(f"{e[key]:.1f}" if s.weights >= LARGE else "" for s, e in zip(sizes, found, strict=True))]

    rows = [
        row("times smaller, last link", lambda each: f"{each['ratio']:.0f}×"),
        row("torch.save + fsync", lambda each: f"{each['torch.save']:.2f} s"),
        row("save blocks", lambda each: f"{each['blocks']:.2f}×"),
        row("save is on the disk", lambda each: f"{each['on disk']:.2f}×"),
        memory("memory of saves, bytes per value", "memory"),
        row("torch.load", lambda each: f"{each[TORCH]:.2f} s"),
        row("load of the keyframe", lambda each: f"{each['keyframe']:.1f}×"),
        row("load of the last link", lambda each: f"{each['last link']:.1f}×"),
        memory("memory of torch.load, bytes per value", f"{TORCH}, memory"),
        memory("memory of the last link's load", "last link, memory"),
    ]
    links = ["links", *(str(size.links) for size in sizes)]
    steps = ["steps between two", *(str(size.steps) for size in sizes)]
    return Table(f"quality {quality!r}", ["", *(size.title for size in sizes)], [links, steps, *rows])


def page(shown: Table, threads: int, described: dict[str, str | int]) -> str:
    """Return the page."""
    return f"""# Chains of checkpoints

```
.venv/bin/python benchmarks/chain.py
```

A stack of residual layers trains with AdamW. There is no metric, so the search decides by its estimate. `torch.save`
writes the same state before each save.

{shown.in_markdown()}

*Blocks* and *on the disk* are multiples of `torch.save` with fsync; *load* is a multiple of `torch.load`, with files in
the system's cache. Each load is the first and only one of its process, as after a crash; the fastest of {TURNS} counts.
The keyframe is a checkpoint without a parent; the last link needs all others. Memory of saves is the peak beyond the
training, for each of the state's values, which have four bytes. Memory of loads is the peak, the loaded state included.
{threads} thread for everything. {sentence(described)}
"""


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, help=f"folder for JSON and page; by default {options.RESULTS}")
    made.add_argument("--quick", action="store_true", help=f"tiny sizes; results go to {options.QUICK}")
    made.add_argument("--tensors", type=int, help="layers")
    made.add_argument("--width", type=int, help="of a layer")
    made.add_argument("--links", type=int, default=7, help="checkpoints of the chain, at least 3")
    made.add_argument("--steps", type=int, default=STEPS, help="of training between checkpoints")
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--quality", default="balanced")
    made.add_argument("--save", type=Path, help=argparse.SUPPRESS)  # by the process that saves
    made.add_argument("--load", nargs=2, help=argparse.SUPPRESS)  # by those that load
    arguments = made.parse_args()
    torch.set_num_threads(arguments.threads)
    chosen = arguments.tensors is not None and arguments.width is not None
    size = Size(arguments.tensors, arguments.width, arguments.links, arguments.steps) if chosen else None
    if size is not None and arguments.save is not None:
        print(json.dumps(save_chain(arguments.save, size, arguments.quality)))
        return
    if arguments.load is not None:
        print(json.dumps(load_once(Path(arguments.load[0]), arguments.load[1])))
        return
    sizes = [size] if size is not None else list(QUICK_SIZES if arguments.quick else SIZES)
    found = [measure(each, arguments.threads, arguments.quality) for each in sizes]
    shown, described = table(sizes, found, arguments.quality), machine("torch")
    show(shown, f"{arguments.threads} threads. {sentence(described)}", width=130)
    if size is None:
        write(arguments, sizes, found, page(shown, arguments.threads, described), described)


def write(
    arguments: argparse.Namespace,
    sizes: list[Size],
    found: list[dict[str, float]],
    text: str,
    described: dict[str, str | int],
) -> None:
    """Write the page and its numbers."""
    out = arguments.out or (options.QUICK if arguments.quick else options.RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [{**asdict(size), **each} for size, each in zip(sizes, found, strict=True)]
    numbers = {"machine": described, "threads": arguments.threads, "quality": arguments.quality, "rows": rows}
    publish(out, "chains", numbers, None, text)


if __name__ == "__main__":
    main()
