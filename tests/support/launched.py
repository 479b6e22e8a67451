"""Runs a script on several ranks, and kills all of them if they take too long."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


def launch(script: Path, ranks: int, timeout: float, *arguments: object) -> tuple[int, str]:
    """Run a script under the launcher of PyTorch. Returns its exit status and output. timeout: in seconds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with subprocess.Popen(
        [*command, script, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output = process.communicate(timeout=timeout)[0]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output


def findings_of(script: Path, folder: Path, ranks: int = 2) -> dict[str, list[Any]]:
    """Run a script that writes what each rank has found to ``rank-<rank>.json`` in a folder, by scenario.

    Returns for each scenario what the ranks have found, in their order.
    """
    status, output = launch(script, ranks, 300, folder)  # seconds: much more than a launch needs
    assert status == 0, output
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    return {name: [each[name] for each in found] for name in found[0]}
