"""Trains with and without saves, in several ways of FSDP2, and compares. Run by ``launched``.

sharded_undisturbed.py FOLDER: writes what differs into ``rank-<rank>.json``.
"""

import json

import torch
import torch.distributed as dist
from sharded_training import batches_of, begin, end, folder, loss_of, model_of, state_of, train
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import dynaquant as dq

STEPS = 4


def plain(reshard=True):
    model = model_of("fsdp", reshard)
    return model, model, train


def mixed():
    model = model_of("plain")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy), model, train


def prefetched():
    model = model_of("fsdp")
    first, second = model.blocks
    model.set_modules_to_forward_prefetch([first])
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    return model, model, train


def compiled():
    model = model_of("fsdp")
    return torch.compile(model, backend="aot_eager"), model, train


def validated():
    """A validation comes right before each save, so the parameters of the root are gathered then."""

    def step(model, optimizer, number):
        loss = train(model, optimizer, number)
        with torch.no_grad():
            return loss, float(loss_of(model, batches_of(-number, 1)[0]))

    model = model_of("fsdp", False)
    return model, model, step


def accumulated():
    """A save comes between two backward passes, so there are gradients."""

    def step(model, optimizer, number, save=lambda: None):
        loss_of(model, batches_of(number, 1)[0]).backward()
        save()
        return train(model, optimizer, -number)

    model = model_of("fsdp")
    return model, model, step


def unfinished():
    """A save comes between the forward and the backward pass."""

    def step(model, optimizer, number, save=lambda: None):
        loss = loss_of(model, batches_of(number, 1)[0])
        save()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    model = model_of("fsdp", False)
    return model, model, step


WAYS = {
    "fsdp": plain,
    "not resharded": lambda: plain(False),
    "mixed precision": mixed,
    "prefetched": prefetched,
    "compiled": compiled,
    "validated": validated,
    "accumulated": accumulated,
    "unfinished": unfinished,
}


def with_backward(model):
    """A metric whose backward pass would leave gradients."""
    with torch.enable_grad():
        loss = loss_of(model, batches_of(10_000, 1)[0])
        loss.backward()
    return float(loss.detach())


def trained(way, run=None):
    model, inner, step = way()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    numbers, seen = [], []
    inside = way in (accumulated, unfinished)
    metric = with_backward if way is plain else dq.LossOn(batches_of(10_000), loss_of)
    ckpt = run and dq.Checkpointer(run, model, optimizer, evaluate=metric)
    for number in range(1, STEPS + 1):

        def save(number=number):
            if ckpt:
                seen.append(ckpt.save(number).result())

        numbers.append(step(model, optimizer, number, save) if inside else step(model, optimizer, number))
        if not inside:
            save()
    if ckpt:
        ckpt.close()
    for child in inner.modules():
        if isinstance(child, FSDPModule):
            child.reshard()
    return numbers, state_of(inner, optimizer), seen


def main():
    begin()
    found = {}
    for name, way in WAYS.items():
        alone, wanted, _ = trained(way)
        beside, state, records = trained(way, folder() / name.replace(" ", "-"))
        different = [key for key in wanted if not torch.equal(wanted[key], state[key])]
        evaluated = [record.judged_by for record in records]
        found[name] = {"losses": alone == beside, "different": different, "judged_by": evaluated}
    (folder() / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    end()


main()
