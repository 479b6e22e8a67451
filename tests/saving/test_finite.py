"""A training that diverges says so, and keeps its last good checkpoints."""

import pytest
import torch
from small_runs import training_of
from training import bits, train

import dynaquant as dq


def same(_: torch.nn.Module) -> float:
    return 0.5  # as an accuracy, which is a number for a model of NaN, too


@pytest.mark.parametrize("quality", ["lossless", "balanced", "published"])
def test_a_diverged_training_keeps_its_newest_finite_checkpoints(tmp_path, caplog, quality):
    model, optimizer = training_of()
    options = {"quality": dq.Quality(method="published")} if quality == "published" else {"quality": quality}
    with dq.Checkpointer(tmp_path, model, optimizer, keep=dq.Keep(last=2), **options) as ckpt:
        for step in range(1, 8):
            train(model, optimizer)
            if step == 4:
                with torch.no_grad():
                    next(model.parameters()).view(-1)[0] = torch.nan
            record = ckpt.save(step).result()
        assert ckpt.steps() == [2, 3, 6, 7]
    said = "training has diverged. The newest checkpoint with finite weights is step 3"
    assert [said in message for message in caplog.messages].count(True) == 1
    assert any(said in note for note in record.notes)
    caplog.clear()
    good = bits(dq.load(tmp_path, 3)["model"])
    with dq.Checkpointer(tmp_path, model, optimizer, keep=dq.Keep(last=2), **options) as ckpt:
        assert ckpt.restore() == 7
        assert "The newest checkpoint with finite weights is step 3: restore(step=3)" in caplog.text
        caplog.clear()
        assert ckpt.restore(step=3) == 3
        assert bits(model.state_dict()) == good
        for step in (4, 5, 6):
            train(model, optimizer)
            ckpt.save(step).result()
        assert ckpt.steps() == [5, 6]
    assert "finite" not in caplog.text


def test_infinite_values_in_a_buffer_are_no_divergence(tmp_path, caplog):
    model, optimizer = training_of()
    model.register_buffer("mask", torch.full((4,), -torch.inf))
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        ckpt.save(1)
    assert "finite" not in caplog.text
