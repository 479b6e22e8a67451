"""``dynaquant demo`` at its smallest: real trainings, real kills."""

import json
import subprocess
import sys

from dynaquant.store.run import Run


def test_the_demo_survives_its_crashes_and_reports_them(tmp_path):
    command = [sys.executable, "-m", "dynaquant.cli", "demo", "--quick", "--json", "--out", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    results = json.loads(process.stdout)
    assert results == json.loads((tmp_path / "demo.json").read_text())
    assert [result["workload"] for result in results] == ["transformer", "convnet"]
    for result in results:
        assert len(result["crashes_at_steps"]) == len(result["resumed_from_steps"]) == 2
        assert all(r <= c for r, c in zip(result["resumed_from_steps"], result["crashes_at_steps"], strict=True))
        weight = result["sizes"]["weight"]
        assert weight["ratio"] > 8
        assert weight["raw"] == sum(record["roles"]["weight"]["raw"] for record in result["records"])
        files = list((tmp_path / result["workload"]).iterdir())
        assert result["sizes"]["total"]["stored"] == sum(file.stat().st_size for file in files)
        assert len(files) == len(Run(tmp_path / result["workload"]).summaries()[0]) == result["checkpoints"]
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def test_the_command_line_explains_itself():
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "dynaquant.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "demo" in run("--help")
    assert "demo.png" in run("demo", "--help")
    assert run("--version").startswith("dynaquant 0.")
