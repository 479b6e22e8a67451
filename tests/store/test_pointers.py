"""A pointer stands for a checkpoint of a run, and never for another one."""

import json

import pytest
import torch
from torch import nn

import dynaquant as dq
from dynaquant.store.pointers import write_pointer
from dynaquant.store.run import Run


@pytest.fixture
def pointer(tmp_path):
    """A pointer to step 1 of a run with two steps."""
    model = nn.Linear(4, 4)
    with dq.Checkpointer(tmp_path / "folder" / "run", model, quality="lossless") as ckpt:
        ckpt.save(1)
        nn.init.zeros_(model.weight)
        ckpt.save(2)
    path = tmp_path / "folder" / "a.ckpt"
    write_pointer(path, Run(tmp_path / "folder" / "run").file(1))
    return path


def test_a_pointer_is_read_like_its_checkpoint_also_after_its_folder_has_moved(pointer):
    assert dq.load(pointer)["model"]["weight"].any()
    moved = pointer.parent.rename(pointer.parent.with_name("moved"))
    loaded = nn.Linear(4, 4)
    dq.load_into(loaded, moved / "a.ckpt")
    assert torch.equal(loaded.weight, dq.load(moved / "run", 1)["model"]["weight"])


def test_a_pointer_to_a_step_that_was_saved_again_is_an_error(pointer):
    with dq.Checkpointer(pointer.parent / "run", nn.Linear(4, 4), quality="lossless") as ckpt:
        ckpt.save(1)
    with pytest.raises(dq.CheckpointError, match="another checkpoint as step 1"):
        dq.load(pointer)


@pytest.mark.parametrize("change", [{"run": "/etc"}, {"run": 3}, {"step": -1}, {"identity": None}])
def test_a_damaged_pointer_is_an_error(pointer, change):
    pointer.write_text(json.dumps({**json.loads(pointer.read_text()), **change}))
    with pytest.raises(dq.CheckpointError, match="damaged"):
        dq.load(pointer)
    pointer.write_text(pointer.read_text()[:60])
    with pytest.raises(dq.CheckpointError, match="damaged"):
        dq.load(pointer)
