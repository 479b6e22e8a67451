"""Trainings with a framework in processes of their own, which a test may kill.

A process forks one training for every line of input, as importing a framework takes seconds. A line is a JSON
dictionary of arguments. With such a dictionary on the command line, the process trains once, as one of several ranks.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def say(word: str, value: Any) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(word, json.dumps(value), flush=True)


def serve(train: Callable[..., Any]) -> None:
    """Run a training for every line of input, or one. It says its steps; what it returns is its result."""
    if len(sys.argv) > 1:
        say("result", train(**json.loads(sys.argv[1])))
        return
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            say("started", os.getpid())
            say("result", train(**json.loads(line)))
            os._exit(0)
        say("ended", os.waitpid(child, 0)[1])


@contextmanager
def trainings(script: Path) -> Iterator[Callable[..., SimpleNamespace]]:
    """Yield a function that lets a script train, and sends the training a signal after a step.

    The function returns the steps, what else the training has said, and its exit status.
    """
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:

        def train(folder, at=None, sent=signal.SIGKILL, **arguments) -> SimpleNamespace:
            process.stdin.write(json.dumps({"folder": str(folder), **arguments}) + "\n")
            found = SimpleNamespace(started=0, steps=[], resumed=None, result=None, ended=None)
            for line in process.stdout:
                word, _, value = line.partition(" ")
                if word == "step":
                    found.steps.append(int(value))
                    if int(value) == at:
                        os.kill(found.started, sent)
                elif word in vars(found):
                    setattr(found, word, json.loads(value))
                if word == "ended":
                    return found
            raise AssertionError("the process has ended")

        try:
            yield train
        finally:
            process.kill()  # a process that was forked meanwhile may hold the other end of its input open


def result_of(output: str) -> dict[str, Any]:
    """Return the result of a training on several ranks from their output."""
    return json.loads(next(line for line in output.splitlines() if line.startswith("result ")).partition(" ")[2])
