"""Paths that are not files, and files that claim more data than they hold, raise one clear error without delay."""

import contextlib
import os
import signal
from pathlib import Path

import crafted
import pytest
import torch
from foreign_files import SHARDS, hf_folder, refuses, with_metadata
from safetensors.torch import save_file

import dynaquant as dq
from dynaquant.interop import dcp_folder, safetensors
from dynaquant.interop.export import export
from dynaquant.interop.packing import Packer, compress, pack
from dynaquant.interop.targets import Target
from dynaquant.interop.whole_state import DCP_METADATA
from dynaquant.restore.stored_checkpoint import StoredCheckpoint


@pytest.fixture(autouse=True)
def _in_time():
    """Fails a test that waits for a FIFO, instead of waiting forever."""

    def late(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def fifo(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def test_a_fifo_or_a_device_is_refused(tmp_path):
    refuses(fifo(tmp_path / "m.safetensors"), "is a FIFO, not a file")
    refuses(Path("/dev/zero"), "is a device, not a file")
    with pytest.raises(dq.CheckpointError, match="is a FIFO"):
        compress(fifo(tmp_path / "m.pt"), tmp_path / "m.dqc", Packer())
    with pytest.raises(dq.CheckpointError, match="is a FIFO"):
        list(pack({1: fifo(tmp_path / "ckpt-1.pt")}, tmp_path / "run", Packer()))


def test_a_folder_that_contains_a_fifo_or_a_folder_instead_of_a_file_is_refused(tmp_path):
    hf_folder(tmp_path / "hf")
    shard = tmp_path / "hf" / SHARDS[1]
    fifo(shard)
    refuses(tmp_path / "hf", SHARDS[1], "is missing")
    shard.unlink()
    shard.mkdir()
    refuses(tmp_path / "hf", SHARDS[1], "is missing")
    for name in (*SHARDS, safetensors.INDEX):
        with contextlib.suppress(OSError):
            (tmp_path / "hf" / name).rmdir()
        fifo(tmp_path / "hf" / name)
    refuses(tmp_path / "hf", "no *.safetensors file")
    dcp_folder.write(tmp_path / "dcp", {"w": torch.randn(4)})
    part = next((tmp_path / "dcp").glob("*.distcp"))
    fifo(part)
    refuses(tmp_path / "dcp", "is a FIFO, not a file")
    fifo(tmp_path / "dcp" / DCP_METADATA)
    refuses(tmp_path / "dcp", "no .metadata")


@pytest.mark.parametrize("target", [Target.SAFETENSORS, Target.HF, Target.TORCH, Target.DCP])
def test_an_output_that_is_not_a_file_is_not_overwritten(tmp_path, target):
    save_file({"w": torch.randn(4, 4)}, tmp_path / "m.safetensors")
    out = fifo(tmp_path / "out")
    with pytest.raises(dq.CheckpointError, match="is a FIFO; give the name of a file"):
        compress(tmp_path / "m.safetensors", out, Packer())
    compress(tmp_path / "m.safetensors", tmp_path / "m.dqc", Packer())
    with pytest.raises(dq.CheckpointError, match=r"is a FIFO|exists and is not"):
        export(StoredCheckpoint(tmp_path / "m.dqc"), target, out)
    assert out.is_fifo()


@pytest.mark.parametrize("depth", [101, 300])
@pytest.mark.parametrize(
    "around",
    [lambda node: [node], lambda node: {"tuple": [node]}, lambda node: {"dict": [["k", node]]}],
    ids=["list", "tuple", "dict"],
)
def test_a_tree_that_is_nested_too_deep_is_one_error(tmp_path, around, depth):
    node: object = {"tensor": "w"}
    for _ in range(depth):
        node = around(node)
    with pytest.raises(dq.CheckpointError, match=r"nested more than 100 levels|cannot be parsed"):
        written(tmp_path, node)


def test_a_malformed_tree_of_any_depth_is_one_error(tmp_path):
    node: object = "x"
    for _ in range(300):
        node = {"nonsense": [node]}
    stored = written(tmp_path, {"dict": [["model", {"dict": [["w", node]]}], ["x", {"tensor": "w"}]]})
    for target in (Target.SAFETENSORS, Target.TORCH, Target.TORCH_STATE):
        with pytest.raises(dq.CheckpointError):
            export(stored, target, tmp_path / "out")


def test_the_deepest_allowed_tree_can_be_exported(tmp_path):
    node: object = {"tensor": "w"}
    for _ in range(98):
        node = {"dict": [["k", node]]}
    export(written(tmp_path, {"dict": [["model", {"dict": [["w", node]]}]]}), Target.TORCH_STATE, tmp_path / "out")
    state = torch.load(tmp_path / "out")["model"]["w"]
    while isinstance(state, dict):
        state = state["k"]
    assert state.shape == (2,)


def written(folder, tree) -> StoredCheckpoint:
    entry = crafted.entry()
    crafted.write(folder / "run", crafted.header(entry, tree=tree), b"\0" * 8)
    return StoredCheckpoint(folder / "run")


def test_a_small_file_that_claims_more_memory_than_there_is_is_refused(tmp_path):
    torch.save({"w": torch.ones(1).expand(26 * 10**9 // 4)}, tmp_path / "m.pt")
    refuses(tmp_path / "m.pt", "w claims 26.00 GB, but repeats 4 B")
    torch.save({"w": torch.ones(1).expand(1000, 1000)}, tmp_path / "m.pt")
    compress(tmp_path / "m.pt", tmp_path / "m.dqc", Packer())
    assert dq.load(tmp_path / "m.dqc")["w"].shape == (1000, 1000)
    hf_folder(tmp_path / "hf")
    with (tmp_path / "hf" / safetensors.INDEX).open("r+b") as index:
        index.truncate(26 * 10**9)
    refuses(tmp_path / "hf", "not the index of a model")


def test_a_dcp_tensor_with_missing_parts_is_refused(tmp_path):
    dcp_folder.write(tmp_path / "dcp", {"w": torch.randn(4, 4)})

    def change(metadata):
        metadata.state_dict_metadata["w"].size = torch.Size([8, 4])

    refuses(with_metadata(tmp_path / "dcp", change), "not a complete folder")


def test_a_dcp_folder_whose_state_is_nested_too_deep_is_refused(tmp_path):
    dcp_folder.write(tmp_path / "dcp", {"w": torch.randn(4, 4)})
    for depth in (200, 5000):

        def change(metadata, depth=depth):
            metadata.planner_data = {"w": ("k",) * depth}

        refuses(with_metadata(tmp_path / "dcp", change))
