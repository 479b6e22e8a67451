"""``load`` and ``load_into``: stored states without the training that made them."""

import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from training import bits, model_of, train

import dynaquant as dq
from dynaquant.interop.export import Target, export
from dynaquant.interop.packing import Packer, compress
from dynaquant.interop.targets import OF_FRAMEWORKS
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import CheckpointFile
from dynaquant.store.retention import Retention, prune
from dynaquant.store.run import Run


@pytest.fixture
def run(tmp_path):
    """Three checkpoints of a model with a tied weight, and a lossless copy of the last."""
    model = model_of(8)
    model[4].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with dq.Checkpointer(tmp_path / "run", model, optimizer, keep=dq.Keep(lossless_copy=True)) as ckpt:
        for step in (1, 2, 3):
            train(model, optimizer)
            ckpt.save(step).result()
    return tmp_path / "run"


def packed(folder, state):
    torch.save(state, folder / "m.pt")
    compress(folder / "m.pt", folder / "m.dqc", Packer())
    return folder / "m.dqc"


def test_only_requested_tensors_are_decoded(run, monkeypatch):
    whole = dq.load(run, 2)["model"]
    stored = StoredCheckpoint(run, 2)
    asked = ["1.weight", "1.bias"]
    places = {entry.name for entry in stored.file.header.entries if entry.name not in {f"model.{k}" for k in asked}}
    read = type(stored.file).read

    def reading(self, entry):
        assert entry.name not in places
        return read(self, entry)

    monkeypatch.setattr(type(stored.file), "read", reading)
    found = dq.load(run, 2, keys=asked)
    assert list(found) == asked
    assert bits(found) == bits({key: whole[key] for key in asked})


def test_a_tied_tensor_is_found_under_all_its_names(run):
    found = dq.load(run, keys=["4.weight", "0.weight"])
    assert torch.equal(found["4.weight"], found["0.weight"])
    assert dq.load(run, keys=[]) == {}


def test_an_unknown_tensor_is_an_error_that_lists_some_names(run):
    with pytest.raises(KeyError, match=r"no tensor '9.weight'; there are '0.weight'"):
        dq.load(run, keys=["1.weight", "9.weight"])


@pytest.mark.parametrize("around", [lambda s: s, lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": s}])
def test_the_model_is_found_in_files_of_other_programs(tmp_path, around):
    model = model_of(8)
    path = packed(tmp_path, around(model.state_dict()))
    other = model_of(8)
    dq.load_into(other, path)
    names = list(model.state_dict())
    assert bits(dq.load(path, keys=names)) == bits(dict(other.state_dict()))


def test_a_step_of_a_file_and_a_folder_without_checkpoints_are_errors(run, tmp_path):
    path = packed(tmp_path, {"w": torch.ones(2)})
    with pytest.raises(ValueError, match="is a single checkpoint"):
        dq.load(path, 3)
    for wrong, reason in ((tmp_path, "no checkpoints here"), (tmp_path / "nowhere", "no such file or folder")):
        with pytest.raises(dq.CheckpointError, match=reason):
            dq.load(wrong)
        with pytest.raises(dq.CheckpointError, match=reason):
            dq.load(wrong, keys=["w"])
    with pytest.raises(dq.CheckpointError, match="no checkpoint of step 9"):
        dq.load(run, 9, keys=["w"])
    with pytest.raises(dq.CheckpointError, match="not a dynaquant checkpoint"):
        dq.load(tmp_path / "m.pt")


@pytest.mark.parametrize("load", [dq.load, lambda run: dq.load_into(model_of(8), run, strict=False)])
def test_a_warning_names_each_file_that_is_skipped(run, load, caplog):
    paths = [Run(run).path(step) for step in (2, 3)]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1])
    load(run)
    assert [message for message in caplog.messages if "skipped" in message] == [
        f"step 1 is the newest that can be read; skipped {path}: truncated, or damaged at its end" for path in paths
    ]
    caplog.clear()
    dq.load(run, 1)
    assert "skipped" not in caplog.text  # that step was asked for


def test_a_checkpoint_of_a_run_can_be_loaded_by_its_file(run):
    assert bits(dq.load(Run(run).path(2))) == bits(dq.load(run, 2))


def test_load_prefers_the_lossless_copy(run):
    exact = dq.load(run)["model"]
    small = dq.load(Run(run).path(3))["model"]
    assert bits(exact) != bits(small)
    assert bits(dq.load(run, keys=["1.weight"])["1.weight"]) == bits(exact["1.weight"])
    model = model_of(8)
    model[4].weight = model[0].weight
    dq.load_into(model, run)
    assert bits(dict(model.state_dict())) == bits(dict(exact))


def test_the_checkpoint_is_loaded_if_its_lossless_copy_is_damaged(run, caplog):
    twin = next(run.glob("exact-*.dqc"))
    twin.write_bytes(twin.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING):
        for keys in (None, ["1.weight"]):
            found = dq.load(run, keys=keys)
            weight = found["model"]["1.weight"] if keys is None else found["1.weight"]
            assert torch.equal(weight, dq.load(Run(run).path(3))["model"]["1.weight"])
    assert caplog.text.count("cannot be used, reading the checkpoint itself instead") == 2


def damage(file: CheckpointFile, name: str) -> None:
    """Flip a bit in the middle of a tensor's stream."""
    entry, content = file.header.by_name[name], bytearray(file.path.read_bytes())
    content[content.index(file.read(entry)) + entry.size // 2] ^= 0x10
    file.path.write_bytes(content)


@pytest.fixture
def damaged(run):
    """The same run, with the last tensor of the model damaged in the lossless copy."""
    damage(CheckpointFile(next(run.glob("exact-*.dqc"))), "model.4.bias")
    return run


def each(tensors):
    return {name: bits(tensor) for name, tensor in tensors.items()}


def test_one_damaged_tensor_of_the_lossless_copy_switches_all_tensors_to_the_checkpoint(damaged, tmp_path, caplog):
    small = each(dq.load(Run(damaged).path(3))["model"])
    with caplog.at_level(logging.WARNING):
        assert each(dq.load(damaged)["model"]) == small
        assert each(dq.load(damaged, keys=list(small))) == small
        model = model_of(8)
        model[4].weight = model[0].weight
        dq.load_into(model, damaged)
        assert each(model.state_dict()) == small
        targets = [target for target in Target if target not in OF_FRAMEWORKS]
        for target in targets:
            export(StoredCheckpoint(damaged), target, tmp_path / target)
    assert caplog.text.count("the lossless copy of step 3 cannot be used") == 3 + len(targets)
    assert "model.4.bias" in caplog.text
    for file in (tmp_path / Target.SAFETENSORS, tmp_path / Target.HF / "model.safetensors"):
        found = each(load_file(file))
        assert found == {name: small[name] for name in found}
    assert each(torch.load(tmp_path / Target.TORCH, weights_only=False)) == small
    assert each(torch.load(tmp_path / Target.TORCH_STATE, weights_only=False)["model"]) == small


def test_the_checkpoint_is_opened_again_if_a_writer_recoded_it_before_its_copy_was_found_damaged(damaged):
    small = each(dq.load(Run(damaged).path(3))["model"])
    stored = StoredCheckpoint(damaged)
    with (writable := WritableRun(damaged)).locked():
        prune(writable, Retention(dq.Keep(last=1)))
    assert each(stored.with_retries(lambda: stored.state("model"))) == small


def test_damaged_tensors_matter_only_if_they_are_loaded(damaged, caplog):
    found = dq.load(damaged, keys=["1.weight"])["1.weight"]
    assert not torch.equal(found, dq.load(Run(damaged).path(3))["model"]["1.weight"])
    assert caplog.text == ""


def test_damage_of_checkpoint_and_lossless_copy_is_reported_for_both(damaged, caplog):
    damage(Run(damaged).file(3), "model.1.weight")
    for load in (lambda: dq.load(damaged, keys=["1.weight", "4.bias"]), lambda: dq.load(damaged)):
        with pytest.raises(dq.CheckpointError, match=r"step-000000000003.dqc: tensor model.1.weight"):
            load()
    assert caplog.text.count("exact-000000000003") == 2


def test_an_undamaged_lossless_copy_is_loaded_although_the_checkpoint_is_damaged(run):
    exact = each(dq.load(run)["model"])
    damage(Run(run).file(3), "model.1.weight")
    assert each(dq.load(run)["model"]) == exact
    assert each(dq.load(run, keys=list(exact))) == exact


def test_a_dtype_that_safetensors_lacks_does_not_count_as_damage(tmp_path, caplog):
    model = nn.Linear(8, 8)
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex128))
    with dq.Checkpointer(tmp_path / "run", model, keep=dq.Keep(lossless_copy=True)) as ckpt:
        ckpt.save(1).result()
    with pytest.raises(dq.CheckpointError, match="export to torch instead"):
        export(StoredCheckpoint(tmp_path / "run"), Target.SAFETENSORS, tmp_path / "m.safetensors")
    assert caplog.text == ""


def test_load_into_keeps_the_models_dtypes_and_ties(run):
    model = model_of(8).to(torch.bfloat16)
    model[4].weight = model[0].weight
    weight = model[1].weight
    dq.load_into(model, run, 2)
    assert model[1].weight is weight
    assert model[0].weight is model[4].weight
    assert torch.equal(weight, dq.load(run, 2)["model"]["1.weight"].to(torch.bfloat16))
    assert weight.requires_grad


def test_a_model_that_does_not_fit_is_not_changed(run):
    for model, reasons in (
        (model_of(16), ["1.weight is [8, 8] in the checkpoint and [16, 16] in the model"]),
        (
            nn.Sequential(*model_of(8), nn.Linear(2, 2)),
            ["5.weight is not in the checkpoint", "5.bias is not in the checkpoint"],
        ),
        (nn.Sequential(*model_of(8)[:4]), ["4.weight is in the checkpoint, but not in the model"]),
        (model_of(8).to("meta"), ["1.weight of the model is on the meta device", "to_empty"]),
    ):
        before = bits(dict(model.state_dict())) if not model[1].weight.is_meta else None
        with pytest.raises(dq.StateError, match="does not fit the model") as caught:
            dq.load_into(model, run)
        assert all(reason in str(caught.value) for reason in reasons)
        assert "Nothing was changed" in str(caught.value)
        assert before is None or bits(dict(model.state_dict())) == before


def test_a_plain_value_in_the_models_state_is_an_error_that_names_it(tmp_path):
    path = packed(tmp_path, {"w": torch.ones(2), "more": 3})
    with pytest.raises(dq.CheckpointError, match="more in the model is not a tensor"):
        dq.load(path, keys=["w"])
    path = packed(tmp_path, {"epoch": 3, "deep": {"er": {"w": torch.ones(2)}}})
    with pytest.raises(dq.CheckpointError, match="there is no model in it; it has epoch, deep"):
        dq.load(path, keys=["w"])
    assert torch.equal(dq.load(path)["deep"]["er"]["w"], torch.ones(2))


def test_a_damaged_tensor_leaves_the_model_unchanged(tmp_path):
    save_file({"weight": torch.randn(32, 32), "bias": torch.randn(32)}, tmp_path / "m.safetensors")
    compress(tmp_path / "m.safetensors", tmp_path / "m.dqc", Packer("lossless"))
    file = StoredCheckpoint(tmp_path / "m.dqc").file
    content = bytearray(file.path.read_bytes())
    start = 16 + sum(
        entry.size for entry in file.header.entries[: file.header.entries.index(file.header.by_name["bias"])]
    )
    content[start + file.header.by_name["bias"].size // 2] ^= 0xFF
    file.path.write_bytes(content)
    model = nn.Linear(32, 32)
    before = bits(dict(model.state_dict()))
    with pytest.raises(dq.CheckpointError, match="bias") as caught:
        dq.load_into(model, tmp_path / "m.dqc")
    assert not hasattr(caught.value, "__notes__")
    assert bits(dict(model.state_dict())) == before
    assert dq.load(tmp_path / "m.dqc", keys=["weight"])
    with pytest.raises(dq.CheckpointError, match="bias"):
        dq.load(tmp_path / "m.dqc")


# Parts of a state, and where its tensors go


@pytest.fixture
def whole(tmp_path):
    """A run of a training with extras. Returns its folder."""
    model = model_of(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    extras = {"trainer": {"epoch": 2, "log": [{"loss": 0.5}], "best": torch.ones(3)}, "a/b": [1, 2]}
    with dq.Checkpointer(tmp_path / "run", model, optimizer, extras=extras, quality="lossless") as ckpt:
        for step in (1, 2):
            train(model, optimizer)
            ckpt.save(step).result()
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("part", "prefix"),
    [
        ("model", "model."),
        ("model/1.weight", "model.1.weight"),
        ("optimizer", "optimizer."),
        ("optimizer/state/model.1.weight", "optimizer.state.model.1.weight."),
        ("trainer", "trainer."),
        ("trainer/log/0/loss", "nothing"),
        ("a/b/1", "nothing"),
    ],
)
def test_a_part_is_that_of_the_whole_state_and_nothing_else_is_decoded(whole, monkeypatch, part, prefix):
    state = dq.load(whole)
    decoded = set()
    read = CheckpointFile.read
    monkeypatch.setattr(CheckpointFile, "read", lambda self, entry: decoded.add(entry.name) or read(self, entry))
    found = dq.load(whole, part=part)
    for key in {"a/b/1": ["a/b", 1]}.get(part, part.split("/")):
        state = state[int(key) if isinstance(state, list) else key]
    assert bits(found) == bits(state)
    assert all(name.startswith(prefix) for name in decoded)
    assert bool(decoded) == (prefix != "nothing")


def test_an_unknown_part_is_an_error_that_says_what_there_is(whole):
    for part, said in (
        ("extras/trainer", r"no part 'extras/trainer' of the state; there are model, optimizer, trainer"),
        ("trainer/loss", "there are epoch, log, best"),
        ("trainer/epoch/0", "there is a single value where '0' should be"),
        ("", "no part ''"),
    ):
        with pytest.raises(KeyError, match=said):
            dq.load(whole, part=part)
    with pytest.raises(TypeError, match=r"keys is a list of names, e\.g\. \['0\.weight'\]"):
        dq.load(whole, keys="0.weight")
    with pytest.raises(dq.CheckpointError, match=r"there is no tag '10' .*; a step is a number"):
        dq.load(whole, "10")
    with pytest.raises(ValueError, match="keys and part exclude each other"):
        dq.load(whole, part="model", keys=["1.weight"])


def test_an_index_that_a_list_does_not_have_is_an_error_that_says_which_there_are(tmp_path):
    state = {"one": [torch.ones(2)], "three": ({}, torch.ones(2), 1), "none": []}
    dq.save(state, tmp_path / "s.dqc")
    for part, said in (
        ("one/1", "there is a list where '1' should be; give the index 0, of its only item"),
        ("three/x", "there is a list where 'x' should be; give an index from 0 to 2"),
        ("none/0", "there is an empty list where '0' should be; leave that out"),
        ("three/2/5", "there is a single value where '5' should be; leave that out"),
    ):
        with pytest.raises(KeyError, match=said):
            dq.load(tmp_path / "s.dqc", part=part)
    assert dq.load(tmp_path / "s.dqc", part="three/2") == 1


def test_map_location_moves_tensors_and_keeps_ties_and_arrays(tmp_path):
    shared = torch.randn(4)
    dq.save({"a": shared, "b": [shared], "n": np.ones(3), "p": nn.Parameter(shared)}, tmp_path / "s.dqc")
    for device in ("meta", torch.device("meta")):
        found = dq.load(tmp_path / "s.dqc", map_location=device)
        assert found["a"].device.type == "meta"
        assert found["a"] is found["b"][0]
        assert isinstance(found["p"], nn.Parameter)
        assert found["p"].is_meta
        assert isinstance(found["n"], np.ndarray)
    assert dq.load(tmp_path / "s.dqc", map_location="cpu")["a"].device.type == "cpu"
    with pytest.raises(RuntimeError, match="device type"):
        dq.load(tmp_path / "s.dqc", map_location="abacus")


def test_map_location_holds_for_single_tensors(run):
    assert dq.load(run, keys=["1.weight"], map_location="meta")["1.weight"].is_meta


def test_a_parent_is_given_for_single_files_only(run):
    with pytest.raises(ValueError, match="is a run, which knows the parents of its checkpoints"):
        dq.load(run, parent=Run(run).path(1))
