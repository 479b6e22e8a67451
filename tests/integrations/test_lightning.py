"""Lightning saves to a run, and goes on from it as if nothing had happened."""

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked_trainings import result_of, trainings
from full_disk import files_of_at_most
from training import bits

import dynaquant as dq
from dynaquant.interop.export import export
from dynaquant.interop.targets import Target
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
from dynaquant.store.pointers import read_pointer
from dynaquant.store.run import Run
from dynaquant.store.tags import tags_of

pytest.importorskip("lightning", reason="Lightning is not installed")

import lightning
from commands import call
from launched import launch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from lightning_training import (
    EPOCHS,
    STEPS_PER_EPOCH,
    WARNINGS,
    Module,
    data,
    fit,
    hash_of,
    silence,
    trainer_of,
)
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader

from dynaquant.engine.quantize.bounds import average_bounds
from dynaquant.integrations.lightning import CheckpointIO, Training
from dynaquant.saving.presets import PRESETS
from dynaquant.saving.record import record_of

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in WARNINGS]
SCRIPT = Path(__file__).parents[1] / "support" / "lightning_training.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_digits.py"
STEPS = EPOCHS * STEPS_PER_EPOCH


@pytest.fixture(scope="module")
def train():
    with trainings(SCRIPT) as train:
        yield train


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> SimpleNamespace:
    """What Lightning makes of the training with its own checkpoints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with warnings.catch_warnings():
        silence()  # marks do not reach fixtures of a module
        module = fit(trainer_of(folder, None), resume=None)
    return SimpleNamespace(weights=hash_of(module), logs=logs_of(folder))


def logs_of(folder) -> dict[tuple[int, str], str]:
    """Return what was logged, by step and name. What a resumed training logs replaces what was logged before."""
    found = {}
    versions = (Path(folder) / "logs").iterdir()
    for version in sorted(versions, key=lambda path: int(path.name.rpartition("_")[2])):
        if (version / "metrics.csv").exists():
            with (version / "metrics.csv").open() as file:
                for row in csv.DictReader(file):
                    found |= {(int(row["step"]), name): value for name, value in row.items() if value}
    return found


def checkpoints(folder) -> Path:
    return Path(folder) / "checkpoints"


def files_in(folder) -> list[str]:
    return sorted(path.name for path in checkpoints(folder).glob("*.ckpt"))


def run_of(folder) -> Run:
    return Run(checkpoints(folder) / "dynaquant")


# Resuming


@pytest.mark.parametrize("quality", ["lossless", "balanced"])
def test_a_training_that_is_killed_three_times_ends_like_an_undisturbed_one(train, undisturbed, tmp_path, quality):
    generator = random.Random(f"lightning {quality}")
    for step in sorted(generator.sample(range(3, STEPS), 3)):
        killed = train(tmp_path, at=step, quality=quality, pause=0.02)
        assert killed.ended == signal.SIGKILL
        assert killed.steps[0] <= step
    ended = train(tmp_path, quality=quality)
    assert ended.steps[0] % STEPS_PER_EPOCH == 1, "it went on from the end of an epoch"
    assert ended.result["steps"] == STEPS
    assert ended.result["epochs"] == EPOCHS
    logs = logs_of(tmp_path)
    assert logs.keys() == undisturbed.logs.keys()
    if quality == "lossless":
        assert ended.result["weights"] == undisturbed.weights
        assert logs == undisturbed.logs


def test_with_asynchronous_saves_a_killed_training_ends_the_same(train, undisturbed, tmp_path):
    train(tmp_path, at=21, quality="lossless", asynchronous=True, pause=0.05)
    ended = train(tmp_path, quality="lossless", asynchronous=True)
    assert (ended.result["weights"], ended.result["steps"]) == (undisturbed.weights, STEPS)
    assert ended.steps[0] > 1


def test_a_kill_during_a_save_leaves_the_last_complete_file(train, tmp_path):
    """Kills right after the step whose checkpoint is written next."""
    train(tmp_path, at=2 * STEPS_PER_EPOCH, quality="lossless")
    assert "last.ckpt" in files_in(tmp_path)
    for path in checkpoints(tmp_path).glob("*.ckpt"):
        assert dq.load(path)["global_step"] % STEPS_PER_EPOCH == 0


# Which files there are


def test_every_file_that_lightning_keeps_can_be_loaded_and_no_other_is_stored(tmp_path):
    fit(trainer_of(tmp_path, "lossless", save_top_k=2))
    own = tmp_path / "own"
    fit(trainer_of(own, None, save_top_k=2))
    assert files_in(tmp_path) == files_in(own)
    assert len(run_of(tmp_path).steps()) == len(files_in(own)) == 3
    for name in files_in(own):
        expected = torch.load(checkpoints(own) / name, weights_only=True)
        found = CheckpointIO().load_checkpoint(checkpoints(tmp_path) / name)
        assert {**found, "callbacks": 0}.keys() == {**expected, "callbacks": 0}.keys()
        assert found["global_step"] == expected["global_step"]
        assert found["loops"] == expected["loops"]
        for key, value in expected["state_dict"].items():
            assert torch.equal(found["state_dict"][key].cpu(), value.cpu())


@pytest.mark.parametrize("link", [True, False])
def test_a_link_to_the_last_file_keeps_its_checkpoint(tmp_path, monkeypatch, link):
    if not link:  # where there are no links, Lightning copies the file
        monkeypatch.setattr(os, "symlink", lambda *_: (_ for _ in ()).throw(OSError("no links")))
    fit(trainer_of(tmp_path, "lossless", save_last="link", epochs=3))
    last = checkpoints(tmp_path) / "last.ckpt"
    assert last.is_symlink() == link
    assert dq.load(last)["global_step"] == 3 * STEPS_PER_EPOCH
    assert "1 of 1 checkpoint decodes" in call("verify", last)


def test_a_copy_keeps_the_checkpoint_of_a_removed_file(tmp_path):
    trainer = trainer_of(tmp_path, "lossless", epochs=1)
    fit(trainer)
    first, copy = checkpoints(tmp_path) / "last.ckpt", checkpoints(tmp_path) / "kept.ckpt"
    shutil.copy(first, copy)
    trainer.strategy.remove_checkpoint(first)
    assert not first.exists()
    assert dq.load(copy)["global_step"] == STEPS_PER_EPOCH
    steps = run_of(tmp_path).steps()
    trainer.strategy.remove_checkpoint(copy)
    assert len(run_of(tmp_path).steps()) == len(steps) - 1


def test_weights_and_paths_of_ones_own_are_saved(tmp_path):
    trainer = trainer_of(tmp_path, "lossless", epochs=1, save_weights_only=True)
    module = fit(trainer)
    found = dq.load(checkpoints(tmp_path) / "last.ckpt")
    assert "optimizer_states" not in found
    assert torch.equal(found["state_dict"]["net.0.weight"], module.net[0].weight)
    path = tmp_path / "elsewhere" / "manual.ckpt"
    trainer.save_checkpoint(path)
    assert dq.load(path)["optimizer_states"][0]["state"][0]["exp_avg"].any()
    trainer.save_checkpoint(path)  # again, in its place
    assert len(Run(path.parent / "dynaquant").steps()) == 1


def test_the_best_file_is_used_for_validation(tmp_path):
    trainer = trainer_of(tmp_path, "lossless", epochs=2)
    module = fit(trainer)
    best = dq.load(trainer.checkpoint_callback.best_model_path)["state_dict"]
    with torch.no_grad():
        module.net[0].weight.zero_()
    trainer.validate(module, torch.utils.data.DataLoader(data(32, 2)), ckpt_path="best", verbose=False)
    assert torch.equal(module.net[0].weight, best["net.0.weight"])


class Hashes(Callback):
    """Hashes the weights that are validated."""

    def __init__(self):
        self.by_step, self.last = {}, None

    def on_validation_end(self, trainer, pl_module):
        self.last = self.by_step[trainer.global_step] = hash_of(pl_module)


def test_the_best_file_has_the_weights_that_were_validated(tmp_path):
    hashes = Hashes()
    trainer = trainer_of(tmp_path, "balanced", callbacks=(hashes,), save_top_k=2)
    module = fit(trainer)
    best = trainer.checkpoint_callback
    step = dq.load(best.best_model_path)["global_step"]
    trainer.validate(module, torch.utils.data.DataLoader(data(128, 2), batch_size=32), ckpt_path="best", verbose=False)
    assert hashes.last == hashes.by_step[step]
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(float(best.best_model_score), rel=1e-6)
    assert len(run_of(tmp_path).lossless_copy_paths()) == 1
    assert {tag.name: tag.step for tag in tags_of(run_of(tmp_path))} == {"best": step}


def test_with_several_monitors_each_best_file_is_exact(tmp_path):
    hashes = Hashes()
    other = ModelCheckpoint(tmp_path / "checkpoints", "noisy-{step}", monitor="noise", mode="max")
    trainer = trainer_of(tmp_path, "balanced", callbacks=(hashes, other))
    module = fit(trainer)
    for callback in (trainer.checkpoint_callback, other):
        stored = dq.load(callback.best_model_path)
        module.load_state_dict(stored["state_dict"])
        assert hash_of(module) == hashes.by_step[stored["global_step"]]
    assert [tag.name for tag in tags_of(run_of(tmp_path))] == ["best-noise", "best-val_loss"]


def test_the_best_file_may_be_quantized(tmp_path):
    trainer = trainer_of(tmp_path, "balanced", epochs=2, io={"exact": None})
    fit(trainer)
    assert run_of(tmp_path).lossless_copy_paths() == []


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damaged", ["checkpoint", "header", "pointer"])
def test_in_place_of_a_damaged_last_file_a_sound_one_beside_it_is_loaded(tmp_path, caplog, damaged):
    fit(trainer_of(tmp_path, "lossless", epochs=3, save_top_k=-1))
    newest = run_of(tmp_path).newest()
    if damaged == "pointer":
        last = checkpoints(tmp_path) / "last.ckpt"
        last.write_bytes(last.read_bytes()[:40])
    elif damaged == "header":
        newest.path.write_bytes(newest.path.read_bytes()[:-10])
    else:
        damage(newest.path)
    trainer = trainer_of(tmp_path, "lossless", save_top_k=-1)
    fit(trainer)
    assert trainer.current_epoch == EPOCHS
    assert "is loaded in place of" in caplog.text


def test_a_damaged_file_that_was_asked_for_is_an_error_that_names_others(tmp_path):
    fit(trainer_of(tmp_path, "lossless", epochs=2, save_top_k=-1))
    pointer = read_pointer(checkpoints(tmp_path) / "epoch=0-step=8.ckpt")
    damage(run_of(tmp_path).path(pointer.step))
    with pytest.raises(dq.CheckpointError) as raised:
        fit(trainer_of(tmp_path, "lossless"), resume=str(checkpoints(tmp_path) / "epoch=0-step=8.ckpt"))
    assert "newest first, these are beside it: last.ckpt" in " ".join(raised.value.__notes__)


def test_saves_and_loads_are_in_the_log_and_warnings_only_once(tmp_path, caplog):
    caplog.set_level("INFO", logger="dynaquant")
    module = Module(16, optimizer=torch.optim.Adam)
    fit(trainer_of(tmp_path, "balanced", epochs=3, io={"skip_objects": True}), module)
    assert caplog.text.count("saved step 24: ") == 1
    assert caplog.text.count("left out of checkpoints") == 1
    fit(trainer_of(tmp_path, "balanced", epochs=4, io={"skip_objects": True}), Module(16))
    assert caplog.text.count("loaded step ") == 1


@pytest.mark.slow
def test_ddp_saves_and_resumes_exactly(tmp_path):
    def ranks(folder, **changes) -> dict:
        settings = json.dumps(
            {"folder": str(folder), "quality": "lossless", "devices": 2, "module": {"dropout": 0.0}, **changes}
        )
        status, output = launch(SCRIPT, 2, 300, settings, modules=("dynaquant.integrations.lightning",))
        assert status == 0, output
        return result_of(output)

    undisturbed = ranks(tmp_path / "a", epochs=3)
    ranks(tmp_path / "b", epochs=2)
    assert ranks(tmp_path / "b", epochs=3) == undisturbed


def test_files_of_lightning_are_read_and_replaced(tmp_path):
    fit(trainer_of(tmp_path, None, epochs=1))
    trainer = trainer_of(tmp_path, "lossless", epochs=2)
    fit(trainer)
    assert trainer.global_step == 2 * STEPS_PER_EPOCH
    assert dq.load(checkpoints(tmp_path) / "last.ckpt")["global_step"] == 2 * STEPS_PER_EPOCH


def test_folders_can_be_moved_whole_and_a_file_alone_says_what_to_do(tmp_path):
    fit(trainer_of(tmp_path, "lossless", epochs=1))
    moved = tmp_path / "moved"
    checkpoints(tmp_path).rename(moved)
    assert dq.load(moved / "last.ckpt")["epoch"] == 0
    (tmp_path / "alone").mkdir()
    shutil.copy(moved / "last.ckpt", tmp_path / "alone")
    with pytest.raises(dq.CheckpointError, match="dynaquant decompress"):
        dq.load(tmp_path / "alone" / "last.ckpt")


def test_decompress_makes_a_file_that_lightning_loads_alone(tmp_path):
    module = fit(trainer_of(tmp_path, "lossless", epochs=1))
    out = tmp_path / "alone.ckpt"
    call("decompress", checkpoints(tmp_path) / "last.ckpt", "-o", out)
    assert hash_of(Module.load_from_checkpoint(out)) == hash_of(module)


def test_an_exported_file_is_continued_without_dynaquant(tmp_path):
    def train(trainer, resume=None):
        lightning.seed_everything(1, verbose=False)
        module = Module(dropout=0.0)  # Lightning itself does not restore random numbers
        loaders = [torch.utils.data.DataLoader(data(number, seed), 32) for number, seed in ((256, 1), (128, 2))]
        trainer.fit(module, *loaders, ckpt_path=resume)
        return hash_of(module), float(trainer.callback_metrics["loss"])

    undisturbed = train(trainer_of(tmp_path, "lossless", epochs=3, save_top_k=-1))
    first = checkpoints(tmp_path) / f"epoch=0-step={STEPS_PER_EPOCH}.ckpt"
    said = " ".join(call("export", first, "--to", "lightning", "-o", tmp_path / "out.ckpt").split())
    assert "does not restore random number generators" in said
    assert 'for ckpt_path="best", export it to that path, too, with --force' in said
    plain = lightning.Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(checkpoints(tmp_path), monitor="val_loss", save_top_k=0)],
    )
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint need to be provided"):
        assert train(plain, tmp_path / "out.ckpt") == undisturbed
    assert plain.global_step == 3 * STEPS_PER_EPOCH
    with pytest.raises(dq.CheckpointError, match=r"saved with Lightning: give --to lightning"):
        export(StoredCheckpoint(first), Target.TRANSFORMERS, tmp_path / "x")
    assert not (tmp_path / "x").exists()


# What is quantized


def test_frozen_parameters_and_buffers_are_exact_and_moments_are_small(tmp_path):
    module = Module(frozen=True)
    fit(trainer_of(tmp_path, "balanced", epochs=2), module)
    found = dq.load(checkpoints(tmp_path) / "last.ckpt")["state_dict"]
    assert torch.equal(found["net.0.weight"], module.net[0].weight)
    assert torch.equal(found["scale"], module.scale)
    assert not torch.equal(found["net.3.weight"], module.net[3].weight)
    roles = record_of(run_of(tmp_path).newest()).roles
    assert roles["weight"].ratio > 3
    assert roles["second_moment"].ratio > 8


class KeepsAverage(EMAWeightAveraging):
    """Keeps what its average was at the last save. Lightning copies it into the module when the training ends."""

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        self.saved = {name: tensor.clone() for name, tensor in checkpoint["state_dict"].items()}


def test_an_average_of_weights_is_stored_on_fine_grids_and_the_metric_judges_the_weights(tmp_path):
    average = KeepsAverage(decay=0.9)
    settings = {"metric": "val_loss", "epochs": 4, "save_last": False, "io": {"exact": None}}
    fit(trainer_of(tmp_path, "balanced", callbacks=(average,), **settings), width=256)
    found = dq.load(next(checkpoints(tmp_path).glob("*.ckpt")))["state_dict"]
    record = record_of(run_of(tmp_path).newest())
    weights = {name: tensor for name, tensor in average.saved.items() if name != "scale"}
    assert record.roles["average"].raw == sum(4 * tensor.numel() for tensor in weights.values())
    assert torch.equal(found["scale"], average.saved["scale"].cpu())
    for name, allowed in average_bounds(weights, PRESETS["balanced"].average_error).items():
        assert 0 < (found[name] - weights[name]).abs().max() <= allowed.absolute
    # Stored exactly, the average would take more than half of the file.
    assert record.roles["average"].ratio > 3.5
    assert record.ratio > 5
    assert record.quality is not None
    assert record.notes == []


def test_a_training_with_an_average_goes_on_exactly(tmp_path):
    def ended(folder, epochs):
        return hash_of(fit(trainer_of(folder, "lossless", epochs=epochs, callbacks=(EMAWeightAveraging(decay=0.9),))))

    expected = ended(tmp_path / "a", 3)
    ended(tmp_path / "b", 2)
    assert ended(tmp_path / "b", 3) == expected


def test_the_best_file_has_the_average_that_was_validated(tmp_path):
    class During(Hashes):
        def on_validation_batch_end(self, trainer, pl_module, *_):
            self.by_step[trainer.global_step] = hash_of(pl_module)

        def on_validation_end(self, *_):
            pass

    hashes = During()
    trainer = trainer_of(tmp_path, "balanced", epochs=3, callbacks=(EMAWeightAveraging(decay=0.9), hashes))
    fit(trainer)
    stored = dq.load(trainer.checkpoint_callback.best_model_path)
    module = Module()
    module.load_state_dict(stored["state_dict"])
    assert hash_of(module) == hashes.by_step[stored["global_step"]]


class Moments(Callback):
    """Compares the length of a first moment after the first step with that of a moment of one gradient."""

    length = None

    def on_train_batch_end(self, trainer, *_):
        if self.length is None and trainer.global_step > STEPS_PER_EPOCH:
            parameter = next(p for p in trainer.lightning_module.parameters() if p.requires_grad)
            moment = trainer.optimizers[0].state[parameter]["exp_avg"]
            self.length = float((moment / (0.1 * parameter.grad)).median())


@pytest.mark.parametrize(("quality", "corrected"), [("balanced", True), ("lossless", False)])
def test_first_moments_that_a_checkpoint_drops_are_corrected_after_a_restore(tmp_path, quality, corrected):
    moments = Moments()
    fit(trainer_of(tmp_path, quality, epochs=1))
    fit(trainer_of(tmp_path, quality, epochs=2, callbacks=(moments,)))
    assert (moments.length == pytest.approx(3.0, rel=0.01)) == corrected  # the largest factor of a correction


def test_first_moments_that_were_zero_at_the_save_are_not_corrected(tmp_path):
    """As those of a parameter without gradients for long."""

    class Zeros(Callback):
        def on_validation_start(self, trainer, _):
            for state in trainer.optimizers[0].state.values():
                state["exp_avg"].zero_()

    moments = Moments()
    fit(trainer_of(tmp_path, "lossless", epochs=1, callbacks=(Zeros(),)))
    fit(trainer_of(tmp_path, "lossless", epochs=2, callbacks=(moments,)))
    assert moments.length == pytest.approx(1.0, rel=0.01)


def test_moments_of_an_optimizer_that_is_not_like_adam_are_exact_and_the_record_says_so(tmp_path):
    class Signs(torch.optim.Adam):
        def step(self, closure=None):
            loss = closure()
            for parameter in self.param_groups[0]["params"]:
                for key in ("exp_avg", "exp_avg_sq"):
                    self.state[parameter].setdefault(key, torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                parameter.data.sub_(self.state[parameter]["exp_avg"].sign(), alpha=1e-3)
            return loss

    class Trained(Module):
        def configure_optimizers(self):
            return Signs(self.parameters())

    trainer = trainer_of(tmp_path, "balanced", epochs=1)
    fit(trainer, Trained())
    path = trainer.checkpoint_callback.last_model_path
    assert dq.load(path)["optimizer_states"][0]["state"][0]["exp_avg"].any()
    notes = record_of(run_of(tmp_path).newest()).notes
    assert any("moments of optimizer_states.0 are stored exactly" in note for note in notes)


def test_noise_in_the_momentum_of_sgd_may_move_no_weight_far(tmp_path):
    def tolerances(rate) -> set[float]:
        class Trained(Module):
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), rate, momentum=0.9)

        trainer = trainer_of(tmp_path / str(rate), "balanced", epochs=1)
        fit(trainer, Trained())
        training = next(each for each in trainer.callbacks if isinstance(each, Training))
        found = training.first_tolerances(PRESETS["balanced"], interval=5)
        assert found.keys() >= {"optimizer_states.0.state.0.momentum_buffer"}
        return set(found.values())

    assert tolerances(1e-6) == {0.5}
    assert max(tolerances(0.3)) < 0.25


def test_dropped_first_moments_that_cannot_be_corrected_are_in_the_log(tmp_path, caplog):
    class Mine(torch.optim.Adam):
        def step(self, closure=None):
            return super().step(closure)

    class Trained(Module):
        def configure_optimizers(self):
            return Mine(self.parameters())

    for epochs in (1, 2):
        assert "first moments" not in caplog.text
        fit(trainer_of(tmp_path, "balanced", epochs=epochs), Trained())
    assert "optimizer 0 came back without its first moments" in caplog.text
    assert "CheckpointIO('lossless') keeps them" in caplog.text


def test_without_a_training_the_plugin_alone_saves_and_resumes(tmp_path):
    from lightning.pytorch import Trainer

    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    for epochs in (1, 2):
        trainer = Trainer(
            max_epochs=epochs, default_root_dir=tmp_path, plugins=[CheckpointIO()], log_every_n_steps=1, **settings
        )
        last = next(checkpoints(tmp_path).glob("epoch=0*.ckpt"), None)
        fit(trainer, resume=last)
        assert trainer.global_step == epochs * STEPS_PER_EPOCH
    assert len(files_in(tmp_path)) >= 1


# The metric


def test_a_metric_of_the_module_bounds_the_loss_and_leaves_no_trace(undisturbed, tmp_path):
    trainer = trainer_of(tmp_path, "high", metric="val_loss")
    module = fit(trainer)
    assert hash_of(module) == undisturbed.weights
    assert logs_of(tmp_path) == undisturbed.logs
    assert module.validated == 2 + EPOCHS * 4, "the search validates a copy"
    quality = record_of(run_of(tmp_path).newest()).quality
    assert quality.degradation <= 0.001
    assert quality.original == pytest.approx(float(trainer.checkpoint_callback.best_model_score), rel=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated")
def test_a_metric_of_a_module_that_holds_tensors_with_a_graph(tmp_path):
    class Holding(Module):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.losses = [*getattr(self, "losses", ()), {"loss": loss}]
            return loss

    module = Holding()
    torch.nn.utils.weight_norm(module.net[0])
    saves = {"every_n_train_steps": 3, "monitor": None, "save_top_k": -1}
    fit(trainer_of(tmp_path, "balanced", metric="val_loss", epochs=2, **saves), module, resume=None)
    assert len(run_of(tmp_path).steps()) > 1
    assert module.losses[0]["loss"].grad_fn is not None


class Tuned(Module):
    """A module whose learning rate and batch size a Tuner may choose."""

    lr, batch_size = 1e-2, 8

    def train_dataloader(self):
        return DataLoader(data(256, 1), batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(data(128, 2), batch_size=32)


@pytest.mark.parametrize("tune", ["lr_find", "scale_batch_size"])
def test_a_tuner_leaves_the_weights_as_they_were(tmp_path, tune):
    lightning.seed_everything(1, verbose=False)
    module = Tuned()
    before = hash_of(module)
    tuner = Tuner(trainer_of(tmp_path, "balanced", epochs=1))
    if tune == "lr_find":
        tuner.lr_find(module, num_training=5)
    else:
        tuner.scale_batch_size(module, max_trials=2, steps_per_trial=2, init_val=8)
    assert hash_of(module) == before


def test_a_metric_that_is_not_logged_is_an_error_that_says_so(tmp_path):
    with pytest.raises(dq.EvaluateError, match=r"must log 'accuracy' once for each batch"):
        fit(trainer_of(tmp_path, "high", metric="accuracy", epochs=1))


def test_a_metric_by_name_needs_a_training_that_the_trainer_has(tmp_path):
    with pytest.raises(ValueError, match="the same Training"):
        CheckpointIO(metric="val_loss")
    with pytest.raises(dq.CheckpointError, match=r"callbacks=\[training"):
        CheckpointIO(training=Training()).save_checkpoint({"state_dict": {}}, tmp_path / "a.ckpt")


def test_a_metric_and_asynchronous_saves_exclude_each_other(tmp_path):
    with pytest.raises(dq.CheckpointError, match="AsyncCheckpointIO"):
        fit(trainer_of(tmp_path, "high", metric="val_loss", asynchronous=True, epochs=2))


# Hyperparameters


def test_plain_hyperparameters_come_back(tmp_path):
    fit(trainer_of(tmp_path, "lossless", epochs=1), Module(16, betas=(0.9, 0.95), name="small", depth=None))
    found = dq.load(checkpoints(tmp_path) / "last.ckpt")["hyper_parameters"]
    assert found == {"width": 16, "frozen": False, "betas": (0.9, 0.95), "name": "small", "depth": None}


def test_a_class_among_hyperparameters_is_an_error_that_says_what_to_do(tmp_path):
    module = Module(16, optimizer=torch.optim.Adam)
    with pytest.raises(dq.StateError, match=r"hyper_parameters\.optimizer.*save_hyperparameters\(ignore.*skip_objects"):
        fit(trainer_of(tmp_path, "lossless", epochs=1), module)
    assert module.validated <= 2  # before the first step of training; there is a sanity check
    assert files_in(tmp_path) == []


def test_a_weight_of_a_tensor_class_is_an_error_that_says_what_to_do(tmp_path):
    module = Module(16)
    layer = next(each for each in module.modules() if isinstance(each, torch.nn.Linear))
    layer.weight = torch.nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach()), requires_grad=False)
    with pytest.raises(dq.StateError, match=r"weight is a TwoTensor, .*strict_loading.* dynaquant\.Checkpointer"):
        fit(trainer_of(tmp_path, "lossless", epochs=1), module)
    assert module.validated <= 2
    with pytest.raises(dq.StateError, match="weight is a TwoTensor"):  # without Training
        CheckpointIO().save_checkpoint({"state_dict": module.state_dict()}, tmp_path / "a.ckpt")
    assert files_in(tmp_path) == []


def test_a_class_among_hyperparameters_is_left_out_on_request(tmp_path, caplog):
    module = Module(16, optimizer=torch.optim.Adam, layers=[torch.nn.ReLU(), 2], path=Path("data"))
    fit(trainer_of(tmp_path, "lossless", epochs=1, io={"skip_objects": True}), module)
    found = dq.load(checkpoints(tmp_path) / "last.ckpt")["hyper_parameters"]
    assert found == {"width": 16, "frozen": False}
    assert "hyper_parameters.optimizer (torch.optim.adam.Adam)" in caplog.text
    assert "hyper_parameters.layers.0 (torch.nn.modules.activation.ReLU)" in caplog.text


def test_storage_options_and_addresses_are_refused(tmp_path):
    with pytest.raises(TypeError, match="storage_options"):
        CheckpointIO().save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"a": 1})
    with pytest.raises(dq.CheckpointError, match="local and shared folders"):
        CheckpointIO().save_checkpoint({}, "s3://bucket/a.ckpt")
    with pytest.raises(FileNotFoundError):
        CheckpointIO().load_checkpoint(tmp_path / "missing.ckpt")


# The example


def test_the_example_trains_and_goes_on_after_a_kill(tmp_path):
    command = [sys.executable, EXAMPLE]
    with subprocess.Popen([*command, "0.02"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as first:
        while not (tmp_path / "runs/digits/last.ckpt").exists():
            assert first.poll() is None
            time.sleep(0.05)
        first.kill()
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "Restored all states from the checkpoint" in ended.stderr
    assert "300 steps" in ended.stdout


# After a restore


def test_checkpoints_after_a_restore_keep_what_the_training_has_changed(tmp_path):
    torch.manual_seed(0)
    state = {"state_dict": {"weight": torch.randn(200, 200)}, "global_step": 10}
    CheckpointIO().save_checkpoint(state, tmp_path / "first.ckpt")

    def share_kept(plugin) -> float:
        weight = CheckpointIO().load_checkpoint(tmp_path / "first.ckpt")["state_dict"]["weight"]
        moved = 0.005 * torch.randn(200, 200, generator=torch.Generator().manual_seed(1))
        changed = {"state_dict": {"weight": weight + moved}, "global_step": 20}
        plugin.save_checkpoint(changed, tmp_path / "second.ckpt")
        stored = CheckpointIO().load_checkpoint(tmp_path / "second.ckpt")["state_dict"]["weight"]
        return float(((stored - weight) * moved).sum() / moved.square().sum())

    restored = CheckpointIO()
    restored.load_checkpoint(tmp_path / "first.ckpt")
    assert share_kept(CheckpointIO()) < 0.5  # that training was not restored, so its weights may be far from there
    assert share_kept(restored) > 0.9


@pytest.mark.parametrize("is_new", [True, False], ids=["new process", "same process"])
def test_what_was_restored_from_an_older_checkpoint_keeps_its_values(tmp_path, is_new):
    """Not those of the newest checkpoint, on which the next one is conditioned."""
    torch.manual_seed(0)
    plugin, frozen = CheckpointIO(), torch.randn(64, 64)

    def state(step, frozen):
        return {"global_step": step, "state_dict": {"frozen": frozen.clone(), "other": torch.randn(64, 64)}}

    plugin.save_checkpoint(state(10, frozen), tmp_path / "older.ckpt")
    plugin.save_checkpoint(state(20, 1.5 * frozen), tmp_path / "newest.ckpt")
    plugin = CheckpointIO() if is_new else plugin
    restored = plugin.load_checkpoint(tmp_path / "older.ckpt")["state_dict"]["frozen"]
    plugin.save_checkpoint(state(30, restored), tmp_path / "next.ckpt")
    assert bits(plugin.load_checkpoint(tmp_path / "next.ckpt")["state_dict"]["frozen"]) == bits(restored)


def test_a_save_that_fails_leaves_what_the_next_one_knows_of_a_restore(tmp_path):
    torch.manual_seed(0)
    groups = [{"lr": 0.1, "params": [0]}]
    state = {"state_dict": {"weight": torch.randn(200, 200)}, "global_step": 10}
    CheckpointIO().save_checkpoint({**state, "optimizer_states": [{"param_groups": groups}]}, tmp_path / "first.ckpt")

    def saved_after(failures: int) -> list:
        plugin = CheckpointIO()
        weight = plugin.load_checkpoint(tmp_path / "first.ckpt")["state_dict"]["weight"]
        moved = 0.005 * torch.randn(200, 200, generator=torch.Generator().manual_seed(1))
        changed = {"state_dict": {"weight": weight + moved}, "global_step": 20}
        changed["optimizer_states"] = [{"param_groups": groups}]
        for _ in range(failures):
            with files_of_at_most(1000), pytest.raises(OSError, match="File too large"):
                plugin.save_checkpoint(changed, tmp_path / "second.ckpt")
        plugin.save_checkpoint(changed, tmp_path / "second.ckpt")
        record = dict(StoredCheckpoint(tmp_path / "second.ckpt").file.header.record)
        plugin.remove_checkpoint(tmp_path / "second.ckpt")
        return [record[key] for key in ("configuration", "interval", "training_budget")]

    assert saved_after(failures=2) == saved_after(failures=0)


class OfAdam(Training):
    """What is known of a training of one weight, whose updates the learning rate scales. Its Trainer is elsewhere."""

    trained = frozenset({"weight"})
    scaled_by_rate = True


def of_adam(**options) -> CheckpointIO:
    return CheckpointIO(training=OfAdam(), **options)


def test_checkpoints_late_in_a_schedule_may_lose_less_after_a_restore(tmp_path):
    def saved(plugin, step, rate) -> float:
        groups = [{"lr": rate, "initial_lr": 1e-5, "params": [0]}]
        state = {
            "state_dict": {"weight": torch.randn(64, 64)},
            "optimizer_states": [{"state": {}, "param_groups": groups}],
        }
        plugin.save_checkpoint({**state, "global_step": step}, tmp_path / f"{step}.ckpt")
        return Run(tmp_path / "dynaquant").file(step).header.record["search"]["limit"]

    torch.manual_seed(0)
    plugin = of_adam()
    early = saved(plugin, 100, 1e-3)
    late = saved(plugin, 200, 1e-4)
    plugin = of_adam()
    plugin.load_checkpoint(tmp_path / "200.ckpt")
    after = saved(plugin, 210, 1e-4)
    explicit = saved(of_adam(quality=dq.Quality(max_degradation=0.01)), 220, 1e-4)
    assert after < late < early == explicit == 0.01


@pytest.mark.parametrize("as_tensor", [False, True])
def test_checkpoints_of_weights_only_count_neither_steps_nor_learning_rates(tmp_path, as_tensor):
    """No training goes on from them, and they do not say how far the schedule is."""
    torch.manual_seed(0)
    plugin = of_adam()

    def saved(step, rate=None) -> dict:
        state = {"state_dict": {"weight": torch.randn(64, 64)}, "global_step": step}
        if rate is not None:
            groups = [{"lr": torch.tensor(rate) if as_tensor else rate, "initial_lr": 1e-5, "params": [0]}]
            state["optimizer_states"] = [{"state": {}, "param_groups": groups}]
        plugin.save_checkpoint(state, tmp_path / f"{step}.ckpt")
        return Run(tmp_path / "dynaquant").file(step).header.record

    saved(100, 1e-3)
    assert saved(190)["search"]["limit"] == 0.01
    record = saved(200, 1.1e-3)
    assert record["interval"] == 100
    assert record["training_budget"]["learned"] == pytest.approx(0.205)
    assert record["search"]["limit"] == 0.01
    assert saved(300, 1e-4)["search"]["limit"] < 0.01


@pytest.mark.slow
def test_first_moments_are_kept_where_checkpoints_lie_close_together(tmp_path):
    def has_first_moment(epochs) -> bool:
        fit(trainer_of(tmp_path, "balanced", epochs=epochs))
        state = dq.load(checkpoints(tmp_path) / "last.ckpt")
        return bool(state["optimizer_states"][0]["state"][0]["exp_avg"].any())

    assert not has_first_moment(1)  # how close is not known at the first save
    assert has_first_moment(2)
    newest = run_of(tmp_path).newest()
    assert newest.header.record["interval"] == STEPS_PER_EPOCH
