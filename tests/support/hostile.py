"""Runs every reader on hostile files and folders, in a process with little memory. For ``test_hostile.py``.

Usage: python hostile.py FOLDER. Each folder in it holds one case. Prints the outcomes as JSON.
"""

import contextlib
import io
import json
import os
import resource
import signal
import sys
import traceback
import warnings
from pathlib import Path

import plotly.offline  # noqa: F401  # imported before memory is limited
import torch
from torch import nn

import dynaquant as dq
from dynaquant import cli
from dynaquant.report import page  # noqa: F401

SECONDS = 180
"""Of wall time, as a reader may also wait for ever. The slowest takes 30 on an idle core; machines are shared."""
MEMORY = 3 << 30
"""Bytes of address space that the readers may use in addition."""


class TooLongError(BaseException):
    """A reader took too long. No ``except Exception`` catches it."""


def too_long(*_: object) -> None:
    raise TooLongError


def readers(run: str, out: Path) -> dict[str, list[str]]:
    """Return the commands by name."""
    step = ["1"] if os.path.isdir(run) else []
    return {
        "log": ["log", run],
        "log --json": ["log", run, "--json"],
        "show": ["show", run],
        "show step": ["show", run, *step, "--tensor", "w"],
        "diff": ["diff", run, "1", "2"],
        "du": ["du", run],
        "verify": ["verify", run],
        "report": ["report", run, "-o", str(out / "report.html")],
        "export": ["export", run, "-o", str(out / "model.safetensors")],
        "export torch-state": ["export", run, "--to", "torch-state", "-o", str(out / "state.pt")],
        "export tag": ["export", run, "hostile", "-o", str(out / "tag.safetensors")],
        "tag": ["tag", run],
        "decompress": ["decompress", run, "-o", str(out / "back.safetensors")],
        "unpack": ["unpack", run, "-o", str(out / "unpacked")],
    }


def command(arguments: list[str]) -> dict:
    """Run a command. Returns its exit code and output, or its traceback."""
    sys.argv = ["dynaquant", *arguments]
    said, failed = io.StringIO(), io.StringIO()
    code, trace = 0, None
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(failed):
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            trace = traceback.format_exc()
    return {"code": code, "out": said.getvalue()[-3000:], "err": failed.getvalue(), "trace": trace}


def call(function, *arguments, **options) -> dict:
    """Call a function. Returns its error in the form of a command's outcome."""
    try:
        function(*arguments, **options)
    except dq.DynaquantError as error:
        return {"code": 1, "out": "", "err": f"dynaquant: {error}", "trace": None}
    except BaseException:
        return {"code": None, "out": "", "err": "", "trace": traceback.format_exc()}
    return {"code": 0, "out": "", "err": "", "trace": None}


def timed(function, *arguments, **options) -> dict:
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return function(*arguments, **options)
    except TooLongError:
        return {"code": None, "out": "", "err": "", "trace": "too long"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    signal.signal(signal.SIGALRM, too_long)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # PyTorch warns about experimental dtypes
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    found: dict[str, dict[str, dict]] = {}
    for case in sorted(Path(sys.argv[1]).iterdir()):
        run, out = str(case / "run"), case / "out"
        out.mkdir()
        results = {name: timed(command, arguments) for name, arguments in readers(run, out).items()}
        results["load"] = timed(call, dq.load, run)
        results["load tag"] = timed(call, dq.load, run, "hostile") if os.path.isdir(run) else results["load"]
        results["load_into"] = timed(call, dq.load_into, nn.Linear(2, 2), run)
        found[case.name] = results
    print(json.dumps(found))


if __name__ == "__main__":
    main()
