"""Runs scripts on several ranks, as the launcher of PyTorch does, but each rank is a fork of this process.

This process has imported what ranks need, so they start in a fraction of a second. It starts no threads. It reads
launches from stdin, one a line, and answers each with a line: the id of the process group of the ranks, then the exit
status. ``launched`` runs it.

launcher.py MODULE …  with the modules to import
"""

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path

from torch.distributed import TCPStore

MODULES = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.testing",
    "dynaquant",
    "dynaquant.restore.restorer",
)
PATIENCE = 30.0
"""Seconds in which ranks must end after another one has failed."""


def answer(number):
    os.write(1, f"{number}\n".encode())


def next_launch():
    """Return the next launch in a fork of this process, after this process has answered all before it."""
    for line in sys.stdin:
        if not (child := os.fork()):
            os.setsid()
            return json.loads(line)
        answer(child)
        answer(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit()


def next_rank(launch):
    """Return the number of the rank in each of the forks of this process. This process waits for all, and ends."""
    listening = socket.create_server(("localhost", 0))
    os.environ.clear()
    os.environ |= launch["environment"] | {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(listening.getsockname()[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 may end before the others
        "WORLD_SIZE": str(launch["ranks"]),
        "LOCAL_WORLD_SIZE": str(launch["ranks"]),
    }
    os.chdir(launch["folder"])
    output = os.open(launch["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    left = set()
    for rank in range(launch["ranks"]):
        if not (child := os.fork()):
            listening.close()
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return rank
        left.add(child)
    port, descriptor = listening.getsockname()[1], listening.detach()
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    status = waited_for(left)
    del store
    os._exit(status)


def waited_for(left):
    """Wait until all ranks have ended. If one fails, end the others. Returns 0 if none failed."""
    status, deadline = 0, None
    while left:
        process, code = os.waitpid(-1, os.WNOHANG)
        if not process:
            if deadline is not None and time.monotonic() > deadline:
                kill(left, signal.SIGKILL)
            time.sleep(0.01)
            continue
        left.discard(process)
        if code and not status:
            print(f"a rank ended with status {os.waitstatus_to_exitcode(code)}", file=sys.stderr, flush=True)
            status, deadline = 1, time.monotonic() + PATIENCE
            kill(left, signal.SIGTERM)
    return status


def kill(processes, number):
    for process in processes:
        os.kill(process, number)


for module in (*MODULES, *sys.argv[1:]):
    importlib.import_module(module)
launch = next_launch()
next_rank(launch)
script = Path(launch["script"])
sys.argv = [str(script), *launch["arguments"]]
sys.path.insert(0, str(script.parent))
runpy.run_path(str(script), run_name="__main__")
