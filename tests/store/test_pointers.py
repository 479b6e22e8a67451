"""A pointer stands for a checkpoint of a run, and never for another one."""

import json

import pytest
import torch
from torch import nn

import dynaquant as dq
from dynaquant.errors import RunChangedError
from dynaquant.store.pointers import POINTER_FILE, RUN_FOLDER, read_pointer, run_at, write_pointer
from dynaquant.store.run import Run


@pytest.fixture
def pointer(tmp_path):
    """A pointer to step 1 of a run with two steps."""
    model = nn.Linear(4, 4)
    with dq.Checkpointer(
        tmp_path / "folder" / "run", model, quality="lossless", keep=dq.Keep(keyframe_every=1)
    ) as ckpt:
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
    with pytest.raises(dq.CheckpointError, match="step 1 was saved again"):
        dq.load(pointer)


@pytest.mark.parametrize("change", [{"run": "/etc"}, {"run": 3}, {"step": -1}, {"identity": None}])
def test_a_damaged_pointer_is_an_error(pointer, change):
    pointer.write_text(json.dumps({**json.loads(pointer.read_text()), **change}))
    with pytest.raises(dq.CheckpointError, match="damaged"):
        dq.load(pointer)
    pointer.write_text(pointer.read_text()[:60])
    with pytest.raises(dq.CheckpointError, match="damaged"):
        dq.load(pointer)


def test_a_reader_follows_a_pointer_that_is_replaced_while_it_is_read(pointer):
    run = Run(pointer.parent / "run")
    old = read_pointer(pointer)
    write_pointer(pointer, run.file(2))
    run.path(1).unlink()
    with pytest.raises(RunChangedError):
        old.file()
    assert not dq.load(pointer)["model"]["weight"].any()


def test_a_folder_stands_for_the_checkpoint_of_the_pointer_in_it(pointer):
    folder = pointer.parent / "step_1"
    folder.mkdir()
    write_pointer(folder / POINTER_FILE, Run(pointer.parent / "run").file(1))
    assert torch.equal(dq.load(folder)["model"]["weight"], dq.load(pointer)["model"]["weight"])
    with pytest.raises(ValueError, match="single checkpoint"):
        dq.load(folder, 2)
    assert run_at(folder).steps() == [1, 2]
    (folder / POINTER_FILE).write_text("{}")
    with pytest.raises(dq.CheckpointError, match="damaged"):
        dq.load(folder)


def test_a_folder_without_checkpoints_stands_for_the_run_in_it(pointer):
    run = pointer.parent / "run"
    run.rename(pointer.parent / RUN_FOLDER)
    assert not dq.load(pointer.parent)["model"]["weight"].any()  # the newest
    assert dq.load(pointer.parent, 1)["model"]["weight"].any()
    assert run_at(pointer.parent / "other").folder == pointer.parent / "other"
