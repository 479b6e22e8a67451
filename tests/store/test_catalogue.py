"""The catalogue spares listings the checkpoints' headers. Whatever happens to it, listings stay right."""

import os
import shutil

import pytest
import torch
from commands import call, data
from committed import checkpoint_of
from hypothesis import given
from hypothesis import strategies as st

import dynaquant as dq
from dynaquant.store import catalogue, container
from dynaquant.store.catalogue import NAME, Catalogue, Line, Listed
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import CheckpointFile
from dynaquant.store.run import Run


@pytest.fixture(autouse=True)
def small_catalogues(monkeypatch):
    monkeypatch.setattr(catalogue, "LEAST", 3)


@pytest.fixture
def run(tmp_path):
    """A run of six checkpoints, and its catalogue."""
    writer, base = WritableRun(tmp_path / "run"), None
    with writer.locked():
        for step in range(1, 7):
            _, base = writer.commit(checkpoint_of(step, {"w": torch.randn(8, 8)}), base)
    return Run(writer.folder)


@pytest.fixture
def opened(monkeypatch):
    """The names of the checkpoints whose headers are read."""
    names, read = [], container.CheckpointFile._read_header

    def counted(self, file):
        names.append(self.path.name)
        return read(self, file)

    monkeypatch.setattr(container.CheckpointFile, "_read_header", counted)
    return names


def wanted(run):
    files = sorted((CheckpointFile(path) for path in run.folder.glob("step-*")), key=lambda file: file.header.sequence)
    return [Listed.of(file) for file in files]


def listed(run):
    """What new readers of the folder find, after a comparison of both ways to list."""
    found = Run(run.folder).listing()[0]
    assert Run(run.folder).summaries()[0] == [each.summary for each in found]
    return found


def test_a_listing_opens_no_checkpoint(run, opened):
    found = listed(run)
    assert opened == []
    assert found == wanted(run)
    assert [each.summary.step for each in found] == [1, 2, 3, 4, 5, 6]


def test_a_listing_leaves_out_how_far_each_weight_has_moved(tmp_path, opened):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with dq.Checkpointer(tmp_path, model, optimizer) as checkpointer:
        for step in range(4):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            checkpointer.save(step).result()
    assert Run(tmp_path).newest().header.record["displaced"]
    assert b"displaced" not in (tmp_path / NAME).read_bytes()
    opened.clear()
    found = listed(Run(tmp_path))
    assert opened == []
    assert found == wanted(Run(tmp_path))
    assert found[-1].record["seconds"]


def test_a_small_run_has_no_catalogue(tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue, "LEAST", 4)
    run = WritableRun(tmp_path)
    with run.locked():
        for step in (1, 2, 3):
            run.commit(checkpoint_of(step, {"w": torch.randn(8, 8)}), None)
        assert not (tmp_path / NAME).exists()
        run.commit(checkpoint_of(4, {"w": torch.randn(8, 8)}), None)
    assert len((tmp_path / NAME).read_bytes().splitlines()) == 4


def test_a_lost_catalogue_is_made_anew_by_the_next_writer(run, opened):
    before = listed(run)
    (run.folder / NAME).unlink()
    assert listed(run) == before
    assert not (run.folder / NAME).exists()  # readers write nothing
    with WritableRun(run.folder).locked():
        pass
    opened.clear()
    assert listed(run) == before
    assert opened == []


def test_a_replaced_a_deleted_and_a_recoded_checkpoint_are_listed_as_they_are(run, opened):
    before = (run.folder / NAME).read_bytes()
    writer = WritableRun(run.folder)
    with writer.locked():
        writer.recode(writer.chain(writer.file(5)), None)
        writer.delete(6)
        writer.commit(checkpoint_of(7, {"w": torch.randn(8, 8)}), None)
    opened.clear()
    assert [each.summary.step for each in listed(run)] == [1, 2, 3, 4, 5, 7]
    assert opened == []
    assert listed(run) == wanted(run)
    (run.folder / NAME).write_bytes(before)  # an older catalogue
    assert listed(run) == wanted(run)


def test_a_copied_run_is_known_by_sizes_and_times_or_headers(run, tmp_path, opened):
    copy = Run(tmp_path / "copy")
    shutil.copytree(run.folder, copy.folder)
    assert [each.summary for each in listed(copy)] == [each.summary for each in listed(run)]
    for path in copy.folder.glob("step-*"):
        os.utime(path, (1, 1))
    assert [each.summary for each in listed(copy)] == [each.summary for each in listed(run)]
    assert b'"modified":1000000000' not in (copy.folder / NAME).read_bytes()  # readers write nothing
    with WritableRun(copy.folder).locked():
        pass
    assert (copy.folder / NAME).read_bytes().count(b'"modified":1000000000') == 6
    assert opened == []


def test_a_copied_file_with_a_damaged_header_is_not_listed(run):
    path = run.path(3)
    content = bytearray(path.read_bytes())
    content[-60] ^= 1
    path.write_bytes(content)
    found, broken = Run(run.folder).listing()
    assert [each.summary.step for each in found] == [1, 2, 4, 5, 6]
    assert [str(error) for error in broken] == [
        f"{path}: altered: its header does not have the checksum that was written with it"
    ]


def test_a_file_that_was_changed_in_place_is_opened(run, opened):
    path, other = run.path(2), run.path(3)
    content = path.read_bytes()
    os.utime(path, (1, 1))
    path.write_bytes(b"x" * len(content))
    assert [str(error) for error in Run(run.folder).summaries()[1]] == [
        f"{path}: not a dynaquant checkpoint (or damaged in its first bytes)"
    ]
    path.unlink()
    other.chmod(0o600)  # a time that a listing does not look at
    assert [summary.step for summary in Run(run.folder).summaries()[0]] == [1, 3, 4, 5, 6]
    assert opened == [path.name]


def test_a_file_of_the_same_size_is_not_taken_for_the_one_that_is_described(run):
    first, second = run.path(2), run.path(3)
    sizes = [b'"bytes":%d' % path.stat().st_size for path in (first, second)]
    lines = (run.folder / NAME).read_bytes().split(b"\n")
    changed = [line.replace(*sizes) if first.name.encode() in line else line for line in lines]
    (run.folder / NAME).write_bytes(b"\n".join(changed))
    first.write_bytes(second.read_bytes())
    assert [str(error) for error in Run(run.folder).summaries()[1]] == [f"{first}: holds step 3; was it renamed?"]


@pytest.mark.parametrize("how", ["fifo", "folder", "unreadable", "other lines", "half", "wrong values"])
def test_a_strange_catalogue_costs_only_time(run, how):
    path, before = run.folder / NAME, listed(run)
    content = path.read_bytes()
    path.unlink()
    if how == "fifo":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "unreadable":
        path.symlink_to(path)
    elif how == "other lines":
        path.write_bytes(b'\n[]\n"a"\n{}\t{}\n\xff\n' + b"[" * 10**5 + b"\n" + content)
    elif how == "half":
        path.write_bytes(content[: len(content) // 2])
    else:
        changes = [(b'"step":2', b'"step":"2"'), (b'"finite":true', b'"finite":1'), (b'"record":{', b'"record":[{')]
        for old, new in changes:
            assert old in content
            path.write_bytes(content.replace(old, new))
            assert listed(run) == before
    assert listed(run) == before
    writer = WritableRun(run.folder)
    with writer.locked():
        writer.commit(checkpoint_of(7, {"w": torch.randn(8, 8)}), None)
    assert listed(run) == wanted(run)


@given(cut=st.integers(0, 10**4), junk=st.binary(max_size=30))
def test_any_torn_catalogue_is_completed(tmp_path_factory, cut, junk):
    folder = tmp_path_factory.mktemp("run")
    writer = WritableRun(folder)
    with writer.locked():
        for step in (1, 2, 3):
            writer.commit(checkpoint_of(step, {"w": torch.ones(2, 2)}), None)
        content = (folder / NAME).read_bytes()
        (folder / NAME).write_bytes(content[: cut % (len(content) + 1)] + junk)
        writer.commit(checkpoint_of(4, {"w": torch.ones(2, 2)}), None)
    assert listed(writer) == wanted(writer)


def test_lines_of_deleted_checkpoints_do_not_stay_forever(tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue, "_STALE_LINES", 5)
    writer = WritableRun(tmp_path)
    for step in range(30):
        with writer.locked():
            writer.commit(checkpoint_of(step, {"w": torch.ones(2, 2)}), None)
            if step >= 3:
                writer.delete(step - 3)
    assert len([line for line in (tmp_path / NAME).read_bytes().splitlines() if line]) <= 2 * 4 + 5 + 2
    assert listed(writer) == wanted(writer)


def test_the_lines_of_a_checkpoint_survive_a_round_trip(run):
    for step in (1, 6):
        line = Line.of(run.file(step))
        name, again = Line.from_bytes(line.to_bytes("a.dqc") + b"\n")
        assert (name, again) == ("a.dqc", line)
        assert again.listed(run.path(step)) == Listed.of(run.file(step))


def test_log_prints_the_same_with_and_without_a_catalogue(run):
    with_it = call("log", run.folder), data("log", run.folder)
    (run.folder / NAME).unlink()
    assert (call("log", run.folder), data("log", run.folder)) == with_it


def test_a_catalogue_in_a_folder_that_is_gone_is_empty(tmp_path):
    assert Catalogue(tmp_path / "none").find(tmp_path / "none" / "a", os.stat(tmp_path)) is None
