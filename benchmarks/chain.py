"""Save a chain of checkpoints of a training with AdamW, and load its ends: dynaquant beside ``torch.save``.

    python benchmarks/chain.py [--tensors 148] [--width 916] [--links 7] [--threads 1] [--quality balanced]

The model is a stack of residual layers: by default 148 layers with 124 million weights between them. Many layers of few
weights show what a tensor costs: ``--tensors 360 --width 30``. There is no metric, so the search decides by its
estimate. Times are multiples of ``torch.save`` with fsync, and of ``torch.load``, of the same state in the same run.
Loads are those of a new process.
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
from pathlib import Path

import torch
from results import Table, machine, sentence, show
from torch import Tensor, nn

import dynaquant as dq
from dynaquant.options import QualityName

STEPS = 3
"""Steps between checkpoints."""
TURNS = 5
"""Loads of each kind. The fastest counts."""


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


def save_chain(folder: Path, tensors: int, width: int, links: int, quality: QualityName) -> dict[str, float]:
    """Save the chain, and the state by ``torch.save`` after each. Returns medians of all but the first two saves."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(width) for _ in range(tensors)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def to_file() -> None:
        with (folder / "state.pt").open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    blocked, whole, reference, ratios = [], [], [], []
    with dq.Checkpointer(folder / "run", model, optimizer, quality=quality) as checkpointer:
        for link in range(1, links + 1):
            for _ in range(STEPS):
                optimizer.zero_grad()
                model(torch.randn(16, width)).square().mean().backward()
                optimizer.step()
            reference.append(seconds(to_file))
            began = time.perf_counter()
            save = checkpointer.save(link)
            blocked.append(time.perf_counter() - began)
            ratios.append(save.result().ratio)
            whole.append(time.perf_counter() - began)
    unit = statistics.median(reference)
    found = {"torch.save": unit, "blocks": statistics.median(blocked[2:]) / unit}
    return found | {"on disk": statistics.median(whole[2:]) / unit, "ratio": ratios[-1]}


def load_ends(folder: Path, links: int) -> dict[str, float]:
    """Load the keyframe and the last link, as multiples of ``torch.load``."""

    def fastest(action: Callable[[], object]) -> float:
        return min(seconds(action) for _ in range(TURNS))

    unit = fastest(lambda: torch.load(folder / "state.pt"))
    ends = {"keyframe": 1, "last link": links}
    return {"torch.load": unit} | {
        name: fastest(lambda: dq.load(folder / "run", step)) / unit  # noqa: B023 - called here
        for name, step in ends.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=148, help="layers")
    parser.add_argument("--width", type=int, default=916, help="of a layer")
    parser.add_argument("--links", type=int, default=7, help="checkpoints of the chain, at least 3")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quality", default="balanced")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)  # by the process that loads
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.load is not None:
        print(json.dumps(load_ends(arguments.load, arguments.links)))
        return
    threads = {"DYNAQUANT_THREADS": str(arguments.threads)}
    if os.environ.get("DYNAQUANT_THREADS") != threads["DYNAQUANT_THREADS"]:  # it is read when dynaquant is imported
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **threads})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = save_chain(folder, arguments.tensors, arguments.width, arguments.links, arguments.quality)
        command = [sys.executable, *sys.argv, "--load", name]
        loaded = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    values = arguments.tensors * arguments.width * (arguments.width + 1)
    rows = [
        ["save blocks", f"{found['blocks']:.2f}×", f"torch.save + fsync, {found['torch.save']:.2f} s"],
        ["save is on the disk", f"{found['on disk']:.2f}×", "the same"],
        ["load of the keyframe", f"{loaded['keyframe']:.1f}×", f"torch.load, {loaded['torch.load']:.2f} s"],
        [f"load of link {arguments.links}", f"{loaded['last link']:.1f}×", "the same"],
    ]
    size = f"{2 * arguments.tensors} tensors, {values / 1e6:.1f} M weights"
    title = f"{size}, {arguments.quality}: {found['ratio']:.0f}× smaller"
    shown = Table(title, ["what", "takes", "times that of"], rows)
    show(shown, f"{arguments.threads} threads. {sentence(machine('torch'))}", width=90)


if __name__ == "__main__":
    main()
