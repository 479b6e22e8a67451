"""What the documentation shows runs as it stands."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynaquant.cli import app

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def guide(tmp_path_factory) -> Path:
    """A folder with the training loop of the guide."""
    folder = tmp_path_factory.mktemp("guide")
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guide.md").read_text(), re.DOTALL)[0]
    (folder / "guide.py").write_text(code)
    return folder


@pytest.fixture(scope="module")
def outputs(guide) -> list[str]:
    """What it prints when it is run twice."""
    command = [sys.executable, "guide.py"]
    return [subprocess.run(command, cwd=guide, capture_output=True, text=True, check=True).stdout for _ in range(2)]


def test_the_guides_training_loop_runs_and_runs_again(guide, outputs):
    # The second start finds the training finished; both print the records of the three checkpoints that are kept.
    assert outputs[0] == outputs[1]
    assert [line.split()[0] for line in outputs[0].splitlines()] == ["300", "400", "500"]
    assert len(os.listdir(guide / "runs/guide")) == 3


@pytest.mark.usefixtures("outputs")
def test_the_guides_commands_work_on_its_run(guide, monkeypatch):
    monkeypatch.chdir(guide)
    commands = re.findall(r"^dynaquant (.*)$", (ROOT / "docs/guide.md").read_text(), re.MULTILINE)
    assert len(commands) > 5
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command, comments=True))
        assert result.exit_code == 0, (command, result.output)
        assert result.output


def test_relative_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
