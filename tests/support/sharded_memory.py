"""Measures the memory that saves and a restore of a sharded training take on each rank. Run by ``launched``.

sharded_memory.py FOLDER: writes bytes to ``rank-<rank>.json``.
"""

import ctypes
import json
from pathlib import Path

import torch
import torch.distributed as dist
from sharded_training import begin, end, folder
from torch import nn
from torch.distributed.fsdp import fully_shard

import dynaquant as dq

TENSORS, ROWS, COLUMNS = 12, 2_000, 1_000


def resident(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(kind)).split()[1])


def training(width=COLUMNS, tensors=TENSORS):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, ROWS, bias=False) for _ in range(tensors)))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        first, second = 1e-3 * torch.randn_like(parameter), 1e-6 * torch.rand_like(parameter)
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": first, "exp_avg_sq": second}
    return model, optimizer


def peak(action):
    """Return the bytes that an action takes at most, beyond what was in use."""
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    action()
    return resident("VmHWM") - before


def metric(_):
    return 1.0


def main():
    begin()
    small = training(8, 1)
    with dq.Checkpointer(folder() / "small", *small, evaluate=metric) as ckpt:  # allocates what is needed once
        ckpt.save(0).result()
        ckpt.restore()
    model, optimizer = training()
    with dq.Checkpointer(folder() / "run", model, optimizer, evaluate=metric) as ckpt:

        def saves():
            for step in range(3):
                ckpt.save(step).result()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.01)

        found = {"saves": peak(saves), "restore": peak(ckpt.restore)}
    (folder() / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    end()


main()
