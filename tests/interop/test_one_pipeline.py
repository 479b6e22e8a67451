"""All ways to save go through one pipeline: what differs is only what each knows of a training."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from training import bits, model_of, train

import dynaquant as dq
from dynaquant.interop.dcp import StorageWriter
from dynaquant.interop.packing import Packer, compress, pack
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
from dynaquant.store.commit import WritableRun
from dynaquant.store.writing import coder_of

PLAIN = dq.Quality(max_degradation=0.01)  # without a budget, which only a training has


@pytest.fixture
def state():
    model = model_of(64)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 20)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_a_file_and_dcp_store_the_same_values_of_weights(tmp_path, state):
    dq.save(state, tmp_path / "saved.dqc", quality=PLAIN)
    torch.save(state, tmp_path / "state.pt")
    compress(tmp_path / "state.pt", tmp_path / "compressed.dqc", Packer(PLAIN))
    list(pack({1: tmp_path / "state.pt"}, tmp_path / "packed", Packer(PLAIN)))
    names = [name for name, _ in model_of(64).named_parameters()]
    moments = {f"{name}.exp_avg_sq": state["optimizer"]["state"][i]["exp_avg_sq"] for i, name in enumerate(names)}
    by_name = {"model": state["model"], "optimizer": {"state": moments}}
    dcp.save(by_name, storage_writer=StorageWriter(tmp_path / "dcp", quality=PLAIN), checkpoint_id="step-1")
    found = bits(dict(dq.load(tmp_path / "saved.dqc")["model"]))
    assert found != bits(dict(state["model"]))
    for other in ("compressed.dqc", "packed", "dcp"):
        assert bits(dict(dq.load(tmp_path / other)["model"])) == found, other


def test_the_same_limit_chooses_the_same_scale_for_a_training_and_its_state(tmp_path):
    """A network of one layer, whose weights have moved further than any grid step that the limit allows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 8, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    with dq.Checkpointer(tmp_path / "run", model, optimizer, quality=dq.Quality("high", max_degradation=1e-3)) as ckpt:
        for scale in (0, 1):  # what is written before the first step is not moved by the training
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(std=scale)
            optimizer.zero_grad()
            model(torch.randn(256, 64)).square().mean().backward()
            optimizer.step()
        live = ckpt.save(1).result()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    saved = dq.save(state, tmp_path / "saved.dqc", quality=dq.Quality("high", max_degradation=1e-3))
    assert (saved.configuration, saved.limit, saved.judged_by) == (live.configuration, live.limit, live.judged_by)
    assert bits(dq.load(tmp_path / "saved.dqc")["model"]) == bits(dq.load(tmp_path / "run")["model"])


@pytest.mark.parametrize(
    "quality",
    [dq.Quality(method="published"), dq.Quality(configuration=dq.Configuration(bins=8))],
    ids=["published", "fixed"],
)
def test_a_state_is_stored_by_the_method_and_configuration_that_its_user_chose(tmp_path, state, quality):
    record = dq.save(state, tmp_path / "saved.dqc", quality=quality)
    assert isinstance(record.configuration, dq.Configuration)
    assert quality.configuration in (None, record.configuration)
    assert coder_of(StoredCheckpoint(tmp_path / "saved.dqc").file) == "rearranged"
    found = dq.load(tmp_path / "saved.dqc")
    assert bits(found["model"]["1.bias"]) == bits(state["model"]["1.bias"])  # vectors and moments are exact
    assert bits(found["optimizer"]) == bits(state["optimizer"])
    assert bits(found["model"]["1.weight"]) != bits(state["model"]["1.weight"])


def test_in_a_series_a_weight_that_has_not_changed_keeps_its_levels_and_takes_no_space(tmp_path, state):
    files = {}
    for step in range(1, 4):
        files[step] = tmp_path / f"{step}.pt"
        torch.save(state["model"], files[step])
        state["model"]["1.weight"] = state["model"]["1.weight"] + 0.01 * torch.randn(64, 64)
        state["model"]["4.weight"] = state["model"]["4.weight"].clone()
    list(pack(files, tmp_path / "run", Packer(PLAIN)))
    first, last = (StoredCheckpoint(tmp_path / "run", step).file.header.by_name for step in (1, 3))
    assert (last["4.weight"].hash, last["4.weight"].stored_size) == (first["4.weight"].hash, 0)
    assert last["1.weight"].hash != first["1.weight"].hash


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_dcp_saves_again_unchanged_takes_no_space(tmp_path, state):
    writer = StorageWriter(tmp_path / "run", quality=PLAIN)
    for step in (1, 2, 3):
        dcp.save({"model": state["model"]}, storage_writer=writer, checkpoint_id=f"step-{step}")
    assert len({str(bits(dq.load(tmp_path / "run", step)["model"])) for step in (1, 2, 3)}) == 1
    sizes = [StoredCheckpoint(tmp_path / "run", step).file.total_size for step in (1, 3)]
    assert sizes[1] < sizes[0] / 4


def test_in_a_series_the_metric_tells_what_it_needs_of_each_tensor_only_once(tmp_path):
    """Also if some of the weights, or all, have not changed since the last file."""
    torch.manual_seed(0)
    state = {name: torch.randn(64, 64) for name in "abcd"}
    files = {}
    for step, changed in enumerate(["", "", "a", "abcd"], start=1):
        state = {n: t + 0.01 * torch.randn(64, 64) if n in changed else t for n, t in state.items()}
        files[step] = tmp_path / f"{step}.pt"
        torch.save(state, files[step])
    probed = []

    def metric(found) -> float:
        moved = [name for name in found if not any(torch.equal(found[name], own[name]) for own in originals)]
        probed.extend(moved if len(moved) == 1 else [])
        return 1.0 + sum(float(tensor.square().mean()) for tensor in found.values())

    originals = [torch.load(path) for path in files.values()]
    packing = pack(files, tmp_path / "run", Packer(PLAIN, metric))
    next(packing)
    assert probed == list("abcd")
    next(packing)
    assert probed == list("abcd")  # nothing has changed
    assert len(list(packing)) == 2
    assert set(probed[4:]) <= {"a"}  # a search, of which only this weight has changed


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_save_of_dcp_that_fails_leaves_what_the_next_one_knows(tmp_path, monkeypatch):
    torch.manual_seed(0)
    weights = [torch.randn(64, 64) * scale for scale in (1.0, 30.0, 1.01)]

    def last_of(folder, failing):
        writer = StorageWriter(folder, quality=PLAIN)
        for step, weight in enumerate(weights, start=1):
            with monkeypatch.context() as patch:
                if step == 2:
                    patch.setattr(WritableRun, "publish", fail)
                    if failing:
                        with pytest.raises(CheckpointException):
                            dcp.save({"w": weight}, storage_writer=writer, checkpoint_id=f"step-{step}")
                    continue
                dcp.save({"w": weight}, storage_writer=writer, checkpoint_id=f"step-{step}")
        return bits(dq.load(folder)["w"]), StoredCheckpoint(folder).file.total_size

    def fail(*_, **__):
        raise OSError("No space left on device")

    assert last_of(tmp_path / "a", failing=True)[0] == last_of(tmp_path / "b", failing=False)[0]
