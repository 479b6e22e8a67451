"""What a command line needs before it can start: help and headers without PyTorch, reports without plotly an error."""

import json
import re
import subprocess
import sys

import pytest
import torch
from commands import make_run
from sharded_checkpoints import commit_sharded, random_state
from torch import nn
from typer.main import get_command
from typer.testing import CliRunner

import dynaquant as dq
from dynaquant.cli import app
from dynaquant.store.commit import WritableRun
from dynaquant.store.pointers import POINTER_FILE, write_pointer
from dynaquant.store.run import Run
from dynaquant.store.tags import set_tag, tags_of

HELP = """
import json, sys
from typer.testing import CliRunner
from dynaquant.cli import app
commands = {commands}
for arguments in ([], *([name] for name in commands)):
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0 and "Usage" in result.output, result.output
print(json.dumps(sorted({{"torch", "numpy", "plotly", "matplotlib"}} & sys.modules.keys())))
"""
WITHOUT = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""
WITHOUT_PLOTLY = WITHOUT.format(package="plotly")
ALL_OF = """
import json, sys
from typer.testing import CliRunner
from dynaquant.cli import app
results = [CliRunner().invoke(app, arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps([[result.exit_code, result.output, repr(result.exception)] for result in results]))
"""
"""Prints exit code, output and exception of each of several command lines."""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *arguments], check=False, capture_output=True, text=True)


def test_help_of_every_command_loads_neither_torch_nor_plotly():
    commands = list(get_command(app).commands)
    assert len(commands) > 15
    done = python(HELP.format(commands=commands))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.fixture
def runs(tmp_path):
    """Two runs: one of the published method, with tags, and one on a grid, with all kinds of files."""
    published, grid = tmp_path / "published", tmp_path / "grid"
    make_run(published)
    set_tag(Run(published), "best", Run(published).file(60))
    base = nn.Linear(600, 600).requires_grad_(False)
    model = nn.Sequential(base, nn.Linear(600, 8))
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    inputs = torch.randn(16, 600)
    evaluate = dq.LossOn([inputs], lambda model, batch: model(batch).square().mean())
    with dq.Checkpointer(grid, model, optimizer, evaluate=evaluate, keep=dq.Keep(lossless_copy=True)) as ckpt:
        for step in (1, 2):
            model(inputs).square().mean().backward()
            optimizer.step()
            ckpt.save(step).result()
        ckpt.tag("first", 1)
        ckpt.save(1).result()  # the one with the tag is kept beside it
    with (writable := WritableRun(grid)).locked():
        commit_sharded(writable, 3, random_state())
    return published, grid


def test_commands_that_read_headers_do_not_need_torch(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    published, grid = runs
    dq.save({"w": torch.ones(3, dtype=torch.complex64)}, tmp_path / "alone.dqc")
    (tmp_path / "pointer").mkdir()
    write_pointer(tmp_path / "pointer" / POINTER_FILE, Run(grid).file(2))
    on_each = (["log"], ["tag"], ["show"], ["show", "1"], ["watch", "--once"], ["du"])
    commands = [[name, str(run), *rest] for run in runs for name, *rest in on_each]
    commands += [[name, str(grid), *rest, "--json"] for name, *rest in on_each]
    commands += [["show", str(published), "best"], ["show", str(grid), "first"]]
    commands += [["show", str(tmp_path / name)] for name in ("alone.dqc", "pointer", "grid/step-000000000002.dqc")]
    wanted = [CliRunner().invoke(app, command) for command in commands]
    report = ["report", str(published), "-o", str(tmp_path / "report.html")]
    last = [report, ["tag", str(published), "other", "80"], ["verify", str(grid)]]
    done = python(WITHOUT.format(package="torch") + ALL_OF, json.dumps([*commands, *last]))
    assert done.returncode == 0, done.stderr
    *found, reported, tagged, verified = json.loads(done.stdout)
    for command, (code, shown, raised), with_torch in zip(commands, found, wanted, strict=True):
        same = _without_ages if command[0] == "watch" else str
        assert (code, same(shown)) == (with_torch.exit_code, same(with_torch.output)), (command, raised)
    assert [with_torch.exit_code for with_torch in wanted].count(1) == 1  # one run has no step 1
    assert reported[0] == 0, reported
    assert tagged[:2] == [0, "other: step 80\n"]
    assert [tag.name for tag in tags_of(Run(published))] == ["best", "other"]
    assert verified[2] == repr(ModuleNotFoundError("No module named 'torch'"))  # it was really hidden


def _without_ages(shown: str) -> str:
    """Return a text without times, and without what depends on their widths."""
    return re.sub(r"[ ─━]+", " ", re.sub(r"[\d.]+ (s|min|h|d)\b", "…", shown))


def test_the_package_runs_as_the_command_does():
    command = [sys.executable, "-m", "dynaquant", "log", "nowhere"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("dynaquant: nowhere")


def test_importing_the_package_loads_no_torch_until_a_name_is_used():
    done = python(
        "import sys, dynaquant as dq\n"
        "assert 'torch' not in sys.modules\n"
        "dq.Checkpointer\n"
        "assert 'torch' in sys.modules and 'plotly' not in sys.modules\n"
        "assert vars(dq)['Checkpointer'].__module__ == 'dynaquant.checkpointer'"
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_can_be_imported():
    assert set(dq.__all__) < set(dir(dq))
    assert all(getattr(dq, name).__name__ == name for name in dq.__all__)
    assert dq.__version__[0].isdigit()
    with pytest.raises(AttributeError, match="no attribute 'Checkpoint'"):
        _ = dq.Checkpoint


def test_a_report_without_plotly_says_how_to_install_it(tmp_path):
    make_run(tmp_path / "run")
    out = tmp_path / "report.html"
    done = python(f"{WITHOUT_PLOTLY}\nfrom dynaquant.cli import main\nmain()", "report", str(tmp_path), "-o", str(out))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "dynaquant: The report of a run needs plotly, which is not installed: pip install 'dynaquant[report]'\n"
    )
    assert not out.exists()
    done = python(
        f"{WITHOUT_PLOTLY}\nimport dynaquant as dq\n"
        "for expected in (dq.DynaquantError, ImportError):\n"
        "    try:\n        import dynaquant.report.page\n"
        "    except expected as error:\n        print(error)"
    )
    assert done.stdout.count("pip install 'dynaquant[report]'") == 2, done.stderr
