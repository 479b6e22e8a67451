"""What the documentation shows runs as it stands."""

import ast
import glob
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import links
import pytest
from commands import call
from launched import launch
from typer.testing import CliRunner

import dynaquant as dq
from dynaquant.cli import app
from dynaquant.saving.record import record_of
from dynaquant.store.run import Run

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.fixture(scope="module")
def guide() -> str:
    return (ROOT / "docs/guide.md").read_text()


def blocks(guide: str) -> list[tuple[str, str]]:
    return re.findall(r"```(python|bash)\n(.*?)```", guide, re.DOTALL)


def test_the_guide_runs_as_it_stands(guide, tmp_path, monkeypatch):
    # Python blocks that begin with a file's name are that file; the shell's lines are run one after another.
    monkeypatch.chdir(tmp_path)
    ran = []
    for language, text in blocks(guide):
        if language == "python" and (name := re.match(r"# (\w+\.py)\n", text)):
            (tmp_path / name[1]).write_text(text)
        for line in text.splitlines() if language == "bash" else []:
            command, *arguments = shlex.split(line, comments=True)
            arguments = [found for argument in arguments for found in sorted(glob.glob(argument)) or [argument]]
            if command == "dynaquant":
                result = CliRunner().invoke(app, arguments)
                assert result.exit_code == 0, (line, result.output, result.exception)
                assert result.output
            else:
                assert command == "python"
                subprocess.run([sys.executable, *arguments], check=True)
            ran.append(line)
    assert len(ran) > 20
    assert sorted(os.listdir(tmp_path / "again")) == ["ckpt-300.pt", "ckpt-400.pt", "ckpt-500.pt"]


RECIPES = (ROOT / "docs/recipes.md").read_text()
COMMANDS = [
    text for language, text in re.findall(r"```(python|bash)\n(.*?)```", RECIPES, re.DOTALL) if language == "bash"
]


@pytest.mark.slow
@pytest.mark.parametrize("commands", COMMANDS, ids=lambda commands: commands.split()[-1])
def test_the_recipes_run_as_they_stand_and_again(commands, tmp_path, monkeypatch):
    if "loader.py" in commands:
        pytest.importorskip("torchdata", reason="torchdata is not installed")
    monkeypatch.chdir(tmp_path)
    for language, text in blocks(RECIPES):
        if language == "python":
            Path(re.match(r"# (\w+\.py)\n", text)[1]).write_text(text)
    outputs = []
    for again in (False, True):
        for line in commands.splitlines():
            command, *arguments = shlex.split(line)
            if command == "dynaquant":
                call(*arguments)
            elif again:  # the first start has shown that it imports what it needs
                status, output = launch(Path(arguments[-1]), int(arguments[-2]) if command == "torchrun" else 1, 150)
                assert status == 0, output
                outputs.append(output.splitlines()[-1:])
            else:
                module = ["-m", "torch.distributed.run"] if command == "torchrun" else []
                done = subprocess.run(
                    [sys.executable, *module, *arguments], capture_output=True, text=True, check=False
                )
                assert done.returncode == 0, done.stderr
                outputs.append(done.stdout.splitlines())
        if (tmp_path / "back").exists():
            break  # dynaquant does not overwrite a folder
    for run in Path().glob("runs/*"):
        assert dq.load(run, step=40)["model"].keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    if "mixed" in commands:
        assert outputs == [["40 updates of the average; scale 1024.0"]] * 2
    if "loader.py" in commands:
        assert outputs == [["48 batches"]] * 2


def steps_in(output: str) -> list[int]:
    return [
        int(step)
        for step in re.findall(r"^step (\d+): \d+\.\d times smaller, validation loss [+-]", output, re.MULTILINE)
    ]


@pytest.mark.slow
def test_the_guides_training_loop_goes_on_after_a_kill_and_runs_again(guide, tmp_path):
    code = next(text for language, text in blocks(guide) if text.startswith("# train.py"))
    (tmp_path / "train.py").write_text(code)
    command = [sys.executable, "train.py"]
    with subprocess.Popen([*command, "0.01"], cwd=tmp_path) as training:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("runs/guide/step-*200.dqc")):
            assert training.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        training.kill()
    resumed, again = (subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True) for _ in "12")
    assert re.search(r"starting at step [2345]00\n", resumed.stderr)
    # The last start finds the training finished; both print the records of the three checkpoints that are kept.
    assert steps_in(resumed.stdout) == [300, 400, 500]
    assert again.stdout == resumed.stdout
    assert len(os.listdir(tmp_path / "runs/guide")) == 3


SAVES = """
import torch

import dynaquant as dq

model = torch.nn.Linear(9, 9)
with dq.Checkpointer("runs/recipe", model, evaluate=lambda model: float(model.weight.norm()), log_to={}) as ckpt:
    for step in (100, 200):
        ckpt.save(step)
"""
TRACKERS = {
    "to_wandb.py": (
        "wandb",
        SAVES.format("to_wandb")
        + "print(run.summary['checkpoint/step'], run.summary['checkpoint/ratio'])\nrun.finish()\n",
    ),
    "to_mlflow.py": (
        "mlflow",
        SAVES.format("ToMLflow()")
        + "for metric in mlflow.MlflowClient().get_metric_history(run.info.run_id, 'dynaquant/ratio'):\n"
        "    print(metric.step, metric.value)\n",
    ),
}
"""What is added to a block of the guide that makes ``log_to``: the package it needs, two saves, and what it has got."""


@pytest.mark.parametrize("name", TRACKERS)
def test_the_guides_recipes_for_log_to_reach_the_tracker(guide, tmp_path, name):
    package, rest = TRACKERS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    code = next(text for language, text in blocks(guide) if text.startswith(f"# {name}"))
    (tmp_path / name).write_text(code + rest)
    environment = os.environ | {"WANDB_MODE": "offline"}
    printed = subprocess.run(
        [sys.executable, name], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    ).stdout
    step, ratio = printed.split()[-2:]
    assert int(step) == 200
    assert float(ratio) == pytest.approx(record_of(Run(tmp_path / "runs/recipe").file(200)).ratio)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_headings_and_definitions_that_exist(page):
    found = links.links(page, (ROOT / page).read_text())
    assert [(link.text, problem) for link in found if (problem := links.problem(link))] == []


def test_a_broken_link_is_found():
    text = (
        "# A b\n[x](no.md) [x](#a-b) [x](#b) [`Run.load`](src/dynaquant/store/run.py) [`no`](src/dynaquant/errors.py)"
    )
    problems = [links.problem(link) for link in links.links("README.md", text)]
    heading = "there is no heading #"
    assert problems == ["there is no such file", f"{heading}a-b", f"{heading}b", None, "it does not define no"]


@pytest.mark.parametrize("page", PAGES)
def test_lists_look_the_same_on_github_and_on_the_site(page):
    # MkDocs' Markdown sees no list without an empty line before it, and no inner list that is not indented by four.
    lines = list(links.prose((ROOT / page).read_text()))
    item = re.compile(r"([-*+]|[0-9]+\.) ")
    for before, line in pairwise(lines):
        assert not re.match(r" {1,3}([-*+]|[0-9]+\.) ", line), line
        assert not (item.match(line) and before and not item.match(before) and before[0] != " "), line


def test_source_files_become_pages_of_the_site():
    text = "[`Run.load`](../src/dynaquant/store/run.py), [it](../README.md#x), [core](../native/), [guide](guide.md)"
    line = links.line_of((ROOT / "src/dynaquant/store/run.py").read_text(), "Run.load")
    assert links.for_site("docs/architecture.md", text) == (
        f"[`Run.load`](source/src/dynaquant/store/run.py.md#L-{line}), [it](index.md#x), core, [guide](guide.md)"
    )
    code = "```\n[a](../README.md)\n```"
    assert links.for_site("docs/guide.md", code) == code


def messages(source: str) -> list[str]:
    """All texts in Python code except docstrings. "…" stands for what an f-string fills in."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text, node.values))
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"

    tree = ast.parse(source)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [text(n) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr | ast.Constant) and n not in docstrings]


def test_messages_on_the_troubleshooting_page_occur_in_the_source():
    known = [text for path in ROOT.glob("src/dynaquant/**/*.py") for text in messages(path.read_text())]
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = [line for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    assert len(quoted) > 40
    patterns = {line: re.compile(".*".join(map(re.escape, line.split("…"))), re.DOTALL) for line in quoted}
    assert [line for line in quoted if not any(map(patterns[line].search, known))] == []


def test_the_table_of_the_readme_is_as_measured():
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/results/promise.md"))
    row = re.compile(r"^\| (\w+), default \| (\S+%(?: ± \S+%)?) \| \w+ \| (\d+) \| ([\d.]+)× ", re.MULTILINE)
    measured = row.findall(page)
    assert len(measured) >= 5
    for _, end, seeds, state in measured:
        assert f"| {float(state):.0f}× | {end} | {seeds} |" in readme


def test_the_comparison_in_the_guide_is_as_measured():
    guide, page = ((ROOT / name).read_text() for name in ("docs/guide.md", "docs/results/failure_recovery.md"))
    row = re.compile(
        r"^\| (ResNet|GPT), ε = 0.01, 10 restores \| ([^|]+?)\+? \| [^|]+ \| ([\d.]+)× \| (\S+)% ", re.MULTILINE
    )
    measured = {(name, training): (float(size), float(end)) for training, name, size, end in row.findall(page)}
    assert len(measured) >= 18
    claimed = dict(re.findall(r"^\| ([\w \-,`=\"]+?) \| (\d+\S*×.*%) \|$", guide, re.MULTILINE))
    for (name, training), (size, end) in measured.items():
        cells = claimed[name.replace("published", '`method="published"`')].split(" | ")[0 if training == "GPT" else 2 :]
        assert float(cells[0].split("×")[0]) == pytest.approx(size, rel=0.05)
        assert float(cells[1].removesuffix(" %")) == pytest.approx(end, abs=0.6 if abs(end) > 10 else 0.06)


FRAMEWORKS = ["transformers", "accelerate", "lightning"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_sizes_on_the_pages_of_frameworks_are_those_measured(framework):
    text = (ROOT / "docs/results/frameworks.md").read_text()
    measured = {}
    for row in re.findall(r"^\| (.*kB.*) \|$", text, re.MULTILINE):
        name, *cells = row.split(" | ")
        measured.setdefault(name.removesuffix(", the default"), []).append(cells[FRAMEWORKS.index(framework)])
    page = (ROOT / f"docs/integrations/{framework}.md").read_text()
    claimed = [row.split(" | ") for row in re.findall(r"^\| (.*kB.*) \|$", page, re.MULTILINE)]
    assert claimed[0][1:] == measured["the framework's own"]
    assert len(claimed) == (6 if framework == "lightning" else 5)
    for name, *cells in claimed[1:]:
        assert cells == measured[name.replace("quality=", "")]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_ends_on_the_pages_of_frameworks_are_those_measured(framework):
    results = (ROOT / "docs/results/frameworks.md").read_text()
    page = (ROOT / f"docs/integrations/{framework}.md").read_text().replace("−", "-")
    rows = re.findall(
        rf"^\| {framework.capitalize()}[^|]* \| \d+ \| [\d.]+ \| (.*?) \| ([\d.]+) \|", results, re.MULTILINE
    )
    assert len(rows) == (3 if framework == "lightning" else 1)
    for end, apart in rows:
        assert end in page
        assert f"seeds are {apart} apart" in page
