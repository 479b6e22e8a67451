"""Replicas of a training that is large enough for all ranks to write. Run by ``launched``.

sharing_replicas.py FOLDER [apart]: trains, saves and restores; "apart" lets a weight differ between ranks.
"""

import sys

import torch
import torch.distributed as dist
from sharded_training import begin, end, folder
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dynaquant as dq


def training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1200), nn.BatchNorm1d(1200), nn.Linear(1200, 512))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return DistributedDataParallel(model), optimizer


def main(apart=""):
    begin()
    (model, optimizer), rank = training(), dist.get_rank()
    with dq.Checkpointer(folder() / "run", model, optimizer) as ckpt:
        for step in (1, 2, 3):
            torch.manual_seed(step + 10 * rank)
            inputs = torch.randn(32, 512)
            (model(inputs) - inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if apart:
                with torch.no_grad():
                    model.module[2].weight += 1e-3 * rank
            records = dist.get_world_size() * [None]
            dist.all_gather_object(records, ckpt.save(step).result())
            assert all(record.identity == records[0].identity for record in records)
        wanted = dq.load(folder() / "run")
        if rank > 0 and apart:
            own = wanted["ranks"][rank]["tensors"]
            assert own.keys() == {"model.2.weight"}
            wanted["model"]["2.weight"] = own["model.2.weight"]
        if apart:
            assert torch.equal(wanted["model"]["2.weight"], model.module[2].weight)
    model, optimizer = training()
    with dq.Checkpointer(folder() / "run", model, optimizer) as ckpt:
        assert ckpt.restore() == 3
        ckpt.save(4).result()
    found = model.module.state_dict()
    assert all(torch.equal(found[name], wanted["model"][name]) for name in found)
    end()


main(*sys.argv[2:])
