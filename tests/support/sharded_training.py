"""A small training under FSDP2, tensor parallel, both, or HSDP, for scripts that ``launched`` runs on several ranks."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding, blocks, and a head that is tied to the embedding."""

    def __init__(self, width=24, blocks=2, words=37):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model_of(layout, reshard=True, **sizes):
    """Return a model on all ranks. layout: one of plain, fsdp, tp, fsdp-tp, hsdp."""
    torch.manual_seed(0)
    model = Model(**sizes)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "plain":
        return model
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (ranks,))
    else:
        names = ("replicas", "shards") if layout == "hsdp" else ("shards", "tp")
        mesh = init_device_mesh("cpu", (2, ranks // 2) if layout == "hsdp" else (ranks // 2, 2), mesh_dim_names=names)
    if layout in ("tp", "fsdp-tp"):
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["shards"]
    if layout != "tp":
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def batches_of(step, count=4, words=37):
    generator = torch.Generator().manual_seed(step)
    found = []
    for _ in range(count):
        first = torch.randint(0, words, (6, 1), generator=generator)
        found.append((first + torch.arange(9) * 3) % words)
    return found


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(model, optimizer, step):
    """Take one step. All ranks see the same batch, so that any number of ranks takes the same one."""
    loss = loss_of(model, batches_of(step, 1)[0])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def whole(tensors):
    """Return tensors as a whole, by name."""
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for n, t in tensors.items()}


def state_of(model, optimizer):
    """Return weights and moments as a whole, by name."""
    found = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = value
    return whole(found)


def begin(seconds=60):
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))


def end():
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of Gloo sometimes abort a process that ends by itself


def folder():
    return Path(sys.argv[1])
