"""A short soak: a training that is killed or interrupted at random loses no checkpoint and is not changed."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.parametrize(("soak", "count"), [("kills", 12), ("interrupts", 50), ("sharded", 6)])
def test_no_checkpoint_is_lost_and_training_is_unchanged(soak, count):
    command = [sys.executable, SOAK, soak, "--count", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: int(n) for n, name in (line.split(None, 1) for line in done.stdout.splitlines())}
    assert found["kills" if soak == "sharded" else soak] >= count
    assert found["commits"] > 0
