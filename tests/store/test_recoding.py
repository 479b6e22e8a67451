"""Branching and compacting change the files, but no values."""

import copy
import errno
import itertools
import os
import random
import shutil
from dataclasses import replace

import pytest
import torch
from full_disk import contents, files_of_at_most
from torch import nn
from training import bits, model_of, train

import dynaquant as dq
from dynaquant.engine.forms.stored import values_of
from dynaquant.store.commit import WritableRun
from dynaquant.store.recoding import branch, compact
from dynaquant.store.retention import Retention, prune
from dynaquant.store.run import Run, chain_lengths
from dynaquant.store.tags import set_tag, tagged_file

PUBLISHED = {
    "quality": dq.Quality(
        method="published", configuration=dq.Configuration(bins=4, embedding_bins=4, protection_metric="magnitude")
    )
}


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = model_of(8)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def save(folder, steps, model, optimizer, restore: int | None = None, **options) -> None:
    with dq.Checkpointer(folder, model, optimizer, **options) as ckpt:
        if restore is not None:
            ckpt.restore(restore)
        for step in steps:
            train(model, optimizer)
            ckpt.save(step).result()


def values(run: Run) -> dict[int, object]:
    """Returns the values of all checkpoints and lossless copies of a run, in the order of its commits."""
    found = {}
    for step in run.steps():
        by_name = {name: bits(values_of(stored)) for name, stored in run.load(run.file(step)).items()}
        found[step] = bits(dq.load(run.folder, step)), by_name, run.file(step).header.identity
    return found


def compacted(run: WritableRun, keyframe_every: int, stop: int | None = None) -> None:
    with run.locked():
        for _ in itertools.islice(compact(run, keyframe_every), stop):
            pass


def chains(run: Run) -> dict[int, int]:
    return {parent.step: length for parent, length in chain_lengths(run.summaries()[0]).items()}


@pytest.mark.parametrize(
    "options", [{}, PUBLISHED, {"quality": "lossless"}, {"keep": dq.Keep(lossless_copy=True)}], ids=str
)
def test_compacting_changes_chains_but_no_values(tmp_path, options):
    keep = replace(options.get("keep", dq.Keep()), keyframe_every=2)
    save(tmp_path, range(4), *training(), **{**options, "keep": keep})
    run = WritableRun(tmp_path)
    before = values(run)
    assert chains(run) == {0: 1, 1: 2, 2: 1, 3: 2}
    for keyframe_every, expected in (
        (1, dict.fromkeys(range(4), 1)),
        (3, {0: 1, 1: 2, 2: 3, 3: 1}),
    ):
        compacted(run, keyframe_every)
        assert chains(run) == expected
        assert values(run) == before


def test_compacting_a_compacted_run_writes_nothing(tmp_path):
    save(tmp_path, range(4), *training(), keep=dq.Keep(keyframe_every=3))
    run = WritableRun(tmp_path)
    compacted(run, 3)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    compacted(run, 3)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_run_can_be_compacted_after_pruning(tmp_path):
    save(tmp_path, range(6), *training())
    run = WritableRun(tmp_path)
    with run.locked():
        prune(run, Retention(dq.Keep(last=1, every=2)))
    assert list(chains(run)) == [0, 2, 4, 5]
    before = values(run)
    compacted(run, 16)
    assert chains(run) == {0: 1, 2: 2, 4: 3, 5: 4}
    assert values(run) == before


def test_compacting_can_be_interrupted_between_any_two_steps(tmp_path):
    save(tmp_path / "run", range(4), *training(), keep=dq.Keep(keyframe_every=2))
    before = values(Run(tmp_path / "run"))
    for stop in (1, 3):
        run = WritableRun(shutil.copytree(tmp_path / "run", tmp_path / str(stop)))
        compacted(run, 3, stop)
        assert values(run) == before
        compacted(run, 3)
        assert chains(run) == {0: 1, 1: 2, 2: 3, 3: 1}
        assert values(run) == before


def test_a_run_with_two_lines_of_training_is_compacted(tmp_path):
    model, optimizer = training()
    save(tmp_path, (1, 2, 3), model, optimizer, keep=dq.Keep(keyframe_every=2))
    save(tmp_path, (4, 5), model, optimizer, restore=1)
    save(tmp_path, (6, 7), model, optimizer, restore=3)
    run = WritableRun(tmp_path)
    before = values(run)
    for keyframe_every in (1, 4):
        compacted(run, keyframe_every)
        assert values(run) == before
        assert max(chains(run).values()) <= keyframe_every


def test_checkpoints_with_equal_contents_do_not_make_a_chain_too_long(tmp_path):
    """Their identities are equal, so identities alone do not distinguish them."""
    with dq.Checkpointer(tmp_path, nn.Linear(4, 4)) as ckpt:
        for step in range(6):
            torch.manual_seed(0)
            ckpt.save(step).result()
    run = WritableRun(tmp_path)
    before = values(run)
    assert len({identity for *_, identity in before.values()}) == 1
    compacted(run, 2)
    assert sorted(chains(run).values()) == [1, 1, 1, 2, 2, 2]
    assert values(run) == before


@pytest.mark.parametrize("seed", [0, 2])
def test_compacting_keeps_whatever_was_saved(tmp_path, seed):
    """Frozen layers, steps saved again, older ones restored, other qualities and optimizers in one run."""
    chance = random.Random(seed)
    model, optimizer = training()
    for _ in range(3):
        options = chance.choice(
            [{}, PUBLISHED, {"quality": "high"}, {"quality": "lossless"}, {"keep": dq.Keep(lossless_copy=True)}]
        )
        model[1].requires_grad_(chance.random() < 0.5)
        there = Run(tmp_path).steps()
        restored = chance.choice(there) if there else None
        steps = [chance.randrange(12) for _ in range(3)]
        keep = replace(options.get("keep", dq.Keep()), keyframe_every=chance.choice([1, 2, 16]))
        save(tmp_path, steps, model, optimizer, restored, **{**options, "keep": keep})
    run = WritableRun(tmp_path)
    before = values(run)
    for keyframe_every in (chance.choice([1, 2, 3]),):
        compacted(run, keyframe_every)
        assert values(run) == before
        assert max(chains(run).values()) <= keyframe_every


def test_compacting_keeps_the_levels_that_dependent_deltas_were_coded_against(tmp_path):
    """Exact values that equal the values of an older checkpoint's levels must not become references to these levels."""
    model, optimizer = training()
    save(tmp_path, (1,), model, optimizer)
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless", keep=dq.Keep(keyframe_every=1)) as ckpt:
        ckpt.restore(1)
        ckpt.save(2).result()
    save(tmp_path, (3, 4), model, optimizer, restore=2, quality="lossless")
    run = WritableRun(tmp_path)
    before = values(run)
    compacted(run, 16)
    assert chains(run)[4] == 4
    assert values(run) == before


def test_a_damaged_checkpoint_stops_compacting_and_nothing_is_lost(tmp_path):
    save(tmp_path, range(4), *training(), keep=dq.Keep(keyframe_every=2))
    run = WritableRun(tmp_path)
    before = values(run)
    run.delete(2)
    with pytest.raises(dq.CheckpointError, match="step 3: its parent, step 2"):
        compacted(run, 1)
    assert run.steps() == [0, 1, 3]
    assert {step: bits(dq.load(tmp_path, step)) for step in (0, 1)} == {step: before[step][0] for step in (0, 1)}


def test_a_full_disk_stops_compacting_and_nothing_is_lost(tmp_path):
    save(tmp_path, range(4), *training())
    run = WritableRun(tmp_path)
    before = contents(tmp_path)
    with files_of_at_most(1000), pytest.raises(OSError, match="File too large"):
        compacted(run, 1)
    assert contents(tmp_path) == before


def test_tags_stay_valid_after_compacting(tmp_path):
    save(tmp_path, range(3), *training(), keep=dq.Keep(keyframe_every=1))
    run = WritableRun(tmp_path)
    set_tag(run, "best", run.file(1))
    compacted(run, 16)
    assert tagged_file(run, "best").header.step == 1


@pytest.mark.parametrize("options", [{}, PUBLISHED], ids=str)
def test_training_continues_in_the_branch_and_in_the_old_run(tmp_path, options):
    model, optimizer = training()
    save(tmp_path / "old", (1, 2, 3), model, optimizer, **options)
    run = Run(tmp_path / "old")
    before = values(run)
    written = branch(run, run.file(2), tmp_path / "new")
    assert written.header.parent is None
    new = Run(tmp_path / "new")
    assert values(new) == {2: before[2]}
    other_model = copy.deepcopy(model)
    other_optimizer = torch.optim.AdamW(other_model.parameters(), lr=1e-3)
    save(tmp_path / "new", (3, 4), other_model, other_optimizer, restore=2, quality="high")
    save(tmp_path / "old", (4,), model, optimizer, **options)
    assert {step: values(run)[step] for step in before} == before
    assert values(new)[2] == before[2]
    assert chains(new)[4] == 3


def test_a_branch_has_the_lossless_copy(tmp_path):
    model, optimizer = training()
    save(tmp_path / "old", (1, 2), model, optimizer, keep=dq.Keep(lossless_copy=True))
    run = Run(tmp_path / "old")
    branch(run, run.file(2), tmp_path / "new")
    assert values(Run(tmp_path / "new"))[2] == values(run)[2]
    assert len(list((tmp_path / "new").glob("exact-*.dqc"))) == 1


def test_a_branch_needs_a_folder_of_its_own(tmp_path):
    save(tmp_path / "old", (1, 2), *training())
    run = Run(tmp_path / "old")
    before = contents(tmp_path / "old")
    branch(run, run.file(1), tmp_path / "new")
    for folder in ("old", "new"):
        with pytest.raises(dq.CheckpointError, match="it has checkpoints already"):
            branch(run, run.file(1), tmp_path / folder)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(dq.CheckpointError, match="is a file"):
        branch(run, run.file(1), tmp_path / "file")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(dq.CheckpointError, match="link is a link to nothing; a run needs a folder"):
        branch(run, run.file(1), tmp_path / "link")
    assert contents(tmp_path / "old") == before


def test_a_branch_leaves_a_folder_that_is_in_its_way(tmp_path):
    save(tmp_path / "old", (1,), *training())
    run = Run(tmp_path / "old")
    for folder in ("old", "new"):
        (tmp_path / folder / "framework").mkdir(parents=True)
        (tmp_path / folder / "framework" / f"{folder}.txt").write_text("precious")
    with pytest.raises(dq.CheckpointError, match=r"framework is there already.* move it away"):
        branch(run, run.file(1), tmp_path / "new")
    assert contents(tmp_path / "new" / "framework") == {"new.txt": b"precious"}
    assert os.listdir(tmp_path / "new") == ["framework"]
    branch(run, run.file(1), tmp_path / "other")
    assert contents(tmp_path / "other" / "framework") == {"old.txt": b"precious"}


def test_a_branch_onto_a_full_disk_leaves_nothing(tmp_path):
    save(tmp_path / "old", (1, 2), *training(), keep=dq.Keep(lossless_copy=True))
    run = Run(tmp_path / "old")
    with files_of_at_most(1000), pytest.raises(OSError, match="File too large"):
        branch(run, run.file(2), tmp_path / "deep" / "new")
    assert os.listdir(tmp_path) == ["old"]
    (tmp_path / "new").mkdir()
    with files_of_at_most(1000), pytest.raises(OSError, match="File too large"):
        branch(run, run.file(2), tmp_path / "new")
    assert os.listdir(tmp_path / "new") == []
    branch(run, run.file(2), tmp_path / "new")
    assert values(Run(tmp_path / "new"))[2] == values(run)[2]


def test_a_branch_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    save(tmp_path / "old", (1, 2), *training(), keep=dq.Keep(lossless_copy=True))
    run, recode = Run(tmp_path / "old"), WritableRun.recode
    seen = []

    def failing(self, chain, *others):
        if chain[0].path.name.startswith("step"):
            seen.extend(os.listdir(self.folder))
            raise OSError(errno.ENOSPC, "No space left on device")
        return recode(self, chain, *others)

    monkeypatch.setattr(WritableRun, "recode", failing)
    with pytest.raises(OSError, match="No space left"):
        branch(run, run.file(2), tmp_path / "new")
    assert seen == ["exact-000000000002-000000000002.dqc"]
    assert os.listdir(tmp_path) == ["old"]


def test_a_branch_whose_folder_cannot_be_synced_leaves_nothing(tmp_path, monkeypatch):
    """The file is in place by then. Without its lossless copy, a restore would use the quantized weights."""
    save(tmp_path / "old", (1, 2), *training(), keep=dq.Keep(lossless_copy=True))
    run, fsync = Run(tmp_path / "old"), os.fsync
    before = contents(tmp_path / "old")

    def failing(descriptor):
        if (tmp_path / "new" / "step-000000000002.dqc").exists():
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match=r"Input/output error: '.*new'"):
        branch(run, run.file(2), tmp_path / "new")
    assert os.listdir(tmp_path) == ["old"]
    assert contents(tmp_path / "old") == before


def test_runs_that_were_put_together_by_hand_are_compacted(tmp_path):
    for folder, steps in (("a", range(1, 4)), ("b", range(4, 7))):
        save(tmp_path / folder, steps, *training())
    for path in (tmp_path / "b").glob("*.dqc"):  # with the sequence numbers of the others
        path.rename(tmp_path / "a" / path.name)
    run = WritableRun(tmp_path / "a")
    before = values(run)
    compacted(run, 16)
    assert values(run) == before


def test_nothing_is_coded_against_a_checkpoint_that_came_later(tmp_path):
    save(tmp_path, range(3), *training(), keep=dq.Keep(keyframe_every=1))
    run = WritableRun(tmp_path)
    before = contents(tmp_path)
    with run.locked(), pytest.raises(dq.CheckpointError, match="has a later sequence number"):
        run.recode(run.chain(run.file(0)), run.chain(run.file(2)))
    assert contents(tmp_path) == before
