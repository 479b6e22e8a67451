"""Replicas of a training that wraps its model differently after every restart, for torchrun.

Usage: torchrun … wrapped_replicas.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import model_of, train

import dynaquant as dq


def compiled(module):
    return torch.compile(module, backend="eager")


WRAPPERS = {
    "DDP compile": lambda m: DistributedDataParallel(compiled(m)),
    "compile DDP": lambda m: compiled(DistributedDataParallel(m)),
    "DDP": DistributedDataParallel,
}


def loss(model):
    assert type(model) is nn.Sequential
    return nn.functional.cross_entropy(model.eval()(torch.arange(40)), torch.arange(40)).item()


class Position:
    """An extra whose state cannot be loaded on rank 1."""

    at = 3

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]
        if dist.get_rank() == 1 and self.at == 3:
            raise RuntimeError("no")


def state_after_a_failed_restore(folder: Path) -> tuple[int, bool]:
    """Restore while an extra fails on rank 1. Returns the position of the extra, and whether the model is unchanged."""
    model, position = DistributedDataParallel(model_of()), Position()
    with dq.Checkpointer(folder, model, extras={"position": position}, quality="lossless") as ckpt:
        ckpt.save(1).result()
        position.at = 5
        with torch.no_grad():
            model.module[0].weight.fill_(1.0)
        try:
            ckpt.restore()
        except (RuntimeError, dq.DynaquantError):
            return position.at, bool((model.module[0].weight == 1).all())
    raise AssertionError("it must have failed")


def main(folder: Path) -> None:
    report = {}
    try:
        dq.Checkpointer(folder / "other", model_of(24 + 8 * dist.get_rank()))
    except dq.StateError as error:
        report["other shapes"] = str(error)
    for number, (name, wrap) in enumerate(WRAPPERS.items(), 1):
        torch.manual_seed(number)
        model = wrap(model_of())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with dq.Checkpointer(folder / "run", model, optimizer, evaluate=loss) as ckpt:
            step = ckpt.restore() or number
            train(model, optimizer, 2)
            ckpt.save(step + 1).result()
        report[name] = [step, step + 1]
    report["failed"] = state_after_a_failed_restore(folder / "failing")
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
