"""On a system that has no flock and cannot sync folders, such as Windows, runs can be read but not written."""

import json
import subprocess
import sys

import torch
from torch import nn
from typer.testing import CliRunner

import dynaquant as dq
from dynaquant.cli import app
from dynaquant.store.run import Run
from dynaquant.store.tags import set_tag

WITHOUT = """
import json, os, sys
import torch, torch.distributed.checkpoint, typer, rich.progress  # these know how to do without on their own
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
for name in ("register_at_fork", "sched_getaffinity", "O_DIRECTORY", "O_NONBLOCK", "fork", "getuid", "mkfifo"):
    delattr(os, name)
open_anything, sync = os.open, os.fsync
def no_folders(path, *others, **options):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return open_anything(path, *others, **options)
def what_can_be_written(descriptor):
    os.pwrite(descriptor, b"", 0)
    sync(descriptor)
os.open, os.fsync = no_folders, what_can_be_written

import dynaquant as dq
from dynaquant.cli import app
from typer.testing import CliRunner
run, new, commands = json.loads(sys.argv[1])
model = torch.nn.Linear(40, 30)
dq.load_into(model, run)
assert torch.equal(model.weight, dq.load(run)["model"]["weight"])
said = {"sum": float(dq.load(run, "best")["model"]["weight"].double().sum())}
for command in commands:
    done = CliRunner().invoke(app, command)
    said[command[0]] = [done.exit_code, done.output, repr(done.exception)]
for folder in (run, new):
    try:
        dq.Checkpointer(folder, model)
    except dq.CheckpointError as error:
        said[folder] = str(error)
print(json.dumps(said))
"""


def test_without_flock_a_run_can_be_read_but_not_written(tmp_path):
    torch.manual_seed(0)
    folder, new = str(tmp_path / "run"), str(tmp_path / "new")
    model = nn.Linear(40, 30)
    with dq.Checkpointer(folder, model, keep=dq.Keep(lossless_copy=True)) as ckpt:
        for step in (1, 2):
            with torch.no_grad():
                model.weight += 0.01
            ckpt.save(step).result()
    set_tag(Run(folder), "best", Run(folder).file(1))
    before = sorted((tmp_path / "run").rglob("*"))
    reading = [["log", folder], ["show", folder], ["du", folder], ["verify", folder], ["tag", folder]]
    reading += [["diff", folder, "1", "2"]]
    export = ["export", folder, "best", "--to", "torch", "-o", str(tmp_path / "model.pt")]
    arguments = json.dumps([folder, new, [*reading, export]])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, arguments], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    weight = dq.load(folder, 1)["model"]["weight"]
    assert said["sum"] == float(weight.double().sum())
    for command in reading:
        assert said[command[0]] == [0, CliRunner().invoke(app, command).output, "None"]
    assert said["export"][0] == 0, said["export"]
    assert torch.equal(torch.load(tmp_path / "model.pt")["weight"], weight)
    for path in (folder, new):
        assert said[path] == f"{path}: runs can be written on Linux and macOS only; this system reads them"
    assert sorted((tmp_path / "run").rglob("*")) == before
    assert not (tmp_path / "new").exists()
