"""Restores the newest checkpoint, if there is one, trains and saves. Run by ``launched``.

sharded_ranks.py FOLDER STEPS LAYOUT [QUALITY]
"""

import sys

import torch
import torch.distributed as dist
from sharded_training import batches_of, begin, end, folder, loss_of, model_of, state_of, train

import dynaquant as dq


def check(model, optimizer, stored):
    """Compare what was restored with what a process without ranks reads."""
    found = state_of(model, optimizer)
    wanted = {f"model.{name}": tensor for name, tensor in stored["model"].items()}
    for name, slots in stored["optimizer"]["state"].items():
        wanted.update({f"{name.removeprefix('model.')}.{key}": value for key, value in slots.items()})
    different = [name for name in found if not torch.equal(found[name], wanted[name])]
    assert not different, different


def main(steps, layout, quality="lossless"):
    begin()
    model = model_of(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    evaluate = dq.LossOn(batches_of(10_000), loss_of)
    rank = dist.get_rank() if dist.is_initialized() else 0
    with dq.Checkpointer(folder() / "run", model, optimizer, evaluate=evaluate, quality=quality) as ckpt:
        start = ckpt.restore() or 0
        if start:
            check(model, optimizer, dq.load(folder() / "run", start))
        for step in range(start + 1, start + int(steps) + 1):
            train(model, optimizer, step)
            before = state_of(model, optimizer)
            ckpt.save(step).result()
            after = state_of(model, optimizer)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)
            if rank == 0:
                torch.save(after, folder() / f"state-{step}.pt")
    end()


main(*sys.argv[2:])
