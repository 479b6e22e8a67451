"""Reads files of other programs. No file can run code or end in a traceback."""

import json
import pickle
import shutil
import struct
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as distributed
from foreign_files import INDEX, SHARDS, Code, hf_folder, refuses, with_metadata
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from training import bits, model_of, train

import dynaquant as dq
from dynaquant.interop import any_format, dcp_folder, inferred_roles, safetensors
from dynaquant.state.flatten import unflatten


def state_of(path):
    file = any_format.read(path)
    return unflatten(file.tree, dict(file.tensors))


def test_a_torch_file_is_read_as_torch_load_does(tmp_path):
    shared = torch.randn(4, 4)
    state = {"w": shared, "tied": shared, "half": shared[:2], 3: {"x": (1, None, 2.5)}, "": torch.tensor(7)}
    for zipped in (True, False):
        torch.save(state, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
        found = state_of(tmp_path / "model.pt")
        assert bits(found) == bits(state)
        assert found["w"] is found["tied"]


def test_the_versions_of_a_state_dict_are_kept(tmp_path):
    state = nn.BatchNorm1d(4).state_dict()
    torch.save(state, tmp_path / "model.pt")
    assert state_of(tmp_path / "model.pt")._metadata == state._metadata


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_file_that_names_code_is_refused_without_running_it(tmp_path, zipped):
    torch.save(
        {"w": torch.ones(2), "x": Code(tmp_path / "made")}, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped
    )
    refuses(tmp_path / "m.pt", "refused", "posix.system", "weights_only=False")
    torch.save(nn.Linear(2, 2), tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    refuses(tmp_path / "m.pt", "refused", "torch.nn.modules.linear.Linear")
    assert not (tmp_path / "made").exists()


def test_objects_in_a_torch_file_are_left_out_on_request_without_running_their_code(tmp_path):
    hyperparameters = {
        "optimizer": torch.optim.Adam,
        "path": Path("data"),
        "layers": [nn.ReLU(), 2],
        "nested": {"act": nn.GELU(), "width": 3},
        "width": 16,
    }
    state = {"state_dict": {"w": torch.randn(4, 4)}, "hyper_parameters": hyperparameters}
    torch.save(state, tmp_path / "m.ckpt")
    refuses(tmp_path / "m.ckpt", "refused", "--skip-objects")
    file = any_format.read(tmp_path / "m.ckpt", skip_objects=True)
    found = unflatten(file.tree, dict(file.tensors))
    assert torch.equal(found["state_dict"]["w"], state["state_dict"]["w"])
    assert found["hyper_parameters"] == {"nested": {"width": 3}, "width": 16}
    (note,) = file.notes
    for part in ("hyper_parameters.optimizer (torch.optim.adam.Adam)", "hyper_parameters.layers.0 (", "nested.act ("):
        assert part in note


@pytest.mark.parametrize("zipped", [True, False])
def test_the_arguments_of_a_training_script_are_kept_as_a_dictionary(tmp_path, zipped):
    arguments = Namespace(lr=0.1, data="imagenet", dist=None, sizes=(1, [2]), inner=Namespace(depth=3))
    state = {"model": {"w": torch.randn(4, 4)}, "args": arguments, "all": [arguments, (arguments,)]}
    torch.save(state, tmp_path / "m.pth", _use_new_zipfile_serialization=zipped)
    plain = {"lr": 0.1, "data": "imagenet", "dist": None, "sizes": (1, [2]), "inner": {"depth": 3}}
    for skip_objects in (False, True) if zipped else (False,):
        file = any_format.read(tmp_path / "m.pth", skip_objects)
        found = unflatten(file.tree, dict(file.tensors))
        assert found["args"] == plain
        assert found["all"] == [plain, (plain,)]
        assert file.notes[0].startswith(
            "an argparse.Namespace is stored as the dictionary of its values: args, args.in"
        )


def test_objects_among_the_arguments_of_a_training_script_run_no_code(tmp_path):
    arguments = Namespace(lr=0.1, x=Code(tmp_path / "made"))
    torch.save({"w": torch.ones(2), "args": arguments}, tmp_path / "m.pth")
    refuses(tmp_path / "m.pth", "refused", "posix.system")
    itself = {"w": torch.ones(2), "args": Namespace(lr=0.1)}
    itself["args"].itself = itself
    torch.save(itself, tmp_path / "m.pth")
    with pytest.raises(dq.StateError, match="contains itself"):
        any_format.read(tmp_path / "m.pth")
    assert not (tmp_path / "made").exists()


class Config(dict):
    """A dictionary with attributes, like those of EasyDict and yacs."""

    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__.update(items)


class OrderedConfig(OrderedDict):
    pass


class History(list):
    pass


def test_containers_of_other_classes_are_left_out_on_request(tmp_path):
    others = {
        "config": Config(lr=0.1, inner=Config(depth=3)),
        "ordered": OrderedConfig(a=1, b=2),
        "default": defaultdict(list, {"loss": [1.0]}),
        "recent": deque([1, 2], maxlen=3),
        "one": deque([1]),
        "history": History([1, 2]),
    }
    weights = {"w": torch.randn(4, 4)}
    torch.save({"model": weights, "epoch": 3, **others}, tmp_path / "m.pth")
    file = any_format.read(tmp_path / "m.pth", skip_objects=True)
    found = unflatten(file.tree, dict(file.tensors))
    assert bits(found) == bits({"model": weights, "epoch": 3})
    for name in others:
        assert name in file.notes[0]
    assert "recent.0 (collections.deque)" in file.notes[0]
    others["config"]["code"] = Code(tmp_path / "made")
    torch.save({"model": weights, **others}, tmp_path / "m.pth")
    with pytest.raises(dq.CheckpointError, match=r"posix\.system"):
        any_format.read(tmp_path / "m.pth", skip_objects=True)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_a_file_of_a_newer_pickle_protocol_is_not_called_damaged(tmp_path, protocol):
    state = {"w": torch.ones(2), "bytes": b"x"}
    torch.save(state, tmp_path / "m.pt", pickle_protocol=protocol)
    said = f"saved with pickle protocol {protocol}.*default protocol: torch.save without pickle_protocol"
    for skip_objects in (False, True):
        with pytest.raises(dq.CheckpointError, match=said):
            any_format.read(tmp_path / "m.pt", skip_objects)


def test_a_torch_file_that_names_a_command_is_refused_even_if_objects_may_be_left_out(tmp_path):
    torch.save({"w": torch.ones(2), "x": Code(tmp_path / "made")}, tmp_path / "m.ckpt")
    with pytest.raises(dq.CheckpointError, match=r"posix\.system"):
        any_format.read(tmp_path / "m.ckpt", skip_objects=True)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_file_that_is_cut_off_anywhere_is_refused(tmp_path, zipped):
    torch.save({"weight": torch.randn(20, 20)}, tmp_path / "whole.pt", _use_new_zipfile_serialization=zipped)
    whole = (tmp_path / "whole.pt").read_bytes()
    for size in [*range(0, 400, 7), len(whole) // 2, len(whole) - 3]:
        (tmp_path / "cut.pt").write_bytes(whole[:size])
        refuses(tmp_path / "cut.pt")


def test_a_torch_file_with_values_that_a_checkpoint_cannot_hold_is_refused(tmp_path):
    path = tmp_path / "model.pt"
    for thing, reason in (
        ([torch.ones(2)], "a list, not a dictionary"),
        (torch.ones(2), "a Tensor, not a dictionary"),
        ({"w": torch.ones(2, 2).to_sparse()}, "sparse_coo"),
    ):
        torch.save(thing, path)
        refuses(path, reason)
    path.write_bytes(pickle.dumps({"a": 1}))  # torch.save uses an older pickle protocol
    refuses(path, "not a complete file of torch.save")


def test_files_of_other_formats_are_refused(tmp_path):
    path = tmp_path / "file"
    for content in (b"", b"{}", b"hello world", b"PK\x03\x04garbage", b"\x80\x02garbage", b"\x93NUMPY garbage"):
        path.write_bytes(content)
        refuses(path)
    refuses(tmp_path / "nowhere", "No such file")
    (tmp_path / "empty").mkdir()
    refuses(tmp_path / "empty", "no *.safetensors file")
    path.write_bytes(b"\x89DQC\r\n\x1a\n")
    refuses(path, "compressed already")


def test_a_safetensors_file_is_recognized_whatever_the_length_of_its_header(tmp_path):
    """A header of 128 bytes begins like a pickle, so safetensors is checked first."""
    path = tmp_path / "model.safetensors"
    for length in (0x80, 0x04034B50 & 0xFFFF, 0x180):
        tensor = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
        path.write_bytes(struct.pack("<Q", length) + json.dumps(tensor).encode().ljust(length) + bytes(8))
        assert any_format.read(path).format == "safetensors"


def lying(path, header, data: bytes = bytes(8)):
    plain = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(plain)) + plain + data)
    return path


def test_a_pickle_that_is_called_safetensors_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x02garbage")
    refuses(tmp_path / "model.safetensors", "not a complete file of torch.save")


def test_a_malformed_safetensors_header_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    sound = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for wrong in ({"shape": [4]}, {"shape": [2**62, 4]}, {"dtype": "X"}, {"data_offsets": [0, 80]}):
        refuses(lying(path, {"x": sound | wrong}), "not a complete safetensors file")
    refuses(lying(path, {"x": sound, "y": sound}))
    refuses(lying(path, {"x": sound}, bytes(7)))
    path.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    refuses(path)


DTYPES = sorted(set(safetensors._TYPES) - {getattr(torch, "float4_e2m1fn_x2", None)}, key=str)


def test_safetensors_of_every_dtype_are_written_and_read_unchanged(tmp_path):
    tensors = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES}
    tensors |= {"": torch.ones(2), "../x": torch.tensor(1.5), "ü/ñ.b": torch.empty(0, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = state_of(tmp_path / "model.safetensors")
    assert {name: bits(tensor) for name, tensor in found.items()} == {n: bits(t) for n, t in tensors.items()}
    with (tmp_path / "again.safetensors").open("wb") as out:
        safetensors.write(out, tensors, {name: tensor.to("meta") for name, tensor in tensors.items()}, {"a": "b"})
    assert {n: bits(t) for n, t in load_file(tmp_path / "again.safetensors").items()} == {
        n: bits(t) for n, t in tensors.items()
    }


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="needs a newer PyTorch")
def test_four_bit_floats_have_the_shape_that_safetensors_expects(tmp_path):
    tensors = {"x": torch.randint(0, 256, (2, 4), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
    save_file(tensors, tmp_path / "model.safetensors")
    with (tmp_path / "again.safetensors").open("wb") as out:
        safetensors.write(out, tensors, {"x": tensors["x"].to("meta")}, None)
    assert json.loads((tmp_path / "again.safetensors").read_bytes()[8:].partition(b"}}")[0] + b"}}")["x"]["shape"] == [
        2,
        8,
    ]
    again = state_of(tmp_path / "again.safetensors")["x"]
    assert torch.equal(again.view(torch.uint8), tensors["x"].view(torch.uint8))


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_safetensors_does_not_allow_are_refused(tmp_path, name):
    with (tmp_path / "x").open("wb") as out, pytest.raises(dq.CheckpointError, match="export to torch instead"):
        safetensors.write(out, {name: torch.ones(1)}, {name: torch.ones(1, device="meta")}, None)


def test_a_hugging_face_folder_is_read_with_and_without_its_index(tmp_path):
    hf_folder(tmp_path / "hf")
    expected = load_file(tmp_path / "hf" / SHARDS[0]) | load_file(tmp_path / "hf" / SHARDS[1])
    assert bits(state_of(tmp_path / "hf")) == bits(expected)
    (tmp_path / "hf" / INDEX).unlink()
    assert bits(state_of(tmp_path / "hf")) == bits(expected)


def test_an_incomplete_hugging_face_folder_is_refused(tmp_path):
    folder = tmp_path / "hf"
    index = hf_folder(folder)
    for wrong in (
        *("{", "[]", "3", '{"weight_map": 3}', '{"weight_map": {"a": ["x"]}}', "[" * 100_000),
        *(json.dumps({"weight_map": index["weight_map"] | {"a": name}}) for name in ("../x", "..", "", "/etc/passwd")),
        json.dumps({"weight_map": index["weight_map"] | {"d": SHARDS[0]}}),
        json.dumps({"weight_map": index["weight_map"] | {"d": "model-3.safetensors"}}),
    ):
        (folder / INDEX).write_text(wrong)
        with pytest.raises(dq.CheckpointError, match="index"):
            any_format.read(folder)
    (folder / INDEX).write_text(json.dumps(index))
    save_file({"a": torch.ones(2), "c": torch.ones(2)}, folder / SHARDS[1])
    refuses(folder, "a is in two files")
    (folder / SHARDS[1]).unlink()
    refuses(folder, SHARDS[1], "is missing")
    shutil.copy(folder / INDEX, folder / "other.safetensors.index.json")
    refuses(folder, "several indices")


def training_state():
    model = model_of(8)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 3)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": [1, {"a": torch.ones(2)}]}


def test_a_dcp_folder_is_read_with_its_plain_values(tmp_path):
    state = training_state()
    dcp_folder.write(tmp_path / "dcp", state)
    found = state_of(tmp_path / "dcp")
    assert bits(found["model"]) == bits(dict(state["model"]))
    assert bits(found["steps"]) == bits(state["steps"])
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert bits(found["optimizer"]["state"]["0"]["exp_avg"]) == bits(state["optimizer"]["state"][0]["exp_avg"])
    file = any_format.read(tmp_path / "dcp")
    labels = inferred_roles.inferred_labels(file.tree, file.tensors)
    assert inferred_roles.mean_squared_gradients(file.tree, file.tensors, labels).keys() == {
        f"model.{name}" for name in state["model"]
    }


def test_a_dcp_folder_that_names_code_is_refused_without_running_it(tmp_path):
    made = tmp_path / "made"
    dcp_folder.write(tmp_path / "dcp", {"w": torch.ones(4), "step": 3})
    call = b"(S'touch " + str(made).encode() + b"'\ntR."
    refuses(with_metadata(tmp_path / "dcp", lambda _: Code(made)), "posix.system")
    refuses(with_metadata(tmp_path / "dcp", lambda m: setattr(m, "planner_data", Code(made))), "posix.system")
    for name in (b"os\nsystem", b"torch\nos.system", b"builtins\neval", b"torch.serialization\nload"):
        refuses(with_metadata(tmp_path / "dcp", lambda _, name=name: b"\x80\x04c" + name + b"\n" + call), "refused")
    dcp_folder.write(tmp_path / "values", {"w": torch.ones(4), "x": Code(made)})
    made.unlink(missing_ok=True)
    refuses(tmp_path / "values", "refused", "posix.system")
    assert not made.exists()


def test_a_dcp_folder_cannot_change_classes(tmp_path):
    dcp_folder.write(tmp_path / "dcp", {"w": torch.randn(3)})
    name = b"torch.distributed.checkpoint.metadata\nMetadata\n"
    attribute = pickle.dumps((None, {"poison": 1}))[2:-1]
    refuses(with_metadata(tmp_path / "dcp", lambda _: b"\x80\x04c" + name + attribute + b"b."), "not a complete folder")
    assert not hasattr(Metadata, "poison")


def test_a_dcp_folder_with_malformed_metadata_is_refused(tmp_path):
    dcp_folder.write(tmp_path / "dcp", training_state())

    def each_place(**values):
        def change(metadata):
            for place in metadata.storage_data.values():
                vars(place).update(values)

        return change

    def each_tensor(size):
        def change(metadata):
            for entry in metadata.state_dict_metadata.values():
                if hasattr(entry, "size"):
                    entry.size = size

        return change

    for change in (
        lambda m: setattr(m, "planner_data", 5),
        lambda m: setattr(m, "planner_data", dict.fromkeys(m.state_dict_metadata, ())),
        lambda m: setattr(m, "planner_data", dict.fromkeys(m.state_dict_metadata, ([],))),
        lambda m: setattr(m, "state_dict_metadata", 5),
        lambda m: setattr(m, "storage_data", {}),
        lambda _: {"a": 1},
        lambda _: b"",
        lambda m: pickle.dumps(m)[:-50],
        each_place(relative_path="../dcp/__0_0.distcp"),
        each_place(offset=10**12),
        each_tensor(torch.Size([2**40, 2**20])),
        each_tensor(torch.Size([3])),
    ):
        refuses(with_metadata(tmp_path / "dcp", change))


def test_an_incomplete_dcp_folder_is_refused(tmp_path):
    dcp_folder.write(tmp_path / "dcp", {"w": torch.ones(4)})
    part = next((tmp_path / "dcp").glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:100])
    refuses(tmp_path / "dcp", "not a complete folder")
    part.unlink()
    refuses(tmp_path / "dcp", "not a complete folder")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_loads_a_folder_that_dynaquant_wrote(tmp_path):
    dcp_folder.write(tmp_path / "dcp", {"w": torch.randn(4, 4), "step": 3})
    place = {"w": torch.zeros(4, 4), "step": 0}
    distributed.load(place, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert bits(place) == bits(state_of(tmp_path / "dcp"))
