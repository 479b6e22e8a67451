"""A run: checkpoints are loaded bit for bit, errors name the missing or wrong parent, and one process writes."""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from committed import assert_holds, checkpoint_of, damage_levels, series, values
from crafted import entry, header, write
from training import bits

import dynaquant as dq
from dynaquant.engine.forms.schemes import Reference
from dynaquant.engine.forms.stored import values_of
from dynaquant.errors import CheckpointError
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import CheckpointFile
from dynaquant.store.reading import load_tensors
from dynaquant.store.run import Run
from dynaquant.store.writing import Base, Checkpoint


@pytest.fixture
def run(tmp_path) -> WritableRun:
    (tmp_path / "run").mkdir()
    return WritableRun(tmp_path / "run")


# Committing and loading


def test_a_committed_checkpoint_is_loaded_bit_for_bit(run):
    made = series(run, [1, 2, 3, 4])
    for checkpoint in made:
        assert_holds(run, checkpoint)
    summaries, broken = run.summaries()
    assert [s.step for s in summaries] == [1, 2, 3, 4]
    assert [s.parent and s.parent.step for s in summaries] == [None, 1, 2, 3]
    assert [s.sequence for s in summaries] == [1, 2, 3, 4]
    assert broken == []


def test_commit_returns_the_same_base_as_loading(run):
    file = base = None
    for checkpoint in series(run, [1, 2, 3]):
        file, base = run.commit(checkpoint, base)
    loaded = Base.from_loaded(file.header, run.load(file))
    assert (base.parent, base.hashes) == (loaded.parent, loaded.hashes)
    assert values(base.tensors) == values(loaded.tensors)
    assert base.tensors["w"].levels.tobytes() == loaded.tensors["w"].levels.tobytes()
    assert base.tensors["w"].centres.tobytes() == loaded.tensors["w"].centres.tobytes()


def test_a_delta_of_weights_that_hardly_changed_is_small(run):
    weight = torch.randn(300, 300)
    first = checkpoint_of(1, {"w": weight})
    changed = weight.clone()
    changed[:5] = torch.randn(5, 300)
    second = checkpoint_of(2, {"w": changed})
    keyframe, base = run.commit(first, None)
    delta, _ = run.commit(second, base)
    assert delta.size < keyframe.size / 3
    assert_holds(run, second)


def test_unchanged_tensors_are_references_that_cost_nothing(run):
    first = checkpoint_of(1, {"w": torch.randn(80, 50)}, {"b": torch.randn(1000), "e": torch.randn(1000)})
    _, base = run.commit(first, None)
    for step in (2, 3):
        changed = replace(first, step=step, tensors={**first.tensors, "e": torch.randn(1000)})
        file, base = run.commit(changed, base)
        schemes = {e.name: (type(e.scheme), e.size) for e in file.header.entries}
        assert schemes["w"] == schemes["b"] == (Reference, 0)
        assert schemes["e"][1] > 2000
        assert_holds(run, changed)


def test_tensors_may_be_added_removed_and_changed_between_checkpoints(run):
    weight = torch.randn(40, 50)
    several = [
        checkpoint_of(1, {"w": weight, "gone": weight * 2}, {"b": torch.ones(3)}),
        checkpoint_of(2, {"w": weight + 0.01, "new": weight}, {"b": torch.ones(4)}),
        checkpoint_of(3, {"w": weight.reshape(50, 40), "new": weight[:20]}, {"b": torch.ones(4, dtype=torch.int32)}),
        checkpoint_of(4, {"w": weight.bfloat16(), "gone": weight * 2}, {"b": torch.ones(4), "new": weight[:20]}),
        checkpoint_of(5, {"w": weight.bfloat16(), "gone": weight * 2, "new": weight[:20]}, {"b": torch.ones(4)}),
        checkpoint_of(6, {"w": weight}, {"b": torch.ones(0), "gone": torch.ones(0, 3)}),
        checkpoint_of(7, {"b": weight}, {"w": weight}),
    ]
    base = None
    for checkpoint in several:
        _, base = run.commit(checkpoint, base)
    for checkpoint in several:
        assert_holds(run, checkpoint)


@pytest.mark.parametrize("coder", ["conditional", "rearranged"])
@pytest.mark.parametrize("bins", [(16, 4, 254), (254, 4, 16), (1, 16, 2)])
def test_the_number_of_bins_may_change(run, bins, coder):
    weight, base, made = torch.randn(300, 300), None, []
    for step, n in enumerate(bins):
        made.append(checkpoint_of(step, {"w": weight + 0.01 * step}, bins=n, coder=coder))
        file, base = run.commit(made[-1], base)
        scheme = file.header.by_name["w"].scheme
        assert scheme.bins <= n
        assert scheme.needs_parent == (step > 0)
    for checkpoint in made:
        assert_holds(run, checkpoint)


def test_committing_a_step_again_replaces_it(run):
    series(run, [1, 2])
    other = checkpoint_of(2, {"w": torch.randn(80, 50)})
    run.commit(other, None)
    assert_holds(run, other)
    assert [s.sequence for s in run.summaries()[0]] == [1, 3]


def test_a_reader_sees_the_checkpoint_that_a_writer_replaced(run):
    reader = Run(run.folder)
    for count in range(60):
        checkpoint = Checkpoint(1, f"{count:04}", {}, {})
        run.commit(checkpoint, None)
        assert reader.summaries()[0] == [CheckpointFile(run.path(1)).header.summary]


def test_a_missing_step_is_an_error_that_lists_the_available_steps(run):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint of step 3 \(available steps: none\)"):
        run.file(3)
    series(run, [1, 2])
    with pytest.raises(CheckpointError, match=r"there is no checkpoint of step 3 \(available steps: 1, 2\)"):
        run.file(3)


# Identity


def test_an_identity_depends_on_the_values_not_on_their_coding(run, tmp_path):
    made = series(run, [1, 2, 3])
    other = WritableRun(tmp_path / "other")
    other.folder.mkdir()
    for checkpoint in made:
        keyframe, _ = other.commit(checkpoint, None)
        delta = run.file(checkpoint.step)
        assert keyframe.header.identity == delta.header.identity
    assert run.path(3).read_bytes() != other.path(3).read_bytes()


def test_every_change_of_the_contents_changes_the_identity(run):
    weight = torch.randn(40, 50)
    touched = weight.clone()
    touched[3, 4] *= 3
    variants = [
        checkpoint_of(1, {"w": weight}, {"b": torch.zeros(3)}, {"lr": 0.1}),
        checkpoint_of(1, {"w": touched}, {"b": torch.zeros(3)}, {"lr": 0.1}),
        checkpoint_of(1, {"w": weight}, {"b": torch.tensor([0, 0, -0.0])}, {"lr": 0.1}),
        checkpoint_of(1, {"w": weight}, {"b": torch.zeros(3)}, {"lr": 0.2}),
        checkpoint_of(1, {"w": weight}, {"c": torch.zeros(3)}, {"lr": 0.1}),
        checkpoint_of(1, {"w": weight}, {"b": torch.zeros(3, 1)}, {"lr": 0.1}),
        checkpoint_of(1, {"w": weight}, {"b": torch.zeros(3)}, {"lr": 0.1}),
    ]
    identities = [run.commit(checkpoint, None)[0].header.identity for checkpoint in variants]
    assert len(set(identities)) == 6
    assert identities[0] == identities[6]


# Missing and wrong parents


def test_the_error_for_a_missing_parent_names_it(run):
    series(run, [1, 2, 3])
    identity = run.file(2).header.identity
    run.path(2).unlink()
    with pytest.raises(CheckpointError) as caught:
        run.load(run.file(3))
    assert str(caught.value) == (
        f"checkpoint step 3: its parent, step 2 ({identity[:8]}…), is not in {run.folder} (was it deleted by hand?)"
    )
    run.load(run.file(1))


def test_the_error_for_a_broken_chain_names_the_checkpoint_that_was_wanted(run):
    series(run, [1, 2, 3, 4])
    run.path(2).unlink()
    with pytest.raises(CheckpointError) as caught:
        run.load(run.file(4))
    assert str(caught.value).startswith("checkpoint step 4: checkpoint step 3: its parent, step 2 (")


def test_a_replaced_parent_is_detected_before_its_levels_are_used(run):
    series(run, [1, 2, 3])
    run.commit(checkpoint_of(2, {"w": torch.randn(80, 50)}), None)
    with pytest.raises(CheckpointError, match=r"checkpoint step 3: its parent, step 2 .* has been replaced in"):
        run.load(run.file(3))


def test_the_error_for_an_altered_parent_names_it(run):
    series(run, [1, 2, 3])
    damage_levels(run, 2)
    for step in (2, 3):
        with pytest.raises(CheckpointError, match=r"step-000000000002\.dqc: tensor w "):
            run.load(run.file(step))


def test_the_error_for_a_parent_with_a_damaged_header_names_it(run):
    series(run, [1, 2])
    run.path(1).write_bytes(run.path(1).read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"step-000000000001\.dqc: truncated"):
        run.load(run.file(2))


def test_a_cycle_of_parents_is_refused(run):
    """The identity does not cover the parent, so forged files can name each other as parents."""
    tensor = entry(data=b"", coding={"kind": "reference"})
    identity = header(tensor)["identity"]
    for step, parent in [(1, 2), (2, 3), (3, 1), (4, 4)]:
        forged = header(tensor, step=step, sequence=5, parent={"step": parent, "identity": identity})
        write(run.folder, forged)
    for step, parent in [(1, 2), (4, 4)]:
        with pytest.raises(CheckpointError, match=f"step {parent} .* has a later sequence number in .*, so it is not"):
            run.load(run.file(step))


def test_a_reference_to_another_tensor_is_refused(run):
    parent = header(entry(), step=1)
    write(run.folder, parent, b"\0" * 8)
    other = entry(data=b"\1" * 8, coding={"kind": "reference"}, size=0)
    of_parent = {"step": 1, "identity": parent["identity"]}
    write(run.folder, header(other, step=2, sequence=2, parent=of_parent))
    with pytest.raises(CheckpointError, match=r"step-000000000002.*tensor w is not the tensor of its parent"):
        run.load(run.file(2))
    write(run.folder, header({**other, "name": "v"}, step=2, sequence=2, parent=of_parent))
    with pytest.raises(CheckpointError, match=r"step-000000000002.*tensor v is not in its parent, step-000000000001"):
        run.load(run.file(2))


def test_a_renamed_file_is_detected_and_not_read_as_the_step_in_its_name(run):
    series(run, [1])
    run.path(1).rename(run.path(7))
    summaries, broken = run.summaries()
    assert summaries == []
    assert [str(error) for error in broken] == [f"{run.path(7)}: holds step 1; was it renamed?"]
    with pytest.raises(CheckpointError, match=r"holds step 1; was it renamed\?"):
        run.file(7)


def test_other_files_in_the_folder_are_left_alone(run):
    series(run, [1])
    (run.folder / "notes.txt").write_text("mine")
    (run.folder / "notes.tmp").write_text("mine")
    with run.locked():
        assert [s.step for s in run.summaries()[0]] == [1]
    assert sorted(os.listdir(run.folder)) == ["notes.tmp", "notes.txt", "step-000000000001.dqc"]


# Writing


def test_a_failed_write_leaves_the_run_as_it_was(run):
    made = series(run, [1, 2])
    before = {path.name: path.read_bytes() for path in run.folder.iterdir()}
    unlabelled = replace(made[1], labels={})
    for step in (2, 3):
        with pytest.raises(KeyError):
            run.commit(replace(unlabelled, step=step), None)
    assert {path.name: path.read_bytes() for path in run.folder.iterdir()} == before


def test_a_second_writer_is_refused_until_the_first_is_done(run):
    with (
        run.locked(),
        pytest.raises(
            CheckpointError, match="another Checkpointer, here or in another process, is writing to this run"
        ),
        run.locked(),
    ):
        pass
    with run.locked():
        pass


def test_a_writer_in_another_process_is_refused(run):
    script = "from dynaquant.store.commit import WritableRun\n"
    script += f"with WritableRun({str(run.folder)!r}).locked(): print('writing')"
    with run.locked():
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert f"{run.folder}: another Checkpointer, here or in another process, is writing to this run" in done.stderr
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "writing\n"


def forked(action) -> int:
    """Forks a child that runs the action and then sleeps, like a worker of a DataLoader. Returns its process number."""
    child = os.fork()
    if child == 0:
        kept = action()
        time.sleep(60)
        os._exit(kept is None)
    return child


def ended(child: int) -> None:
    os.kill(child, 9)
    os.waitpid(child, 0)


def test_a_forked_worker_does_not_keep_the_run_locked_after_close(run):
    with run.locked():
        worker = forked(lambda: None)
    try:
        with run.locked():
            pass
    finally:
        ended(worker)


def test_a_forked_worker_does_not_keep_the_run_of_a_killed_training_locked(run):
    reader, out = os.pipe()

    def train_with_a_worker() -> object:
        holding = run.locked()
        holding.__enter__()
        forked(lambda: os.write(out, os.getpid().to_bytes(4, "little")))
        return holding

    training = forked(train_with_a_worker)
    worker = int.from_bytes(os.read(reader, 4), "little")
    ended(training)
    try:
        with run.locked():
            pass
    finally:
        os.kill(worker, 9)
        os.close(reader)
        os.close(out)


def test_a_reader_ignores_a_file_that_is_being_written(run):
    stray = run.folder / "step-000000000002.dqc.tmp"
    stray.write_bytes(b"half a checkpoint")
    series(run, [1])
    Run(run.folder).load(run.file(1))
    assert stray.exists()


def test_a_run_can_be_moved(run, tmp_path):
    made = series(run, [1, 2, 3])
    shutil.move(run.folder, tmp_path / "elsewhere")
    moved = Run(tmp_path / "elsewhere")
    for checkpoint in made:
        assert_holds(moved, checkpoint)


def test_a_folder_that_does_not_exist_has_no_checkpoints(tmp_path):
    assert Run(tmp_path / "nowhere").summaries() == ([], [])
    assert not Path(tmp_path / "nowhere").exists()


def test_tensors_that_a_reader_holds_already_stay_as_they_are(tmp_path):
    """Of the links of a chain that it decodes itself, it decodes each into the levels of the one before."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    quality = dq.Quality(configuration=dq.GridConfiguration(-80))
    with dq.Checkpointer(tmp_path, model, quality=quality) as ckpt:
        for step in range(1, 6):
            with torch.no_grad():
                model[0].weight.add_(0.02 * torch.randn(64, 64))  # the others are references to the first checkpoint
                if step == 5:
                    model[1].weight.add_(0.02 * torch.randn(64, 64))
            ckpt.save(step).result()
    run = Run(tmp_path)
    first, newest = run.file(1), run.file(5)
    held = run.load(first)
    before = {name: bits(values_of(tensor)) for name, tensor in held.items()}
    chain = run.chain(newest, decoded=first)
    assert [file.header.step for file in chain] == [5, 4, 3, 2, 1]
    found = load_tensors(chain, list(held), decoded=held)
    assert {name: bits(values_of(tensor)) for name, tensor in held.items()} == before
    assert {name: bits(values_of(tensor)) for name, tensor in found.items()} == {
        name: bits(values_of(tensor)) for name, tensor in run.load(newest).items()
    }
