"""Exports checkpoints as files that other programs read."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from foreign_files import INDEX, SHARDS, hf_folder
from full_disk import contents, files_of_at_most
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from training import bits, model_of, train

import dynaquant as dq
from dynaquant.interop import any_format, safetensors
from dynaquant.interop.export import Target, export, target_for
from dynaquant.interop.packing import Packer, compress, pack
from dynaquant.interop.targets import OF_FRAMEWORKS
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
from dynaquant.state.flatten import unflatten


def packed(source, folder, quality="lossless") -> StoredCheckpoint:
    compress(source, folder / "packed.dqc", Packer(quality))
    return StoredCheckpoint(folder / "packed.dqc")


def content_of(path):
    file = any_format.read(path)
    return unflatten(file.tree, dict(file.tensors))


@pytest.fixture
def trained(tmp_path) -> StoredCheckpoint:
    """A checkpoint of a training with a tied weight."""
    model = model_of(8)
    model[4].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    with dq.Checkpointer(tmp_path / "run", model, optimizer) as ckpt:
        ckpt.save(7).result()
    return StoredCheckpoint(tmp_path / "run")


@pytest.fixture
def folder(tmp_path) -> StoredCheckpoint:
    """A Hugging Face folder of two shards, compressed."""
    hf_folder(tmp_path / "hf")
    return packed(tmp_path / "hf", tmp_path)


def test_exported_files_hold_what_load_returns(trained, tmp_path):
    state = dq.load(tmp_path / "run")
    model = {name: tensor for name, tensor in state["model"].items() if name != "4.weight"}
    for target, expected in (
        (Target.SAFETENSORS, model),
        (Target.HF, model),
        (Target.TORCH, state["model"]),
    ):
        out = tmp_path / target
        export(trained, target, out)
        assert bits(dict(sorted(content_of(out).items()))) == bits(dict(sorted(expected.items())))
    export(trained, Target.TORCH_STATE, tmp_path / "state.pt")
    assert bits(torch.load(tmp_path / "state.pt", weights_only=False)) == bits(state)


def test_a_training_is_exported_as_dcp(tmp_path):
    torch.save({"model": {"w": torch.randn(4, 4)}, "step": 3, "list": [torch.ones(2), "x"]}, tmp_path / "m.pt")
    export(packed(tmp_path / "m.pt", tmp_path), Target.DCP, tmp_path / "dcp")
    assert bits(content_of(tmp_path / "dcp")) == bits(torch.load(tmp_path / "m.pt"))


def test_other_names_of_tied_tensors_are_in_the_metadata(trained, tmp_path):
    export(trained, Target.SAFETENSORS, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "7", "4.weight": "0.weight"}
    linear = nn.Module()
    linear.embed, linear.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    linear.head.weight = linear.embed.weight
    torch.save(linear.state_dict(), tmp_path / "m.pt")
    export(packed(tmp_path / "m.pt", tmp_path), Target.SAFETENSORS, tmp_path / "tied.safetensors")
    with safe_open(tmp_path / "tied.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "made by": "ü"}])
def test_an_exported_safetensors_file_keeps_its_metadata(tmp_path, metadata):
    save_file({"w": torch.randn(4, 4), "i": torch.arange(3)}, tmp_path / "m.safetensors", metadata=metadata)
    stored = packed(tmp_path / "m.safetensors", tmp_path)
    export(stored, target_for(stored, tmp_path / "back"), tmp_path / "back")
    with safe_open(tmp_path / "back", "pt") as file:
        assert file.metadata() == metadata
    assert bits(content_of(tmp_path / "back")) == bits(content_of(tmp_path / "m.safetensors"))


def test_an_exported_hugging_face_folder_has_the_original_files(folder, tmp_path):
    export(folder, target_for(folder, tmp_path / "back"), tmp_path / "back")
    assert sorted(os.listdir(tmp_path / "back")) == sorted((*SHARDS, INDEX))
    for shard in SHARDS:
        assert bits(dict(sorted(load_file(tmp_path / "back" / shard).items()))) == bits(
            dict(sorted(load_file(tmp_path / "hf" / shard).items()))
        )
    assert json.loads((tmp_path / "back" / INDEX).read_text()) == json.loads((tmp_path / "hf" / INDEX).read_text())


def test_a_hugging_face_folder_can_be_exported_as_one_safetensors_file(folder, tmp_path):
    out = tmp_path / "one.safetensors"
    export(folder, target_for(folder, out), out)
    assert bits(dict(sorted(load_file(out).items()))) == bits(dict(sorted(content_of(tmp_path / "hf").items())))
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_large_models_are_exported_as_several_files_and_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "SHARD_BYTES", 200)
    tensors = {name: torch.randn(6, 6) for name in "abc"} | {"d": torch.ones(2), "e": torch.ones(2)}
    save_file(tensors, tmp_path / "m.safetensors")
    export(packed(tmp_path / "m.safetensors", tmp_path), Target.HF, tmp_path / "hf")
    names = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path / "hf")) == sorted([*names, INDEX])
    assert json.loads((tmp_path / "hf" / INDEX).read_text())["metadata"] == {"total_size": 3 * 144 + 16}
    assert bits(dict(sorted(content_of(tmp_path / "hf").items()))) == bits(tensors)


def test_the_suffix_decides_the_format_and_then_the_original_format(folder, trained, tmp_path):
    assert target_for(folder, Path("x.safetensors")) is Target.SAFETENSORS
    assert target_for(folder, Path("x.pt")) is Target.TORCH_STATE
    assert target_for(folder, Path("x")) is Target.HF
    assert target_for(trained, Path("x")) is Target.SAFETENSORS
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    assert target_for(packed(tmp_path / "m.pt", tmp_path), Path("x")) is Target.TORCH_STATE


@pytest.mark.parametrize("name", ["x.onnx", "x.GGUF", "x.h5", "x.tflite", "x.npz", "x.dqc"])
def test_a_suffix_of_another_format_is_refused(folder, trained, tmp_path, name):
    for stored in (folder, trained):
        with pytest.raises(dq.CheckpointError, match=r"does not write files of the format .*; let it end in .safe"):
            target_for(stored, tmp_path / name)
    torch.save({"w": torch.ones(2)}, tmp_path / name)  # unpack gives a file its own name again
    list(pack({1: tmp_path / name}, tmp_path / "packed", Packer()))
    assert target_for(StoredCheckpoint(tmp_path / "packed"), tmp_path / "back" / name) is Target.TORCH_STATE


@pytest.mark.parametrize(
    "source",
    [
        {"shards": {"../precious": {"metadata": None, "tensors": ["a", "b", "c"]}}, "index": None},
        {"shards": {"/tmp/precious": {"metadata": None, "tensors": ["a", "b", "c"]}}, "index": None},
        {"shards": {"..": {"metadata": None, "tensors": ["a", "b", "c"]}}, "index": None},
        {"shards": {"x\0": {"metadata": None, "tensors": ["a", "b", "c"]}}, "index": None},
        {"shards": {"x": {"metadata": None, "tensors": ["a", "b", "c"]}}, "index": "../precious"},
        {"shards": {"x": {"metadata": None, "tensors": ["a", "b", "c"]}}, "index": 5},
        {"shards": {"x": {"metadata": None, "tensors": ["a", "b", "z"]}}},
        {"shards": {"x": {"metadata": None, "tensors": ["a", "b"]}}},
        {"shards": {"x": {"metadata": 5, "tensors": ["a", "a", "b", "c"]}}},
        {"shards": {"x.safetensors": {"metadata": {"a": 5, "b": "c"}, "tensors": ["a", "b", "c"]}}},
        *({"shards": wrong} for wrong in (5, [], {"x": 5}, {"x": {}}, {"x": {"metadata": None, "tensors": 5}}, None)),
        *(
            5,
            None,
            {"format": []},
            {"format": "safetensors", "metadata": 5},
            {"format": "safetensors", "metadata": {"a": 5}},
        ),
    ],
    ids=str,
)
def test_a_malformed_record_neither_writes_outside_the_folder_nor_prevents_the_export(folder, tmp_path, source):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("precious")
    expected = bits(dict(sorted(dq.load(tmp_path / "packed.dqc").items())))
    folder.file.header.record["source"] = source
    for target in (Target.HF, Target.SAFETENSORS):
        export(folder, target, out / target)
        assert bits(dict(sorted(content_of(out / target).items()))) == expected
    assert target_for(folder, Path("x")) in Target
    assert (out / "precious").read_text() == "precious"
    assert sorted(os.listdir(out)) == ["hf", "precious", "safetensors"]


def test_extra_state_of_a_model_is_exported_to_torch(tmp_path):
    class Counting(nn.Linear):
        def get_extra_state(self):
            return {"seen": (torch.tensor(3), [torch.ones(2)]), "array": torch.ones(2).numpy()}

        def set_extra_state(self, state):
            pass

    model = Counting(2, 2)
    with dq.Checkpointer(tmp_path / "run", model) as ckpt:
        ckpt.save(1).result()
    stored = StoredCheckpoint(tmp_path / "run")
    export(stored, Target.TORCH, tmp_path / "m.pt")
    assert bits(torch.load(tmp_path / "m.pt", weights_only=False)) == bits(dq.load(tmp_path / "run")["model"])
    with pytest.raises(dq.CheckpointError, match="_extra_state in the model is not a tensor; load the whole state"):
        export(stored, Target.SAFETENSORS, tmp_path / "m.safetensors")


@pytest.mark.parametrize("target", [target for target in Target if target not in OF_FRAMEWORKS])
def test_an_error_leaves_no_output_behind(trained, tmp_path, target):
    out = tmp_path / "out"
    before = set(os.listdir(tmp_path))
    for room in (0, 1000, 2000):
        with files_of_at_most(room), pytest.raises(OSError, match="File too large") as caught:
            export(trained, target, out)
        assert set(os.listdir(tmp_path)) == before
        assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(out))
        assert caught.value.__notes__ == [
            "the file exceeds the largest size allowed there: choose a path on another disk, or raise the limit"
        ]
    with pytest.raises(dq.CheckpointError, match="is not a folder; create it first"):
        export(trained, target, tmp_path / "nowhere" / "out")
    content = bytearray(trained.file.path.read_bytes())
    for place in range(20, len(content) // 2):
        content[place] ^= 0xFF
    trained.file.path.write_bytes(content)
    with pytest.raises(dq.CheckpointError):
        export(trained, target, out)
    assert set(os.listdir(tmp_path)) == before


def test_folders_are_exported_only_to_new_or_empty_folders(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    export(folder, Target.HF, tmp_path / "empty")
    before = contents(tmp_path / "empty")
    with pytest.raises(dq.CheckpointError, match="not an empty folder"):
        export(folder, Target.HF, tmp_path / "empty")
    (tmp_path / "file").write_text("precious")
    with pytest.raises(dq.CheckpointError, match="not an empty folder"):
        export(folder, Target.DCP, tmp_path / "file")
    assert contents(tmp_path / "empty") == before
    with pytest.raises(dq.CheckpointError, match="is a folder"):
        export(folder, Target.TORCH, tmp_path / "empty")
