"""Runs of format version 4 are converted to version 1: the golden files of version 4 decode to what they held."""

import json
import shutil
from pathlib import Path

import pytest
from commands import call, data
from format_decoder import decode
from make_golden import summary

from dynaquant.errors import CheckpointError
from dynaquant.store.run import Run
from dynaquant.store.tags import set_tag
from dynaquant.store.verifying import verify_run
from dynaquant.store.version_4 import convert
from dynaquant.store.writer_lock import lock_for_writing

OLD = Path(__file__).parents[1] / "golden" / "version-4"


@pytest.fixture
def old(tmp_path):
    return Path(shutil.copytree(OLD, tmp_path / "run"))


def test_a_converted_run_holds_what_it_held(old):
    expected = json.loads((old / "expected.json").read_text())
    said = call("convert-run", old)
    assert "converted 17 files" in said
    known = {}
    for step, wanted in expected.items():
        assert summary(*decode(old, int(step), known)) == wanted
    assert dict(verify_run(Run(old))) == {int(step): None for step in expected}
    assert [path.name for path in old.iterdir() if path.is_dir()] == ["parts"]


def test_a_conversion_that_was_interrupted_goes_on(old):
    files = convert(old)
    for _ in range(15):
        next(files)
    files.close()
    assert len(list(convert(old))) == 2
    assert list(convert(old)) == []
    assert all(error is None for _, error in verify_run(Run(old)))
    set_tag(Run(old), "best", Run(old).file(130))
    assert data("show", old, "best")["step"] == 130


def test_a_single_file_is_converted(old):
    for name in ("frozen-00748dc0d95a71e0.dqc", "step-000000000010.dqc"):
        assert list(convert(old / name)) == [old / name]
    assert Run(old).load(Run(old).file(10))


def test_a_reader_says_how_to_convert_a_file_of_version_4(old):
    with pytest.raises(CheckpointError, match=r"format version 4; convert .* dynaquant convert-run FOLDER"):
        Run(old).file(10)


def test_a_run_that_another_process_writes_is_not_converted(old):
    with lock_for_writing(old), pytest.raises(CheckpointError, match="is writing to this run"):
        list(convert(old))


@pytest.mark.parametrize("at", [0, 8, -20, -5, -200])
def test_a_damaged_file_is_refused_and_stays(old, at):
    path = old / "step-000000000010.dqc"
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="step-000000000010"):
        list(convert(path))
    assert path.read_bytes() == content


def test_a_missing_part_is_an_error_and_the_checkpoint_stays(old):
    path = old / "step-000000000130.dqc"
    before = path.read_bytes()
    (next(old.glob("parts-000000000130-*")) / "part-00001.dqc").unlink()
    with pytest.raises(OSError, match="part-00001"):
        list(convert(path))
    assert path.read_bytes() == before
