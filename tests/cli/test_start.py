"""What a command line needs before it can start: help without PyTorch, reports without plotly only as an error."""

import json
import subprocess
import sys

import pytest
from commands import make_run
from typer.main import get_command

import dynaquant as dq
from dynaquant.cli import app

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
WITHOUT_PLOTLY = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "plotly":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *arguments], check=False, capture_output=True, text=True)


def test_help_of_every_command_loads_neither_torch_nor_plotly():
    commands = list(get_command(app).commands)
    assert len(commands) > 15
    done = python(HELP.format(commands=commands))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


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
