"""Lossless resumes on two ranks, of weights in several layouts and of data loaders. Run by ``launched``.

resuming_ranks.py FOLDER [SCENARIO…]: writes what each scenario has found into ``rank-<rank>.json``: names of tensors
that differ from those of an undisturbed training.
"""

import json
import sys
import warnings
from functools import partial

import torch
import torch.distributed as dist
from sharded_training import begin, end, folder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from training import bits

import dynaquant as dq

STEPS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6))
        self.head = nn.Linear(6, 6, bias=False)

    def forward(self, images):
        return self.head(self.body(images))


class Parts(nn.Module):
    """A layer of which each rank holds some rows, in the layout of a transpose, as FSDP2 itself does not allow."""

    def __init__(self):
        super().__init__()
        own = torch.randn(48, 6).t() * (dist.get_rank() + 1) / 48
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.weight = nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)]))

    def forward(self, images):
        return images.flatten(1) @ self.weight.to_local().t()


def model_of(layout, wrap):
    torch.manual_seed(0)
    if wrap == "parts":
        return Parts()
    model = Net()
    if layout == "channels_last":
        model.to(memory_format=torch.channels_last)
    for layer in (model.body[4], model.head) if layout == "transposed" else ():
        layer.weight.data = layer.weight.data.t().contiguous().t()
    if wrap == "fsdp":
        fully_shard(model.body)
        return fully_shard(model)
    return DistributedDataParallel(model)


def train(model, optimizer, numbers):
    for number in numbers:
        generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
        images, classes = torch.randn(4, 3, 4, 4, generator=generator), torch.randint(0, 6, (4,), generator=generator)
        nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()
        optimizer.zero_grad()


def held(model, optimizer):
    """Return what this rank holds: the bits and strides of every tensor."""
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in found.items()}
    return {name: (bits(value), value.stride()) for name, value in local.items()}


def weights(wrap, layout, new, run):
    def training():
        model = model_of(layout, wrap)
        return model, new(model.parameters())

    whole = training()
    train(*whole, range(STEPS))
    with dq.Checkpointer(run, *whole, quality="lossless") as ckpt:
        ckpt.save(STEPS)
    train(*whole, range(STEPS, 2 * STEPS))
    resumed = training()
    with dq.Checkpointer(run, *resumed, quality="lossless") as ckpt:
        ckpt.restore()
    train(*resumed, range(STEPS, 2 * STEPS))
    wanted, found = held(*whole), held(*resumed)
    return [name for name in wanted if found[name] != wanted[name]]


def loader(workers, run):
    """Return the items that this rank's loader goes on with, undisturbed and after a restore."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    def training():
        model = nn.Linear(2, 1)
        sampler = StatefulDistributedSampler(range(24), dist.get_world_size(), dist.get_rank(), shuffle=True, seed=1)
        loader = StatefulDataLoader(range(24), batch_size=2, sampler=sampler, num_workers=workers)
        return model, torch.optim.SGD(model.parameters()), loader

    def items(loader, count):
        batches = iter(loader)
        return [next(batches).tolist() for _ in range(count)]

    model, optimizer, data = training()
    batches = iter(data)
    before = [next(batches).tolist() for _ in range(2 + dist.get_rank())]
    with dq.Checkpointer(run, model, optimizer, extras={"loader": data}, quality="lossless") as ckpt:
        ckpt.save(1)
    undisturbed = [batch.tolist() for batch in batches]
    model, optimizer, data = training()
    with dq.Checkpointer(run, model, optimizer, extras={"loader": data}, quality="lossless") as ckpt:
        ckpt.restore()
    return {"before": before, "undisturbed": undisturbed, "resumed": [batch.tolist() for batch in data]}


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def plain(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


KINDS = [("ddp", "transposed"), ("ddp", "channels_last"), ("fsdp", "contiguous"), ("parts", "transposed")]
SCENARIOS = {
    f"{wrap} {layout} {new.__name__}": partial(weights, wrap, layout, new)
    for wrap, layout in KINDS
    for new in (fused, plain)
}
SCENARIOS |= {f"loader {workers}": partial(loader, workers) for workers in (0, 1)}


def main(*names):
    begin()
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # by torchdata
    found = {}
    for name in names or SCENARIOS:
        try:
            found[name] = SCENARIOS[name](folder() / name.replace(" ", "-"))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        (folder() / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    end()


if __name__ == "__main__":
    main(*sys.argv[2:])
