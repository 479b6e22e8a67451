"""A small FSDP2 training whose state DCP saves to a run and loads from it. Run on several ranks by ``launched``.

dcp_ranks.py FOLDER save STEPS LAYOUT [QUALITY [FAULT]] | load STEP LAYOUT

FAULT: what happens to rank 1 in its second save, while it writes: ``killed`` or ``full disk``.
"""

import errno
import os
import signal
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dynaquant.interop.dcp import StorageReader, StorageWriter
from dynaquant.options import Keep


def training(layout):
    """Return a model and an optimizer. layout: fsdp, or tp (FSDP2 over tensor parallel of 2)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 70), nn.LayerNorm(70), nn.Linear(70, 33), nn.Linear(33, 1))
    with torch.no_grad():
        model[0].weight[35:] *= 50  # ranks choose different grids
    size = dist.get_world_size()
    if layout == "tp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if size > 2:
            fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def state_of(model, optimizer, step):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "progress": {"step": step, "epoch": 0.5, "losses": [1.0, 2.0]}}


def whole(state):
    """Return all tensors of a state, gathered, by name."""
    found = {}
    for name, tensor in state["model"].items():
        found[f"model.{name}"] = tensor
    for name, own in state["optimizer"]["state"].items():
        found.update({f"optimizer.state.{name}.{key}": tensor for key, tensor in own.items()})
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for n, t in found.items()}


class Faulty(DefaultSavePlanner):
    """A planner with which rank 1 fails when it looks up a tensor."""

    def __init__(self, fault):
        super().__init__()
        self._fault = fault

    def resolve_data(self, write_item):
        if dist.get_rank() == 1 and self._fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 1 and self._fault == "full disk":
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().resolve_data(write_item)


def save(state, step, writer, fault):
    expected = pytest.raises(CheckpointException, match="No space left") if fault == "full disk" else nullcontext()
    with expected:
        dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer, planner=Faulty(fault))


def main(folder, action, steps, layout, quality="lossless", fault=None):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model, optimizer = training(layout)
    if action == "save":
        writer = StorageWriter(folder / "run", quality=quality, keep=Keep(last=int(steps)))
        for step in range(1, int(steps) + 1):
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            state = state_of(model, optimizer, step)
            save(state, step, writer, fault if step == 2 else None)
            found = whole(state)
            if dist.get_rank() == 0:
                torch.save(found, folder / f"state-{step}.pt")
    else:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        state = state_of(model, optimizer, 0)
        dcp.load(state, storage_reader=StorageReader(folder / "run", int(steps)))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found = whole(state_of(model, optimizer, 0))
        assert state["progress"] == {"step": int(steps), "epoch": 0.5, "losses": [1.0, 2.0]}, state["progress"]
        if dist.get_rank() == 0:
            torch.save(found, folder / f"loaded-{dist.get_world_size()}-{layout}.pt")
    dist.destroy_process_group()


main(Path(sys.argv[1]), *sys.argv[2:])
os._exit(0)  # threads of Gloo sometimes abort a process that ends by itself
