"""A checkpoint manager of torchtitan saves to a run, and a training goes on as if nothing had happened."""

import json
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dynaquant as dq
from dynaquant.store.run import Run

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-torchtitan")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchtitan imports what PyTorch calls deprecated
    import tyro

    from dynaquant.integrations import torchtitan as integration

SCRIPT = Path(__file__).parents[1] / "support" / "torchtitan_training.py"
STEPS = 12


class Trainings:
    """A process with torchtitan loaded, which forks one for each training."""

    def __init__(self, process, log):
        self.process, self.log = process, log

    def run(self, folder, **options) -> SimpleNamespace:
        self.process.stdin.write(json.dumps({"folder": str(folder), **options}) + "\n")
        found = SimpleNamespace(losses={}, weights=None, tokens=None, errors=[])
        for line in self.process.stdout:
            word, _, text = line.partition(" ")
            if word == "step":
                step, loss = json.loads(text)
                found.losses[step] = loss
            elif word == "error":
                found.errors.append(json.loads(text))
            elif word in ("weights", "tokens"):
                setattr(found, word, json.loads(text))
            elif word == "ended":
                found.status = json.loads(text)
                return found
        raise AssertionError(f"the process has ended: see {self.log}")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchtitan")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    command = [sys.executable, SCRIPT, folder / "assets"]
    with (folder / "log.txt").open("w") as log, subprocess.Popen(command, stderr=log, **pipes) as process:
        yield Trainings(process, log.name)
        process.stdin.close()
        assert process.wait() == 0


@pytest.fixture(scope="module")
def undisturbed(trainings, tmp_path_factory):
    """By number of ranks, what the training comes to without checkpoints."""
    found = {ranks: trainings.run(tmp_path_factory.mktemp("without"), checkpoint=None, ranks=ranks) for ranks in (1, 2)}
    assert all(each.status == 0 and len(each.losses) == STEPS for each in found.values())
    return found


# Resuming


@pytest.mark.parametrize("quality", ["lossless", "balanced"])
def test_a_training_that_is_killed_three_times_ends_like_an_undisturbed_one(trainings, undisturbed, tmp_path, quality):
    losses = {}
    generator = random.Random(f"torchtitan {quality}")
    for at in sorted(generator.sample(range(6, STEPS + 1), 3)):
        killed = trainings.run(tmp_path, checkpoint={"quality": quality}, kill_at=at)
        assert killed.status == -signal.SIGKILL
        losses |= killed.losses
    last = trainings.run(tmp_path, checkpoint={"quality": quality})
    assert last.status == 0
    assert min(last.losses) > 4
    losses |= last.losses
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert last.tokens == undisturbed[1].tokens
    if quality == "lossless":
        assert losses == undisturbed[1].losses
        assert last.weights == undisturbed[1].weights


@pytest.mark.parametrize("ranks", [1, 2])
def test_saves_do_not_change_the_training(trainings, undisturbed, tmp_path, ranks):
    found = trainings.run(tmp_path, checkpoint={"quality": "balanced", "keep_latest_k": 3}, ranks=ranks)
    assert (found.losses, found.weights) == (undisturbed[ranks].losses, undisturbed[ranks].weights)
    summaries, _ = Run(tmp_path / "checkpoint").summaries()
    assert [each.step for each in summaries] == [8, 10, 12]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_two_ranks_resume_exactly_after_a_kill(trainings, undisturbed, tmp_path, tensor_parallel):
    options = {"checkpoint": {"quality": "lossless"}, "ranks": 2, "tensor_parallel": tensor_parallel}
    wanted = undisturbed[2]
    if tensor_parallel > 1:
        wanted = trainings.run(tmp_path / "without", **{**options, "checkpoint": None})
    assert trainings.run(tmp_path, kill_at=7, **options).status == -signal.SIGKILL
    found = trainings.run(tmp_path, **options)
    assert (found.status, min(found.losses)) in [(0, 7), (0, 5)]  # the last save may not have been committed
    assert found.weights == wanted.weights


def test_another_number_of_ranks_restores_all_but_the_position_in_the_data(trainings, tmp_path):
    assert trainings.run(tmp_path, ranks=2, steps=6).status == 0
    refused = trainings.run(tmp_path, steps=8)
    assert refused.status == 1
    assert "the data was divided among 2 data-parallel ranks" in refused.errors[0]
    found = trainings.run(tmp_path, steps=8, checkpoint={"exclude_from_loading": ["dataloader"]})
    assert (found.status, sorted(found.losses)) == (0, [7, 8])


def test_a_training_goes_on_from_an_older_step(trainings, undisturbed, tmp_path):
    assert trainings.run(tmp_path, checkpoint={"quality": "lossless"}, kill_at=9).status == -signal.SIGKILL
    found = trainings.run(tmp_path, checkpoint={"quality": "lossless", "load_step": 4})
    assert min(found.losses) == 5
    assert found.weights == undisturbed[1].weights


def test_a_training_begins_from_a_checkpoint_of_torchtitan(trainings, undisturbed, tmp_path):
    own = {"interval": 4, "last_save_model_only": False}
    assert trainings.run(tmp_path / "own", own=True, checkpoint=own, kill_at=6).status == -signal.SIGKILL
    start = {"initial_load_path": str(tmp_path / "own" / "checkpoint" / "step-4"), "initial_load_model_only": False}
    begun = trainings.run(tmp_path / "ours", checkpoint={"quality": "lossless", **start}, kill_at=9)
    assert (begun.status, min(begun.losses)) == (-signal.SIGKILL, 5)
    found = trainings.run(tmp_path / "ours", checkpoint={"quality": "lossless", **start})
    assert min(found.losses) in (7, 9)
    assert found.weights == undisturbed[1].weights
    refused = trainings.run(tmp_path / "own", steps=4)
    assert "holds torchtitan's own checkpoints: give another checkpoint.folder" in refused.errors[0]


# What is saved


def test_fused_weights_are_quantized_under_their_own_names(trainings, tmp_path):
    assert trainings.run(tmp_path, steps=4, validator=False).status == 0
    weights = dq.load(tmp_path / "checkpoint")["model"]
    fused = weights["layers.0.attention.qkv_linear.wqkv.weight"]
    assert fused.shape == (768, 256)
    assert len(fused.unique()) < fused.numel() / 100  # levels
    assert not any("qkv_linear.wq." in name for name in weights)


# What is refused


class Part(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)


def made(base_folder, parts=1, **options):
    return integration.CheckpointManager.Config(enable=True, **options).build(
        dataloader=None,
        model_parts=[Part() for _ in range(parts)],
        optimizers=[],
        lr_schedulers=None,
        states={"train_state": SimpleNamespace()},
        base_folder=str(base_folder),
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parts": 2}, "pipeline parallelism is not supported"),
        ({"last_save_model_only": True}, "checkpoint.last_save_model_only is not supported: leave it False"),
        ({"create_seed_checkpoint": True}, "begin from it with checkpoint.initial_load_path"),
        ({"folder": "s3://bucket/run"}, "is a remote folder"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, options, said):
    with pytest.raises(dq.DynaquantError, match=said):
        made("" if "folder" in options else tmp_path, **options)


def test_quality_is_a_value_also_on_the_command_line():
    config = integration.CheckpointManager.Config
    for words, quality in (
        ([], "balanced"),
        (["--quality", "high"], dq.Quality("high")),
        (["--quality", "high", "max_degradation=0.002"], dq.Quality("high", max_degradation=0.002)),
        (
            ["--quality", "small", "training_budget=0.01", "expected_restores=3", "--interval", "7"],
            dq.Quality("small", training_budget=0.01, expected_restores=3),
        ),
    ):
        assert tyro.cli(config, args=words).quality == quality
    kept = config(quality=dq.Quality(max_degradation=0.005))
    assert tyro.cli(config, args=["--interval", "7"], default=kept).quality == kept.quality


@pytest.mark.parametrize("words", [["best"], ["high", "max_degradation=5"], ["high", "max"], ["high", "limit=1"]])
def test_a_wrong_quality_on_the_command_line_is_refused(words, capsys):
    with pytest.raises(SystemExit):
        tyro.cli(integration.CheckpointManager.Config, args=["--quality", *words])
    assert "Error parsing --quality" in capsys.readouterr().err


def test_flat_names_of_the_quality_are_deprecated(tmp_path):
    with pytest.warns(
        DeprecationWarning, match=r"max_degradation=0\.02 is deprecated: give quality=dq\.Quality\('high', max"
    ):
        manager = made(tmp_path, quality="high", max_degradation=0.02)
    assert manager._quality == dq.Quality("high", max_degradation=0.02)


def test_a_disabled_manager_does_nothing(tmp_path):
    manager = integration.CheckpointManager.Config().build(
        dataloader=None, model_parts=[], optimizers=[], lr_schedulers=None, states={}, base_folder=str(tmp_path)
    )
    assert (manager.load(), manager.save(1), list(tmp_path.iterdir())) == (False, False, [])
    manager.close()


def test_hooks_are_put_back():
    layer = nn.Linear(2, 2, bias=False)
    model = nn.Sequential(layer)
    layer.register_state_dict_post_hook(lambda _, state, prefix, *__: state.update(w=state.pop(f"{prefix}weight")))
    with integration._without_hooks(integration._modules_that_hide_parameters(model)):
        assert list(model.state_dict()) == ["0.weight"]
    assert list(model.state_dict()) == ["w"]
    assert torch.equal(model.state_dict()["w"], layer.weight)
