"""Runs a script on several ranks, and kills all of them if they take too long."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

LAUNCHER = Path(__file__).with_name("launcher.py")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Of ranks: each has one thread, and no accelerator, which they might have to share."""
STARTED: list[subprocess.Popen[bytes]] = []


@cache
def launcher(modules: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Start a launcher whose ranks have imported these modules. It ends with this process."""
    process = subprocess.Popen(
        [sys.executable, LAUNCHER, *modules],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    STARTED.append(process)
    return process


def cpu_seconds() -> float:
    """Return the CPU seconds of all launchers and their ranks."""
    stats = [Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split() for process in STARTED]
    return sum(int(ticks) for fields in stats for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def launch(
    script: Path, ranks: int, timeout: float, *arguments: object, modules: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Run a script on several ranks. Returns 1 if one of them fails, else 0, and their output.

    timeout: in seconds. modules: what the ranks need not import themselves.
    """
    process = launcher(modules)
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.NamedTemporaryFile("r", suffix=".txt") as output:
        request = {
            "script": str(script),
            "ranks": ranks,
            "arguments": [str(argument) for argument in arguments],
            "environment": os.environ | ENVIRONMENT,
            "folder": str(Path.cwd()),
            "output": output.name,
        }
        process.stdin.write(json.dumps(request).encode() + b"\n")
        group = int(process.stdout.readline())
        in_time = select.select([process.stdout], [], [], timeout)[0]
        if not in_time:
            os.killpg(group, signal.SIGKILL)
        status = int(process.stdout.readline())
        if not in_time:
            raise subprocess.TimeoutExpired([script, *arguments], timeout, output.read())
        return status, output.read()


def launch_anew(script: Path, ranks: int, timeout: float, *arguments: object) -> tuple[int, str]:
    """Run a script on several ranks under the launcher of PyTorch, for what forks do not show. As ``launch``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with subprocess.Popen(
        [*command, script, *map(str, arguments)],
        env=os.environ | ENVIRONMENT,
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
