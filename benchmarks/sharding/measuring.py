"""Sizes, CPU seconds and memory of a save and a restore, on this rank of several."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from memory import memory_now, peak_memory, stored_in
from sharding import dcp
from sharding.gpt import Training, Work, new_work, rank, ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

import dynaquant as dq

SCALE = -48
"""Of the grid, where memory is measured."""
STEPS = 20
"""With random gradients, so many give most second moments the form that they have in a training: two factors."""


def measure(folder: Path, orders: dict[str, Any]) -> None:
    """Save two states of a real training by turns, with a fixed configuration, and write what that took.

    keep: their steps. ``prepare`` has left the states in the folder. repeats: deltas that are measured.
    """
    work = new_work(Training(**orders["training"]))
    states = []
    for step in orders["keep"]:
        dcp.load(work, folder / f"dcp-{step}")
        states.append([tensor.clone() for tensor in _locals(work)])
    run = folder / f"run-{ranks()}"
    found: dict[str, Any] = {"deltas": [], "delta_cpu": []}
    with dq.Checkpointer(
        run,
        work.model,
        work.optimizer,
        quality=dq.Quality(configuration=dq.GridConfiguration(**orders["configuration"])),
    ) as ckpt:
        for number in range(1 + orders["repeats"]):
            for tensor, value in zip(_locals(work), states[number % 2], strict=True):
                tensor.copy_(value)
            before = stored_in(run)
            cpu = cpu_of(lambda n=number: ckpt.save(n + 1).result())  # type: ignore[misc]
            stored = stored_in(run) - before
            if number == 0:
                found |= {"keyframe": stored, "keyframe_cpu": cpu}
            else:
                found["deltas"].append(stored)
                found["delta_cpu"].append(cpu)
    found |= {"delta": found["deltas"][0], "cpu": median(found["delta_cpu"])}
    for name, zstd in (("dcp", False), ("dcp_zstd", True)):
        path = folder / f"{name}-of-{ranks()}"
        found[f"{name}_cpu"] = cpu_of(lambda p=path, z=zstd: dcp.save(work, p, z))  # type: ignore[misc]
        found[name] = stored_in(path)
        _barrier()
        if rank() == 0:
            shutil.rmtree(path)
    matrices = [tensor for tensor in _locals(work) if tensor.ndim == 2]
    found["smallest_share"] = min(int(tensor.numel()) for tensor in matrices if tensor.numel())
    found["raw"] = sum(p.numel() * 12 for p in work.model.parameters())
    _write(folder / f"measured-{ranks()}.json", found)


def measure_memory(folder: Path, orders: dict[str, Any]) -> None:
    """Save a state twice and restore it, and write the peak memory of every rank beside its share of the state."""
    training = Training(**orders["training"])
    tiny = replace(training, width=32, layers=1)
    _memory_of(new_work(tiny), folder / "tiny", orders["quality"])  # tables and modules that any state needs
    found = _memory_of(new_work(training), folder / "run", orders["quality"])
    of_ranks: list[Any] = [found]
    if dist.is_initialized():
        of_ranks = [None] * ranks()
        dist.all_gather_object(of_ranks, found)
    _write(folder / f"memory-{ranks()}.json", of_ranks)


def _memory_of(work: Work, run: Path, quality: str) -> dict[str, float]:
    """Return bytes above those of the state: at the peaks of saves and restores, and between two saves (``kept``).

    Also returns the CPU seconds that all ranks spend on each save.
    """
    configuration = None if quality == "lossless" else dq.GridConfiguration(scale=SCALE)
    chosen = dq.Quality(quality, configuration=configuration)  # type: ignore[arg-type]
    _train_at_random(work, STEPS)
    share = sum(tensor.nbytes for tensor in _locals(work))
    found: dict[str, float] = {"share": share, "largest": max(tensor.nbytes for tensor in _locals(work))}
    with dq.Checkpointer(run, work.model, work.optimizer, quality=chosen) as ckpt:
        before = memory_now()
        found["keyframe_cpu"] = cpu_of(lambda: ckpt.save(1).result())
        found["keyframe"] = peak_memory() - before
        found["kept"] = memory_now() - before  # what the next save conditions on
        _train_at_random(work, 1)
        memory_now()
        found["cpu"] = cpu_of(lambda: ckpt.save(2).result())
        found["delta"] = peak_memory() - before
    del ckpt
    work.optimizer.state.clear()
    with dq.Checkpointer(run, work.model, work.optimizer, quality=chosen) as ckpt:
        before = memory_now()
        ckpt.restore(2)
        found["restore"] = peak_memory() - before - (share - sum(p.nbytes for p in _parameters(work)))
    return found


def cpu_of(action: Callable[[], object]) -> float:
    """Return the CPU seconds that all ranks together spend on an action, in all threads. Collective."""
    _barrier()
    before = _cpu()
    action()
    own = torch.tensor(_cpu() - before, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(own)
    return float(own)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _local(tensor: Tensor) -> Tensor:
    detached: Any = tensor.detach()
    own: Tensor = detached.to_local() if isinstance(tensor, DTensor) else detached
    return own


def _parameters(work: Work) -> list[Tensor]:
    return [_local(parameter) for parameter in work.model.parameters()]


def _locals(work: Work) -> list[Tensor]:
    """Return what this rank holds of parameters and moments."""
    moments = [
        _local(value) for p in work.model.parameters() for value in work.optimizer.state[p].values() if value.ndim
    ]
    return _parameters(work) + moments


def _train_at_random(work: Work, steps: int) -> None:
    """Take steps with random gradients. Enough to measure memory and time."""
    for _ in range(steps):
        for parameter in work.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            _local(parameter.grad).normal_()
        work.optimizer.step()
        work.optimizer.zero_grad()


def _write(path: Path, found: Any) -> None:
    if rank() == 0:
        path.write_text(json.dumps(found))
