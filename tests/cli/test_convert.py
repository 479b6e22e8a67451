"""The commands for files of other programs, called as from a shell."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from commands import call, data, failed, ran
from full_disk import contents, files_of_at_most
from safetensors.torch import load_file, save_file
from training import bits

import dynaquant as dq
from dynaquant.store.commit import WritableRun
from dynaquant.store.run import Run


@pytest.fixture
def fails(monkeypatch, capsys):
    return lambda reason, *arguments: failed(monkeypatch, capsys, reason, *arguments)


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.randn(64, 64), "bias": torch.randn(64)}, path, metadata={"format": "pt"})
    return path


@pytest.fixture
def series(tmp_path):
    """Three files, with their contents."""
    weight, found = torch.randn(64, 64), {}
    for step in (100, 200, 300):
        weight = weight + 0.01 * torch.randn(64, 64)
        found[tmp_path / f"ckpt-{step}.safetensors"] = {"w": weight}
        save_file({"w": weight}, tmp_path / f"ckpt-{step}.safetensors")
    return found


@pytest.fixture
def run(series, tmp_path):
    call("pack", *series, "-o", tmp_path / "run")
    return tmp_path / "run"


def test_a_file_is_compressed_beside_itself_and_decompressed(model, tmp_path):
    said = call("compress", model)
    small = tmp_path / "model.safetensors.dqc"
    assert str(small) in said
    assert "estimated" in said
    call("decompress", small, "-o", tmp_path / "back.safetensors")
    assert bits(load_file(tmp_path / "back.safetensors")) == bits(dq.load(small))


def test_objects_among_hyperparameters_are_left_out_on_request(fails, tmp_path):
    path = tmp_path / "epoch=3-step=400.ckpt"
    torch.save({"state_dict": {"w": torch.randn(8, 8)}, "hyper_parameters": {"loss": torch.nn.MSELoss, "d": 3}}, path)
    for command in (["compress", path], ["pack", path, "-o", tmp_path / "run"]):
        fails("or leave it out: --skip-objects", *command)
    note = "left out, as they are not tensors or plain values: hyper_parameters.loss (torch.nn.modules.loss.MSELoss)"
    assert note in call("compress", path, "--skip-objects")
    assert dq.load(f"{path}.dqc")["hyper_parameters"] == {"d": 3}
    assert note in call("pack", path, "-o", tmp_path / "run", "--skip-objects")
    assert dq.load(tmp_path / "run", 400)["hyper_parameters"] == {"d": 3}
    assert f"note: {note}" in call("unpack", tmp_path / "run", "-o", tmp_path / "all")
    assert data("decompress", f"{path}.dqc", "-o", tmp_path / "one")["notes"] == [note]


def test_lossless_compression_restores_the_file_byte_for_byte(model, tmp_path):
    assert "lossless" in call("compress", model, "-o", tmp_path / "m.dqc", "--quality", "lossless")
    call("decompress", tmp_path / "m.dqc", "-o", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == model.read_bytes()


def test_compress_reports_sizes_as_json(model, tmp_path):
    record = data("compress", model, "-o", tmp_path / "m.dqc")
    assert record["before"] == record["total"]["raw"] == 64 * 65 * 4
    assert record["total"]["stored"] == (tmp_path / "m.dqc").stat().st_size
    assert record["out"] == str(tmp_path / "m.dqc")


METRICS = """
import torch
torch.manual_seed(0)
def size(state): return state["weight"].square().mean()
def minus(state): return -size(state)
def constant(state): return 1.0
def broken(state): raise RuntimeError("no data")
number = 3
"""


def test_a_metric_is_a_function_of_a_module_in_the_working_directory(model, tmp_path, monkeypatch):
    (tmp_path / "metrics_here.py").write_text(METRICS)
    monkeypatch.chdir(tmp_path)
    said = call("compress", model, "-o", tmp_path / "m.dqc", "--metric", "metrics_here:size")
    assert "limit 1.00%" in said
    call("compress", model, "-o", tmp_path / "m2.dqc", "--metric", "metrics_here:minus", "--higher-is-better")
    quality = data("show", tmp_path / "m2.dqc")["quality"]
    assert quality["original"] < 0 <= quality["degradation"] <= 0.01
    assert str(tmp_path) not in sys.path


def test_a_metric_that_does_not_decide_is_not_asked_for_again(model, tmp_path, monkeypatch):
    (tmp_path / "metrics_constant.py").write_text(METRICS)
    monkeypatch.chdir(tmp_path)
    assert "use --metric" in call("compress", model, "-o", tmp_path / "m.dqc")
    said = call("compress", model, "-o", tmp_path / "m2.dqc", "--metric", "metrics_constant:constant")
    assert "quality: estimated from how far the weights move\n" in said
    assert "note: evaluate does not tell weights apart" in said


def test_invalid_metrics_and_options_give_exit_code_2(model, tmp_path, monkeypatch):
    (tmp_path / "metrics_wrong.py").write_text(METRICS)
    (tmp_path / "metrics_broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    names = (
        "metrics_wrong",
        ":size",
        "metrics_wrong:",
        "metrics_wrong:nothing",
        "metrics_wrong:number",
        "nowhere:x",
        ".x:y",
    )
    for name in (*names, "metrics_broken:x"):
        call("compress", model, "--metric", name, code=2)
    said = ran(("compress", model, "--metric", "metrics_wrong:nothing"), code=2).stderr.replace("│", " ")
    assert "metrics_wrong has no such function; it has " in " ".join(said.split())
    for wrong in (
        ("--quality", "best"),
        ("--max-degradation", "-1"),
        ("--max-degradation", "inf"),
        ("--max-degradation", "5"),
        ("--quality", "lossless", "--metric", "metrics_wrong:size"),
        ("--quality", "lossless", "--max-degradation", "0.1"),
    ):
        call("compress", model, *wrong, code=2)
    assert not (tmp_path / "model.safetensors.dqc").exists()


def test_a_metric_that_raises_gives_one_message(model, tmp_path, monkeypatch, fails):
    (tmp_path / "metrics_fail.py").write_text(METRICS)
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path).keys()
    fails("no data", "compress", model, "--metric", "metrics_fail:broken")
    assert {name for name in os.listdir(tmp_path) if name != "__pycache__"} == before - {"__pycache__"}


def test_outputs_are_replaced_only_with_force(model, tmp_path, fails):
    before = contents(tmp_path)
    for out in (model, tmp_path / "small.onnx", tmp_path / "small.PT"):
        fails("let its name end in .dqc", "compress", model, "-o", out, "--force")
    assert contents(tmp_path) == before
    call("compress", model)
    small = tmp_path / "model.safetensors.dqc"
    for arguments in (("compress", model), ("decompress", small, "-o", model)):
        before = contents(tmp_path)
        fails("--force", *arguments)
        assert contents(tmp_path) == before
    call("compress", model, "--quality", "high", "--force")
    call("decompress", small, "-o", model, "--force")
    assert bits(load_file(model)) == bits(dq.load(small))


def test_bad_input_gives_one_message_and_changes_no_file(model, tmp_path, fails):
    text = tmp_path / "text.pt"
    text.write_text("hello")
    torch.save([1], tmp_path / "list.pt")
    call("compress", model, "-o", tmp_path / "m.dqc")
    (tmp_path / "folder").mkdir()
    (tmp_path / "old").mkdir()
    nameless = tmp_path / "old" / "model.safetensors"
    nameless.write_bytes(model.read_bytes())
    before = set(tmp_path.rglob("*"))
    new = tmp_path / "new"
    fails("neither a safetensors file nor one of torch.save", "compress", text)
    fails("a list, not a dictionary", "compress", tmp_path / "list.pt")
    fails("No such file", "compress", tmp_path / "nowhere.pt")
    fails("no *.safetensors file in it", "compress", tmp_path / "folder")
    fails("compressed already", "compress", tmp_path / "m.dqc")
    fails("is not a folder", "compress", model, "-o", tmp_path / "nowhere" / "m.dqc")
    fails("is a folder", "compress", model, "-o", tmp_path / "folder", "--force")
    fails("not a dynaquant checkpoint", "decompress", text, "-o", new)
    fails("is not a file", "decompress", tmp_path / "nowhere", "-o", new)
    fails("use unpack or export", "decompress", tmp_path / "folder", "-o", new)
    fails("not an empty folder", "decompress", tmp_path / "m.dqc", "-o", text, "--to", "hf", "--force")
    fails("no number in its name", "pack", nameless, "-o", new)
    fails("nowhere.pt does not exist", "pack", tmp_path / "nowhere.pt", "-o", new)
    fails("is a file", "unpack", tmp_path / "m.dqc", "-o", new)
    fails("is one checkpoint", "show", tmp_path / "m.dqc", "3")
    with files_of_at_most(1000):
        fails("File too large", "compress", model)
        fails("File too large", "decompress", tmp_path / "m.dqc", "-o", new)
    assert set(tmp_path.rglob("*")) == before


def test_show_verify_and_export_accept_a_single_file(model, tmp_path):
    call("compress", model, "-o", tmp_path / "m.dqc")
    small = tmp_path / "m.dqc"
    assert {tensor["name"] for tensor in data("show", small)["tensors"]} == {"weight", "bias"}
    assert data("verify", small) == {"sound": 1, "damaged": [], "unreadable": []}
    call("export", small, "--to", "torch", "-o", tmp_path / "m.pt")
    assert bits(torch.load(tmp_path / "m.pt")) == bits(dq.load(small))
    small.write_bytes(small.read_bytes()[:-3])
    assert data("verify", small, code=1)["sound"] == 0


def test_an_export_names_a_step_only_of_a_run(model, run, tmp_path):
    call("compress", model, "-o", tmp_path / "m.dqc")
    assert ": step" not in call("export", tmp_path / "m.dqc", "-o", tmp_path / "new.pt")
    assert ": step" in call("export", run, "-o", tmp_path / "of_run.pt")


@pytest.mark.parametrize("write", [save_file, torch.save])
def test_a_path_that_is_not_utf_8_is_not_called_damaged(write, fails, tmp_path):
    path = tmp_path / os.fsdecode(b"model\xff")
    write({"weight": torch.ones(4)}, tmp_path / "model")
    (tmp_path / "model").rename(path)
    fails("its path is not UTF-8", "compress", path)


def test_unpack_writes_the_files_that_were_packed(series, run, tmp_path, fails):
    call("unpack", run, "-o", tmp_path / "back")
    assert sorted(os.listdir(tmp_path / "back")) == [path.name for path in series]
    for step, path in zip((100, 200, 300), series, strict=True):
        assert bits(load_file(tmp_path / "back" / path.name)) == bits(dq.load(run, step))
    call("unpack", run, "-o", tmp_path / "other", "--to", "safetensors")
    for path in series:
        assert load_file(tmp_path / "other" / path.with_suffix(".safetensors").name)
    call("unpack", run, "--step", "200", "-o", tmp_path / "one.pt")
    assert bits(torch.load(tmp_path / "one.pt")) == bits(dq.load(run, 200))
    fails("exists", "unpack", run, "-o", tmp_path / "back")
    fails("available steps: 100, 200, 300", "unpack", run, "--step", "250", "-o", tmp_path / "x")


@pytest.mark.parametrize(
    ("to", "name"),
    [(None, "step-20.safetensors"), ("torch", "step-20.pt"), ("torch-state", "step-20.pt"), ("dcp", "step-20")],
)
def test_unpack_names_what_a_training_saved_by_step_and_format(tmp_path, to, name):
    model = torch.nn.Linear(9, 9)
    with dq.Checkpointer(tmp_path / "run", model, torch.optim.AdamW(model.parameters())) as ckpt:
        ckpt.save(20)
    said = call("unpack", tmp_path / "run", "-o", tmp_path / "out", *(["--to", to] if to else []))
    assert os.listdir(tmp_path / "out") == [name]
    assert ("note: left out: optimizer" in said) == (to in (None, "torch"))
    if to is None:
        assert bits(load_file(tmp_path / "out" / name)) == bits(dict(dq.load(tmp_path / "run", part="model")))
    elif to != "dcp":
        found = torch.load(tmp_path / "out" / name, weights_only=False)
        assert ("optimizer" in found) == (to == "torch-state")


@pytest.mark.parametrize("name", ["../precious", "/tmp/precious", "..", "", "a\0b", "a/b", "same", 5, None])
def test_a_file_name_in_a_run_cannot_lead_out_of_the_folder(run, tmp_path, name):
    (tmp_path / "precious").write_text("precious")
    for step in (100, 200, 300):
        file = Run(run).file(step)
        chain, record = (
            Run(run).chain(file),
            {**file.header.record, "source": {**file.header.record["source"], "name": name}},
        )
        WritableRun(run).recode(chain, chain[1:] or None, record)
    call("unpack", run, "-o", tmp_path / "back", "--to", "safetensors")
    assert sorted(os.listdir(tmp_path / "back")) == ["step-100", "step-200", "step-300"]
    assert (tmp_path / "precious").read_text() == "precious"


def test_pack_adds_new_steps_and_skips_known_ones(series, tmp_path, fails):
    first, *rest = series
    assert "1 checkpoint packed;" in call("pack", first, "-o", tmp_path / "run")
    assert "2 checkpoints packed, 1 skipped (already in the run)" in call("pack", first, *rest, "-o", tmp_path / "run")
    assert data("pack", *series, "-o", tmp_path / "run") == []
    assert [record["step"] for record in data("log", tmp_path / "run")] == [100, 200, 300]
    fails("would both be step 100", "pack", first, first, "-o", tmp_path / "other")
    save_file({"w": torch.ones(2)}, tmp_path / "old-50.safetensors")
    assert "step 50 was packed last" in call("pack", tmp_path / "old-50.safetensors", "-o", tmp_path / "run")


def test_pack_can_be_repeated_after_it_was_killed(tmp_path):
    weight = torch.randn(256, 256)
    files = [tmp_path / f"ckpt-{step}.safetensors" for step in range(40)]
    for path in files:
        weight = weight + 0.01 * torch.randn(256, 256)
        save_file({"w": weight}, path)
    command = [sys.executable, "-m", "dynaquant.cli", "pack", *map(str, files), "-o", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        while not list(tmp_path.glob("run/step-*2.dqc")) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    there = Run(tmp_path / "run").steps()
    assert 0 < len(there) < len(files)
    call("pack", *files, "-o", tmp_path / "run")
    assert data("verify", tmp_path / "run") == {"sound": len(files), "damaged": [], "unreadable": []}
    assert Run(tmp_path / "run").steps() == list(range(40))


def test_a_pipe_gets_neither_colours_nor_progress(run, model):
    for command in (["log", str(run)], ["compress", str(model), "--json"]):
        done = subprocess.run([sys.executable, "-m", "dynaquant.cli", *command], check=True, capture_output=True)
        assert b"\x1b" not in done.stdout
        assert done.stderr == b""
        if "--json" in command:
            json.loads(done.stdout)


def test_a_file_is_never_written_over_itself(model, tmp_path, monkeypatch, capsys):
    small = tmp_path / "model.dqc"
    call("compress", model, "-o", small)
    before = small.read_bytes()
    failed(monkeypatch, capsys, "is a file that this reads", "decompress", small, "-o", small, "--force")
    assert small.read_bytes() == before


def test_unpack_never_writes_over_the_checkpoint_that_it_reads(model, tmp_path, monkeypatch, capsys):
    source = tmp_path / "ckpt-100.safetensors"
    source.write_bytes(model.read_bytes())
    call("pack", source, "-o", tmp_path / "run")
    checkpoint = Run(tmp_path / "run").path(100)
    before = checkpoint.read_bytes()
    where = ("-o", checkpoint, "--step", "100", "--to", "safetensors", "--force")
    failed(monkeypatch, capsys, "is a file that this reads", "unpack", tmp_path / "run", *where)
    assert checkpoint.read_bytes() == before


def test_a_folder_may_be_given_as_the_working_directory(model, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").write_bytes(model.read_bytes())
    monkeypatch.chdir(tmp_path / "folder")
    call("compress", ".")
    assert (tmp_path / "folder.dqc").exists()
    (tmp_path / "folder" / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "folder" / "inside")
    call("compress", "..", "--force")
    assert [name for name in os.listdir(tmp_path) if name.endswith(".dqc")] == ["folder.dqc"]


def test_the_output_may_be_closed(model, tmp_path):
    command = f"exec {sys.executable} -m dynaquant.cli compress {model} -o {tmp_path / 'closed.dqc'} >&- 2>&-"
    assert subprocess.run(command, shell=True, check=False).returncode == 0
    assert (tmp_path / "closed.dqc").exists()


def test_a_delta_without_its_parent_is_not_called_damaged(tmp_path):
    state = {"w": torch.randn(50, 50)}
    dq.save(state, tmp_path / "a.dqc")
    dq.save(state, tmp_path / "b.dqc", parent=tmp_path / "a.dqc")
    (tmp_path / "a.dqc").rename(tmp_path / "elsewhere.dqc")
    said = call("verify", tmp_path / "b.dqc", code=1)
    assert "is missing; put it back there" in said
    assert "delete" not in said
    assert data("verify", tmp_path / "b.dqc", code=1)["damaged"] == []
