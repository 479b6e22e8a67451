"""DCP saves to runs and loads from them, on real ranks."""

import errno
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launched import launch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from training import bits
from typer.testing import CliRunner

import dynaquant as dq
from dynaquant.cli import app
from dynaquant.interop.dcp import StorageReader, StorageWriter
from dynaquant.store.commit import WritableRun
from dynaquant.store.recoding import branch, compact
from dynaquant.store.retention import Retention, prune
from dynaquant.store.run import Run
from dynaquant.store.verifying import verify_run

RANKS = Path(__file__).parents[1] / "support" / "dcp_ranks.py"


def run_ranks(folder, count, *arguments):
    status, output = launch(RANKS, count, 240, folder, *arguments)
    assert status == 0, output


@pytest.mark.parametrize(("ranks", "layout"), [(2, "fsdp"), (4, "tp")])
def test_what_dcp_saves_is_read_by_any_number_of_ranks_and_by_one_process(tmp_path, ranks, layout):
    run_ranks(tmp_path, ranks, "save", 3, layout)
    wanted = torch.load(tmp_path / "state-3.pt")
    run = Run(tmp_path / "run")
    assert run.steps() == [1, 2, 3]
    assert dict(verify_run(run)) == dict.fromkeys([1, 2, 3])
    assert [run.file(step).header.parent is None for step in (1, 2, 3)] == [True, False, False]
    assert len(run.file(3).header.parts) == ranks
    for step in (1, 3):
        loaded = dq.load(tmp_path / "run", step=step)
        original = torch.load(tmp_path / f"state-{step}.pt")
        for name, tensor in loaded["model"].items():
            assert bits(tensor) == bits(original[f"model.{name}"])
        assert loaded["progress"] == {"step": step, "epoch": 0.5, "losses": [1.0, 2.0]}
    for other, other_layout in ((2, "tp"), (3, "fsdp")):
        run_ranks(tmp_path, other, "load", 3, other_layout)
        found = torch.load(tmp_path / f"loaded-{other}-{other_layout}.pt")
        assert found.keys() == wanted.keys()
        assert all(bits(found[name]) == bits(wanted[name]) for name in wanted)


@pytest.mark.slow
@pytest.mark.parametrize("quality", ["balanced", "high"])
def test_quantized_checkpoints_of_ranks_that_chose_different_grids(tmp_path, quality):
    run_ranks(tmp_path, 2, "save", 4, "fsdp", quality)
    run = WritableRun(tmp_path / "run")
    assert dict(verify_run(run)) == dict.fromkeys([1, 2, 3, 4])
    assert run.file(4).header.by_name["model.0.weight"].needs_parent
    before = {step: dq.load(run.folder, step=step)["model"] for step in (2, 4)}
    run_ranks(tmp_path, 3, "load", 4, "fsdp")
    loaded = torch.load(tmp_path / "loaded-3-fsdp.pt")
    for name, tensor in before[4].items():
        assert bits(loaded[f"model.{name}"]) == bits(tensor)
    size = run.file(4).total_size
    with run.locked():
        assert list(compact(run, 2)) == [1, 2, 3, 4]
        assert dict(verify_run(run)) == dict.fromkeys([1, 2, 3, 4])
        branch(run, run.file(4), tmp_path / "branch")
        assert prune(run, Retention(dq.Keep(last=1))) == []
    assert run.file(4).total_size < 4 * size  # a keyframe, but still quantized
    for folder in (run.folder, tmp_path / "branch"):
        found = dq.load(folder)["model"]
        assert all(bits(found[name]) == bits(tensor) for name, tensor in before[4].items())


def unneeded_parts(run):
    """Return the files in the folder of the parts that no checkpoint refers to."""
    needed = {f"{part.address}.dqc" for file in run.files()[0] for part in file.header.parts}
    return [path.name for path in run.folder.glob("parts/*") if path.name not in needed]


def test_a_rank_with_a_full_disk_fails_the_save_on_all_ranks_and_the_next_save_works(tmp_path):
    run_ranks(tmp_path, 2, "save", 3, "fsdp", "lossless", "full disk")
    run = Run(tmp_path / "run")
    assert run.steps() == [1, 3]
    assert dict(verify_run(run)) == dict.fromkeys([1, 3])
    assert unneeded_parts(run) == []


@pytest.mark.slow
def test_a_killed_rank_leaves_the_last_commit(tmp_path):
    status, _ = launch(RANKS, 2, 240, tmp_path, "save", 3, "fsdp", "lossless", "killed")
    assert status != 0
    run = Run(tmp_path / "run")
    assert run.steps() == [1]
    assert dict(verify_run(run)) == {1: None}
    assert unneeded_parts(run)  # of the second save, without its file
    run_ranks(tmp_path, 2, "save", 1, "fsdp")
    assert run.steps() == [1]
    assert unneeded_parts(run) == []


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # DCP warns that there is one process, which is intended here
        yield


def trained(steps=1, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(96, 64), nn.BatchNorm1d(64), nn.Linear(64, 80))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, steps)
    return model, optimizer


def train(model, optimizer, steps):
    for _ in range(steps):
        model(torch.randn(32, 96)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model, optimizer, **extras):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, **extras}


def empty_state():
    model, optimizer = trained(seed=1)
    return state_of(model, optimizer)


def test_a_series_of_saves_is_a_chain_of_small_deltas(tmp_path):
    model, optimizer = trained(20)
    writer = StorageWriter(tmp_path / "run")
    for step in (10, 20, 30):
        train(model, optimizer, 3)
        dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path / f"step-{step}", storage_writer=writer)
    run = Run(tmp_path / "run")
    files = [run.file(step) for step in (10, 20, 30)]
    assert [file.header.parent and file.header.parent.step for file in files] == [None, 10, 20]
    raw = sum(tensor.nbytes for tensor in model.state_dict().values()) * 3
    assert raw / files[0].total_size > 8
    assert files[2].total_size < files[0].total_size
    state = empty_state()
    dcp.load(state, storage_reader=StorageReader(tmp_path / "run"))
    loaded = dq.load(tmp_path / "run")
    for name, tensor in state["model"].items():
        assert bits(tensor) == bits(loaded["model"][name])
    original = model.state_dict()
    assert bits(state["model"]["1.running_var"]) == bits(original["1.running_var"])
    error = (state["model"]["0.weight"] - original["0.weight"]).norm() / original["0.weight"].norm()
    assert 0 < error < 0.3


@pytest.mark.parametrize(("given", "step"), [("runs/ckpt-2/step-0040", 40), (None, 1), ("last", 1), ("7", 7)])
def test_the_step_is_the_last_number_of_the_id(tmp_path, given, step):
    writer = StorageWriter(tmp_path / "run", quality="lossless")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=given, storage_writer=writer)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    assert Run(tmp_path / "run").steps() == [step, step + 1]


def test_a_step_can_be_saved_again_and_old_ones_are_deleted(tmp_path):
    writer = StorageWriter(tmp_path / "run", quality="lossless", keep=dq.Keep(last=2))
    for i, step in enumerate((1, 2, 3, 3, 4)):
        dcp.save({"w": torch.arange(1000) + i}, checkpoint_id=str(step), storage_writer=writer)
    run = Run(tmp_path / "run")
    assert run.steps() == [3, 4]
    assert dict(verify_run(run)) == {3: None, 4: None}
    assert [int(dq.load(tmp_path / "run", step=step)["w"][0]) for step in (3, 4)] == [3, 4]
    assert unneeded_parts(run) == []


def test_an_asynchronous_save(tmp_path):
    model, optimizer = trained()
    writer = StorageWriter(tmp_path / "run", quality="lossless")
    state = state_of(model, optimizer)
    wanted = {name: tensor.clone() for name, tensor in state["model"].items()}
    saving = dcp.async_save(state, checkpoint_id="5", storage_writer=writer)
    train(model, optimizer, 2)
    getattr(saving, "upload_completion", saving).result()
    loaded = dq.load(tmp_path / "run")["model"]
    assert all(bits(loaded[name]) == bits(tensor) for name, tensor in wanted.items())


class Own:
    """An object that only pickle could store."""


def test_objects_are_refused_and_nothing_of_the_save_is_left(tmp_path):
    writer = StorageWriter(tmp_path / "run")
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(3), "own": Own()}, storage_writer=writer)
    (error,) = [cause for cause, _ in caught.value.failures.values()]
    assert isinstance(error, dq.StateError)
    assert "own: a checkpoint holds only tensors and plain values" in str(error)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    assert Run(tmp_path / "run").steps() == [1]
    assert unneeded_parts(Run(tmp_path / "run")) == []


def test_a_run_that_a_checkpointer_has_written_is_loaded_through_dcp(tmp_path):
    model, optimizer = trained()
    with dq.Checkpointer(tmp_path / "run", model, optimizer, quality="lossless") as ckpt:
        ckpt.save(3)
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}}
    dcp.load(state, storage_reader=StorageReader(tmp_path / "run"))
    assert all(bits(state["model"][name]) == bits(tensor) for name, tensor in model.state_dict().items())


def test_a_checkpoint_of_dcp_can_be_verified_listed_and_exported(tmp_path):
    model, optimizer = trained()
    dcp.save(state_of(model, optimizer), checkpoint_id="5", storage_writer=StorageWriter(tmp_path / "run"))
    for command in (["log"], ["show"], ["du"], ["verify"], ["show", "--tensor", "model.0.weight"]):
        name, *options = command
        assert CliRunner().invoke(app, [name, str(tmp_path / "run"), *options]).exit_code == 0, command
    out = tmp_path / "weights.safetensors"
    assert CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--out", str(out)]).exit_code == 0
    loaded = dq.load(tmp_path / "run")["model"]
    exported = load_file(out)
    assert {name: bits(tensor) for name, tensor in exported.items()} == {n: bits(t) for n, t in loaded.items()}


def test_arguments_are_checked(tmp_path):
    with pytest.raises(ValueError, match="quality must be one of"):
        StorageWriter(tmp_path, quality="best")
    with pytest.raises(ValueError, match=r"StorageWriter takes no method in dq\.Quality"):
        StorageWriter(tmp_path, quality=dq.Quality(method="published"))
    with pytest.raises(ValueError, match=r"StorageWriter takes no best in dq\.Keep"):
        StorageWriter(tmp_path, keep=dq.Keep(best=1))


def test_a_save_after_a_failed_one_is_conditioned_on_what_was_committed(tmp_path, monkeypatch):
    writer = StorageWriter(tmp_path / "run", quality="lossless")
    values = [torch.arange(5000.0) + i for i in range(5)]
    dcp.save({"w": values[0]}, checkpoint_id="1", storage_writer=writer)
    dcp.save({"w": values[1]}, checkpoint_id="2", storage_writer=writer)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(WritableRun, "publish", full)
        with pytest.raises(CheckpointException):
            dcp.save({"w": values[2]}, checkpoint_id="2", storage_writer=writer)
    dcp.save({"w": values[3]}, checkpoint_id="3", storage_writer=writer)
    run = Run(tmp_path / "run")
    assert dict(verify_run(run)) == dict.fromkeys([1, 2, 3])
    assert bits(dq.load(run.folder, step=2)["w"]) == bits(values[1])
    assert bits(dq.load(run.folder)["w"]) == bits(values[3])


def test_a_failed_save_releases_the_run_and_its_id_is_forgotten(tmp_path, monkeypatch):
    writer = StorageWriter(tmp_path / "run", quality="lossless")
    with monkeypatch.context() as patch:
        patch.setattr(WritableRun, "publish", lambda *_: 1 / 0)
        with pytest.raises(CheckpointException):
            dcp.save({"w": torch.ones(3)}, checkpoint_id="500", storage_writer=writer)
    with WritableRun(tmp_path / "run").locked():
        pass
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    assert Run(tmp_path / "run").steps() == [1]


@pytest.mark.parametrize("quality", ["lossless", "high", "balanced"])
def test_a_tensor_that_changes_its_shape_is_not_conditioned_on_the_last_one(tmp_path, quality):
    writer = StorageWriter(tmp_path / "run", quality=quality)
    weight = torch.randn(128, 64)
    for shape in ((128, 64), (64, 128), (64, 128), (8192,)):
        dcp.save({"w": weight.reshape(shape)}, storage_writer=writer)
    assert dict(verify_run(Run(tmp_path / "run"))) == dict.fromkeys([1, 2, 3, 4])
    assert dq.load(tmp_path / "run")["w"].shape == (8192,)


def test_plans_that_are_used_again_are_refused(tmp_path):
    writer = StorageWriter(tmp_path / "run")
    planner = DefaultSavePlanner(enable_plan_caching=True)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=planner)
    with pytest.raises(CheckpointException, match="enable_plan_caching"):
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=planner)
    with pytest.raises(ValueError, match="needs collectives"):
        writer.set_up_storage_writer(True, rank=0, use_collectives=False)


def test_a_load_goes_on_if_the_writer_prunes_meanwhile(tmp_path):
    writer = StorageWriter(tmp_path / "run", quality="lossless", keep=dq.Keep(last=2))
    values = {step: {"a": torch.randn(3000) * step, "b": torch.randn(50)} for step in (1, 2, 3)}
    for step in (1, 2):
        dcp.save(values[step], checkpoint_id=str(step), storage_writer=writer)

    class Slow(DefaultLoadPlanner):
        """A planner during whose work the writer saves once more and re-codes the checkpoint that is loaded."""

        def resolve_tensor(self, read_item):
            if len(Run(tmp_path / "run").steps()) == 2 and 1 in Run(tmp_path / "run").steps():
                dcp.save(values[3], checkpoint_id="3", storage_writer=writer)
            return super().resolve_tensor(read_item)

    state = {name: torch.zeros_like(tensor) for name, tensor in values[2].items()}
    dcp.load(state, storage_reader=StorageReader(tmp_path / "run", 2), planner=Slow())
    assert Run(tmp_path / "run").steps() == [2, 3]
    assert all(bits(state[name]) == bits(tensor) for name, tensor in values[2].items())
