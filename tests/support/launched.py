"""Runs a script on several ranks, and kills all of them if they take too long."""

import os
import signal
import subprocess
import sys
from pathlib import Path


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
