"""Train for thousands of checkpoints: does a save, a restore or a listing take longer the more there are?

    python benchmarks/long_run.py [--checkpoints 3000] [--layers 500]

A stack of small residual layers trains with AdamW and saves at every step. A layer has a weight and a bias, each with
two moments and a count of steps: 500 layers have 4,000 tensors. All checkpoints are kept. Listings and restores are
timed at the end; of three turns the fastest counts. (What changes the run has one turn.) A restore is also timed in a
folder that holds only its chain.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import options
import torch
from chain import Layer, seconds
from results import Table, machine, publish, sentence, show
from rich.progress import track
from torch import nn

import dynaquant as dq
from dynaquant.store.catalogue import LEAST, NAME
from dynaquant.store.commit import WritableRun
from dynaquant.store.run import Run

WIDTH, BATCH = 8, 16
TURNS = 3
MEDIAN_OF = 10
"""Saves of which the median is shown."""


class Training:
    """The training, from the same weights each time."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Layer(WIDTH) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)

    def step(self) -> None:
        """Take one step on random inputs and noisy targets."""
        self.optimizer.zero_grad()
        inputs = torch.randn(BATCH, WIDTH)
        wanted = inputs.flip(1) + 0.5 * torch.randn(BATCH, WIDTH)
        (self.model(inputs) - wanted).square().mean().backward()
        self.optimizer.step()

    def checkpointer(self, folder: Path) -> dq.Checkpointer:
        """Return a checkpointer that keeps all."""
        return dq.Checkpointer(folder, self.model, self.optimizer)


def save_all(folder: Path, checkpoints: int, layers: int) -> list[tuple[float, float]]:
    """Save a run. Returns, for each save, the seconds until training goes on, and until it is on the disk."""
    training, times = Training(layers), []
    with training.checkpointer(folder) as checkpointer:
        for number in track(range(1, checkpoints + 1), description="saving"):
            training.step()
            began = perf_counter()
            save = checkpointer.save(number)
            blocked = perf_counter() - began
            save.result()
            times.append((blocked, perf_counter() - began))
    return times


def shown_saves(times: list[tuple[float, float]]) -> dict[int, tuple[float, float]]:
    """Return the medians of a few saves that end at the 10th, the 100th, …, and the last."""
    ends = sorted({*(10**n for n in range(1, 10) if 10**n < len(times)), len(times)})
    return {
        end: (statistics.median(a for a, _ in some), statistics.median(b for _, b in some))
        for end in ends
        if (some := times[max(0, end - MEDIAN_OF) : end])
    }


def other_calls(folder: Path, layers: int) -> dict[str, float]:
    """Return the seconds of restores and listings. The last ones are on a run whose catalogue was lost."""
    training = Training(layers)

    def restore(run: Path) -> None:
        with training.checkpointer(run) as checkpointer:
            checkpointer.restore()

    def log() -> None:
        command = [sys.executable, "-m", "dynaquant.cli", "log", str(folder)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)

    def take_lock() -> None:
        with WritableRun(folder).locked():
            pass

    run = Run(folder)
    alone = folder.with_name("alone")
    alone.mkdir()
    for file in run.chain(run.newest()):
        shutil.copy2(file.path, alone)
    calls: dict[str, Callable[[], object]] = {
        "open the run and restore the newest": lambda: restore(folder),
        "the same where only its chain is": lambda: restore(alone),
        "summaries": lambda: Run(folder).summaries(),
        "records": lambda: Run(folder).listing(),
        "dynaquant log, a process": log,
    }
    found = {name: min(seconds(call) for _ in range(TURNS)) for name, call in calls.items()}
    for path in folder.iterdir():
        path.touch()
    found["a writer opens a copy"] = seconds(take_lock)
    (folder / NAME).unlink()
    return found | {"a writer makes a lost catalogue": seconds(take_lock)}


def page(shown: list[Table], about: str) -> str:
    """Return the page."""
    saves, calls = (each.in_markdown() for each in shown)
    return f"""# A long run

```
.venv/bin/python benchmarks/long_run.py
```

A stack of small residual layers trains with AdamW and saves at every step, without a metric. All checkpoints are kept.

{saves}

*Blocks*: until training goes on. *On the disk*: until the checkpoint is committed. Medians of {MEDIAN_OF} saves.

{calls}

A restore opens the run, reads the chain of the newest checkpoint and fills model and optimizer. Listings read the
catalogue. The files of a copy have other times, unless it is made with `cp -p` or `rsync -t`, so its first writer
compares their headers with the catalogue. If the catalogue is lost, the next writer parses all headers.
{about}
"""


def main() -> None:
    made = options.parser(__doc__, data=None)
    made.add_argument("--checkpoints", type=int, help="of the run; by default 3000")
    made.add_argument("--layers", type=int, help="of the model; by default 500")
    arguments = options.parse(made)
    checkpoints = arguments.checkpoints or (LEAST + 8 if arguments.quick else 3000)
    layers = arguments.layers or (5 if arguments.quick else 500)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.cache) as name:
        folder = Path(name) / "run"
        times = save_all(folder, checkpoints, layers)
        calls = other_calls(folder, layers)
        stored = sum(path.stat().st_size for path in folder.iterdir()) / checkpoints
    tensors = 8 * layers
    rows = [[f"{end:,}", f"{a:.3f} s", f"{b:.3f} s"] for end, (a, b) in shown_saves(times).items()]
    title = f"{checkpoints:,} checkpoints of {tensors:,} tensors, {stored / 1e3:.0f} kB each"
    shown = [
        Table(title, ["saves until", "blocks", "on the disk"], rows),
        Table("At the end", ["call", "time"], [[call, f"{taken:.2f} s"] for call, taken in calls.items()]),
    ]
    described = machine("torch")
    about = f"One thread for PyTorch. {sentence(described)}"
    show(*shown, about, width=100)
    numbers = {"machine": described, "layers": layers, "saves": shown_saves(times), "calls": calls, "bytes": stored}
    publish(arguments.out, "long_run", numbers, None, page(shown, about))


if __name__ == "__main__":
    main()
