"""Trainings on two ranks that do not see, hold or do the same. Run by ``launched``.

ranks_apart.py FOLDER [SCENARIO…]: writes what each scenario has found into ``rank-<rank>.json``.
"""

import json
import sys
from functools import partial

import torch
import torch.distributed as dist
from sharded_training import begin, end, folder, model_of, state_of, train

import dynaquant as dq


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def text_of(action):
    """Return the error that an action raises, as text, or its result."""
    try:
        return action()
    except dq.DynaquantError as error:
        return f"{type(error).__name__}: {error}"


# Ranks do not see the same folder.


def own_folders(layout, run):
    model = model_of(layout)
    return text_of(lambda: dq.Checkpointer(run / f"rank-{dist.get_rank()}", model, adam(model)))


def other_checkpoints(layout, run):
    """Rank 1 sees another run of the same steps from the moment on at which the Checkpointer is open."""
    for seed in (1, 2):
        model = model_of(layout)
        optimizer = adam(model)
        train(model, optimizer, seed)
        with dq.Checkpointer(run / f"run-{seed}", model, optimizer) as ckpt:
            ckpt.save(10).result()
    link = run / f"seen-by-{dist.get_rank()}"
    link.symlink_to(run / "run-1")
    before = state_of(model, optimizer)
    with dq.Checkpointer(link, model, optimizer) as ckpt:
        if dist.get_rank() == 1:
            link.unlink()
            link.symlink_to(run / "run-2")
        found = text_of(ckpt.restore)
    after = state_of(model, optimizer)
    return {"restored": found, "unchanged": all(torch.equal(after[name], before[name]) for name in before)}


SCENARIOS = {
    **{f"own folders: {layout}": partial(own_folders, layout) for layout in ("plain", "fsdp")},
    **{f"other checkpoints: {layout}": partial(other_checkpoints, layout) for layout in ("plain", "fsdp")},
}


def main(*names):
    begin()
    found = {}
    for name in names or SCENARIOS:
        run = folder() / name.replace(": ", "-").replace(" ", "-")
        run.mkdir(exist_ok=True)
        try:
            found[name] = SCENARIOS[name](run)
        except Exception as error:
            found[name] = {"raised": f"{type(error).__name__}: {error}"}
        (folder() / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    end()


main(*sys.argv[2:])
