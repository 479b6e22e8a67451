"""What the documentation shows runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_guides_training_loop_runs_and_runs_again(tmp_path):
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guide.md").read_text(), re.DOTALL)[0]
    (tmp_path / "guide.py").write_text(code)
    command = [sys.executable, "guide.py"]
    first, second = (
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True) for _ in range(2)
    )
    # The second start finds the training finished; both print the records of the three checkpoints that are kept.
    assert first.stdout == second.stdout
    assert [line.split()[0] for line in first.stdout.splitlines()] == ["300", "400", "500"]
    assert len(os.listdir(tmp_path / "runs/guide")) == 3


def test_relative_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
