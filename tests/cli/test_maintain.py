"""The commands that change a run, called as from a shell."""

import re

import pytest
import torch
from commands import call, data, failed
from safetensors.torch import save_file
from training import bits

import dynaquant as dq
from dynaquant.store.commit import WritableRun


@pytest.fixture
def fails(monkeypatch, capsys):
    return lambda reason, *arguments: failed(monkeypatch, capsys, reason, *arguments)


@pytest.fixture
def run(tmp_path):
    """A run with three steps."""
    weight = torch.randn(64, 64)
    for step in (100, 200, 300):
        weight = weight + 0.01 * torch.randn(64, 64)
        save_file({"w": weight}, tmp_path / f"ckpt-{step}.safetensors")
    call("pack", *sorted(tmp_path.glob("ckpt-*")), "-o", tmp_path / "run")
    return tmp_path / "run"


def test_a_run_without_its_keyframe_gives_one_message(run, tmp_path, fails):
    WritableRun(run).delete(100)
    for arguments in (("unpack", run, "-o", tmp_path / "x"), ("compact", run), ("branch", run, "200", tmp_path / "y")):
        fails("its parent, step 100", *arguments)
    assert not (tmp_path / "y").exists()
    assert data("verify", run, code=1)["sound"] == 0


def test_a_tag_is_accepted_wherever_a_step_is(run, tmp_path, fails):
    call("tag", run, "best", "200")
    call("tag", run, "last")
    assert [(tag["name"], tag["step"]) for tag in data("tag", run)] == [("best", 200), ("last", 300)]
    assert [record["tags"] for record in data("log", run)] == [[], ["best"], ["last"]]
    assert data("show", run, "best")["step"] == 200
    call("diff", run, "best", "last")
    call("unpack", run, "--step", "best", "-o", tmp_path / "best.safetensors")
    call("export", run, "best", "-o", tmp_path / "best.pt", "--to", "torch")
    fails("is the tag of step 200", "tag", run, "best", "300")
    fails("cannot be a tag", "tag", run, "../best", "300")
    fails("there is no tag 'worst' (tags: best, last)", "show", run, "worst")
    shown = call("prune", run, "--keep-last", "1", "--keep-every", "100", "--dry-run")
    assert "keep 3 (100: a multiple of 100; 200: tag best; 300: tag last)" in shown
    call("tag", run, "last", "--delete")
    assert "kept 2 (200: tag best; 300: among the newest), " in call("prune", run, "--keep-last", "1")
    assert call("prune", run, "--keep-last", "1").endswith("kB as before\n")
    assert call("verify", run).startswith("2 of 2 checkpoints decode to")
    assert call("verify", run / "step-000000000300.dqc").startswith("1 of 1 checkpoint decodes to")
    call("tag", run, "last")
    assert [record["step"] for record in data("log", run)] == [200, 300]
    call("tag", run, "best", "--delete")
    call("tag", run, "--delete", code=2)
    assert [tag["name"] for tag in data("tag", run)] == ["last"]


def test_a_branch_starts_with_the_given_checkpoint(run, tmp_path, fails):
    call("branch", run, "200", tmp_path / "new")
    assert [record["step"] for record in data("log", tmp_path / "new")] == [200]
    assert bits(dq.load(tmp_path / "new")) == bits(dq.load(run, 200))
    fails("it has checkpoints already", "branch", run, "100", tmp_path / "new")


def test_compact_and_du_report_keyframes_and_sizes(run):
    before = {step: bits(dq.load(run, step)) for step in (100, 200, 300)}
    assert "3 checkpoints, 3 keyframes" in call("compact", run, "--keyframe-every", "1")
    assert re.search(r"3 checkpoints, 1 keyframe: [\d.]+ kB instead of [\d.]+ kB\n", call("compact", run))
    assert re.search(r"3 checkpoints, 1 keyframe: [\d.]+ kB as before\n", call("compact", run))
    assert {step: bits(dq.load(run, step)) for step in before} == before
    call("compact", run, "--keyframe-every", "0", code=2)
    use = {part["what"].strip(): part for part in data("du", run)}
    assert (use["keyframes"]["files"], use["deltas"]["files"]) == (1, 2)
    assert use["all"]["size"]["stored"] == sum(path.stat().st_size for path in run.iterdir())
    assert use["weight"]["size"]["stored"] + use["headers"]["size"]["stored"] == use["all"]["size"]["stored"]
    call("du", run)
