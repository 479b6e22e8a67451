"""A command deletes the temporary files of a killed command for the same output."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from commands import call
from safetensors.torch import save_file

from dynaquant.interop.packing import Packer, compress
from dynaquant.store.atomic_files import atomic_file, atomic_folder


def killed(folder, *arguments) -> None:
    """Runs a command until it has begun to write a temporary file, and kills it."""
    before = set(os.listdir(folder))
    with subprocess.Popen([sys.executable, "-m", "dynaquant.cli", *map(str, arguments)]) as process:
        while set(os.listdir(folder)) == before and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert set(os.listdir(folder)) > before, "it was done before it could be killed"


@pytest.mark.parametrize("to", ["compress", "hf", "safetensors"])
def test_repeating_a_killed_command_deletes_its_temporary_files(tmp_path, to):
    model, small, out = tmp_path / "m.safetensors", tmp_path / "m.dqc", tmp_path / "out" / "new"
    out.parent.mkdir()
    save_file({f"{i}": torch.randn(512, 512) for i in range(16)}, model)
    if to == "compress":
        command = ["compress", model, "-o", out]
    else:
        compress(model, small, Packer("lossless"))
        command = ["decompress", small, "-o", out, "--to", to]
    killed(out.parent, *command)
    call(*command)
    assert os.listdir(out.parent) == ["new"]


WRITING = """
import sys, pathlib
from dynaquant.store.atomic_files import {what}
with {what}(pathlib.Path(sys.argv[1])):
    print("writing", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["out", "n" * 255])
@pytest.mark.parametrize("place", [atomic_file, atomic_folder])
def test_a_file_that_another_process_is_writing_is_not_deleted(tmp_path, place, name):
    code = WRITING.format(what=place.__name__)
    command = [sys.executable, "-c", code, str(tmp_path / name)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"writing\n"
        with atomic_file(tmp_path / name) as file:
            file.write(b"mine")
        there = os.listdir(tmp_path)
        (tmp_path / name).unlink()
        other.communicate(b"")
    assert len(there) == 2
    assert other.returncode == 0
    assert os.listdir(tmp_path) == [name]


def test_files_of_other_programs_are_left_alone(tmp_path):
    names = ["out.tmp", "out.1.tmp", "out.dynaquant-x.tmp", "other.dynaquant-1.tmp", "out.dynaquant-1.tmp2"]
    for name in names:
        (tmp_path / name).write_text("precious")
    with atomic_file(tmp_path / "out"):
        pass
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "out"])
