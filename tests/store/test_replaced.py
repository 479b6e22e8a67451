"""A step that is saved again: the earlier checkpoint stays if a tag names it or ``Keep(best=…)`` holds it."""

import logging
import os

import pytest
import torch
from commands import call, data
from faults import CALLS, at_call
from sharded_checkpoints import commit_sharded, random_state
from small_runs import LOSSLESS, adamw, damage, loss_of, training_of
from torch import nn
from training import bits, train

import dynaquant as dq
from dynaquant.store.commit import WritableRun
from dynaquant.store.retention import Retention, prepare_replacement, prune
from dynaquant.store.tags import remove_tag, set_tag, tagged_file, tags_of

FIXED = {"quality": dq.Quality(configuration=dq.GridConfiguration(-80))}


def lines(folder, **options):
    """Save 300 to 500, tag 400 as best, restore 300, and save 400 again. Returns the two states of step 400."""
    model, optimizer = training_of()
    with dq.Checkpointer(folder, model, optimizer, **options) as ckpt:
        for step in (300, 400, 500):
            train(model, optimizer)
            ckpt.save(step)
        ckpt.wait()
        ckpt.tag("best", 400)
        earlier, later = bits(dq.load(folder, 400)), bits(dq.load(folder, 500))
        ckpt.restore(300)
        train(model, optimizer, 5)
        ckpt.save(400).result()
    assert bits(dq.load(folder, 500)) == later
    return earlier, bits(dq.load(folder, 400))


@pytest.mark.parametrize("options", [{}, LOSSLESS], ids=["grid", "lossless"])
def test_a_tagged_checkpoint_stays_when_its_step_is_saved_again(tmp_path, caplog, options):
    caplog.set_level(logging.INFO, "dynaquant")
    run, out = tmp_path / "run", tmp_path / "out.safetensors"
    earlier, again = lines(run, **options)
    assert earlier != again
    assert bits(dq.load(run, "best")) == earlier
    assert "replaced step 400" in caplog.messages
    assert "the earlier checkpoint of step 400 is kept; its tag is best" in caplog.messages

    model, optimizer = training_of(1)
    with dq.Checkpointer(run, model, optimizer, **options) as ckpt:
        assert ckpt.restore("best") == 400
        assert f"restored step 400 of {run}" in caplog.messages
        if options == LOSSLESS:
            assert bits(model.state_dict()) == bits(dq.load(run, "best")["model"])
        ckpt.save(401).result()  # goes on from the earlier one
    assert bits(dq.load(run, "best")) == earlier
    assert bits(dq.load(run, 400)) == again

    call("export", run, "best", "-o", out)
    assert out.exists()
    assert "replaced-000000000400" in call("show", run, "best")
    rows = [(row["step"], row["tags"], row["replaced"]) for row in data("log", run)]
    assert sorted(rows) == [
        *((300, [], False), (400, [], False), (400, ["best"], True)),
        *((401, [], False), (500, [], False)),
    ]
    assert data("verify", run) == {"sound": 5, "damaged": [], "unreadable": []}
    call("branch", run, "best", tmp_path / "branch")
    assert bits(dq.load(tmp_path / "branch", 400)) == earlier


def test_a_replaced_checkpoint_does_without_its_lossless_copy(tmp_path, caplog):
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer, keep=dq.Keep(lossless_copy=True)) as ckpt:
        for _ in range(2):
            train(model, optimizer)
            ckpt.save(400).result()
            ckpt.tag("first") if not tags_of(WritableRun(tmp_path)) else None
        assert ckpt.restore("first") == 400
    assert not [entry for entry in caplog.records if entry.levelno >= logging.WARNING]


def test_a_replaced_checkpoint_goes_with_its_last_tag(tmp_path):
    lines(tmp_path)
    run = WritableRun(tmp_path)
    set_tag(run, "also", tagged_file(run, "best"))
    remove_tag(run, "best")
    prune(run, Retention())
    assert tagged_file(run, "also").header.step == 400
    assert call("tag", tmp_path) == "also: step 400, the checkpoint before the step was saved again\n"
    assert "prune deletes its checkpoint" in call("tag", tmp_path, "also", "--delete")
    call("prune", tmp_path, "--keep-last", 9)
    assert run.replaced() == ([], [])
    assert run.steps() == [300, 500, 400]


def test_retention_keeps_a_replaced_checkpoint_and_not_the_one_in_its_place(tmp_path):
    earlier, _ = lines(tmp_path)
    run = WritableRun(tmp_path)
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer, keep=dq.Keep(last=1)) as ckpt:
        ckpt.restore()
        ckpt.save(600)
    assert run.steps() == [600]
    assert bits(dq.load(tmp_path, "best")) == earlier


def test_what_is_among_the_best_gets_a_tag_before_it_is_replaced(tmp_path):
    model, metric = nn.Linear(1, 1), {}
    with dq.Checkpointer(tmp_path, model, evaluate=lambda _: metric["now"], keep=dq.Keep(best=1), **FIXED) as ckpt:
        for step, metric["now"] in ((1, 1.0), (2, 5.0), (1, 9.0), (2, 7.0)):
            with torch.no_grad():
                model.weight.fill_(metric["now"])
            ckpt.save(step).result()
    tags = tags_of(WritableRun(tmp_path))
    assert [tag.name for tag in tags] == [f"replaced-{tag.step}-{tag.identity[:8]}" for tag in tags]
    assert [dq.load(tmp_path, tag.name)["model"]["weight"].item() for tag in tags] == [1.0, 5.0]


def test_a_damaged_checkpoint_does_not_prevent_its_replacement(tmp_path):
    model, optimizer = training_of()
    run = WritableRun(tmp_path)
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        train(model, optimizer)
        ckpt.save(1).result()
        ckpt.tag("best")
        damage(run.path(1))
        train(model, optimizer)
        record = ckpt.save(1).result()
    assert "step 1 was damaged, so it was replaced in spite of its tag" in " ".join(record.notes)
    assert run.replaced() == ([], [])
    with pytest.raises(dq.CheckpointError, match="step 1 was saved again, and the earlier checkpoint"):
        dq.load(tmp_path, "best")


def test_frozen_parameters_of_a_replaced_checkpoint_stay(tmp_path):
    def saved(step: int, seed: int) -> dict:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 1))
        model[0].requires_grad_(False)
        with dq.Checkpointer(tmp_path, model, adamw(model), keep=dq.Keep(last=1)) as ckpt:
            ckpt.save(step).result()
        return bits(dq.load(tmp_path, step))

    earlier, run = saved(1, 0), WritableRun(tmp_path)
    set_tag(run, "best", run.file(1))
    saved(1, 1)
    assert bits(dq.load(tmp_path, "best")) == earlier
    assert len(list(tmp_path.glob("frozen-*"))) == 2
    for tag in tags_of(run):
        remove_tag(run, tag.name)
    saved(2, 1)
    assert len(list(tmp_path.glob("frozen-*"))) == 1


def test_a_sharded_checkpoint_stays_when_its_step_is_saved_again(tmp_path):
    run = WritableRun(tmp_path)
    with run.locked():
        base = commit_sharded(run, 1, random_state())
        commit_sharded(run, 2, random_state(), parent=base)
        earlier = bits(dq.load(tmp_path, 2))
        set_tag(run, "best", run.file(2))
        prepare_replacement(run, 2, Retention())
        commit_sharded(run, 2, random_state(1), parts=2)
    assert bits(dq.load(tmp_path, "best")) == earlier != bits(dq.load(tmp_path, 2))
    with WritableRun(tmp_path).locked():
        assert bits(dq.load(tmp_path, "best")) == earlier
    remove_tag(run, "best")
    with run.locked():
        needed = {part.address for step in (1, 2) for part in run.file(step).header.parts}
        assert {path.stem for path in (tmp_path / "parts").iterdir()} == needed


class Killed(BaseException):
    """Stands for a kill at a call that changes the disk: what follows does not happen."""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_save_that_ends_at_any_point_leaves_the_tagged_checkpoint(tmp_path, when):
    def saved_again(folder) -> None:
        with dq.Checkpointer(folder, *training_of(2), **LOSSLESS) as ckpt:
            ckpt.save(400)

    def prepared(folder) -> dict:
        model, optimizer = training_of()
        with dq.Checkpointer(folder, model, optimizer, **LOSSLESS) as ckpt:
            for step in (300, 400):
                train(model, optimizer)
                ckpt.save(step)
            ckpt.wait()
            ckpt.tag("best")
        return bits(dq.load(folder, 400))

    def stop() -> None:
        raise Killed

    number, calls_left = 0, True
    while calls_left:
        number += 1
        folder = tmp_path / f"{number}"
        earlier = prepared(folder)
        calls_left = False
        try:
            with at_call(number, when, stop):
                saved_again(folder)
        except Killed:
            calls_left = True
        assert bits(dq.load(folder, "best")) == earlier, number
        saved_again(folder)
        assert bits(dq.load(folder, "best")) == earlier, number
        assert len(WritableRun(folder).replaced()[0]) == 1
        assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]
    assert number > 2 * len(CALLS)


def test_the_steps_that_retention_deletes_are_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO, "dynaquant")
    model, optimizer = training_of()
    with dq.Checkpointer(tmp_path, model, optimizer, evaluate=loss_of, keep=dq.Keep(last=1)) as ckpt:
        for step in (1, 2):
            ckpt.save(step)
    assert "deleted step 1" in caplog.messages
