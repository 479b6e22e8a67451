"""States whose tensors lie in pieces on the ranks, and a script in which DCP saves and loads them.

pieces.py FOLDER save QUALITY HOLDERS ROWS | load HOLDERS ROWS

HOLDERS: how many ranks hold one copy of the tensors between them. ROWS: of a piece. Run on several ranks by
``launched``, with a PyTorch that has ``CheckpointableTensor``.
"""

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from dynaquant.interop.dcp import StorageReader, StorageWriter

SHAPE = (70, 48)
STEPS = (1, 2, 3)


def in_pieces(whole: Tensor, rows: Sequence[tuple[int, int]]) -> Tensor:
    """Return a tensor that holds some rows of another one, and says so as DCP's ``CheckpointableTensor`` does.

    rows: begin and end of each piece. Before each piece lies a row of NaN.
    """
    sizes = [end - begin for begin, end in rows]
    found = torch.full((sum(sizes) + len(sizes), whole.shape[1]), torch.nan)
    at = [sum(sizes[:i]) + i + 1 for i in range(len(sizes))]
    for start, (begin, end) in zip(at, rows, strict=True):
        found[start : start + end - begin] = whole[begin:end]
    found.global_shape = tuple(whole.shape)
    found.global_offsets = tuple((begin, 0) for begin, _ in rows)
    found.local_offsets = tuple((start, 0) for start in at)
    found.local_sizes = tuple((size, whole.shape[1]) for size in sizes)
    return found


def state_of(step: int, divided: Callable[[Tensor], Tensor] = lambda whole: whole) -> dict:
    """Return the state of a training at a step. Its weights and moments differ much between pieces."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.logspace(-2, 2, SHAPE[0])[:, None]
    weight = torch.randn(SHAPE, generator=generator)
    first = torch.randn(SHAPE, generator=generator) * rows
    second = first.square() * torch.rand(SHAPE, generator=generator) * 4 + rows.square()
    generator.manual_seed(step)
    weight += 1e-3 * torch.randn(SHAPE, generator=generator)
    moments = {"step": torch.tensor(float(step)), "exp_avg": divided(first), "exp_avg_sq": divided(second)}
    return {"model": {"weight": divided(weight)}, "optimizer": {"state": {"weight": moments}}}


def tensors_of(state: dict) -> dict[str, Tensor]:
    return {"weight": state["model"]["weight"], **state["optimizer"]["state"]["weight"]}


def main(folder: Path, action: str, *arguments: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    holders, rows = map(int, arguments[-2:])
    begins = range(0, SHAPE[0], rows)[dist.get_rank() % holders :: holders]
    own = [(begin, min(begin + rows, SHAPE[0])) for begin in begins]

    def divided(whole: Tensor) -> Tensor:
        return in_pieces(whole, own)

    if action == "save":
        writer = StorageWriter(folder, quality=arguments[0])
        for step in STEPS:
            dcp.save(state_of(step, divided), checkpoint_id=f"step-{step}", storage_writer=writer)
    else:
        for step in STEPS:
            state = state_of(0, divided)
            dcp.load(state, storage_reader=StorageReader(folder, step))
            wanted = torch.load(folder.parent / f"wanted-{step}.pt")
            for name, tensor in tensors_of(state).items():
                expected = divided(wanted[name]) if tensor.ndim else wanted[name]
                assert torch.equal(tensor.view(torch.int32), expected.view(torch.int32)), (step, name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    os._exit(0)  # threads of Gloo sometimes abort a process that ends by itself
