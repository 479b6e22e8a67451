"""Ranks that are done with a Checkpointer keep none of its connections and threads."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import launch, launch_anew
from torch import nn

import dynaquant as dq

SCRIPT = Path(__file__).parents[1] / "support" / "closed_ranks.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads in /proc")


def reports(kind: str, folder: Path, start: Callable[..., tuple[int, str]]) -> list[dict[str, Any]]:
    status, output = start(SCRIPT, 2, 120, kind, folder)
    assert status == 0, output
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_close_ends_the_threads_that_connect_the_ranks(kind, tmp_path):
    for found in reports(kind, tmp_path, launch):
        assert found["before"] < found["open"]
        assert "is writing to this run" in found["held"]
        assert found["after the error"] == found["open"]  # what could not be opened left none
        assert found["closed"] == found["before"]
        assert found["records"] == 1
        assert found["closed late"] < found["destroyed"]
        assert found["closed late"] <= found["before"]


@pytest.mark.slow
def test_the_end_of_the_process_ends_these_threads_while_python_still_runs(tmp_path):
    for found in reports("forgotten", tmp_path, launch_anew):
        assert found["before"] == found["at the end"] < found["open"]
    with dq.Checkpointer(tmp_path / "run", nn.Linear(8, 1)) as checkpointer:
        assert checkpointer.steps() == [1]
