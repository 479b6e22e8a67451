"""Measure listings of a run of many checkpoints, with a catalogue and without one. Prints a table only.

    python benchmarks/listing.py [--checkpoints 3000] [--tensors 300]

The checkpoints are deltas in chains of 16. Tensors have one value, as a listing reads headers only. Each figure is the
wall time of one call, beside that of reading all files of the run as bytes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from results import Table, show

from dynaquant.engine.forms.schemes import Raw, Reference
from dynaquant.engine.label import Label
from dynaquant.engine.tensors.hashing import tensor_hash
from dynaquant.state.tree import state_dict_tree
from dynaquant.store.catalogue import NAME
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import CheckpointWriter, Header, Parent
from dynaquant.store.entry import Entry
from dynaquant.store.run import Run

CHAIN = 16
RECORD = {"configuration": {"scale": -40, "dithered": False}, "seconds": {"search": 1.0}, "notes": [], "interval": 20}


def make(folder: Path, checkpoints: int, tensors: int) -> None:
    """Write a run without syncing it. Only its keyframes have values; the others refer to them."""
    value = torch.ones(1)
    data, digest = value.numpy().tobytes(), tensor_hash(value)
    names = [f"model.layers.{i}.weight" for i in range(tensors)]
    label = Label("weight", "linear")
    entries = tuple(Entry(name, label, "float32", (1,), digest, len(data), Raw()) for name in names)
    references = tuple(Entry(name, label, "float32", (1,), digest, 0, Reference()) for name in names)
    tree = {"dict": [["model", state_dict_tree(names)]]}
    parent = None
    for step in range(1, checkpoints + 1):
        is_keyframe = step % CHAIN == 1
        own = entries if is_keyframe else references
        header = Header(step, step, None if is_keyframe else parent, tree, own, dict(RECORD))
        with (folder / f"step-{step:012d}.dqc").open("wb") as out:
            writer = CheckpointWriter(out)
            for _ in names if is_keyframe else ():
                writer.add(data)
            writer.finish(header, durable=False)
        parent = Parent(step, header.identity)


def measure(folder: Path) -> dict[str, float]:
    """Return the seconds of each call on a run that has no catalogue yet."""

    def read_all() -> None:
        for path in folder.glob("step-*"):
            path.read_bytes()

    def take_lock() -> None:
        with WritableRun(folder).locked():
            pass

    def newest() -> None:
        run = Run(folder)
        run.load(run.newest())

    def log() -> None:
        command = [sys.executable, "-m", "dynaquant.cli", "log", str(folder)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)

    calls: dict[str, Callable[[], object]] = {
        "all files as bytes": read_all,
        "summaries, no catalogue": lambda: Run(folder).summaries(),
        "newest loaded, no catalogue": newest,
        "a writer makes the catalogue": take_lock,
        "summaries": lambda: Run(folder).summaries(),
        "records": lambda: Run(folder).listing(),
        "newest loaded": newest,
        "dynaquant log": log,
    }
    found = {}
    for name, call in calls.items():
        began = time.perf_counter()
        call()
        found[name] = time.perf_counter() - began
    assert (folder / NAME).exists(), "the run is too small for a catalogue"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=3000, help="checkpoints of the run, at least 32")
    parser.add_argument("--tensors", type=int, default=300, help="tensors of each")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), arguments.checkpoints, arguments.tensors)
        found = measure(Path(folder))
    rows = [[name, f"{seconds:.2f} s"] for name, seconds in found.items()]
    show(Table(f"{arguments.checkpoints} checkpoints of {arguments.tensors} tensors", ["call", "time"], rows), width=80)


if __name__ == "__main__":
    main()
