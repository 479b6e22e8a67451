"""The GPT that ``sharded.py`` trains: under FSDP2 and tensor parallel together, or in one process.

All layouts take the same batches, so their losses differ only by the order in which PyTorch adds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from promise_small import Batch, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import OneCycleLR
from workloads import shakespeare

from dynaquant import LossOn
from dynaquant.demo.models import GPT

CONTEXT = 64
"""Characters in a window of text."""
TENSOR_PARALLEL = 2
"""Ranks that hold the columns or rows of one matrix between them. FSDP2 divides the rest."""
TIMEOUT = timedelta(seconds=120)
"""After which a rank gives up waiting for another one."""


@dataclass(frozen=True)
class Training:
    """What is trained. data: the folder with the text. steps: of the schedule. batch: windows in a batch.

    final: windows of the metric at the end. search: batches of the metric of searches.
    """

    data: str
    seed: int
    steps: int
    width: int = 128
    layers: int = 3
    heads: int = 4
    batch: int = 8
    rate: float = 2e-3
    final: int = 1024
    search: int = 8


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def begin() -> None:
    """Join the other ranks, if there are any. PyTorch runs one thread, so that its sums have one order."""
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", timeout=TIMEOUT)


def meshes() -> DeviceMesh | None:
    """Return the ranks as a grid of FSDP2 and tensor parallel; None for one process."""
    if ranks() == 1:
        return None
    shape = (ranks() // TENSOR_PARALLEL, TENSOR_PARALLEL)
    return init_device_mesh("cpu", shape, mesh_dim_names=("shards", "columns"))


def new_gpt(training: Training, vocabulary: int, mesh: DeviceMesh | None) -> nn.Module:
    """Return the model at its first step, divided among the ranks of a mesh."""
    torch.manual_seed(training.seed)
    model = GPT(vocabulary, CONTEXT, training.width, training.layers, training.heads)
    if mesh is None:
        return model
    plan: dict[str, ParallelStyle] = {
        "qkv": ColwiseParallel(output_layouts=Replicate()),
        "proj": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh["columns"], plan)
        fully_shard(block, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    return model


@dataclass(frozen=True)
class Work:
    """A training at work on this rank. text: token ids to train on. mesh: None for one process."""

    training: Training
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: OneCycleLR
    text: Tensor
    mesh: DeviceMesh | None
    search_loss: LossOn
    final_loss: Callable[[], float]

    def step(self, step: int) -> float:
        """Train for one step and return the loss on its whole batch. The batch follows from seed and step."""
        self.model.train()
        loss = loss_of(self.model, self._own(self._batch(step)))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return self._mean(float(loss.detach()))

    def _batch(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(1_000_003 * self.training.seed + step)
        starts = torch.randint(len(self.text) - CONTEXT - 1, (self.training.batch, 1), generator=generator)
        window = self.text[starts + torch.arange(CONTEXT + 1)]
        return window[:, :-1], window[:, 1:]

    def _own(self, batch: Batch) -> Batch:
        """Return the windows of this rank. Ranks of one tensor-parallel group have the same."""
        if self.mesh is None:
            return batch
        place, places = self.mesh["shards"].get_local_rank(), self.mesh["shards"].size()
        inputs, targets = (part.chunk(places)[place] for part in batch)
        return inputs, targets

    def _mean(self, loss: float) -> float:
        if self.mesh is None or self.mesh["shards"].size() == 1:
            return loss
        both = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(both, group=self.mesh["shards"].get_group())
        return float(both) / self.mesh["shards"].size()


def new_work(training: Training) -> Work:
    """Return a training before its first step, on this rank. Collective."""
    train, held_out, vocabulary = shakespeare(Path(training.data))
    mesh = meshes()
    model = new_gpt(training, vocabulary, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.rate, weight_decay=0.1, betas=(0.9, 0.99))
    scheduler = OneCycleLR(optimizer, training.rate, total_steps=training.steps, pct_start=0.1, cycle_momentum=False)
    split = int(0.2 * len(held_out))  # searches see this part, the metric at the end the other one
    seen = _windows(held_out[:split], training.search * training.batch, training.batch)
    unseen = _windows(held_out[split:], training.final, 4 * training.batch)

    def final_loss() -> float:
        model.eval()
        with torch.no_grad():
            losses = [(float(loss_of(model, batch)), len(batch[0])) for batch in unseen]
        return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)

    return Work(training, model, optimizer, scheduler, train, mesh, LossOn(seen, loss_of), final_loss)


def _windows(tokens: Tensor, count: int, size: int) -> list[Batch]:
    """Return batches of evenly spaced windows and the same windows one character later."""
    starts = torch.linspace(0, len(tokens) - CONTEXT - 1, count).long()
    window = tokens[starts[:, None] + torch.arange(CONTEXT + 1)]
    return list(zip(torch.split(window[:, :-1], size), torch.split(window[:, 1:], size), strict=True))
