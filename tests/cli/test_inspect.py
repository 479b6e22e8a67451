"""The commands that look into a run, called as from a shell."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from functools import partial

import pytest
import torch
from commands import STEPS, call, data, failed, make_run
from full_disk import files_of_at_most
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from training import bits, model_of, train
from typer.main import get_command
from typer.testing import CliRunner

import dynaquant as dq
from dynaquant.cli import app, output
from dynaquant.store.pointers import POINTER_FILE, RUN_FOLDER, write_pointer
from dynaquant.store.run import Run
from dynaquant.store.tags import set_tag


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_run(folder)
    return folder


def damage(folder, step: int, tensor: str) -> None:
    """Flips a bit in the middle of a tensor's stream."""
    file = Run(folder).file(step)
    names = [entry.name for entry in file.header.entries]
    before = file.header.entries[: names.index(tensor)]
    content = bytearray(file.path.read_bytes())
    content[16 + sum(entry.size for entry in before) + file.header.by_name[tensor].size // 2] ^= 0x10
    file.path.write_bytes(content)


@pytest.fixture
def fails(monkeypatch, capsys):
    return partial(failed, monkeypatch, capsys)


def test_log_has_the_records_of_all_checkpoints(run):
    records = data("log", run)
    assert [record["step"] for record in records] == STEPS
    assert [record["parent"] for record in records] == [None, 20, 40, None]
    with dq.Checkpointer(run, model_of(32)) as ckpt:
        own = [json.loads(json.dumps({**record.to_json(), "tags": [], "replaced": False})) for record in ckpt.records()]
    assert records == own
    shown = call("log", run)
    assert all(f" {step} " in shown for step in STEPS)
    assert f"{records[-1]['total']['stored'] / 1000:.2f} kB" in shown


def test_what_a_metric_that_sees_nothing_says_is_not_shown_as_measured(tmp_path):
    model = model_of()
    with dq.Checkpointer(tmp_path, model, evaluate=lambda _: 0.5) as ckpt:
        ckpt.save(1).result()
    assert all("0.00%" not in call(*command) for command in (("log", tmp_path), ("watch", tmp_path, "--once")))
    assert "0.5 as restored: the metric does not see the weights" in " ".join(call("show", tmp_path, 1).split())


def test_log_lists_a_lossless_copy(tmp_path):
    with dq.Checkpointer(tmp_path, nn.Linear(40, 40), keep=dq.Keep(lossless_copy=True)) as ckpt:
        for step in (1, 2):
            ckpt.save(step)
    (copy,) = tmp_path.glob("exact-*")
    name = "exact-000000000002-000000000002.dqc"
    said = f"{name}, the lossless copy of a checkpoint: {copy.stat().st_size / 1000:.2f} kB"
    assert said in call("log", tmp_path)


@pytest.fixture(scope="module")
def run_with_long_names(tmp_path_factory):
    """A run of one checkpoint, with a high step, long names of tensors, and many long tags."""
    folder = tmp_path_factory.mktemp("long")
    inner = nn.ModuleDict({"attention_output_projection": nn.Linear(4, 4)})
    model = nn.ModuleDict({"a_rather_long_name_of_a_module": inner})
    with dq.Checkpointer(folder, model, torch.optim.AdamW(model.parameters()), quality="high") as ckpt:
        ckpt.save(10**9).result()
    for i in range(9):
        set_tag(Run(folder), f"a-rather-long-name-of-a-checkpoint-{i}", Run(folder).file(10**9))
    return folder


TABLES = ["log", "show", "du", "watch --once", "show --tensor model.0.weight", "diff"]


@pytest.mark.parametrize("command", TABLES)
@pytest.mark.parametrize("environment", [{"COLUMNS": "80"}, {"COLUMNS": "60", "FORCE_COLOR": "1"}], ids=str)
def test_tables_fit_the_columns_that_there_are_without_folding(run, run_with_long_names, command, environment):
    name, *options = command.split()
    for folder in (run,) if "--tensor" in options or name == "diff" else (run, run_with_long_names):
        arguments = [name, str(folder), *(["20", "40"] if name == "diff" else []), *options]
        done = CliRunner().invoke(app, arguments, env=environment)
        assert done.exit_code == 0, done.output
        plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
        lines = [line for line in plain.splitlines() if line[:1] in set("┏┃┡│└")]
        assert len(lines) >= 5
        assert all(len(line) <= int(environment["COLUMNS"]) for line in lines)
        assert sum(line.startswith("┃") for line in lines) == sum(line.startswith("└") for line in lines)


def test_a_pipe_without_columns_gets_whole_names(run_with_long_names, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    shown = call("show", run_with_long_names)
    name = "model.a_rather_long_name_of_a_module.attention_output_projection.weight"
    assert f"│ {name} │" in shown
    assert max(map(len, shown.splitlines())) < 140
    assert ", ".join(f"a-rather-long-name-of-a-checkpoint-{i}" for i in range(9)) in call("log", run_with_long_names)


def test_a_wide_output_gets_all_columns(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert all(title in call("log", run) for title in ("limit", "configuration", "found by"))
    assert all(title in call("show", run) for title in ("dtype", "coded as", "bins"))


def test_what_is_too_wide_is_cut_in_the_middle():
    name = "model.layers.0.attention.weight"
    assert output.shortened(name, 31) == name
    assert len(output.shortened(name, 30)) == 30
    assert output.shortened(name, 9) == "mo…weight"


def test_help_shows_a_flag_without_a_type():
    for name in get_command(app).commands:
        assert "<bool>" not in call(name, "--help")
    assert "<bool>" not in call("--help")
    assert "--force" in call("export", "--help")


def test_every_command_has_a_valid_example():
    commands = get_command(app).commands
    assert len(commands) > 15
    for name, command in commands.items():
        shown = " ".join(call(name, "--help").split())
        example = re.search(rf"Example: dynaquant {name} (.+)$", shown)
        assert example, name
        command.make_context(name, shlex.split(example[1]))


def test_sizes_in_show_add_up(run):
    for step in (20, 40, 80):
        shown = data("show", run, step)
        keys = {"name", "role", "layer_type", "dtype", "shape", "coding", "bins", "size", "bits"}
        assert all(tensor.keys() == keys for tensor in shown["tensors"])
        streams = sum(tensor["size"]["stored"] for tensor in shown["tensors"])
        assert streams < shown["total"]["stored"] == Run(run).path(step).stat().st_size
        for role, size in shown["roles"].items():
            assert size["stored"] == sum(t["size"]["stored"] for t in shown["tensors"] if t["role"] == role)
    assert data("show", run)["step"] == 80
    text = call("show", run, 40)
    assert "model.kept[bold]" in text
    assert "16 bins" in text


def test_show_names_the_parent_of_a_file_that_was_written_alone(tmp_path):
    first, delta, of_memory = tmp_path / "a.dqc", tmp_path / "deltas" / "b.dqc", tmp_path / "c.dqc"
    delta.parent.mkdir()
    dq.save({"w": torch.ones(9)}, first)
    dq.save({"w": torch.zeros(9)}, delta, parent=first)
    dq.save({"w": torch.zeros(9)}, content := io.BytesIO(), parent=first)
    of_memory.write_bytes(content.getvalue())
    identity = data("show", first)["identity"]
    for path, said in (
        (first, "none (it stands alone)"),
        (delta, f"../a.dqc (from the folder of this file), identity {identity}"),
        (of_memory, f"a file object, which load must be given, identity {identity}"),
    ):
        shown = call("show", path)
        assert f" parent {said} " in " ".join(shown.split())
        assert "  step " not in shown


def test_show_folds_the_step_counts_of_an_optimizer_into_one_line(run):
    names = [tensor["name"] for tensor in data("show", run, 80)["tensors"]]
    counts = [name for name in names if name.endswith(".step")]
    assert len(counts) > 1
    shown = call("show", run, 80)
    assert f"optimizer.….step ({len(counts)} scalars)" in shown
    assert not any(name in shown for name in counts)
    assert all(name in shown for name in names if name.endswith(".exp_avg_sq"))


def test_show_counts_the_levels_of_a_tensor(run):
    shown = data("show", run, "40", "--tensor", "model.1.weight")
    assert shown["bins"] == 16
    assert sum(level["count"] for level in shown["levels"]) == 32 * 32
    stored = dq.load(run, 40)["model"]["1.weight"]
    for level in shown["levels"]:
        if level["value"] is not None and level["level"] != "pruned":
            assert int((stored == torch.tensor(level["value"])).sum()) >= level["count"]
    values = [level["value"] for level in shown["levels"] if level["level"].startswith("bin")]
    assert values == sorted(values)
    assert "█" in call("show", run, "40", "--tensor", "model.1.weight")
    assert "it has no levels" in call("show", run, "--tensor", "model.1.bias")


def save_on_grids(folder, dithered: bool = False, scales=(-80,)) -> None:
    torch.manual_seed(0)
    model = model_of(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = 0
    for scale in scales:
        quality = dq.Quality(configuration=dq.GridConfiguration(scale, dithered))
        with dq.Checkpointer(folder, model, optimizer, quality=quality) as ckpt:
            ckpt.restore()
            train(model, optimizer, 20)
            ckpt.save(step := step + 20)


@pytest.mark.parametrize(("dithered", "rounding"), [(False, "rounding to nearest"), (True, "stochastic rounding")])
def test_show_says_once_how_weights_were_rounded(tmp_path, dithered, rounding):
    save_on_grids(tmp_path, dithered)
    shown = " ".join(call("show", tmp_path).split())
    assert f"configuration grid 2^-5.00, {rounding}: grid steps of 2^(-80/16) / sqrt(F) found by" in shown


def test_show_names_the_levels_of_a_grid_by_their_multiples_of_the_grid_step(tmp_path):
    save_on_grids(tmp_path)
    levels = data("show", tmp_path, "--tensor", "model.1.weight")["levels"]
    on_the_grid = [(int(level["level"]), level["value"]) for level in levels if level["level"] != "outlier"]
    (step,) = {value for number, value in on_the_grid if number == 1}
    assert [value for _, value in on_the_grid] == pytest.approx([number * step for number, _ in on_the_grid])
    assert on_the_grid == sorted(on_the_grid)
    assert {-1, 0, 1} <= {number for number, _ in on_the_grid}


def test_diff_shows_how_far_tensors_moved(run):
    changes = {change["name"]: change for change in data("diff", run, 20, 40)}
    assert changes["model.kept[bold]"]["kind"] == "same"
    before, after = (dq.load(run, step)["model"]["1.weight"].double() for step in (20, 40))
    weight = changes["model.1.weight"]
    assert weight["kind"] == "changed"
    assert weight["moved"] == pytest.approx(float((after - before).norm() / before.norm()))
    assert weight["changed"] == float((after != before).double().mean())
    assert 0 < weight["migrated"] < 1
    assert changes["model.1.bias"]["migrated"] is None
    assert all(change["kind"] == "same" for change in data("diff", run, 40, 40))
    assert f"{weight['moved']:.2%}" in call("diff", run, 20, 40)


def test_diff_compares_no_levels_on_different_grids(tmp_path):
    save_on_grids(tmp_path, scales=(-80, -96))
    assert data("show", tmp_path, "20", "--tensor", "model.1.weight")["levels"]
    change = next(each for each in data("diff", tmp_path, 20, 40) if each["name"] == "model.1.weight")
    assert change["migrated"] is None
    assert "– where a tensor has no levels, or another grid" in " ".join(call("diff", tmp_path, 20, 40).split())


def test_diff_gives_no_distance_between_integers(run):
    changes = {change["name"]: change for change in data("diff", run, 20, 40)}
    assert changes["rng.torch"]["kind"] == "changed"
    assert changes["rng.torch"]["changed"] > 0
    assert changes["rng.torch"]["moved"] is None


def test_diff_of_different_architectures(tmp_path):
    models = (nn.Linear(8, 8), nn.Linear(8, 9, bias=False), nn.Linear(8, 9), nn.Linear(8, 9).double())
    for step, model in enumerate(models):
        with dq.Checkpointer(tmp_path, model, roles={"*": "exact"}) as ckpt:
            ckpt.save(step).result()
    kinds = {change["name"]: change["kind"] for change in data("diff", tmp_path, 0, 1)}
    assert (kinds["model.weight"], kinds["model.bias"]) == ("reshaped", "removed")
    kinds = {change["name"]: change["kind"] for change in data("diff", tmp_path, 1, 2)}
    assert (kinds["model.weight"], kinds["model.bias"]) == ("changed", "added")
    kinds = {change["name"]: change["kind"] for change in data("diff", tmp_path, 2, 3)}
    assert (kinds["model.weight"], kinds["model.bias"]) == ("another dtype", "another dtype")


def test_a_change_from_zero_has_no_relative_size(tmp_path):
    model = nn.Linear(4, 4)
    with dq.Checkpointer(tmp_path, model, roles={"*": "exact"}) as ckpt:
        for step in range(2):
            nn.init.constant_(model.bias, step)
            ckpt.save(step).result()
    change = next(change for change in data("diff", tmp_path, 0, 1) if change["name"] == "model.bias")
    assert (change["kind"], change["moved"], change["changed"]) == ("changed", None, 1.0)
    call("diff", tmp_path, 0, 1)


def test_verify_finds_damaged_checkpoints_and_their_dependent_deltas(tmp_path):
    make_run(tmp_path)
    assert data("verify", tmp_path) == {"sound": 4, "damaged": [], "unreadable": []}
    damage(tmp_path, 40, "model.1.weight")
    found = data("verify", tmp_path, code=1)
    assert found["sound"] == 2
    assert all("step-000000000040" in reason for reason in found["damaged"])
    assert call("verify", tmp_path, code=1).count("damaged:") == 2


def test_verify_advises_to_delete_damaged_files_of_runs_only(tmp_path):
    make_run(tmp_path / "run")
    damage(tmp_path / "run", 40, "model.1.weight")
    assert "put a damaged file back from a copy, or delete it" in call("verify", tmp_path / "run", code=1)
    torch.save({}, tmp_path / "model.pt")  # perhaps the only one that there is
    shown = call("verify", tmp_path / "model.pt", code=1)
    assert "not a dynaquant checkpoint" in shown
    assert "or delete it" not in shown


@pytest.mark.parametrize("to", ["safetensors", "torch", "torch-state"])
def test_export_holds_the_values_that_a_restore_returns(run, tmp_path, to):
    out = tmp_path / "model.out"
    call("export", run, 40, "--to", to, "-o", out)
    expected = dq.load(run, 40)
    if to == "torch-state":
        assert bits(torch.load(out, weights_only=False)) == bits(expected)
    elif to == "torch":
        found = torch.load(out, weights_only=True)
        assert bits(dict(found)) == bits(dict(expected["model"]))
        assert found["0.weight"].data_ptr() == found["4.weight"].data_ptr()
    else:
        with safe_open(out, "pt") as file:
            metadata = file.metadata()
        assert metadata == {"format": "pt", "step": "40", "4.weight": "0.weight"}
        found = load_file(out)
        assert found.keys() == expected["model"].keys() - {"4.weight"}
        assert all(torch.equal(found[name], expected["model"][name]) for name in found)
    assert list(tmp_path.iterdir()) == [out]


def test_export_chooses_the_format_by_the_suffix_and_refuses_others(run, tmp_path, fails):
    for name in ("m.pt", "m.pth", "m.bin", "m.ckpt"):
        call("export", run, "-o", tmp_path / name)
        assert bits(torch.load(tmp_path / name)) == bits(dq.load(run)["model"])
    call("export", run, "-o", tmp_path / "m.safetensors")
    assert load_file(tmp_path / "m.safetensors")
    said = call("export", run, "-o", tmp_path / "m.pt", "--force")
    assert "note: left out: optimizer, random number generators" in said
    for name in ("transformers", "accelerate", "lightning"):
        fails("no framework saved it: --to hf", "export", run, "--to", name, "-o", tmp_path / name)
    for name in ("m", "m.onnx", "m.pt.gz"):
        fails("the name does not tell the format", "export", run, "-o", tmp_path / name)
        assert not (tmp_path / name).exists()


def test_export_replaces_a_file_only_with_force(run, tmp_path, fails):
    out = tmp_path / "model.safetensors"
    out.write_bytes(b"precious")
    fails("exists", "export", run, "-o", out)
    assert out.read_bytes() == b"precious"
    call("export", run, "-o", out, "--force")
    assert load_file(out)


def test_a_failed_export_leaves_no_file(tmp_path, fails):
    model = nn.Linear(4, 4)
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex128))
    with dq.Checkpointer(tmp_path / "run", model) as ckpt:
        ckpt.save(1).result()
    out = tmp_path / "model.safetensors"
    fails("export to torch instead", "export", tmp_path / "run", "-o", out)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    call("export", tmp_path / "run", "--to", "torch", "-o", out)


def test_prune_deletes_old_checkpoints_and_changes_no_value_of_the_others(tmp_path):
    make_run(tmp_path)
    before = {step: bits(dq.load(tmp_path, step)) for step in (60, 80)}
    assert "would delete 2 (20, 40), keep 2 (60, 80: among the newest)" in call(
        "prune", tmp_path, "--keep-last", 2, "--dry-run"
    )
    assert len(data("log", tmp_path)) == 4
    assert "deleted 2 (20, 40)" in call("prune", tmp_path, "--keep-last", 2)
    assert [record["step"] for record in data("log", tmp_path)] == [60, 80]
    assert {step: bits(dq.load(tmp_path, step)) for step in before} == before
    assert data("verify", tmp_path)["sound"] == 2


@pytest.mark.parametrize("options", [["--dry-run"], []])
def test_prune_promises_and_deletes_nothing_beside_a_file_that_cannot_be_read_now(tmp_path, fails, options):
    make_run(tmp_path)
    file = Run(tmp_path).path(60)
    hidden = file.read_bytes()
    file.unlink()
    file.symlink_to(file)  # opening it is an OSError, as on a disk that fails for a moment
    fails("cannot be read", "prune", tmp_path, "--keep-last", 1, *options)
    file.unlink()
    file.write_bytes(hidden)
    assert len(data("log", tmp_path)) == 4


def test_prune_needs_an_option(run):
    assert len(data("log", run)) == 4
    call("prune", run, code=2)
    assert len(data("log", run)) == 4


def test_a_run_with_an_open_checkpointer_is_not_pruned(tmp_path, fails):
    model = make_run(tmp_path)
    with dq.Checkpointer(tmp_path, model):
        fails("another Checkpointer", "prune", tmp_path, "--keep-last", 1)
        assert [record["step"] for record in data("log", tmp_path)] == STEPS


def test_bad_input_gives_one_message(run, tmp_path, fails):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no run")
    fails("no checkpoints in this folder", "log", tmp_path / "empty")
    fails("is a file", "log", tmp_path / "file")
    fails("not a dynaquant checkpoint", "show", tmp_path / "file")
    fails("does not exist", "verify", tmp_path / "nowhere")
    fails("available steps: 20, 40, 60, 80", "show", run, "30")
    fails("there is no tensor 'model.9'", "show", run, "--tensor", "model.9")
    for to in ("safetensors", "torch"):
        fails("is not a folder; create it first", "export", run, "--to", to, "-o", tmp_path / "nowhere" / "model.out")


def test_a_truncated_file_is_skipped_with_a_warning(tmp_path, fails):
    make_run(tmp_path)
    path = Run(tmp_path).path(80)
    path.write_bytes(path.read_bytes()[:-5])
    result = CliRunner().invoke(app, ["log", str(tmp_path), "--json"])
    assert [record["step"] for record in json.loads(result.stdout)] == [20, 40, 60]
    assert "skipped" in result.stderr
    assert path.name in result.stderr
    assert data("verify", tmp_path, code=1)["sound"] == 3
    command = [sys.executable, "-m", "dynaquant.cli", "diff", str(tmp_path), "20", "40"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert said.count("skipped") == 1  # although it opens the run several times
    command = [sys.executable, "-m", "dynaquant.cli", "export", str(tmp_path), "-o", str(tmp_path / "model.pt")]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert said.count(f"skipped {path}") == 1
    for step in (20, 40, 60):
        path = Run(tmp_path).path(step)
        path.write_bytes(path.read_bytes()[:-5])
    fails("no checkpoint of this run can be read", "log", tmp_path)


def test_an_error_is_one_line_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "dynaquant.cli", "log", "nowhere"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "dynaquant: nowhere does not exist; give the folder that a Checkpointer writes to\n"


@pytest.mark.parametrize("to", ["safetensors", "torch", "torch-state"])
def test_export_to_a_full_disk_leaves_no_file(run, tmp_path, fails, to):
    with files_of_at_most(5000):
        fails("", "export", run, "--to", to, "-o", tmp_path / "model.out")
    assert list(tmp_path.iterdir()) == []


def test_prune_keeps_an_older_checkpoint_if_the_newest_is_damaged(tmp_path):
    make_run(tmp_path)
    damage(tmp_path, 80, "model.1.weight")  # a keyframe, so no other checkpoint is damaged
    assert "keep 2 (60: among the newest; 80: damaged, but newer)" in call(
        "prune", tmp_path, "--keep-last", 1, "--dry-run"
    )
    before = bits(dq.load(tmp_path, 60))
    assert "kept 2 (60: among the newest; 80: damaged, but newer)" in call("prune", tmp_path, "--keep-last", 1)
    assert bits(dq.load(tmp_path, 60)) == before


def test_export_changes_no_other_file(run, tmp_path, fails):
    others = {"model.out.tmp", f"taken.{os.getpid()}.tmp"}
    for name in others:
        (tmp_path / name).write_text("precious")
    call("export", run, "-o", tmp_path / "model.out", "--to", "torch")
    call("export", run, "-o", tmp_path / "taken", "--to", "safetensors")
    fails("is a folder", "export", run, "-o", tmp_path, "--force", "--to", "torch")
    assert {path.name for path in tmp_path.iterdir()} == {"model.out", "taken", *others}
    assert all((tmp_path / name).read_text() == "precious" for name in others)


def test_verify_ignores_a_checkpoint_that_is_deleted_meanwhile(tmp_path, monkeypatch):
    make_run(tmp_path / "verify")
    file = Run.file

    def deleting(self, step):
        """The writer deletes step 80 before it is read."""
        self.path(80).unlink(missing_ok=True)
        return file(self, step)

    monkeypatch.setattr(Run, "file", deleting)
    assert data("verify", tmp_path / "verify") == {"sound": 3, "damaged": [], "unreadable": []}


def test_scalars_empty_tensors_and_nans_are_shown(tmp_path):
    model = nn.Module()
    model.register_buffer("count", torch.tensor(3))
    model.register_buffer("nothing", torch.empty(0, 4))
    model.register_buffer("broken", torch.tensor([1.0, float("nan")]))
    with dq.Checkpointer(tmp_path, model) as ckpt:
        for step in range(2):
            model.broken[0] = step
            ckpt.save(step).result()
    text = call("show", tmp_path)
    assert "scalar" in text
    assert "0×4" in text
    call("show", tmp_path, "--tensor", "model.nothing")
    change = next(change for change in data("diff", tmp_path, 0, 1) if change["name"] == "model.broken")
    assert (change["kind"], change["moved"]) == ("changed", None)
    assert "nan" not in call("diff", tmp_path, 0, 1)
    assert "inf" not in call("log", tmp_path)


def test_a_terminal_without_unicode_gets_question_marks(run):
    command = [sys.executable, "-m", "dynaquant.cli", "log", str(run)]
    done = subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert b"keyframe" in done.stdout


def test_folders_of_frameworks_stand_for_a_run_and_for_a_checkpoint(tmp_path, fails):
    run = tmp_path / RUN_FOLDER
    make_run(run)
    assert data("log", tmp_path) == data("log", run)
    step = STEPS[0]
    (tmp_path / "first").mkdir()
    write_pointer(tmp_path / "first" / POINTER_FILE, Run(run).file(step))
    assert data("show", tmp_path / "first")["step"] == step
    fails("not a run", "show", tmp_path / "first", step)
    assert data("verify", tmp_path / "first") == {"sound": 1, "damaged": [], "unreadable": []}
    for command in (("log",), ("prune", "--keep-last", 1)):
        fails(f"step {step} of the run", *command, tmp_path / "first")
