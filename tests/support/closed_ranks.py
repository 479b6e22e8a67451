"""Ranks that open and close a Checkpointer. Each reports how many threads of Gloo it has. Run by ``test_closed_ranks``.

Usage: closed_ranks.py DDP|FSDP2|forgotten FOLDER
"""

import atexit
import json
import os
import sys
from pathlib import Path

FOUND: dict[str, object] = {}


def report() -> None:
    """Write what was found, and how many threads are there when the process ends."""
    FOUND["at the end"] = threads_of_gloo()
    Path(sys.argv[2], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(FOUND))


atexit.register(report)  # before the imports that register others, so it is called after them

from datetime import timedelta  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import dynaquant as dq  # noqa: E402


def threads_of_gloo() -> int:
    """Count the threads in which Gloo runs operations."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)


def loss_of(model: nn.Module) -> torch.Tensor:
    inputs = torch.linspace(-1, 1, 32).reshape(4, 8)
    return (model(inputs) - 0.3).square().mean()


def main(kind: str, folder: Path) -> None:
    """Count the threads before, with an open Checkpointer, with one that failed to open, and after each is closed."""
    rank = dist.get_rank()
    model: nn.Module = nn.Linear(8, 1)
    if kind == "FSDP2":
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model).backward()
    optimizer.step()

    def open_run(name: str) -> dq.Checkpointer:
        return dq.Checkpointer(folder / name, model, optimizer, evaluate=lambda model: loss_of(model).item())

    FOUND["before"] = threads_of_gloo()
    checkpointer = open_run("run")
    checkpointer.save(1)
    FOUND["open"] = threads_of_gloo()
    if kind == "forgotten":  # the process ends with it open
        return
    try:
        open_run("run")
    except dq.DynaquantError as error:
        FOUND["held"] = str(error)
    FOUND["after the error"] = threads_of_gloo()
    checkpointer.close()
    FOUND["closed"] = threads_of_gloo()
    checkpointer.close()
    FOUND["records"] = len(checkpointer.records())
    if kind == "DDP" and rank == 0:  # alone, while the other rank is elsewhere
        dq.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "alone.dq")
    last = open_run("other")  # is closed after the training has destroyed its groups
    last.save(1)
    last.wait()
    dist.destroy_process_group()
    FOUND["destroyed"] = threads_of_gloo()
    last.close()
    FOUND["closed late"] = threads_of_gloo()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    main(sys.argv[1], Path(sys.argv[2]))
