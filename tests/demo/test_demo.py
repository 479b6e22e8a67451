"""``dynaquant demo`` at its smallest: real trainings, real kills."""

import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from commands import call
from torch import nn

import dynaquant as dq
from dynaquant.demo.comparison import Result, table_of
from dynaquant.demo.crashes import Outcome
from dynaquant.store.run import Run

COMMAND = [sys.executable, "-m", "dynaquant.cli", "demo", "--quick"]
RATIOS = {"transformer": {"weight": 20, "total": 18}, "convnet": {"weight": 6.6, "total": 9.5}}
"""How many times smaller, as measured for ``--quick``. They vary a little with the moments of the crashes."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder of a quick demo, and its results."""
    out = tmp_path_factory.mktemp("demo")
    done = subprocess.run([*COMMAND, "--json", "--out", str(out)], capture_output=True, text=True, check=True)
    return out, json.loads(done.stdout)


@pytest.mark.slow
def test_training_survives_its_crashes(demo):
    _, results = demo
    assert [result["workload"] for result in results] == ["transformer", "convnet"]
    for result in results:
        assert len(result["crashes_at_steps"]) == len(result["resumed_from_steps"]) == 2
        assert all(r <= c for r, c in zip(result["resumed_from_steps"], result["crashes_at_steps"], strict=True))


@pytest.mark.slow
def test_sizes_are_those_of_the_files(demo):
    out, results = demo
    for result in results:
        weight = result["sizes"]["weight"]
        assert weight["raw"] == sum(record["roles"]["weight"]["raw"] for record in result["records"])
        files = list((out / result["workload"]).iterdir())
        assert result["sizes"]["total"]["stored"] == sum(file.stat().st_size for file in files)
        assert len(files) == len(Run(out / result["workload"]).summaries()[0]) == result["checkpoints"]


@pytest.mark.slow
def test_ratios_reach_70_percent_of_the_measured_ones(demo):
    _, results = demo
    for result in results:
        for what, ratio in RATIOS[result["workload"]].items():
            assert result["sizes"][what]["ratio"] > 0.7 * ratio, (result["workload"], what)


@pytest.mark.slow
def test_the_demo_writes_results_a_picture_and_a_report_of_each_run(demo):
    out, results = demo
    assert results == json.loads((out / "demo.json").read_text())
    assert (out / "demo.png").stat().st_size > 10_000
    for result in results:
        page = (out / f"{result['workload']}.html").read_text()
        assert f"<h1>{result['workload']}</h1>" in page


def test_an_interrupt_leaves_no_training_process_behind(tmp_path):
    with subprocess.Popen(
        [*COMMAND, "--out", str(tmp_path)], stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        while not (children := _children(process.pid)):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)  # to the demo alone, unlike Ctrl-C in a terminal
        process.wait(timeout=60)
    assert process.returncode != 0
    assert not any(_is_alive(child) for child in children)


def _children(parent: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = (map(int, line.split()) for line in listed.splitlines())
    return [pid for pid, above in pairs if above == parent]


def _is_alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def test_a_role_that_takes_next_to_nothing_is_no_row(tmp_path):
    model = nn.Linear(200, 200)
    model.register_buffer("counts", torch.arange(8))
    with dq.Checkpointer(tmp_path, model, quality="lossless") as ckpt:
        record = ckpt.save(1).result()
    assert {"weight", "buffer"} <= record.roles.keys()
    table = table_of(Result("small", "loss", 1, Outcome(), Outcome(), [record]))
    assert next(iter(table.columns[0].cells)) == "weight"
    assert "buffer" not in table.columns[0].cells
    assert "0.00 MB" not in table.columns[2].cells


def test_full_and_quick_exclude_each_other(tmp_path):
    call("demo", "--full", "--quick", "--out", tmp_path, code=2)


def test_the_command_line_has_help_and_a_version():
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "dynaquant.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "demo" in run("--help")
    assert "demo.png" in run("demo", "--help")
    assert run("--version").startswith("dynaquant 0.")
