"""``follow``: a model is kept at the newest checkpoint of a run, beside the training that writes it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import bits, model_of, train

import dynaquant as dq
from dynaquant.cli import maintain
from dynaquant.errors import CheckpointError, StateError
from dynaquant.restore import follow as follow_module
from dynaquant.store.container import CheckpointFile
from dynaquant.store.pointers import write_pointer
from dynaquant.store.run import Run

SUPPORT = Path(__file__).parents[1] / "support"


class Training:
    """A training that saves when called."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, **options) -> None:
        self.folder, self.model, self.step = folder, model_of().to(dtype), 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.ckpt = dq.Checkpointer(folder, self.model, self.optimizer, **options)

    def __call__(self, saves: int = 1) -> None:
        for _ in range(saves):
            self.step += 1
            train(self.model, self.optimizer)
            self.ckpt.save(self.step).result()


@pytest.fixture
def trained(tmp_path) -> Iterator[Training]:
    training = Training(tmp_path / "run", quality="lossless")
    with training.ckpt:
        yield training


def follower_of(training: Training, **options):
    """Return a follower that does not wait, and its model."""
    torch.manual_seed(7)  # other weights than the training's
    model = model_of().to(next(training.model.parameters()).dtype)
    return dq.follow(training.folder, model, **{"timeout": 0, **options}), model


def weights(model: nn.Module):
    return bits(dict(model.state_dict()))


def stored(folder: Path, step: int | None = None):
    return bits(dict(dq.load(folder, step)["model"]))


def damage(folder: Path, step: int, tensor: str) -> None:
    file = Run(folder).file(step)
    content = bytearray(file.path.read_bytes())
    stream = file.read(file.header.by_name[tensor])
    content[content.index(stream) + len(stream) // 2] ^= 1
    file.path.write_bytes(content)


# What the model holds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{"quality": "lossless"}, {}, {"quality": dq.Quality(method="published")}], ids=str)
def test_the_model_holds_what_a_restore_returns(tmp_path, dtype, options):
    training = Training(tmp_path / "run", dtype, keep=dq.Keep(keyframe_every=4), **options)
    follower, model = follower_of(training)
    with training.ckpt:
        for _ in range(9):
            training()
            assert list(follower) == [training.step] == [follower.step]
            assert weights(model) == stored(training.folder)
            if options == {"quality": "lossless"}:
                assert weights(model) == weights(training.model)


def test_the_newest_of_several_checkpoints_is_loaded(trained):
    follower, model = follower_of(trained)
    for _ in range(3):
        trained(4)
        assert list(follower) == [trained.step]
        assert weights(model) == weights(trained.model)
    assert list(follower) == []


def test_a_model_of_another_dtype_gets_rounded_values(trained):
    trained(2)
    model = model_of().bfloat16()
    assert list(dq.follow(trained.folder, model, timeout=0)) == [2]
    assert weights(model) == bits({name: tensor.bfloat16() for name, tensor in trained.model.state_dict().items()})


def test_several_models_are_followed_by_name(tmp_path):
    models = {"G": nn.Linear(9, 9), "D": nn.Linear(4, 4)}
    mine = {"G": nn.Linear(9, 9), "D": nn.Linear(4, 4)}
    with dq.Checkpointer(tmp_path, models, quality="lossless") as ckpt:
        ckpt.save(1).result()
        assert list(dq.follow(tmp_path, mine, timeout=0)) == [1]
    assert {name: weights(model) for name, model in mine.items()} == {n: weights(model) for n, model in models.items()}


def test_after_a_restore_of_an_older_step_the_newest_commit_counts(trained):
    follower, model = follower_of(trained)
    trained(4)
    assert list(follower) == [4]
    trained.ckpt.restore(step=1)
    trained.step = 1
    trained()
    assert list(follower) == [2]
    assert weights(model) == weights(trained.model)


# What is read and written


@pytest.fixture
def reads(monkeypatch) -> list[tuple[int, str]]:
    """The step and the name of every tensor whose stream is read from a file."""
    found = []
    read = CheckpointFile.read
    monkeypatch.setattr(
        CheckpointFile, "read", lambda self, entry: found.append((self.header.step, entry.name)) or read(self, entry)
    )
    return found


@pytest.mark.parametrize("options", [{"quality": "lossless"}, {}], ids=str)
def test_only_the_weights_of_newer_deltas_are_read(tmp_path, reads, options):
    training = Training(tmp_path / "run", **options)
    follower, model = follower_of(training)
    with training.ckpt:
        training(3)
        next(follower)
        training(2)
        reads.clear()
        assert next(follower) == 5
    assert {step for step, _ in reads} == {4, 5}
    assert {name for _, name in reads} == {f"model.{name}" for name, _ in model.named_parameters()}


def test_only_tensors_that_have_changed_are_written(trained):
    follower, model = follower_of(trained)
    trained()
    next(follower)
    before = {name: tensor._version for name, tensor in model.named_parameters()}
    with torch.no_grad():
        trained.model[1].bias += 1
    trained.ckpt.save(2).result()
    assert next(follower) == 2
    assert {name for name, tensor in model.named_parameters() if tensor._version != before[name]} == {"1.bias"}
    assert weights(model) == weights(trained.model)


def test_a_tensor_that_the_caller_has_changed_is_written_again(trained):
    follower, model = follower_of(trained)
    trained()
    next(follower)
    with torch.no_grad():
        model[2].weight.zero_()
        model[4].bias = nn.Parameter(torch.zeros(40))
    trained()
    next(follower)
    assert weights(model) == weights(trained.model)


def test_a_tensor_whose_memory_the_caller_has_replaced_is_written_again(trained):
    follower, model = follower_of(trained)
    trained()
    next(follower)
    for number in (0, 2):
        model[number].weight.data = model[number].weight.half().float()  # PyTorch counts no write
    trained()
    next(follower)
    assert weights(model) == weights(trained.model)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_chain_that_was_pruned_meanwhile_is_loaded_afresh(tmp_path, keep):
    training = Training(tmp_path / "run", quality="lossless", keep=dq.Keep(last=keep, keyframe_every=3))
    follower, model = follower_of(training)
    with training.ckpt:
        for saves in (1, 5, 1, 2, 3, 7):
            training(saves)
            assert next(follower) == training.step
            assert weights(model) == weights(training.model)


def test_a_run_that_was_recoded_meanwhile_is_followed_on(trained):
    follower, model = follower_of(trained)
    trained(3)
    next(follower)
    trained(2)
    trained.ckpt.close()
    maintain.compact(trained.folder, keyframe_every=2)
    assert next(follower) == 5
    assert weights(model) == weights(trained.model)
    assert list(follower) == []


def test_a_delta_on_a_deleted_file_is_decoded_from_memory(trained):
    follower, model = follower_of(trained)
    trained(3)
    next(follower)
    trained()
    Run(trained.folder).path(3).unlink()
    with pytest.raises(CheckpointError, match="its parent, step 3"):
        dq.load(trained.folder)
    assert next(follower) == 4
    assert weights(model) == weights(trained.model)


def test_frozen_parameters_are_read_once_and_omitted_ones_compared(tmp_path, reads):
    def build() -> nn.Sequential:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)
        return model

    model, mine, other = build(), build(), build()
    with torch.no_grad():
        model[1].weight += 1
        other[0].weight.zero_()
    with dq.Checkpointer(tmp_path, model, quality="lossless", roles={"model.2.*": "omit"}) as ckpt:
        ckpt.save(1).result()
        assert len(list(tmp_path.glob("frozen-*"))) == 1
        reads.clear()
        assert list(dq.follow(tmp_path, mine, timeout=0)) == [1]
        assert "model.0.weight" not in {name for _, name in reads}  # the model had them
        follower = dq.follow(tmp_path, other, timeout=0)
        assert list(follower) == [1]
        assert "model.0.weight" in {name for _, name in reads}
        with torch.no_grad():
            model[1].bias += 1
        ckpt.save(2).result()
        reads.clear()
        assert list(follower) == [2]
        assert {name for _, name in reads} == {"model.1.bias"}
        assert weights(other) == weights(model)
        with torch.no_grad():
            other[2].bias += 1
            model[1].bias += 1
        ckpt.save(3).result()
        before = weights(other)
        with pytest.raises(StateError, match="load the same base model first"):
            list(follower)
        assert weights(other) == before


def test_tied_tensors_that_are_omitted_are_known_by_one_name(tmp_path):
    def build() -> nn.ModuleDict:
        torch.manual_seed(3)
        model = nn.ModuleDict({"table": nn.Embedding(20, 8), "head": nn.Linear(8, 20, False), "own": nn.Linear(8, 8)})
        model["head"].weight = model["table"].weight
        model["table"].requires_grad_(False)
        return model

    model, mine, other = build(), build(), build()
    with torch.no_grad():
        model["own"].weight += 1
        other["table"].weight += 1
    roles = {"model.table.*": "omit"}
    with dq.Checkpointer(tmp_path, model, quality="lossless", roles=roles) as ckpt:
        ckpt.save(1).result()
    assert dq.load_into(build(), tmp_path) == []
    assert list(dq.follow(tmp_path, mine, timeout=0)) == [1]
    assert weights(mine) == weights(model)
    with pytest.raises(StateError, match="load the same base model first"):
        dq.load_into(other, tmp_path)
    with pytest.raises(StateError, match=r"extra\.weight is not in the checkpoint"):
        dq.load_into(nn.ModuleDict({**build(), "extra": nn.Linear(8, 8)}), tmp_path)


# Never half


@pytest.mark.parametrize("step", [4, 5])
def test_damage_leaves_the_model_as_it_was(trained, step):
    follower, model = follower_of(trained)
    trained(3)
    next(follower)
    before = weights(model)
    trained(2)
    damage(trained.folder, step, "model.4.weight")
    with pytest.raises(CheckpointError, match=r"model\.4\.weight"):
        next(follower)
    assert weights(model) == before
    assert follower.step == 3


def test_after_damage_the_next_sound_checkpoint_is_loaded(tmp_path):
    training = Training(tmp_path / "run", quality="lossless", keep=dq.Keep(keyframe_every=2))
    follower, model = follower_of(training)
    with training.ckpt:
        training(1)
        next(follower)
        training()
        damage(training.folder, 2, "model.1.weight")
        with pytest.raises(CheckpointError):
            next(follower)
        training()
        assert next(follower) == 3
        assert weights(model) == weights(training.model)


def test_after_an_interrupt_the_model_is_written_again_whatever_is_the_newest_then(trained, monkeypatch):
    follower, model = follower_of(trained)
    trained()
    next(follower)
    trained()
    copied = []

    def interrupted(target, values):
        if len(copied) == 2:
            raise KeyboardInterrupt
        copied.append(target)
        target.data.copy_(values)

    with monkeypatch.context() as patched:
        patched.setattr(follow_module, "copy_into", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(follower)
    assert weights(model) not in (stored(trained.folder, 1), stored(trained.folder, 2))
    trained.ckpt.close()
    Run(trained.folder).path(2).unlink()
    assert next(follower) == 1
    assert weights(model) == stored(trained.folder)


def test_a_model_that_does_not_fit_is_an_error_and_unchanged(trained):
    trained()
    model = model_of(width=25)
    before = weights(model)
    with pytest.raises(StateError, match=r"1\.weight is \[24, 24\] in the checkpoint and \[25, 25\] in the model"):
        list(dq.follow(trained.folder, model, timeout=0))
    assert weights(model) == before


@pytest.mark.usefixtures("process_group")
def test_a_sharded_model_is_an_error_that_says_what_to_do(trained):
    trained()
    model = model_of()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    follower = dq.follow(trained.folder, model, timeout=0)
    for load in (follower.update, lambda: dq.load_into(model, trained.folder)):
        with pytest.raises(StateError, match="divided among ranks"):
            load()


def test_a_model_made_in_inference_mode_is_followed(trained):
    with torch.inference_mode():
        model = model_of()
        follower = dq.follow(trained.folder, model, timeout=0)
    trained()
    assert next(follower) == 1
    assert weights(model) == weights(trained.model)
    trained()
    with torch.inference_mode():
        assert next(follower) == 2
    assert weights(model) == weights(trained.model)


# Waiting


def test_the_iteration_ends_after_the_timeout_and_can_go_on(trained):
    follower, _ = follower_of(trained, timeout=0.2, poll=0.02)
    start = time.monotonic()
    assert list(follower) == []
    assert time.monotonic() - start >= 0.2
    trained()
    assert list(follower) == [1]
    trained()
    assert list(follower) == [2]


def test_update_does_not_wait(trained):
    follower, _ = follower_of(trained, timeout=None)
    assert follower.update() is None
    trained()
    assert follower.update() == 1
    assert follower.update() is None


def test_a_run_that_does_not_exist_yet_is_waited_for(tmp_path):
    model = nn.Linear(3, 3)

    def save():
        time.sleep(0.3)
        with dq.Checkpointer(tmp_path / "later" / "run", model, quality="lossless") as ckpt:
            ckpt.save(5)

    mine = nn.Linear(3, 3)
    thread = threading.Thread(target=save)
    thread.start()
    assert next(dq.follow(tmp_path / "later" / "run", mine, poll=0.01, timeout=60)) == 5
    thread.join()
    assert weights(mine) == weights(model)


def test_a_file_and_numbers_out_of_range_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="is a file; give the folder of a run"):
        dq.follow(tmp_path / "file", model)
    for options in ({"poll": 0}, {"poll": float("nan")}, {"timeout": -1}, {"timeout": float("nan")}):
        with pytest.raises(ValueError, match="must be"):
            dq.follow(tmp_path, model, **options)


def test_a_run_of_unreadable_files_is_an_error(tmp_path):
    (tmp_path / "step-000000000001.dqc").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="not a dynaquant checkpoint"):
        dq.follow(tmp_path, nn.Linear(2, 2)).update()


def test_an_unreadable_newest_file_does_not_take_the_model_back(trained):
    follower, _ = follower_of(trained)
    trained(2)
    assert next(follower) == 2
    Run(trained.folder).path(2).write_bytes(b"nonsense")
    assert follower.update() is None
    trained.ckpt.close()


def test_a_warning_names_a_skipped_file_once(trained, caplog):
    trained(3)
    trained.ckpt.close()
    path = Run(trained.folder).path(3)
    path.write_bytes(b"nonsense")
    said = f"step 2 is the newest that can be read; skipped {path}: not a dynaquant checkpoint"
    misfit = dq.follow(trained.folder, nn.Linear(2, 2), timeout=0)
    for _ in range(2):
        with pytest.raises(StateError):
            misfit.update()
    assert [message.startswith(said) for message in caplog.messages] == [True]
    caplog.clear()
    follower, _ = follower_of(trained)
    assert [follower.update() for _ in range(3)] == [2, None, None]
    assert [message.startswith(said) for message in caplog.messages] == [True]


def test_a_warning_names_a_newer_file_that_cannot_be_read(trained, caplog):
    follower, _ = follower_of(trained)
    trained()
    assert next(follower) == 1
    trained()
    trained.ckpt.close()
    Run(trained.folder).path(2).write_bytes(b"nonsense")
    assert [follower.update() for _ in range(3)] == [None, None, None]
    assert len(caplog.messages) == 1
    assert "step 1 is the newest that can be read; skipped" in caplog.text


# Real writers


def said(trainer: subprocess.Popen, word: str) -> int:
    """Return the number after the next report of this word."""
    for line in trainer.stdout:
        if line.split()[0] == word:
            return int(line.split()[1])
    raise AssertionError("the training has ended")


@pytest.mark.parametrize("method", ["grid", "published"])
def test_a_follower_goes_on_while_the_training_is_killed_and_started_again(tmp_path, method):
    folder, model = tmp_path / "run", nn.Linear(256, 200)
    follower = dq.follow(folder, model, poll=0.002, timeout=60)
    compared, seen = 0, []
    command = [sys.executable, SUPPORT / "killed.py", folder, method]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as trainer:
        for _ in range(6):
            trainer.stdin.write("go\n")
            process = said(trainer, "started")
            for _ in range(8):
                step = next(follower)
                seen.append(step)
                assert torch.equal(model.bias.detach(), torch.full((200,), float(step)))
                try:
                    wanted = stored(folder, step)
                except CheckpointError:  # the training keeps three
                    continue
                assert weights(model) == wanted
                compared += 1
            os.kill(process, signal.SIGKILL)
            said(trainer, "ended")
        trainer.stdin.close()
    assert seen == sorted(set(seen))  # without retention's deletions or restores the run only moves on
    assert compared >= 6
    follower.update()
    assert weights(model) == stored(folder)


def test_the_run_in_the_folder_of_a_framework_is_found_as_soon_as_it_is_there(tmp_path):
    folder, model = tmp_path / "output", model_of()
    follower = dq.follow(folder, model, timeout=0)
    assert follower.update() is None
    folder.mkdir()
    assert follower.update() is None
    training = Training(folder / "dynaquant", quality="lossless")
    with training.ckpt:
        training()
        assert follower.update() == 1
        training()
        assert follower.update() == 2
    assert weights(model) == weights(training.model)


def test_a_pointer_leads_to_the_newest_checkpoint_of_its_run_also_after_it_is_removed(tmp_path, trained):
    trained()
    pointer = tmp_path / "last.ckpt"
    write_pointer(pointer, Run(trained.folder).newest())
    follower = dq.follow(pointer, model_of(), timeout=0)
    pointer.unlink()
    trained()
    assert follower.update() == 2
