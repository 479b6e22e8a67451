"""Checkpoint folders as Transformers' Trainer and Accelerate write them."""

import json
import os
import re
import socket

import pytest
import torch
from commands import call, data
from foreign_files import Code
from safetensors.torch import load_file, save_file
from torch import nn
from training import bits, model_of, train

import dynaquant as dq
from dynaquant.interop import dcp_folder, folder
from dynaquant.interop.export import export, target_for
from dynaquant.interop.packing import Packer, compress
from dynaquant.interop.targets import Target
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
from dynaquant.store.run import Run


class Arguments:
    """An arbitrary class. Its pickle names code, like training_args.bin."""


def trained():
    torch.manual_seed(0)
    model = model_of(48)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 3)
    return model, optimizer


def trainers(path, step=3):
    """Write a folder as the Trainer does. Returns model and optimizer."""
    model, optimizer = trained()
    train(model, optimizer, step)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    path.mkdir(parents=True)
    save_file(model.state_dict(), path / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    torch.save(scheduler.state_dict(), path / "scheduler.pt")
    torch.save({"python": (3, (1, 2), None), "cpu": torch.get_rng_state()}, path / "rng_state.pth")
    torch.save(Arguments(), path / "training_args.bin")
    (path / "config.json").write_text('{"model_type": "tiny"}')
    (path / "tokenizer.json").write_text("{}" * 3000)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (path / "merges.txt").write_bytes(b"")
    return model, optimizer


STORED_RAW = {
    *("scheduler.pt", "rng_state.pth", "training_args.bin"),
    *("config.json", "tokenizer.json", "trainer_state.json", "merges.txt"),
}


def back_of(source, out, quality="balanced"):
    """Compress and decompress a folder. Returns the folder beside ``out`` with the result."""
    compress(source, out, Packer(quality))
    stored = StoredCheckpoint(out)
    back = out.with_name("back")
    export(stored, target_for(stored, back), back)
    return back


def contents(path):
    return {name: (path / name).read_bytes() for name in os.listdir(path)}


def in_order(state_dict):
    return bits(dict(sorted(state_dict.items())))


def test_a_trainers_folder_is_decompressed_with_its_optimizer_and_every_other_file(tmp_path):
    model, optimizer = trainers(tmp_path / "checkpoint-3")
    back = back_of(tmp_path / "checkpoint-3", tmp_path / "c.dqc", "high")
    before, after = contents(tmp_path / "checkpoint-3"), contents(back)
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] == after[name]} == STORED_RAW
    found = torch.load(back / "optimizer.pt", weights_only=True)
    assert found["param_groups"] == optimizer.state_dict()["param_groups"]
    assert bits(found) == bits(dq.load(tmp_path / "c.dqc")["optimizer"])
    assert in_order(load_file(back / "model.safetensors")) == in_order(dq.load(tmp_path / "c.dqc")["model"])
    model.load_state_dict(load_file(back / "model.safetensors"))
    optimizer.load_state_dict(found)
    train(model, optimizer)


def test_moments_in_a_folder_are_quantized_as_in_a_training(tmp_path):
    trainers(tmp_path / "checkpoint-3")
    record = compress(tmp_path / "checkpoint-3", tmp_path / "c.dqc", Packer())
    assert record.roles.keys() == {"weight", "first_moment", "second_moment", "exact"}
    assert record.roles["first_moment"].ratio > 30
    assert record.roles["second_moment"].ratio > 7


def test_moments_that_cannot_be_matched_with_weights_are_not_used_as_sensitivity(tmp_path):
    """safetensors sorts weights by name; the optimizer numbers them in the order of the model."""
    trainers(tmp_path / "checkpoint-3")
    with_optimizer = compress(tmp_path / "checkpoint-3", tmp_path / "c.dqc", Packer())
    (tmp_path / "checkpoint-3" / "optimizer.pt").unlink()
    alone = compress(tmp_path / "checkpoint-3", tmp_path / "d.dqc", Packer())
    assert with_optimizer.configuration == alone.configuration
    assert with_optimizer.roles["weight"] == alone.roles["weight"]


def test_lossless_keeps_every_bit_of_a_folder(tmp_path):
    model, optimizer = trainers(tmp_path / "checkpoint-3")
    back = back_of(tmp_path / "checkpoint-3", tmp_path / "c.dqc", "lossless")
    assert in_order(load_file(back / "model.safetensors")) == in_order(model.state_dict())
    assert bits(torch.load(back / "optimizer.pt")) == bits(optimizer.state_dict())
    before, after = contents(tmp_path / "checkpoint-3"), contents(back)
    assert all(before[name] == after[name] for name in STORED_RAW)


def test_compress_pack_and_log_report_the_same_sizes_of_the_stored_files(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "MAX_RAW_FILE_BYTES", 10_000)
    sources = [tmp_path / f"checkpoint-{step}" for step in (1, 2, 3)]
    for step, source in enumerate(sources, 1):
        trainers(source, step)
        (source / "large.bin").write_bytes(os.urandom(50_000))
        (source / "global_step3").mkdir()
        (source / "global_step3" / "shard.pt").write_bytes(bytes(10**6))
    expected = sum(file.stat().st_size for file in sources[0].iterdir() if file.is_file() and file.name != "large.bin")
    left_out = {"left out: global_step3 (a folder)", "left out: large.bin (50.00 kB; more than 10.00 kB)"}

    record = compress(sources[0], tmp_path / "c.dqc", Packer())
    assert expected * 0.9 < record.total.raw < expected
    assert set(record.notes) == left_out
    said = call("compress", sources[0], "-o", tmp_path / "d.dqc")
    # Another file of the same content: the seconds in its record can make it some bytes smaller or larger.
    (ratio,) = re.findall(r"\((\d+\.\d\d)×\)", said)
    assert float(ratio) == pytest.approx(record.ratio, rel=0.005)
    assert all(f"note: {note}" in said for note in left_out)
    assert f"({ratio}×)" in call("show", tmp_path / "d.dqc")
    assert data("compress", sources[0], "-o", tmp_path / "e.dqc")["before"] == record.total.raw

    said = call("pack", *sources, "-o", tmp_path / "run")
    records = data("log", tmp_path / "run")
    raw, stored = (sum(record["total"][key] for record in records) for key in ("raw", "stored"))
    assert f"({raw / stored:.2f}×)" in said
    assert f"({raw / stored:.2f}×)" in call("log", tmp_path / "run")
    assert all(f"note: {note} (3 of 3 checkpoints)" in said for note in left_out)
    said = call("unpack", tmp_path / "run", "-o", tmp_path / "back")
    assert all(f"note: {note} (3 of 3 checkpoints)" in said for note in left_out)


def test_a_series_of_folders_is_unpacked_as_folders_and_unchanged_files_cost_nothing(tmp_path):
    sources = [tmp_path / f"checkpoint-{step}" for step in (1, 2)]
    for step, source in enumerate(sources, 1):
        trainers(source, step)
    call("pack", *sources, "-o", tmp_path / "run")
    entries = Run(tmp_path / "run").file(2).header.by_name
    assert entries["files.tokenizer.json"].size == entries["files.config.json"].size == 0
    call("unpack", run := tmp_path / "run", "-o", tmp_path / "again")
    for step, source in enumerate(sources, 1):
        before, after = contents(source), contents(tmp_path / "again" / source.name)
        assert before.keys() == after.keys()
        assert {name for name in before if before[name] == after[name]} == STORED_RAW
        found = torch.load(tmp_path / "again" / source.name / "optimizer.pt")
        assert bits(found) == bits(dq.load(run, step)["optimizer"])


def test_a_folder_of_weights_and_small_files_loads_as_a_state_dict(tmp_path):
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.randn(64, 64)}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text("{}")
    back = back_of(tmp_path / "hf", tmp_path / "c.dqc")
    assert dq.load(tmp_path / "c.dqc").keys() == {"w"}
    assert contents(back)["config.json"] == b"{}"
    assert data("verify", tmp_path / "c.dqc")["sound"] == 1


def test_exporting_a_folder_to_safetensors_writes_only_its_weights(tmp_path):
    model, _ = trainers(tmp_path / "checkpoint-3")
    compress(tmp_path / "checkpoint-3", tmp_path / "c.dqc", Packer("lossless"))
    for target in (Target.SAFETENSORS, Target.TORCH):
        export(StoredCheckpoint(tmp_path / "c.dqc"), target, tmp_path / target)
    assert in_order(load_file(tmp_path / "safetensors")) == in_order(model.state_dict())
    assert in_order(torch.load(tmp_path / "torch")) == in_order(model.state_dict())
    other = model_of(48)
    dq.load_into(other, tmp_path / "c.dqc")
    assert in_order(other.state_dict()) == in_order(model.state_dict())


def test_a_metric_gets_what_load_returns(tmp_path):
    model, optimizer = trainers(tmp_path / "checkpoint-3")

    def distance(state) -> float:
        assert state["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
        return 1 + sum(float((state["model"][name] - p).square().mean()) for name, p in model.state_dict().items())

    record = compress(tmp_path / "checkpoint-3", tmp_path / "c.dqc", Packer(metric=distance))
    assert 0 < record.quality.degradation <= 0.01


def test_several_models_with_the_same_names_are_kept_apart(tmp_path):
    """As Accelerate writes them."""
    source = tmp_path / "acc"
    source.mkdir()
    for number in ("", "_1"):
        model, optimizer = trained()
        model = nn.Sequential(model[1])
        save_file({k: v + len(number) for k, v in model.state_dict().items()}, source / f"model{number}.safetensors")
        torch.save(optimizer.state_dict(), source / f"optimizer{number}.bin")
    torch.save({"step": 3}, source / "custom_checkpoint_0.pkl")
    back = back_of(source, tmp_path / "c.dqc", "lossless")
    assert list(dq.load(tmp_path / "c.dqc")) == ["model", "model_1", "optimizer", "optimizer_1"]
    before, after = contents(source), contents(back)
    assert before.keys() == after.keys()
    assert all(before[name] == after[name] for name in before if not name.startswith("optimizer"))
    assert bits(torch.load(back / "optimizer_1.bin")) == bits(torch.load(source / "optimizer_1.bin"))


def test_older_folders_with_weights_in_torch_files_are_read(tmp_path):
    source = tmp_path / "checkpoint-3"
    model, optimizer = trainers(source)
    (source / "model.safetensors").unlink()
    torch.save(model.state_dict(), source / "pytorch_model.bin")
    back = back_of(source, tmp_path / "c.dqc", "lossless")
    assert sorted(os.listdir(back)) == sorted(os.listdir(source))
    assert bits(torch.load(back / "pytorch_model.bin")) == bits(model.state_dict())
    assert bits(dq.load(tmp_path / "c.dqc")) == bits({"optimizer": optimizer.state_dict(), "model": model.state_dict()})
    assert compress(source, tmp_path / "c.dqc", Packer()).roles["weight"].ratio > 4


def test_tensors_other_than_weights_and_moments_are_exact(tmp_path):
    """The state of a user's object may not tolerate quantization."""
    source = tmp_path / "checkpoint-3"
    trainers(source)
    state = {"mean": torch.randn(200, 200), "std": torch.rand(200)}
    torch.save(state, source / "custom_checkpoint_0.pkl")
    back = back_of(source, tmp_path / "c.dqc", "small")
    assert bits(torch.load(back / "custom_checkpoint_0.pkl")) == bits(state)


def test_a_large_file_that_names_code_is_stored_byte_for_byte_with_a_note(tmp_path):
    source = tmp_path / "checkpoint-3"
    trainers(source)
    made = tmp_path / "made"
    torch.save({"state": torch.randn(200, 200), "x": Code(made)}, source / "optimizer.pt")
    back = back_of(source, tmp_path / "c.dqc")
    assert contents(back)["optimizer.pt"] == contents(source)["optimizer.pt"]
    (note,) = StoredCheckpoint(tmp_path / "c.dqc").file.header.record["notes"]
    assert note.startswith("optimizer.pt is stored byte for byte: refused, as reading it would run code")
    assert not made.exists()


def test_special_files_and_links_out_of_the_folder_are_left_out_and_named(tmp_path):
    source = tmp_path / "hf"
    source.mkdir()
    save_file({"w": torch.randn(64, 64)}, source / "model.safetensors")
    (tmp_path / "secret").write_text("secret")
    (source / "link").symlink_to(tmp_path / "secret")
    (source / "lost").symlink_to(tmp_path / "nowhere")
    (source / "config.json").write_text("{}")
    (source / "same.json").symlink_to("config.json")
    os.mkfifo(source / "fifo")
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    compress(tmp_path / "w.safetensors", source / "model.dqc", Packer())
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(source / "socket"))
        back = back_of(source, tmp_path / "c.dqc")
    assert sorted(os.listdir(back)) == ["config.json", "model.safetensors", "same.json"]
    assert StoredCheckpoint(tmp_path / "c.dqc").file.header.record["notes"] == [
        "left out: fifo (a FIFO)",
        "left out: link (a link out of the folder)",
        "left out: lost (a link to nothing)",
        "left out: model.dqc (a checkpoint of dynaquant)",
        "left out: socket (a socket)",
    ]


def test_a_snapshot_in_the_cache_of_the_hub_is_read_although_its_files_are_links(tmp_path):
    blobs, source = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    source.mkdir(parents=True)
    save_file({"w": torch.randn(64, 64)}, blobs / "1")
    (blobs / "2").write_text("{}")
    (source / "model.safetensors").symlink_to("../../blobs/1")
    (source / "config.json").symlink_to("../../blobs/2")
    back = back_of(source, tmp_path / "c.dqc")
    assert contents(back)["config.json"] == b"{}"
    assert StoredCheckpoint(tmp_path / "c.dqc").file.header.record["notes"] == []


def test_other_files_in_a_dcp_folder_are_stored_byte_for_byte(tmp_path):
    dcp_folder.write(tmp_path / "dcp", {"w": torch.randn(8, 8), "step": 3})
    (tmp_path / "dcp" / "config.json").write_text("{}")
    back = back_of(tmp_path / "dcp", tmp_path / "c.dqc", "lossless")
    assert sorted(os.listdir(back)) == sorted(os.listdir(tmp_path / "dcp"))
    assert contents(back)["config.json"] == b"{}"
    assert dq.load(tmp_path / "c.dqc").keys() == {"w", "step"}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"files": {name: "files.config.json"}} for name in ("../precious", "/tmp/precious", "..", "", "a/b", "x\0")),
        *({"files": wrong} for wrong in (5, [], {"x": "nothing"}, {"x": 5}, {"x": []}, {"x": "model.1.weight"})),
        *({"torch": wrong} for wrong in (5, {"../precious": "optimizer"}, {"x": "nothing"}, {"x": []})),
        *({"more": wrong} for wrong in (5, {"nothing": {}}, {"model": 5}, {"optimizer": {}})),
        {"files": {"model.safetensors": "files.config.json"}},
        {"files": {"optimizer.pt": "files.config.json"}},
    ],
    ids=str,
)
def test_a_malformed_record_of_a_folder_is_refused(tmp_path, wrong):
    trainers(tmp_path / "checkpoint-3")
    compress(tmp_path / "checkpoint-3", tmp_path / "c.dqc", Packer())
    stored = StoredCheckpoint(tmp_path / "c.dqc")
    stored.file.header.record["source"].update(wrong)
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("precious")
    with pytest.raises(dq.CheckpointError, match="its record"):
        export(stored, Target.HF, out / "back")
    assert sorted(os.listdir(out)) == ["precious"]
    assert (out / "precious").read_text() == "precious"
    export(stored, Target.SAFETENSORS, out / "model.safetensors")


def test_a_file_that_disappears_during_reading_is_an_error_that_names_it(tmp_path):
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.randn(64, 64)}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text("{}")
    packer = Packer(metric=lambda _: (tmp_path / "hf" / "config.json").unlink(missing_ok=True) or 1.0)
    with pytest.raises(dq.CheckpointError, match=r"config\.json: cannot be read"):
        compress(tmp_path / "hf", tmp_path / "c.dqc", packer)
    assert os.listdir(tmp_path) == ["hf"]
