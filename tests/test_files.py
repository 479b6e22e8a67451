"""Files and folders that are there whole or not at all, after a power cut too."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import dynaquant as dq
from dynaquant.files import new_folder, replacing
from dynaquant.packing import Packer, compress
from dynaquant.run import Run
from dynaquant.tags import set_tag


@pytest.fixture
def done(monkeypatch):
    """What is made durable and what gets a name, in order: pairs of what is done and the file that it is done to."""
    order = []

    def noting(what, do, path_of):
        def noted(first, *others, **options):
            order.append((what, path_of(first)))
            return do(first, *others, **options)

        return noted

    monkeypatch.setattr(os, "fsync", noting("durable", os.fsync, lambda number: os.readlink(f"/proc/self/fd/{number}")))
    monkeypatch.setattr(os, "replace", noting("named", os.replace, str))
    monkeypatch.setattr(os, "link", noting("named", os.link, str))
    return order


def test_a_file_is_durable_before_it_gets_its_name_and_the_name_after_that(tmp_path, done):
    with replacing(tmp_path / "out") as file:
        file.write(b"whole")
    temporary = str(tmp_path / f"out.dynaquant-{os.getpid()}.tmp")
    assert done == [("durable", temporary), ("named", temporary), ("durable", str(tmp_path))]
    assert (tmp_path / "out").read_bytes() == b"whole"


def test_so_is_all_of_a_folder(tmp_path, done):
    with new_folder(tmp_path / "out") as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_bytes(b"whole")
        (folder / "index").write_text("{}")
    temporary = str(tmp_path / f"out.dynaquant-{os.getpid()}.tmp")
    assert sorted(done[:-2]) == [
        ("durable", f"{temporary}{inside}") for inside in ("", "/deep", "/deep/file", "/index")
    ]
    assert done[-2:] == [("named", temporary), ("durable", str(tmp_path))]


def test_so_are_checkpoints_compressed_files_and_tags(tmp_path, done):
    with dq.Checkpointer(tmp_path / "run", nn.Linear(4, 4)) as ckpt:
        ckpt.save(1).result()
    set_tag(Run(tmp_path / "run"), "best", Run(tmp_path / "run").file(1))
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    compress(tmp_path / "m.pt", tmp_path / "m.dqc", Packer())
    names = [i for i, (what, _) in enumerate(done) if what == "named"]
    assert len(names) == 4  # the compressed file has one of its own before it is complete
    for i in names:
        assert done[i - 1][0] == "durable"
    for i in names[:3]:
        assert done[i - 1] == ("durable", done[i][1])
        assert done[i + 1] == ("durable", os.path.dirname(done[i][1]))
    assert done[names[3] + 1] == ("durable", str(tmp_path))


def half(place) -> None:
    with place as out:
        if isinstance(out, Path):
            (out / "file").write_text("half")
        else:
            out.write(b"half")
        raise ZeroDivisionError


def test_on_an_error_nothing_is_left_and_nothing_changed(tmp_path):
    (tmp_path / "out").write_text("precious")
    for place in (replacing(tmp_path / "out"), new_folder(tmp_path / "new")):
        with pytest.raises(ZeroDivisionError):
            half(place)
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out").read_text() == "precious"
