"""Commits with lossless copies, and makes them fail or be killed at the n-th call that changes the disk.

As a program, it reads lines with a folder and n, and forks a process for each, which is killed at call n.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager

import torch

from dynaquant.engine.label import Label
from dynaquant.state.flatten import flatten
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import CheckpointWriter
from dynaquant.store.writing import Checkpoint

STEPS = (1, 2, 2, 1)
"""Saves a step twice, then a lower step, as after a restore of an older checkpoint."""
CALLS = [(os, "replace"), (os, "unlink"), (os, "fsync"), (CheckpointWriter, "add"), (CheckpointWriter, "finish")]


def checkpoint_of(step: int, number: int, copy: bool = True) -> Checkpoint:
    """Return a checkpoint that holds the number of its commit. Its lossless copy holds that number plus 0.5."""
    tensors = {"number": torch.full((3,), float(number))}
    labels = {"number": Label("exact")}
    tree, _ = flatten({"number": tensors["number"]})
    exact = {"number": tensors["number"] + 0.5} if copy else None
    return Checkpoint(step, tree, tensors, labels, lossless_copy=exact)


@contextmanager
def at_call(n: int, when: str, fault: Callable[[], None]):
    """Call ``fault`` before or after the n-th call. Skips fsync, because these tests simulate no power loss."""
    count, plain = 0, [getattr(place, name) for place, name in CALLS]
    syncing = os.fsync

    def faulty(call):
        def called(*args, **options):
            nonlocal count
            count += 1
            here = count == n
            if here and when == "before":
                fault()
            found = call(*args, **options) if call is not syncing else None
            if here and when == "after":
                fault()
            return found

        return called

    for (place, name), call in zip(CALLS, plain, strict=True):
        setattr(place, name, faulty(call))
    try:
        yield
    finally:
        for (place, name), call in zip(CALLS, plain, strict=True):
            setattr(place, name, call)


def commit_all(run: WritableRun, committed: Callable[[int], None]) -> None:
    base = None
    for number, step in enumerate(STEPS, 1):
        _, base = run.commit(checkpoint_of(step, number), None if base and base.parent.step == step else base)
        committed(number)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    for line in sys.stdin:
        folder, call = line.split()
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            killed = WritableRun(folder)
            with at_call(int(call), "before", die), killed.locked():
                commit_all(killed, lambda number: os.write(1, f"{number} ".encode()))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        os.write(1, b"killed\n" if os.WIFSIGNALED(status) else b"done\n")
