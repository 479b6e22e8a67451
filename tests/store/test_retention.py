"""Retention: which checkpoints are kept; deleting the others does not change their values."""

import pytest
from committed import assert_holds, checkpoint_of, damage_levels, series
from full_disk import files_of_at_most
from hypothesis import given
from hypothesis import strategies as st
from rewritten import rewrite
from torch import randn

from dynaquant.engine.forms.schemes import Rearranged
from dynaquant.errors import CheckpointError
from dynaquant.options import Keep
from dynaquant.store.commit import WritableRun
from dynaquant.store.retention import Retention, prepare_replacement, prune, recode_dependents
from dynaquant.store.run import Run


@pytest.fixture
def run(tmp_path) -> WritableRun:
    (tmp_path / "run").mkdir()
    return WritableRun(tmp_path / "run")


def steps_of(run: Run) -> list[int]:
    summaries, broken = Run(run.folder).summaries()
    assert broken == []
    return [summary.step for summary in summaries]


def identities(run: Run) -> dict[int, str]:
    return {summary.step: summary.identity for summary in run.summaries()[0]}


def parents(run: Run) -> dict[int, int | None]:
    return {summary.step: summary.parent and summary.parent.step for summary in run.summaries()[0]}


# What is kept


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), [10, 20, 30, 40, 50, 60]),
        (Retention(Keep(last=2)), [50, 60]),
        (Retention(Keep(last=1)), [60]),
        (Retention(Keep(last=9)), [10, 20, 30, 40, 50, 60]),
        (Retention(Keep(every=30)), [30, 60]),
        (Retention(Keep(every=40)), [40, 60]),
        (Retention(Keep(every=10)), [10, 20, 30, 40, 50, 60]),
        (Retention(Keep(last=2, every=30)), [30, 50, 60]),
    ],
)
def test_the_retention_decides_what_is_kept(run, retention, kept):
    made = series(run, [10, 20, 30, 40, 50, 60])
    before = identities(run)
    assert prune(run, retention) == []
    assert steps_of(run) == kept
    for checkpoint in made:
        if checkpoint.step in kept:
            assert assert_holds(run, checkpoint).header.identity == before[checkpoint.step]


def test_the_newest_checkpoint_is_the_last_commit_not_the_highest_step(run):
    series(run, [10, 20, 30])
    series(run, [5])
    prune(run, Retention(Keep(last=1)))
    assert steps_of(run) == [5]


def test_step_zero_counts_as_a_multiple(run):
    series(run, [0, 1, 2])
    prune(run, Retention(Keep(every=10)))
    assert steps_of(run) == [0, 2]


@given(
    st.lists(st.integers(0, 50), unique=True),
    st.none() | st.integers(1, 60),
    st.none() | st.integers(1, 60),
)
def test_the_newest_and_the_multiples_always_stay(steps, keep_last, keep_every):
    gone = set(Retention(Keep(last=keep_last, every=keep_every)).steps_to_delete(steps, steps))
    assert gone <= set(steps)
    assert not gone & set(steps[-(keep_last or 1) :])
    assert not any(keep_every and step % keep_every == 0 for step in gone)
    if keep_last and not keep_every:
        assert len(steps) - len(gone) == min(keep_last, len(steps))


# How the others are deleted


@pytest.mark.parametrize("coder", ["conditional", "rearranged"])
def test_children_are_conditioned_on_the_nearest_ancestor_that_stays(run, coder):
    made = series(run, [1, 2, 3, 4, 5], coder=coder)
    assert recode_dependents(run, [2, 3, 5]) == (set(), [])
    assert parents(run) == {1: None, 2: 1, 3: 2, 4: 1, 5: 4}
    assert recode_dependents(run, [1, 2, 3]) == (set(), [])
    assert parents(run) == {1: None, 2: 1, 3: 2, 4: None, 5: 4}
    for checkpoint in made:
        scheme = assert_holds(run, checkpoint).header.by_name["w"].scheme
        assert isinstance(scheme, Rearranged) == (coder == "rearranged")


def test_a_crash_between_recoding_and_deleting_leaves_a_whole_run(run):
    made = series(run, [1, 2, 3, 4])
    before = identities(run)
    recode_dependents(run, [1, 2])
    for checkpoint in made:
        assert_holds(run, checkpoint)
    assert identities(run) == before
    assert prune(run, Retention(Keep(last=2))) == []
    assert steps_of(run) == [3, 4]
    for checkpoint in made[2:]:
        assert_holds(run, checkpoint)


class PowerCutError(Exception):
    pass


class DiesAfterOneDeletion(WritableRun):
    def delete(self, step: int) -> None:
        super().delete(step)
        raise PowerCutError


def test_a_crash_between_two_deletions_leaves_a_whole_run(run):
    made = series(run, [1, 2, 3, 4])
    with pytest.raises(PowerCutError):
        prune(DiesAfterOneDeletion(run.folder), Retention(Keep(last=1)))
    left = steps_of(run)
    assert len(left) == 3
    for checkpoint in made:
        if checkpoint.step in left:
            assert_holds(run, checkpoint)


def test_all_children_of_a_parent_are_recoded(run):
    first = series(run, [1])[0]
    _, base = run.commit(first, None)
    others = [checkpoint_of(step, {"w": randn(80, 50)}, {"b": first.tensors["b"]}) for step in (2, 3, 4)]
    for checkpoint in others:
        run.commit(checkpoint, base)
    assert parents(run) == {1: None, 2: 1, 3: 1, 4: 1}
    prune(run, Retention(Keep(last=3)))
    assert parents(run) == {2: None, 3: None, 4: None}
    for checkpoint in others:
        assert_holds(run, checkpoint)


def test_the_oldest_checkpoints_of_a_long_chain_can_be_deleted(run):
    made = series(run, range(40))
    for newest in range(30, 0, -10):
        assert prune(run, Retention(Keep(last=newest))) == []
        assert steps_of(run) == list(range(40 - newest, 40))
        for checkpoint in made[-newest:]:
            assert_holds(run, checkpoint)
    keyframes = [step for step, parent in parents(run).items() if parent is None]
    assert keyframes == [30]


def test_a_damaged_child_is_noted_and_keeps_its_parent_until_it_is_deleted(run):
    first = checkpoint_of(1, {"w": randn(80, 50)}, {"b": randn(9)})
    _, base = run.commit(first, None)
    for step in (2, 3):
        run.commit(checkpoint_of(step, {"w": randn(80, 50)}, {"b": first.tensors["b"]}), base)
    damaged = damage_levels(run, 2)
    notes = prune(run, Retention(Keep(last=2)))
    assert len(notes) == 1
    assert notes[0].startswith(
        f"step 2 could not be re-coded, so the steps it depends on were kept: {run.path(2)}: tensor w "
    )
    assert run.path(2).read_bytes() == damaged
    assert parents(run) == {1: None, 2: 1, 3: None}
    assert_holds(run, first)
    assert prune(run, Retention(Keep(last=1))) == []
    assert steps_of(run) == [3]


def test_a_damaged_parent_is_noted_and_kept_as_long_as_its_child(run):
    series(run, [1, 2])
    alone = checkpoint_of(3, {"w": randn(80, 50)})
    run.commit(alone, None)
    damage_levels(run, 1)
    notes = prune(run, Retention(Keep(last=2)))
    assert [note[:30] for note in notes] == ["step 2 could not be re-coded, "]
    assert steps_of(run) == [1, 2, 3]
    assert_holds(run, alone)
    assert prune(run, Retention(Keep(last=1))) == []
    assert steps_of(run) == [3]


def test_nothing_is_deleted_while_a_header_cannot_be_read(run):
    made = series(run, [1, 2])
    made.append(checkpoint_of(3, {"w": randn(80, 50)}))
    run.commit(made[2], None)
    hidden = run.path(2).read_bytes()
    run.path(2).unlink()
    run.path(2).symlink_to(run.path(2))  # opening it is an OSError, as on a disk that fails for a moment
    notes = prune(run, Retention(Keep(last=1)))
    assert len(notes) == 1
    assert notes[0].startswith(f"nothing was deleted: {run.path(2)}: cannot be read")
    with pytest.raises(CheckpointError, match="cannot be read"):
        recode_dependents(run, [1])  # replacing a checkpoint raises, too
    run.path(2).unlink()
    run.path(2).write_bytes(hidden)
    for checkpoint in made:
        assert_holds(run, checkpoint)


def test_on_a_full_disk_what_nothing_depends_on_is_deleted(run):
    made = series(run, [1, 2])
    _, base = run.commit(checkpoint_of(3, {"w": randn(80, 50)}), None)
    made.append(checkpoint_of(4, {"w": randn(80, 50)}))
    run.commit(made[-1], base)
    with files_of_at_most(0), pytest.raises(OSError, match="step-000000000004"):  # no space for it without its parent
        prune(run, Retention(Keep(last=1)))
    assert parents(run) == {3: None, 4: 3}
    assert_holds(run, made[-1])
    assert prune(run, Retention(Keep(last=1))) == []
    assert parents(run) == {4: None}


@pytest.mark.parametrize("keep", [Keep(), Keep(last=9)])
def test_nothing_is_noted_beside_a_header_that_cannot_be_read_if_nothing_is_to_be_deleted(run, keep):
    series(run, [1, 2])
    rewrite(run.path(1), lambda header: header.update(requires=["coding of the future"]))
    with (other := WritableRun(run.folder)).locked():
        assert prune(other, Retention(keep)) == []


def test_an_error_while_checkpoints_are_deleted_is_raised(run, monkeypatch):
    for step in (1, 2, 3):
        run.commit(checkpoint_of(step, {"w": randn(80, 50)}), None)
    delete = WritableRun.delete

    def failing(self, step):
        if step == 1:
            raise CheckpointError("the folder was replaced")
        delete(self, step)

    monkeypatch.setattr(WritableRun, "delete", failing)
    with pytest.raises(CheckpointError, match="the folder was replaced"):
        prune(run, Retention(Keep(last=1)))
    assert steps_of(run) == [1, 3]


def test_a_file_that_cannot_be_read_is_left_alone(run):
    made = series(run, [1, 2, 3])
    run.path(2).write_bytes(b"not a checkpoint")
    prune(run, Retention(Keep(last=1)))
    assert run.path(2).read_bytes() == b"not a checkpoint"
    assert_holds(run, made[0])  # the only one that can still be decoded, so the newest usable one
    with pytest.raises(CheckpointError, match="step-000000000002"):
        assert_holds(run, made[2])


def test_checkpoints_that_are_known_to_be_damaged_do_not_count_as_kept(run):
    made = series(run, [1, 2, 3])
    assert prune(run, Retention(Keep(last=1)), damaged={3}) == []
    assert steps_of(run) == [2, 3]
    assert_holds(run, made[1])


# Replacing a checkpoint


def chain_with(run: WritableRun, extra: int) -> list:
    """Commits steps 1 to 4 as a chain. Damages a tensor that only step ``extra`` has."""
    made, base = [], None
    for step in (1, 2, 3, 4):
        weights = {"w": randn(80, 50)} if step != extra else {"only here": randn(80, 50), "w": randn(80, 50)}
        made.append(checkpoint_of(step, weights))
        _, base = run.commit(made[-1], base)
    damage_levels(run, extra)
    return made


def test_a_child_that_decodes_survives_the_replacement_of_its_damaged_parent(run):
    made = chain_with(run, 1)
    for checkpoint in made[1:]:
        assert_holds(run, checkpoint)
    assert prepare_replacement(run, 2, Retention()) == []
    assert parents(run) == {1: None, 2: 1, 3: None, 4: 3}
    run.commit(checkpoint_of(2, {"w": randn(80, 50)}), None)
    for checkpoint in made[2:]:
        assert_holds(run, checkpoint)


def test_a_grandchild_that_decodes_survives_a_damaged_child_and_the_replacement(run):
    made = chain_with(run, 3)
    notes = prepare_replacement(run, 2, Retention())
    assert len(notes) == 1
    assert notes[0].startswith("step 3 was damaged, and step 2, which it depended on, was replaced: ")
    assert parents(run) == {1: None, 2: 1, 3: 2, 4: 1}
    run.commit(checkpoint_of(2, {"w": randn(80, 50)}), None)
    for checkpoint in (made[0], made[3]):
        assert_holds(run, checkpoint)
    assert prepare_replacement(run, 2, Retention()) == []  # no checkpoint depends on the replaced one any more
    assert prune(run, Retention(Keep(last=1))) == []


def test_a_step_is_not_replaced_if_a_sound_child_cannot_be_recoded(run, monkeypatch):
    made = series(run, [1, 2, 3])

    def failing(*_):
        raise CheckpointError("re-coding would change the values")

    monkeypatch.setattr(WritableRun, "recode", failing)
    with pytest.raises(
        CheckpointError, match="step 2 was not replaced, because step 3 depends on it and could not be re-"
    ):
        prepare_replacement(run, 2, Retention())
    for checkpoint in made:
        assert_holds(run, checkpoint)


def test_what_a_checkpoint_of_a_newer_version_may_need_is_not_deleted(run):
    base = None
    for step in (1, 2, 3):
        _, base = run.commit(checkpoint_of(step, {"w": randn(80, 50)}), base)
    sound = run.path(3).read_bytes()
    rewrite(run.path(3), lambda header: header.update(requires=["coding of the future"]))
    with (other := WritableRun(run.folder)).locked():
        (note,) = prune(other, Retention(Keep(last=1)))
    assert "nothing was deleted" in note
    assert "install a newer one" in note
    run.path(3).write_bytes(sound)
    assert steps_of(run) == [1, 2, 3]
