"""Ranks that do not see, hold or do the same: see ``support/ranks_apart.py``."""

import json
from pathlib import Path

import pytest
from launched import launch

SCRIPT = Path(__file__).parents[1] / "support" / "ranks_apart.py"
TIMEOUT = 300
"""Seconds. Much more than the launch needs."""
RANKS = range(2)


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """Return by scenario what each rank has found."""
    folder = tmp_path_factory.mktemp("apart")
    status, output = launch(SCRIPT, len(RANKS), TIMEOUT, folder)
    assert status == 0, output
    first, second = (json.loads((folder / f"rank-{rank}.json").read_text()) for rank in RANKS)
    return {name: [first[name], second[name]] for name in first}


# Ranks do not see the same folder


@pytest.mark.parametrize("layout", ["plain", "fsdp"])
def test_a_folder_that_is_not_shared_is_an_error_of_the_constructor(findings, layout):
    for found in findings[f"own folders: {layout}"]:
        assert found.startswith("CheckpointError: ")
        assert "rank-1" in found.split(" is not the folder that rank 0 writes to")[0]
        assert "rank 1 does not see what rank 0 has written there" in found
        assert "Give all ranks one folder on a file system that they share" in found


@pytest.mark.parametrize("layout", ["plain", "fsdp"])
def test_ranks_that_open_different_checkpoints_of_one_step_restore_nothing(findings, layout):
    for found in findings[f"other checkpoints: {layout}"]:
        assert "rank 1 has opened another checkpoint than rank 0" in found["restored"]
        assert found["unchanged"]
