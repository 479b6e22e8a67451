"""Which checkpoint ``restore`` and ``load`` choose: the newest that verifies, or the requested one."""

import errno
import logging
import os
from pathlib import Path

import pytest
from commands import call
from safetensors.torch import load_file
from small_runs import damage, saved, training_of, weights_of
from training import bits, train

import dynaquant as dq
from dynaquant.store.run import Run
from dynaquant.training.collect import collect


def test_an_empty_run_restores_nothing(tmp_path):
    model, optimizer = training_of()
    before = bits(collect({"model": model, "optimizer": optimizer}))
    with dq.Checkpointer(tmp_path / "new", model, optimizer) as ckpt:
        assert ckpt.restore() is None
    assert bits(collect({"model": model, "optimizer": optimizer})) == before


def test_restore_takes_the_requested_step(tmp_path):
    states = saved(tmp_path, [1, 2, 3])
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        for step in (2, 1, 3):
            assert ckpt.restore(step=step) == step
            assert bits(dict(weights_of(model))) == bits(dict(dq.load(tmp_path, step)["model"]))
        with pytest.raises(dq.CheckpointError, match=r"there is no checkpoint of step 9 \(available steps: 1, 2, 3\)"):
            ckpt.restore(step=9)
    assert len({repr(state) for state in states}) == 3


def test_restore_takes_the_newest_checkpoint_that_verifies_and_names_the_skipped_ones(tmp_path, caplog):
    saved(tmp_path, [1, 2, 3, 4, 5], keep=dq.Keep(keyframe_every=2))
    run = Run(tmp_path)
    damage(run.path(3))
    run.path(5).write_bytes(run.path(5).read_bytes()[:-1])
    with dq.Checkpointer(tmp_path, *training_of(1)) as ckpt, caplog.at_level(logging.WARNING, "dynaquant"):
        assert ckpt.restore() == 2
    said = [str(error) for error in ckpt.skipped]
    assert len(said) == 3
    assert said[0] == f"{run.path(5)}: truncated, or damaged at its end"
    assert said[1].startswith(f"checkpoint step 4: {run.path(3)}: tensor ")  # step 4 is a delta against it
    assert said[2].startswith(f"{run.path(3)}: tensor ")
    assert [record.getMessage() for record in caplog.records] == [
        f"restored step 2; skipped {reason}" for reason in said
    ]


def test_each_skipped_file_is_named_once(tmp_path):
    saved(tmp_path, [1, 2, 3, 4], keep=dq.Keep(keyframe_every=1))
    run = Run(tmp_path)
    for step in (2, 4):
        run.path(step).write_bytes(b"")
    damage(run.path(3))
    with dq.Checkpointer(tmp_path, *training_of(1)) as ckpt:
        assert ckpt.restore() == 1
    assert sorted(str(error).partition(": ")[0] for error in ckpt.skipped) == [str(run.path(s)) for s in (2, 3, 4)]


def test_an_undamaged_newest_checkpoint_is_restored_without_a_warning(tmp_path, caplog):
    saved(tmp_path, [1, 2])
    with dq.Checkpointer(tmp_path, *training_of(1)) as ckpt, caplog.at_level(logging.WARNING, "dynaquant"):
        assert ckpt.restore() == 2
    assert ckpt.skipped == []
    assert caplog.records == []


def test_a_run_without_a_checkpoint_that_verifies_is_an_error_and_changes_nothing(tmp_path):
    saved(tmp_path, [1, 2], keep=dq.Keep(keyframe_every=1))
    run = Run(tmp_path)
    damage(run.path(1))
    run.path(2).write_bytes(b"")
    model, optimizer = training_of(1)
    before = bits(collect({"model": model, "optimizer": optimizer}))
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt, pytest.raises(dq.CheckpointError) as caught:
        ckpt.restore()
    said = str(caught.value)
    assert said.startswith(f"{tmp_path}: no checkpoint of this run can be restored:\n  {run.path(2)}: ")
    assert f"\n  {run.path(1)}: tensor " in said
    assert "Nothing was changed." in said
    assert bits(collect({"model": model, "optimizer": optimizer})) == before


def test_weights_can_be_read_if_only_another_part_is_damaged(tmp_path):
    saved(tmp_path, [1])
    file = Run(tmp_path).file(1)
    stream = file.read(file.header.by_name["rng.torch"])
    content = bytearray(file.path.read_bytes())
    content[content.index(stream) + len(stream) // 2] ^= 1
    file.path.write_bytes(content)
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt, pytest.raises(dq.CheckpointError) as caught:
        ckpt.restore(only="model")
    assert "tensor rng.torch" in str(caught.value)
    for way in ("dq.load(run, step, part='model')", "dq.load_into(model, run, step)", "dynaquant export RUN STEP"):
        assert way in str(caught.value)
    dq.load_into(model, tmp_path, 1)
    call("export", tmp_path, 1, "-o", tmp_path / "model.safetensors")
    assert bits(dq.load(tmp_path, 1, part="model")) == bits(model.state_dict())
    assert {*load_file(tmp_path / "model.safetensors")} == {*model.state_dict()}


def test_training_continues_after_a_damaged_newest_checkpoint(tmp_path):
    saved(tmp_path, [1, 2, 3])
    damage(Run(tmp_path).path(3))
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        assert ckpt.restore() == 2
        train(model, optimizer)
        record = ckpt.save(3).result()
        assert record.parent == 2
        assert ckpt.restore() == 3
        assert ckpt.skipped == []


def test_load_takes_the_newest_or_the_given_step_and_names_damage(tmp_path):
    with pytest.raises(dq.CheckpointError, match="there are no checkpoints here"):
        dq.load(tmp_path)
    states = saved(tmp_path, [1, 2])
    assert bits(dq.load(tmp_path)) == states[1]
    assert bits(dq.load(tmp_path, 1)) == states[0]
    assert set(dq.load(tmp_path)) == {"model", "optimizer", "rng", "classes", "parameters"}
    damage(Run(tmp_path).path(2))
    with pytest.raises(dq.CheckpointError, match=r"step-000000000002\.dqc: tensor "):
        dq.load(tmp_path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ESTALE])
def test_a_file_that_the_system_does_not_open_is_not_damaged(tmp_path, monkeypatch, number):
    saved(tmp_path, [1, 2])
    model, optimizer = training_of(1)
    before, newest = bits(dict(weights_of(model))), Run(tmp_path).path(2)
    opened = os.open

    def refused(path, *rest, **options):
        if Path(path).name == newest.name:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *rest, **options)

    monkeypatch.setattr(os, "open", refused)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        with pytest.raises(dq.CheckpointError, match="It may be sound, so no older checkpoint was taken"):
            ckpt.restore()
        assert bits(dict(weights_of(model))) == before
        monkeypatch.undo()
        assert ckpt.restore() == 2
