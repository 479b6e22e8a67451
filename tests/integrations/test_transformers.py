"""Transformers' Trainer saves to a run, and goes on from it as if nothing had happened."""

import errno
import importlib
import inspect
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import call
from forked_trainings import result_of, trainings
from launched import launch
from training import bits

import dynaquant as dq
from dynaquant.interop.export import export
from dynaquant.interop.targets import Target
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
from dynaquant.saving.record import record_of
from dynaquant.state.of_ranks import ranks_in
from dynaquant.store.run import Run
from dynaquant.store.tags import tags_of

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
pytest.importorskip("accelerate", reason="Accelerate is not installed")

import tokenizers  # noqa: E402
from transformers import default_data_collator  # noqa: E402
from transformers_training import STEPS, Counter, arguments, hash_of, history_of, model_of, sequences  # noqa: E402

from dynaquant.integrations.transformers import CheckpointMixin, Options, Trainer, get_last_checkpoint  # noqa: E402

SCRIPT = Path(__file__).parents[1] / "support" / "transformers_training.py"
LOSSLESS = {"quality": "lossless"}


@pytest.fixture(scope="module")
def train():
    with trainings(SCRIPT) as train:
        yield train


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> SimpleNamespace:
    """What Transformers' own Trainer makes of the training, without any checkpoint."""
    counter = Counter()
    trainer = transformers.Trainer(
        model_of(),
        arguments(tmp_path_factory.mktemp("undisturbed"), save_strategy="no"),
        train_dataset=sequences(96),
        eval_dataset=sequences(32, 96),
        callbacks=[counter],
    )
    trainer.train()
    return SimpleNamespace(weights=hash_of(trainer.model), history=history_of(trainer), flos=trainer.state.total_flos)


def trainer_of(folder, kind=Trainer, evaluation=True, model=None, dynaquant=LOSSLESS, callbacks=None, **changes):
    return kind(
        model or model_of(),
        arguments(folder, **{"max_steps": 20, "save_steps": 5, "eval_steps": 5, **changes}),
        train_dataset=sequences(96),
        callbacks=callbacks,
        **({"eval_dataset": sequences(32, 96)} if evaluation else {"compute_metrics": None}),
        **({} if dynaquant is None else {"dynaquant": dynaquant}),
    )


def run_of(folder) -> Path:
    return Path(folder) / "dynaquant"


def steps_of(folder) -> list[int]:
    return Run(run_of(folder)).steps()


def records_of(folder) -> list[dq.Record]:
    return [record_of(file) for file in Run(run_of(folder)).files()[0]]


def tags(folder) -> dict[str, int]:
    return {tag.name: tag.step for tag in tags_of(Run(run_of(folder)))}


# Resuming


@pytest.mark.parametrize("quality", ["lossless", "balanced"])
def test_a_training_that_is_killed_three_times_ends_like_an_undisturbed_one(train, undisturbed, tmp_path, quality):
    generator = random.Random(f"transformers {quality}")
    for step in sorted(generator.sample(range(5, STEPS), 3)):
        killed = train(tmp_path, dynaquant={"quality": quality}, at=step)
        assert killed.ended == signal.SIGKILL
    last = train(tmp_path, dynaquant={"quality": quality})
    assert last.steps[0] > 1  # it has resumed
    assert last.result["steps"] == STEPS
    assert last.result["evaluations"] == STEPS // 10
    steps = [(entry["step"], sorted(entry)) for entry in last.result["history"]]
    assert steps == [(entry["step"], sorted(entry)) for entry in undisturbed.history]
    if quality == "lossless":
        assert last.result["weights"] == undisturbed.weights
        assert last.result["history"] == undisturbed.history
        assert last.result["flos"] == undisturbed.flos


def test_saves_do_not_change_the_training(train, undisturbed, tmp_path):
    # With a metric, which evaluates many candidates.
    result = train(tmp_path, dynaquant={}).result
    assert (result["weights"], result["history"]) == (undisturbed.weights, undisturbed.history)
    assert [record.judged_by for record in records_of(tmp_path)] == ["evaluate"] * 6


def test_gradient_accumulation_and_epochs_resume_exactly(train, tmp_path):
    changes = {"gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 3, "save_strategy": "epoch"}
    undisturbed = train(tmp_path / "a", dynaquant=LOSSLESS, **changes).result
    assert undisturbed["steps"] == 36
    train(tmp_path / "b", dynaquant=LOSSLESS, at=20, **changes)
    assert steps_of(tmp_path / "b") == [12]
    assert train(tmp_path / "b", dynaquant=LOSSLESS, **changes).result == undisturbed


def test_a_checkpoint_is_saved_on_sigterm(train, undisturbed, tmp_path):
    # JITCheckpointCallback waits for three seconds, then saves at the end of the step.
    slowly = {"enable_jit_checkpoint": True, "save_steps": 1000, "pause": 0.1}
    stopped = train(tmp_path, dynaquant=LOSSLESS, at=11, sent=signal.SIGTERM, **slowly)
    assert 11 < stopped.steps[-1] < STEPS
    assert steps_of(tmp_path) == [stopped.steps[-1]]
    assert sorted(os.listdir(tmp_path)) == ["dynaquant"]
    resumed = train(tmp_path, dynaquant=LOSSLESS, save_steps=1000)
    assert resumed.steps[0] == stopped.steps[-1] + 1
    assert (resumed.result["weights"], resumed.result["history"]) == (undisturbed.weights, undisturbed.history)


def test_a_callback_that_saves_in_the_middle_of_a_step_gets_a_checkpoint_of_its_end(tmp_path):
    class Saving(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, _args, state, _control, **_):
            if state.global_step == 12:
                trainer._save_checkpoint(trainer.model, trial=None)

    trainer = trainer_of(tmp_path, save_strategy="no", callbacks=[Saving()])
    trainer.train()
    weights = hash_of(trainer.model)
    assert steps_of(tmp_path) == [13]
    again = trainer_of(tmp_path, save_strategy="no")
    again.train(resume_from_checkpoint=True)
    assert hash_of(again.model) == weights


@pytest.mark.slow
def test_ddp_resumes_exactly_after_a_kill(tmp_path):
    def ranks(folder, **changes) -> tuple[int, str]:
        settings = {"folder": str(folder), "dynaquant": LOSSLESS, "ddp_backend": "gloo", "max_steps": 30, **changes}
        return launch(SCRIPT, 2, 300, json.dumps(settings), modules=("dynaquant.integrations.transformers",))

    status, output = ranks(tmp_path / "a")
    assert status == 0, output
    undisturbed = result_of(output)
    status, output = ranks(tmp_path / "b", kill_at=17)
    assert status != 0
    assert steps_of(tmp_path / "b") == [10]
    status, output = ranks(tmp_path / "b")
    assert status == 0, output
    assert result_of(output) == undisturbed


@pytest.mark.slow
def test_a_training_of_two_ranks_goes_on_in_one_process(train, tmp_path):
    settings = {"dynaquant": {}, "logging_steps": 5, "save_steps": 5, "eval_steps": 5}
    on_two = {**settings, "folder": str(tmp_path), "ddp_backend": "gloo", "max_steps": 10}
    status, output = launch(SCRIPT, 2, 300, json.dumps(on_two), modules=("dynaquant.integrations.transformers",))
    assert status == 0, output
    of_ranks = ranks_in(Run(run_of(tmp_path)).file(10).header.tree)
    assert [name for each in of_ranks for name in each.objects if name == "trainer"] == []  # stored once
    resumed = train(tmp_path, gradient_accumulation_steps=2, max_steps=20, **settings)
    assert resumed.steps == list(range(11, 21)), resumed
    assert [entry["step"] for entry in resumed.result["history"] if "loss" in entry] == [5, 10, 15, 20]


@pytest.mark.slow
def test_ddp_saves_on_all_ranks_if_one_gets_sigterm(tmp_path):
    settings = {"folder": str(tmp_path), "dynaquant": {}, "ddp_backend": "gloo", "enable_jit_checkpoint": True}
    status, output = launch(
        SCRIPT,
        2,
        300,
        json.dumps({**settings, "pause": 0.1, "save_steps": 1000, "term_at": 5}),
        modules=("dynaquant.integrations.transformers",),
    )
    assert status == 0, output
    (step,) = steps_of(tmp_path)
    assert 5 < step < STEPS


def test_a_grad_scaler_is_restored(tmp_path):
    def with_scaler(folder) -> Trainer:
        trainer = trainer_of(folder)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        return trainer

    undisturbed = with_scaler(tmp_path)
    undisturbed.train()
    again = with_scaler(tmp_path)
    again.train(resume_from_checkpoint=10)
    assert hash_of(again.model) == hash_of(undisturbed.model)
    assert again.accelerator.scaler.state_dict() == undisturbed.accelerator.scaler.state_dict()
    assert again.accelerator.scaler.get_scale() == 2.0**16


# Which checkpoint


def test_without_a_checkpoint_resuming_is_the_error_of_transformers(tmp_path):
    assert get_last_checkpoint(tmp_path / "none") is None
    assert get_last_checkpoint(tmp_path) is None
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        trainer_of(tmp_path).train(resume_from_checkpoint=True)


def test_resumes_from_a_folder_a_step_and_a_tag(tmp_path):
    first = trainer_of(tmp_path, metric_for_best_model="loss")
    first.train()
    weights = hash_of(first.model)
    assert get_last_checkpoint(tmp_path) == str(run_of(tmp_path))
    assert steps_of(tmp_path) == [5, 10, 15, 20]
    for given, steps in ((str(run_of(tmp_path)), [20]), (10, [10, 15, 20]), ("15", [15, 20]), ("best", [20])):
        seen = []

        class Saves(transformers.TrainerCallback):
            def on_train_begin(self, _args, state, _control, seen=seen, **_):
                seen.append(state.global_step)

            def on_save(self, _args, state, _control, seen=seen, **_):
                seen.append(state.global_step)

        again = trainer_of(tmp_path, metric_for_best_model="loss", callbacks=[Saves()])
        again.train(resume_from_checkpoint=given)
        assert (hash_of(again.model), seen) == (weights, steps)


def test_the_loss_of_a_call_of_train_is_that_of_its_steps(tmp_path):
    """Those before the resume were not logged."""
    losses = []
    for kind, dynaquant in ((transformers.Trainer, None), (Trainer, LOSSLESS)):
        options = {"kind": kind, "dynaquant": dynaquant, "logging_steps": 500, "eval_strategy": "no", "save_steps": 15}
        folder = tmp_path / kind.__module__
        trainer_of(folder, max_steps=15, lr_scheduler_type="constant", **options).train()
        again = trainer_of(folder, max_steps=18, lr_scheduler_type="constant", **options)
        losses.append(again.train(resume_from_checkpoint=True).training_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # added up in float32


def test_a_finished_training_is_not_trained_further(tmp_path):
    # Transformers trains one step more.
    first = trainer_of(tmp_path, lr_scheduler_type="constant")
    first.train()
    again = trainer_of(tmp_path, lr_scheduler_type="constant")
    assert again.train(resume_from_checkpoint=True).global_step == 20
    assert hash_of(again.model) == hash_of(first.model)
    assert history_of(again)[:-1] == history_of(first)[:-1]


def test_what_cannot_be_resumed_is_an_error_that_says_what_there_is(tmp_path):
    trainer_of(tmp_path / "a").train()
    trainer = trainer_of(tmp_path / "a")
    with pytest.raises(dq.CheckpointError, match=r"no checkpoint of step 7 \(available steps: 5, 10, 15, 20\)"):
        trainer.train(resume_from_checkpoint=7)
    with pytest.raises(dq.CheckpointError, match="there is no tag 'best'"):
        trainer.train(resume_from_checkpoint="best")
    with pytest.raises(ValueError, match=r"is another run; .*dynaquant branch"):
        trainer_of(tmp_path / "b").train(resume_from_checkpoint=str(run_of(tmp_path / "a")))
    with pytest.raises(ValueError, match="Can't find a valid checkpoint at"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "nothing"))


def test_a_run_of_another_program_is_refused(tmp_path):
    with dq.Checkpointer(run_of(tmp_path), model_of()) as ckpt:
        ckpt.save(5)
    with pytest.raises(dq.CheckpointError, match="step 5 was not saved by a Trainer"):
        trainer_of(tmp_path).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_transformers_is_continued(tmp_path):
    changes = {"max_steps": 20, "save_steps": 5, "eval_steps": 5}
    own = transformers.Trainer(
        model_of(), arguments(tmp_path, **changes), train_dataset=sequences(96), eval_dataset=sequences(32, 96)
    )
    own.train()
    weights = hash_of(own.model)
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-20")
    trainer = trainer_of(tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert hash_of(trainer.model) == weights
    assert steps_of(tmp_path) == [15, 20]
    assert get_last_checkpoint(tmp_path) == str(run_of(tmp_path))


def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog):
    undisturbed = trainer_of(tmp_path)
    undisturbed.train()
    newest = Run(run_of(tmp_path)).path(20)
    content = bytearray(newest.read_bytes())
    content[len(content) // 4] ^= 1  # in a stream; the header is at the end
    newest.write_bytes(content)
    again = trainer_of(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert "step-000000000020.dqc" in caplog.text
    assert hash_of(again.model) == hash_of(undisturbed.model)
    assert history_of(again) == history_of(undisturbed)


def test_a_training_that_begins_anew_in_a_used_folder_is_warned_about(tmp_path, caplog):
    trainer_of(tmp_path).train()
    assert "begins anew" not in caplog.text
    trainer_of(tmp_path, max_steps=5).train()
    assert "begins anew" in caplog.text


# The way back to Transformers


def plain_trainer(folder, **changes) -> transformers.Trainer:
    return trainer_of(folder, transformers.Trainer, dynaquant=None, **changes)


def same_training(one, other) -> None:
    assert hash_of(one.model) == hash_of(other.model)
    assert history_of(one)[:-1] == history_of(other)[:-1]  # the last entry is about one call of ``train``


def tokenizer_of() -> transformers.PreTrainedTokenizerFast:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(64)}, "0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0")


def test_an_exported_checkpoint_is_continued_without_dynaquant(tmp_path):
    settings = {"logging_steps": 5, "metric_for_best_model": "loss", "load_best_model_at_end": True}
    undisturbed = trainer_of(tmp_path, **settings)
    undisturbed.processing_class = tokenizer_of()
    undisturbed.train()
    out = tmp_path / "plain" / "checkpoint-10"
    assert "note:" not in call("export", tmp_path, 10, "--to", "transformers", "-o", out)
    assert out.stat().st_mode == out.parent.stat().st_mode
    again = plain_trainer(out.parent, **settings)
    again.train(resume_from_checkpoint=True)
    same_training(again, undisturbed)
    call("export", tmp_path, 10, "--to", "hf", "-o", tmp_path / "hf")
    for folder in (out, tmp_path / "hf"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert bits(dict(model.state_dict())) == bits(dict(dq.load(run_of(tmp_path), 10)["model"]))
    assert transformers.AutoTokenizer.from_pretrained(out)("7").input_ids == [7]
    assert torch.load(out / "training_args.bin", weights_only=False).max_steps == 20
    call("branch", run_of(tmp_path), 10, tmp_path / "branch")  # takes what does not belong to a step along
    call("export", tmp_path / "branch", "--to", "transformers", "-o", tmp_path / "again")
    assert sorted(os.listdir(tmp_path / "again")) == sorted(os.listdir(out))


def test_an_exported_checkpoint_says_what_it_leaves_out(tmp_path):
    changes = {"metric_for_best_model": "loss", "greater_is_better": True, "save_only_model": True}
    trainer_of(tmp_path, dynaquant={**LOSSLESS, "extras": {"mine": {"a": 1}}}, max_steps=10, **changes).train()
    shutil.rmtree(run_of(tmp_path) / "framework")  # as in a run of an earlier version
    said = " ".join(call("export", tmp_path, 10, "--to", "transformers", "-o", tmp_path / "out").split())
    for part in ("config.json", "save_only_model was set", "best checkpoint is step 5", "does not load them: mine"):
        assert part in said
    assert json.loads((tmp_path / "out/trainer_state.json").read_text())["best_model_checkpoint"] is None
    with pytest.raises(dq.CheckpointError, match="saved with Transformers: give --to transformers"):
        export(StoredCheckpoint(tmp_path), Target.LIGHTNING, tmp_path / "x.ckpt")


def test_a_model_that_is_not_stored_as_a_whole_is_not_exported(tmp_path):
    model = model_of()
    model.model.embed_tokens.requires_grad_(False)
    trainer_of(
        tmp_path, model=model, dynaquant={**LOSSLESS, "roles": {"model.*embed_tokens.weight": "omit"}}, max_steps=5
    ).train()
    with pytest.raises(
        dq.CheckpointError, match=r"does not store 1 tensor of the model \(role omit\), such as model\."
    ):
        export(StoredCheckpoint(tmp_path), Target.TRANSFORMERS, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class WritesItsOwn(Trainer):
    """Writes more than the state dict that it is given."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        torch.save(self.model.state_dict(), Path(output_dir) / "whole.pt")
        with (Path(output_dir) / "cache").open("wb") as file:
            file.truncate(65 * 2**20)
        (Path(output_dir) / "notes.txt").write_text("mine")


def test_weights_that_a_trainer_writes_itself_are_not_kept_as_its_configuration(tmp_path, caplog):
    trainer_of(tmp_path, WritesItsOwn, max_steps=5).train()
    assert {"config.json", "notes.txt", "training_args.bin"} == set(os.listdir(run_of(tmp_path) / "framework")) - {
        "generation_config.json"
    }
    for name in ("whole.pt", "cache"):
        assert f"{name}, which the Trainer saves beside the model, is not kept" in caplog.text


def test_a_failing_save_of_the_configuration_keeps_the_older_one(tmp_path, caplog, monkeypatch):
    trainer_of(tmp_path, max_steps=5).train()
    config = run_of(tmp_path) / "framework" / "config.json"
    config.write_text("{}")
    fsync = os.fsync

    def failing(descriptor):
        if "framework" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        trainer_of(tmp_path, max_steps=10).train(resume_from_checkpoint=True)
    assert "configuration and tokenizer are not kept" in caplog.text
    assert config.read_text() == "{}"
    trainer_of(tmp_path, max_steps=15).train(resume_from_checkpoint=True)
    assert "model_type" in config.read_text()
    assert [name for name in os.listdir(run_of(tmp_path)) if "tmp" in name] == []


def test_a_newer_checkpoint_of_transformers_beside_the_run_is_not_passed_over(tmp_path):
    trainer_of(tmp_path, max_steps=10, lr_scheduler_type="constant").train()
    call("export", tmp_path, 10, "--to", "transformers", "-o", tmp_path / "checkpoint-10")
    assert get_last_checkpoint(tmp_path) == str(run_of(tmp_path))
    plain_trainer(tmp_path, max_steps=15, lr_scheduler_type="constant").train(resume_from_checkpoint=True)
    trainer = trainer_of(tmp_path, lr_scheduler_type="constant")
    for ask in (lambda: get_last_checkpoint(tmp_path), lambda: trainer.train(resume_from_checkpoint=True)):
        with pytest.raises(ValueError, match=r"checkpoint-15.* has a higher step than .* step 10\. Choose one: "):
            ask()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-15"))
    assert steps_of(tmp_path) == [5, 10, 20]
    assert get_last_checkpoint(tmp_path) == str(run_of(tmp_path))


def test_a_run_that_went_on_beside_a_newer_checkpoint_of_transformers_goes_on_again(tmp_path, caplog):
    trainer_of(tmp_path, max_steps=5).train()
    plain_trainer(tmp_path, max_steps=20).train()
    with pytest.raises(ValueError, match="After the next save, True goes on with the one that you chose"):
        get_last_checkpoint(tmp_path)
    trainer_of(tmp_path, max_steps=10).train(resume_from_checkpoint=str(run_of(tmp_path)))
    trainer_of(tmp_path, max_steps=15).train(resume_from_checkpoint=True)
    assert steps_of(tmp_path) == [5, 10, 15]
    assert "going on from step 10" in caplog.text
    with (tmp_path / "checkpoint-20" / "trainer_state.json").open("a") as file:  # written again since
        file.write("\n")
    with pytest.raises(ValueError, match=r"checkpoint-20.* has a higher step than .* step 15\. Choose one: "):
        get_last_checkpoint(tmp_path)


# Which checkpoints are kept


class Scores(transformers.Trainer):
    """A subclass of one's own, whose evaluations have these scores, one after another."""

    scores = (1.0, 4.0, 3.0, 2.0)

    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        metrics["eval_score"] = self.scores[self.state.global_step // 5 - 1]
        return metrics


class Scored(CheckpointMixin, Scores):
    """The same with checkpoints in a run."""


BEST = {"metric_for_best_model": "score", "greater_is_better": True, "load_best_model_at_end": True}


@pytest.mark.parametrize("quality", ["lossless", "balanced"])
def test_the_best_checkpoint_is_tagged_kept_and_loaded_at_the_end(tmp_path, quality):
    trainer = trainer_of(tmp_path, Scored, dynaquant={"quality": quality}, save_total_limit=1, **BEST)
    trainer.train()
    assert steps_of(tmp_path) == [10, 20]
    assert tags(tmp_path) == {"best": 10}
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (4.0, 10)
    assert trainer.state.best_model_checkpoint == str(run_of(tmp_path))
    for name, weight in dq.load(run_of(tmp_path), "best")["model"].items():
        assert torch.equal(trainer.model.state_dict()[name].cpu(), weight), name


class Hashes(transformers.TrainerCallback):
    """Hashes the weights that are evaluated."""

    def __init__(self):
        self.of = {}

    def on_evaluate(self, _args, state, _control, model, **_):
        self.of[state.global_step] = hash_of(model)


def test_the_best_model_is_the_one_that_was_evaluated(tmp_path, caplog):
    hashes = Hashes()
    trainer = trainer_of(tmp_path, Scored, dynaquant={}, callbacks=[hashes], **BEST)
    trainer.train()
    assert hash_of(trainer.model) == hashes.of[10]
    copies = [path.name for path in run_of(tmp_path).glob("exact-*")]
    assert len(copies) == 1  # step 5, the best before, has none any more
    finished = trainer_of(tmp_path, Scored, dynaquant={}, **BEST)
    finished.train(resume_from_checkpoint=True)
    assert hash_of(finished.model) == hashes.of[10]
    fresh = model_of()
    dq.load_into(fresh, run_of(tmp_path), step="best")
    assert hash_of(fresh) == hashes.of[10]
    assert "quantized" not in caplog.text


def test_the_best_model_may_be_quantized_and_a_warning_says_so(tmp_path, caplog):
    hashes = Hashes()
    trainer = trainer_of(tmp_path, Scored, dynaquant={"exact": None}, callbacks=[hashes], **BEST)
    trainer.train()
    assert hash_of(trainer.model) != hashes.of[10]
    assert "the best checkpoint, step 10, come back quantized" in caplog.text
    assert "it was saved without an exact copy, with dynaquant={'exact': None} or from a sharded model" in caplog.text


def test_going_back_to_an_older_best_checkpoint_says_that_its_exact_copy_was_deleted(tmp_path, caplog):
    trainer_of(tmp_path, Scored, dynaquant={}, **BEST).train()
    assert "quantized" not in caplog.text
    again = trainer_of(tmp_path, Scored, dynaquant={}, **{**BEST, "max_steps": 5})
    again.train(resume_from_checkpoint=5)
    assert "the best checkpoint, step 5, come back quantized" in caplog.text
    assert "its exact copy was deleted when a later step became the best" in caplog.text


def test_a_best_checkpoint_whose_copy_a_later_save_has_deleted_says_so(tmp_path, caplog):
    trainer_of(tmp_path, Scored, dynaquant={"keep": dq.Keep(lossless_copy=True)}, **BEST).train()
    assert "step 10, come back quantized" in caplog.text
    assert "dq.Keep(lossless_copy=True) keeps an exact copy of the newest checkpoint only" in caplog.text


def test_the_best_checkpoint_survives_a_resume(tmp_path):
    class Stopped(transformers.TrainerCallback):
        def on_step_end(self, _args, state, control, **_):
            control.should_training_stop = state.global_step == 15

    stopped = trainer_of(tmp_path, Scored, save_total_limit=1, callbacks=[Stopped()], **BEST)
    stopped.train()
    assert steps_of(tmp_path) == [10, 15]
    trainer = trainer_of(tmp_path, Scored, save_total_limit=1, **BEST)
    trainer.train(resume_from_checkpoint=True)
    assert (steps_of(tmp_path), tags(tmp_path)) == ([10, 20], {"best": 10})
    assert trainer.state.best_model_checkpoint == str(run_of(tmp_path))
    assert hash_of(trainer.model) == hash_of(stopped.model)


class Rising(Scored):
    """A training whose last checkpoint is the best."""

    scores = (1.0, 2.0, 3.0, 4.0)


def test_the_best_checkpoint_before_is_deleted_if_the_last_save_is_the_best(tmp_path, caplog):
    trainer_of(tmp_path, Rising, dynaquant={}, save_total_limit=1, **BEST).train()
    assert (steps_of(tmp_path), tags(tmp_path)) == ([20], {"best": 20})
    assert [path.name[:18] for path in run_of(tmp_path).glob("exact-*")] == ["exact-000000000020"]
    assert dq.load(run_of(tmp_path))["trainer"]["state"]["global_step"] == 20  # re-coded without step 15
    assert "retention" not in caplog.text


def test_a_training_that_saves_nothing_deletes_nothing(tmp_path):
    trainer_of(tmp_path, Rising, **BEST).train()
    trainer_of(tmp_path, Rising, save_total_limit=1, **BEST).train(resume_from_checkpoint=True)
    assert steps_of(tmp_path) == [5, 10, 15, 20]


def test_the_tag_goes_back_with_the_training(tmp_path):
    trainer_of(tmp_path, Scored, **BEST).train()
    assert tags(tmp_path) == {"best": 10}
    again = trainer_of(tmp_path, Scored, **{**BEST, "max_steps": 5})
    again.train(resume_from_checkpoint=5)
    assert tags(tmp_path) == {"best": 5}


def test_the_best_checkpoint_may_be_a_folder_that_transformers_wrote(tmp_path):
    own = trainer_of(tmp_path, Scores, dynaquant=None, **BEST)
    own.train()
    again = trainer_of(tmp_path, Scored, **BEST)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-15"))
    assert steps_of(tmp_path) == [20]
    assert again.state.best_model_checkpoint == str(tmp_path / "checkpoint-10")
    assert hash_of(again.model) == hash_of(own.model)


def test_only_the_best_are_saved_if_asked(tmp_path):
    trainer_of(tmp_path, Scored, **{**BEST, "save_strategy": "best"}).train()
    assert steps_of(tmp_path) == [5, 10]
    assert tags(tmp_path) == {"best": 10}


def test_the_newest_checkpoints_are_kept(tmp_path):
    trainer_of(tmp_path, save_total_limit=2).train()
    assert steps_of(tmp_path) == [15, 20]


def test_only_the_model_is_saved_if_asked(tmp_path, caplog):
    trainer = trainer_of(tmp_path, save_only_model=True)
    trainer.train()
    state = dq.load(run_of(tmp_path))
    assert "optimizer" not in state
    assert "scheduler" not in state
    assert state["trainer"]["state"]["global_step"] == 20
    for changes in ({"save_only_model": True}, {}):
        again = trainer_of(tmp_path, max_steps=25, **changes)
        again.train(resume_from_checkpoint=20)
        assert again.state.global_step == 25
    assert caplog.text.count("only the weights and the TrainerState of step 20 are restored") == 1


# Adapters


old_name = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT uses it


def adapted(seed=0) -> torch.nn.Module:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model = model_of()
    torch.manual_seed(seed)
    if seed:
        torch.nn.init.normal_(model.model.layers[0].mlp.up_proj.weight)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], lora_dropout=0.1)
    return peft.get_peft_model(model, config)


@old_name
def test_of_a_peft_model_only_the_adapter_is_saved(tmp_path):
    undisturbed = trainer_of(tmp_path, model=adapted())
    undisturbed.train()
    saved = set(dq.load(run_of(tmp_path))["model"])
    trained = {name for name, parameter in undisturbed.model.named_parameters() if parameter.requires_grad}
    assert saved == {*trained, "base_model.model.lm_head.original_module.weight"}
    again = trainer_of(tmp_path, model=adapted())
    again.train(resume_from_checkpoint=10)
    assert hash_of(again.model) == hash_of(undisturbed.model)
    with pytest.raises(dq.StateError, match="up_proj"):
        trainer_of(tmp_path, model=adapted(seed=1)).train(resume_from_checkpoint=True)


@old_name
def test_an_exported_adapter_is_one_of_peft_and_is_continued_without_dynaquant(tmp_path):
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    undisturbed = trainer_of(tmp_path, model=adapted(), logging_steps=5)
    undisturbed.train()
    call("export", tmp_path, 10, "--to", "transformers", "-o", out := tmp_path / "out")
    again = plain_trainer(tmp_path / "again", model=adapted(), logging_steps=5)
    again.train(resume_from_checkpoint=str(out))
    same_training(again, undisturbed)
    loaded = dict(peft.PeftModel.from_pretrained(model_of(), out).state_dict())
    stored = dq.load(run_of(tmp_path), 10)["model"]
    assert bits({name: loaded[name] for name in stored}) == bits(dict(stored))
    names = run_of(tmp_path) / "framework" / "dynaquant_adapters.json"
    by_key = json.loads(names.read_text())[""]
    names.write_text(json.dumps({"": by_key, "of/two": by_key}))
    call("export", tmp_path, 10, "--to", "transformers", "-o", tmp_path / "nested")
    assert (tmp_path / "nested" / "of" / "two" / "adapter_model.safetensors").is_file()
    names.write_text(json.dumps({"../two": by_key}))
    with pytest.raises(dq.CheckpointError, match=r"'\.\./two' is no folder in it.*resume the training once"):
        export(StoredCheckpoint(tmp_path), Target.TRANSFORMERS, tmp_path / "x")
    shutil.rmtree(run_of(tmp_path) / "framework")
    with pytest.raises(dq.CheckpointError, match=r"If it is a model of PEFT, .* resume the training once"):
        export(StoredCheckpoint(tmp_path), Target.TRANSFORMERS, tmp_path / "x")


@old_name
def test_a_new_head_beside_an_adapter_resumes(tmp_path):
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    base = model_of().model.state_dict()

    def with_new_head(seed):
        torch.manual_seed(seed)  # another one in every process, as nobody has set it
        model = transformers.LlamaForSequenceClassification(model_of().config)
        torch.nn.init.normal_(model.score.weight)
        model.model.load_state_dict(base)  # the pretrained model
        model.config.pad_token_id = 0
        return peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj"]))

    def trained(seed, resumed):
        data = [{"input_ids": entry["input_ids"], "labels": i % 2} for i, entry in enumerate(sequences(96))]
        without = {"evaluation": False, "eval_strategy": "no"}
        trainer = trainer_of(tmp_path, model=with_new_head(seed), **without)
        trainer.train_dataset = data
        trainer.train(resume_from_checkpoint=resumed)
        return hash_of(trainer.model)

    undisturbed = trained(1, resumed=None)
    assert trained(2, resumed=10) == undisturbed  # with the unused original of the head


def test_what_does_not_fit_can_be_left_out(tmp_path, caplog):
    def other():
        model = model_of()
        model.lm_head = torch.nn.Linear(32, 64)  # with a bias
        return model

    trainer_of(tmp_path).train()
    with pytest.raises(dq.StateError, match=r"lm_head") as raised:
        trainer_of(tmp_path, model=other()).train(resume_from_checkpoint=10)
    assert "dynaquant={'strict': False}" in " ".join(raised.value.__notes__)
    again = trainer_of(tmp_path, model=other(), dynaquant={**LOSSLESS, "strict": False})
    again.train(resume_from_checkpoint=10)
    assert again.state.global_step == 20
    assert "left out what does not fit" in caplog.text
    weights_only = trainer_of(tmp_path, dynaquant={**LOSSLESS, "only": "model"}, max_steps=12)
    weights_only.train(resume_from_checkpoint=10)
    assert weights_only.state.global_step == 12


@old_name
def test_adapters_that_do_not_train_are_saved_as_well(tmp_path):
    def with_two(seed):
        model = adapted()
        torch.manual_seed(seed)
        model.add_adapter("other", model.peft_config["default"])
        return model

    first = trainer_of(tmp_path, model=with_two(seed=1))
    first.train()
    again = trainer_of(tmp_path, model=with_two(seed=2))
    again.train(resume_from_checkpoint=True)
    assert hash_of(again.model) == hash_of(first.model)


@old_name
def test_the_best_adapter_is_loaded_at_the_end(tmp_path):
    trainer = trainer_of(tmp_path, Scored, model=adapted(), dynaquant={}, **BEST)
    trainer.train()
    own = trainer.model.state_dict()
    best = dq.load(run_of(tmp_path), "best")["model"]
    assert all(torch.equal(own[name].cpu(), weight) for name, weight in best.items())
    fresh = adapted()
    dq.load_into(fresh, run_of(tmp_path), step="best")
    assert hash_of(fresh) == hash_of(trainer.model)


# What it looks like for a user


@pytest.mark.slow
def test_the_example_goes_on_after_a_kill(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "transformers_trainer.py"
    with subprocess.Popen([sys.executable, example, "0.05"], cwd=tmp_path, stdout=subprocess.DEVNULL) as training:
        while not (tmp_path / "runs/llama/dynaquant/step-000000000040.dqc").exists():
            assert training.poll() is None
            time.sleep(0.05)
        training.kill()
    again = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "starting at runs/llama/dynaquant\n" in again.stdout
    assert Run(tmp_path / "runs/llama/dynaquant").steps()[-1] == 200
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs/llama/best")
    best = dq.load(tmp_path / "runs/llama/dynaquant", "best")["model"]
    assert all(torch.equal(weight, best[name]) for name, weight in loaded.state_dict().items())


# The metric and the options


def test_the_options_are_the_arguments_of_a_checkpointer_that_the_trainer_does_not_decide():
    decided = {"folder", "model", "optimizer", "every", "deprecated"}
    of_restore = set(inspect.signature(dq.Checkpointer.restore).parameters) - {"self", "step"}
    assert set(Options.__annotations__) == set(inspect.signature(dq.Checkpointer).parameters) - decided | of_restore | {
        "exact"
    }


def test_the_page_names_all_options():
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "transformers.md").read_text()
    assert [name for name in Options.__annotations__ if f"`{name}`" not in page] == []


def test_without_an_evaluation_set_there_is_no_metric(tmp_path, caplog):
    trainer_of(tmp_path, evaluation=False, eval_strategy="no", dynaquant={}).train()
    assert {record.judged_by for record in records_of(tmp_path)} == {"fisher distortion"}
    assert "without a metric, as the Trainer has no eval_dataset" in caplog.text


def test_the_metric_is_the_loss_of_the_evaluation(tmp_path):
    trainer = trainer_of(tmp_path, dynaquant={"quality": "high"})
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    found = [record.quality.original for record in records_of(tmp_path)]
    assert found == pytest.approx(losses, rel=1e-5)


def test_several_evaluation_sets_share_the_metric(tmp_path):
    trainer = trainer_of(tmp_path, dynaquant={"quality": "high"})
    trainer.eval_dataset = {"low": sequences(32, 96), "high": sequences(32, 128)}
    trainer.train()
    losses = [
        [e[f"eval_{n}_loss"] for e in trainer.state.log_history if f"eval_{n}_loss" in e] for n in ("low", "high")
    ]
    found = [record.quality.original for record in records_of(tmp_path)]
    assert found == pytest.approx([math.fsum(pair) / 2 for pair in zip(*losses, strict=True)], rel=1e-5)


def test_a_loss_function_that_logs_does_so_in_evaluations_only(tmp_path):
    class Logging(Scored):
        def compute_loss(self, model, inputs, **kwargs):
            if not model.training:
                self.log({"seen": 1.0})
            return super().compute_loss(model, inputs, **kwargs)

    trainer = trainer_of(tmp_path, Logging, dynaquant={}, **BEST)
    trainer.train()
    assert sum("seen" in entry for entry in trainer.state.log_history) == 4 * 4  # batches of each evaluation


class Collecting(transformers.Trainer):
    """A subclass of one's own whose loss collects numbers of all kinds, and depends on one of them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count, self.total, self.drawn = 0, torch.zeros(2), torch.Generator()
        self.seen = {"eval": defaultdict(list), "nested": ([], {1})}
        self.last, self.held = deque(maxlen=3), Held()

    def compute_loss(self, model, inputs, **kwargs):
        loss = super().compute_loss(model, inputs, **kwargs)
        if not model.training:
            self.count += 1
            self.total += 1
            self.seen["eval"]["loss"].append(self.count)
            self.seen["nested"][0].append(float(torch.rand((), generator=self.drawn)))
            self.seen["nested"][1].add(self.count)
            self.last.append(self.count)
            self.held.numbers[self.count] = True
            self.held.most = self.new = self.count
        return loss

    def collected(self) -> tuple:
        held = self.held.numbers, self.held.most, self.new
        return self.count, self.total.tolist(), self.seen, list(self.last), held, self.drawn.initial_seed()


@dataclass
class Held:
    numbers: dict = field(default_factory=dict)
    most: int = 0


class CollectingInARun(CheckpointMixin, Collecting):
    """The same with checkpoints in a run."""


@pytest.fixture(scope="module")
def collecting(tmp_path_factory) -> Collecting:
    """A trained one without checkpoints."""
    alone = trainer_of(tmp_path_factory.mktemp("collecting"), Collecting, dynaquant=None)
    alone.train()
    return alone


@pytest.mark.parametrize("metric", ["default", "loss", "own", "own batches"])
def test_a_metric_leaves_no_trace_in_what_a_trainer_holds(tmp_path, collecting, metric):
    options = {"evaluate": "loss"} if metric == "loss" else {}
    own = trainer_of(tmp_path, CollectingInARun, dynaquant=options)
    batches = [default_data_collator(sequences(4, first)) for first in (96, 100)]
    if metric == "own":
        options["evaluate"] = lambda _: own.evaluate()["eval_loss"]
    elif metric == "own batches":
        options["evaluate"] = dq.LossOn(batches, own.compute_loss)
    own.train()
    assert own.collected() == collecting.collected()
    assert torch.equal(own.drawn.get_state(), collecting.drawn.get_state())
    assert history_of(own) == history_of(collecting)
    assert hash_of(own.model) == hash_of(collecting.model)
    assert {record.judged_by for record in records_of(tmp_path)} == {"evaluate"}


def test_the_metric_may_be_a_number_of_the_evaluation(tmp_path):
    def accuracy(found):
        hits = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
        return {"accuracy": float(hits.mean())}

    trainer = trainer_of(tmp_path, dynaquant={"evaluate": "accuracy", "quality": "high"})
    trainer.compute_metrics = accuracy
    trainer.train()
    logged = [entry["eval_accuracy"] for entry in trainer.state.log_history if "eval_accuracy" in entry]
    assert [record.quality.original for record in records_of(tmp_path)] == pytest.approx(logged)
    again = trainer_of(tmp_path / "b", dynaquant={"evaluate": "acuracy"})
    with pytest.raises(dq.EvaluateError, match=r"returns no 'eval_acuracy'.*'loss'"):
        again.train()


@pytest.mark.parametrize("evaluate", ["default", "loss"])
def test_a_loss_that_writes_to_its_batch_is_measured_on_the_same_data_each_time(tmp_path, evaluate):
    class Writing(Scored):
        def compute_loss(self, model, inputs, **kwargs):
            found = super().compute_loss(model, inputs, **kwargs)
            seen.append(inputs["labels"].sum().item())
            inputs["labels"].fill_(-100)
            return found

    seen: list[int] = []
    options = {} if evaluate == "default" else {"evaluate": evaluate}
    trainer_of(tmp_path, Writing, dynaquant={"quality": "high", **options}).train()
    assert all(labels > 0 for labels in seen)


def test_data_without_labels_needs_a_metric(tmp_path):
    trainer = trainer_of(tmp_path, dynaquant={}, eval_strategy="no")
    trainer.eval_dataset = [{"input_ids": entry["input_ids"]} for entry in sequences(32)]
    with pytest.raises(dq.EvaluateError, match="the evaluation set has no labels"):
        trainer.train()


def test_options_reach_the_checkpointer(tmp_path):
    records = []
    options = {
        "evaluate": lambda model: 1.0 + float(model.lm_head.weight.abs().mean()),
        "roles": {"model.lm_head.weight": "exact"},
        "extras": {"mine": {"answer": 42}},
        "log_to": records.append,
        "keep": dq.Keep(every=10),
        "quality": dq.Quality(max_degradation=0.02),
    }
    trainer = trainer_of(tmp_path, dynaquant=options, save_total_limit=1)
    trainer.train()
    assert [record.step for record in records] == [5, 10, 15, 20]
    assert steps_of(tmp_path) == [10, 20]
    assert dq.load(run_of(tmp_path))["mine"] == {"answer": 42}
    assert torch.equal(dq.load(run_of(tmp_path))["model"]["lm_head.weight"], trainer.model.lm_head.weight.cpu())
    assert records[0].limit == 0.02


@pytest.mark.slow
def test_a_training_that_begins_again_with_smaller_batches_saves(tmp_path):
    class Large(Scored):
        def training_step(self, model, inputs, *args):
            if len(inputs["input_ids"]) > 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *args)

    trainer = trainer_of(tmp_path, Large, auto_find_batch_size=True)
    trainer.train()
    assert trainer.state.train_batch_size == 2
    assert steps_of(tmp_path) == [5, 10, 15, 20]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qualty": "high"}, "dynaquant has no option 'qualty'; the options are quality, evaluate"),
        ("high", "dictionary"),
        ({"quality": "hihg"}, "hihg"),
        ({"keep": 2}, r"keep must be a dq\.Keep"),
        ({"exact": "worst"}, "exact must be"),
        ({"keep": dq.Keep(best=2), "evaluate": None}, r"Keep\(best=…\) needs a metric"),
        ({"keep": dq.Keep(last=2)}, r"dynaquant takes no last in dq\.Keep"),
        ({"every": 10}, "dynaquant has no option 'every'"),
        ({"evaluate": 3}, "evaluate must be a function"),
        ({"log_to": 3}, "log_to"),
    ],
)
def test_wrong_options_are_an_error_of_the_constructor(tmp_path, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        trainer_of(tmp_path, dynaquant=options)


def test_a_mixin_that_comes_last_is_refused():
    with pytest.raises(TypeError, match=r"CheckpointMixin must come first, class Wrong\(CheckpointMixin"):

        class Wrong(Scores, CheckpointMixin):
            pass

    class Right(Scored):  # a subclass of one that is right
        pass

    assert issubclass(Right, CheckpointMixin)


def test_uploads_of_checkpoint_folders_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.Trainer, "init_hf_repo", lambda _: None)  # it would need a network
    with pytest.raises(ValueError, match="hub_strategy='end'"):
        trainer_of(tmp_path, push_to_hub=True)


# Without Transformers


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    package = "dynaquant.integrations.transformers"
    for name in [name for name in sys.modules if name.startswith(package)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'dynaquant[transformers]'")):
        importlib.import_module(package)
