"""A run over several processes, with replaced steps, chains, retention, damage, and a return to older steps."""

import os

import pytest
from small_runs import LOSSLESS, damage, saved, training_of
from training import bits, named_state, train

import dynaquant as dq
from dynaquant.store import verifying
from dynaquant.store.commit import WritableRun
from dynaquant.store.run import Run
from dynaquant.store.tags import set_tag, tags_of


def test_a_step_that_is_saved_again_is_replaced(tmp_path):
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer, **LOSSLESS) as ckpt:
        for step in (1, 1, 2, 2, 3, 1):
            train(model, optimizer)
            record = ckpt.save(step).result()
            wanted = bits(named_state(optimizer, model=model))
            assert record.parent != step
            assert bits(dq.load(tmp_path, step)["optimizer"]) == wanted
        assert ckpt.restore() == 1
        for step in (1, 2, 3):
            dq.load(tmp_path, step)
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:012d}.dqc" for step in (1, 2, 3)]


def test_a_step_is_not_replaced_if_its_dependent_deltas_cannot_be_recoded(tmp_path, monkeypatch):
    saved(tmp_path, [1, 2, 3])
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    recode = WritableRun.recode

    def failing(*_):
        raise dq.CheckpointError("re-coding would change the values")

    monkeypatch.setattr(WritableRun, "recode", failing)
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        ckpt.restore(step=1)
        with pytest.raises(dq.CheckpointError, match="step 2 was not replaced, because step 3 depends on it"):
            ckpt.save(2).result()
        assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before
        monkeypatch.setattr(WritableRun, "recode", recode)
        ckpt.save(2).result()
    assert verifying.damage(Run(tmp_path), 3) is None


def test_damaged_checkpoints_that_depend_on_each_other_can_be_replaced(tmp_path):
    saved(tmp_path, [1, 2, 3])
    damage(Run(tmp_path).path(2))
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        assert ckpt.restore() == 1
        record = ckpt.save(2).result()
        assert [note[:18] for note in record.notes] == ["step 3 was damaged"]
        assert ckpt.save(3).result().notes == []
        assert ckpt.restore() == 3


def test_a_save_after_restoring_an_old_step_is_the_newest_and_later_steps_stay(tmp_path):
    states = saved(tmp_path, [1, 2, 3, 4])
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer, **LOSSLESS) as ckpt:
        ckpt.restore(step=2)
        train(model, optimizer)
        record = ckpt.save(3).result()
        assert record.parent == 2
        wanted = bits(named_state(optimizer, model=model))
    for step in (1, 2, 4):
        assert bits(dq.load(tmp_path, step)) == states[step - 1]
    model, optimizer = training_of(2)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        assert ckpt.restore() == 3
        assert bits(named_state(optimizer, model=model)) == wanted
        assert [record.step for record in ckpt.records()] == [1, 2, 4, 3]


def test_keyframe_every_limits_chains_across_restarts(tmp_path):
    model, optimizer = training_of()
    for start in (0, 5, 7):
        with dq.Checkpointer(tmp_path, model, optimizer, keep=dq.Keep(keyframe_every=3)) as ckpt:
            ckpt.restore()
            for step in range(start, start + 5):
                train(model, optimizer)
                ckpt.save(step).result()
    run = Run(tmp_path)
    lengths = [len(run.chain(run.file(summary.step))) for summary in run.summaries()[0]]
    assert max(lengths) == 3
    assert lengths.count(1) <= 5


def test_retention_continues_in_a_new_process(tmp_path):
    model, optimizer = training_of()
    states = {}
    for start in (1, 4, 7):
        with dq.Checkpointer(tmp_path, model, optimizer, keep=dq.Keep(last=2, every=5)) as ckpt:
            assert ckpt.restore() == (start - 1 or None)
            for step in range(start, start + 3):
                train(model, optimizer)
                ckpt.save(step).result()
                states[step] = bits(dq.load(tmp_path, step))
    assert [summary.step for summary in Run(tmp_path).summaries()[0]] == [5, 8, 9]
    for step in (5, 8, 9):
        assert bits(dq.load(tmp_path, step)) == states[step]


def test_a_deleted_ancestor_makes_the_next_checkpoint_a_keyframe(tmp_path):
    saved(tmp_path, [1, 2])
    Run(tmp_path).path(1).unlink()
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        with pytest.raises(dq.CheckpointError, match="no checkpoint of this run can be restored"):
            ckpt.restore()
        assert ckpt.save(3).result().keyframe
    saved(tmp_path / "open", [])
    with dq.Checkpointer(tmp_path / "open", model, optimizer) as ckpt:
        for step in (1, 2):
            train(model, optimizer)
            ckpt.save(step).result()
        Run(tmp_path / "open").path(1).unlink()
        assert ckpt.save(3).result().keyframe
    assert dq.load(tmp_path / "open", 3)


def test_retention_never_deletes_the_last_checkpoint_that_loads(tmp_path):
    saved(tmp_path, [1, 2])
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer, keep=dq.Keep(last=2)) as ckpt:
        assert ckpt.restore() == 2
        damage(Run(tmp_path).path(2))
        train(model, optimizer)
        assert ckpt.save(3).result().notes
    with dq.Checkpointer(tmp_path, *training_of(2)) as ckpt:
        assert ckpt.restore() == 1


def test_if_few_are_kept_the_record_describes_the_recoded_file(tmp_path):
    model, optimizer = training_of(0)
    with dq.Checkpointer(tmp_path, model, optimizer, keep=dq.Keep(last=1)) as ckpt:
        for step in (1, 2, 3):
            train(model, optimizer)
            record = ckpt.save(step).result()
            assert (record.keyframe, record.total.stored) == (True, Run(tmp_path).path(step).stat().st_size)


def test_damaged_checkpoints_do_not_count_as_the_newest(tmp_path):
    saved(tmp_path, [1, 2, 3, 4, 5], keep=dq.Keep(keyframe_every=1))
    for step in (4, 5):
        damage(Run(tmp_path).path(step))
    model, optimizer = training_of(1)
    with dq.Checkpointer(tmp_path, model, optimizer, keep=dq.Keep(last=2, keyframe_every=1)) as ckpt:
        assert ckpt.restore() == 3
        train(model, optimizer)
        ckpt.save(6).result()
    assert dq.load(tmp_path, 3)
    assert dq.load(tmp_path, 6)
    with pytest.raises(dq.CheckpointError, match="there is no checkpoint of step 2"):
        dq.load(tmp_path, 2)


def test_saving_into_a_run_without_restoring_keeps_the_newest_and_the_tagged_of_the_earlier_training(tmp_path, caplog):
    saved(tmp_path, [1, 2, 3])
    run = Run(tmp_path)
    set_tag(run, "best", run.file(1))
    earlier = {step: bits(dq.load(tmp_path, step)["model"]) for step in (1, 3)}
    names = {step: f"earlier-{step}-{run.file(step).header.identity[:8]}" for step in (1, 3)}
    for _ in range(2):  # the second one finds no more to keep than the newest of the first
        with dq.Checkpointer(tmp_path, *training_of(1), keep=dq.Keep(last=1)) as ckpt:
            ckpt.save(3).result()
            ckpt.tag("best")
    assert {step: bits(dq.load(tmp_path, name)["model"]) for step, name in names.items()} == earlier
    assert len([tag for tag in tags_of(run) if tag.name.startswith("earlier-")]) == 3
    assert "holds 3 checkpoints, but none was restored" in caplog.text
    assert f"The newest of them and those with a tag stay: {names[1]}, {names[3]}." in caplog.text


def test_the_warning_of_another_training_counts_one_checkpoint(tmp_path, caplog):
    saved(tmp_path, [1])
    with dq.Checkpointer(tmp_path, *training_of(1)) as ckpt:
        ckpt.save(1)
    assert "holds 1 checkpoint, but none was restored" in caplog.text
