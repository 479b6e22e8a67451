"""A background write that fails is reported once, and does not hide other errors."""

import os
import shutil

import pytest
from small_runs import LOSSLESS, training_of
from training import bits, named_state

import dynaquant as dq


def test_a_failed_write_is_raised_once_at_the_next_save(tmp_path):
    model, optimizer = training_of()
    folder = tmp_path / "run"
    ckpt = dq.Checkpointer(folder, model, optimizer, **LOSSLESS)
    ckpt.save(1).result()
    shutil.move(folder, tmp_path / "away")
    failed = ckpt.save(2)
    with pytest.raises(dq.CheckpointError, match="no longer exists, so nothing was read or written"):
        ckpt.save(3)
    assert isinstance(failed.exception(), dq.CheckpointError)
    shutil.move(tmp_path / "away", folder)
    assert ckpt.save(3).result().step == 3
    ckpt.close()
    assert sorted(os.listdir(folder)) == ["step-000000000001.dqc", "step-000000000003.dqc"]
    assert bits(dq.load(folder)["optimizer"]) == bits(named_state(optimizer, model=model))


@pytest.mark.parametrize("call", [dq.Checkpointer.restore, dq.Checkpointer.records, dq.Checkpointer.steps])
def test_a_run_that_is_gone_is_not_taken_for_an_empty_one(call, tmp_path):
    folder = tmp_path / "run"
    with dq.Checkpointer(folder, *training_of(), **LOSSLESS) as ckpt:
        ckpt.save(1).result()
        shutil.move(folder, tmp_path / "away")
        with pytest.raises(dq.CheckpointError, match="no longer exists"):
            call(ckpt)
        folder.mkdir()
        with pytest.raises(dq.CheckpointError, match="another folder than the one"):
            call(ckpt)


def test_a_failed_write_is_raised_once_at_close(tmp_path):
    folder = tmp_path / "run"
    ckpt = dq.Checkpointer(folder, *training_of())
    folder.rmdir()
    folder.write_text("a file where the folder was")
    ckpt.save(1)
    with pytest.raises(dq.CheckpointError, match="run is another folder"):
        ckpt.close()
    ckpt.close()
    folder.unlink()
    with dq.Checkpointer(folder, *training_of()) as ckpt:
        assert ckpt.restore() is None


def test_a_write_error_does_not_hide_the_error_that_ended_training(tmp_path, caplog):
    folder = tmp_path / "run"

    def training() -> None:
        with dq.Checkpointer(folder, *training_of()) as ckpt:
            folder.rmdir()
            ckpt.save(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training()
    assert "the last checkpoint could not be written" in caplog.text
    with dq.Checkpointer(folder, *training_of()):
        pass


def test_leaving_the_with_block_waits_for_the_last_write(tmp_path):
    with dq.Checkpointer(tmp_path, *training_of()) as ckpt:
        future = ckpt.save(1)
    assert future.done()
    assert dq.load(tmp_path, 1)
