"""Trainings on two ranks whose metric averages over them. Run by ``launched``.

averaging_ranks.py FOLDER: writes, for each metric, what each save has found into ``rank-<rank>.json``.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from searches import training_of
from sharded_training import begin, end
from torch import nn
from training import train

import dynaquant as dq

OPTIONS = {"higher_is_better": True, "quality": dq.Quality(max_degradation=0.02)}


def accuracy(model: nn.Module) -> float:
    """Return the share of 40 classes that are right; each rank looks at half of them."""
    own = torch.arange(40)[dist.get_rank() :: 2]
    right = (model.eval()(own).argmax(-1) == own).double().sum()
    dist.all_reduce(right)
    return float(right / 40)


def constant(_: nn.Module) -> float:
    """Return the same number for all weights."""
    total = torch.ones(())
    dist.all_reduce(total)
    return float(total)


def saves(path: Path, evaluate) -> list[dict[str, object]]:
    model, optimizer = training_of()
    found = []
    with dq.Checkpointer(path, model, optimizer, evaluate=evaluate, **OPTIONS) as ckpt:
        for step in range(1, 4):
            train(model, optimizer, 5)
            record = ckpt.save(step).result()
            found.append({"judged_by": record.judged_by, "notes": record.notes, "limit": record.limit})
    return found


def main() -> None:
    begin()
    path = Path(sys.argv[1])
    found = {metric.__name__: saves(path / metric.__name__, metric) for metric in (accuracy, constant)}
    (path / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    end()


if __name__ == "__main__":
    main()
