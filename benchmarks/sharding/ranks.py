"""What a rank of ``sharded.py`` does. Run by ``launching``, once for each rank.

python -m sharding.ranks FOLDER ORDERS, where ORDERS is a JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharding import dcp
from sharding.gpt import Training, Work, begin, new_work, rank
from sharding.measuring import measure, measure_memory

import dynaquant as dq


def train(folder: Path, orders: dict[str, Any]) -> None:
    """Train to the end, or until this process is killed. Rank 0 tells what it does, line by line.

    quality: of the checkpoints; None trains without checkpoints.
    """
    work = new_work(Training(**orders["training"]))
    steps, quality = work.training.steps, orders["quality"]
    if quality is None:
        _tell(folder, restored=0)
        for step in range(1, steps + 1):
            _tell(folder, step=step, loss=work.step(step))
        _tell(folder, final=work.final_loss())
        return
    with dq.Checkpointer(
        folder / "run",
        work.model,
        work.optimizer,
        extras={"scheduler": work.scheduler},
        evaluate=work.search_loss,
        every=orders["every"],
        quality=quality,
    ) as ckpt:
        start = ckpt.restore() or 0
        _tell(folder, restored=start)
        for step in range(start + 1, steps + 1):
            _tell(folder, step=step, loss=work.step(step))
            if ckpt.due(step):
                ckpt.save(step)
    _tell(folder, final=work.final_loss())


def replay(folder: Path, orders: dict[str, Any]) -> None:
    """Train from one step to another, between checkpoints of ``torch.distributed.checkpoint``."""
    work = new_work(Training(**orders["training"]))
    if orders["after"]:
        dcp.load(work, folder / f"dcp-{orders['after']}")
    _tell(folder, restored=orders["after"])
    for step in range(orders["after"] + 1, orders["until"] + 1):
        _tell(folder, step=step, loss=work.step(step))
    if orders["until"] == work.training.steps:
        _tell(folder, final=work.final_loss())
    else:
        dcp.save(work, folder / f"dcp-{orders['until']}")


def prepare(folder: Path, orders: dict[str, Any]) -> None:
    """Train in one process; keep the states of some steps, and the configuration that a search finds for the last."""
    work = new_work(Training(**orders["training"]))
    for step in range(1, max(orders["keep"]) + 1):
        work.step(step)
        if step in orders["keep"]:
            dcp.save(work, folder / f"dcp-{step}")
    found = _searched(work, folder)
    (folder / "prepared.json").write_text(json.dumps(found))


def _searched(work: Work, folder: Path) -> dict[str, Any]:
    with dq.Checkpointer(folder / "searched", work.model, work.optimizer, evaluate=work.search_loss) as ckpt:
        record = ckpt.save(1).result()
    assert isinstance(record.configuration, dq.GridConfiguration)
    return {"scale": record.configuration.scale, "dithered": record.configuration.dithered}


def _tell(folder: Path, **told: float) -> None:
    if rank() == 0:
        with (folder / "told.jsonl").open("a") as out:
            out.write(json.dumps(told) + "\n")


ACTIONS = {"train": train, "replay": replay, "prepare": prepare, "measure": measure, "memory": measure_memory}


def main() -> None:
    folder, orders = Path(sys.argv[1]), json.loads(sys.argv[2])
    here = folder / f"rank-{os.environ.get('RANK', '0')}.pid"
    here.with_suffix(".new").write_text(str(os.getpid()))
    here.with_suffix(".new").rename(here)
    begin()
    ACTIONS[orders["action"]](folder, orders)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of Gloo sometimes abort a process that ends by itself


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
