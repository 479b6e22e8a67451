"""Tags: names of checkpoints."""

import errno
import json
import os
import re

import pytest
import torch
from torch import nn

import dynaquant as dq
from dynaquant.store import tags
from dynaquant.store.commit import WritableRun
from dynaquant.store.retention import Retention, prune
from dynaquant.store.tags import FOLDER, remove_tag, set_tag, tagged_file, tags_of


def save(folder, *steps: int, model=None, **options) -> None:
    model = model or nn.Linear(4, 4)
    with dq.Checkpointer(folder, model, **options) as ckpt:
        for step in steps:
            with torch.no_grad():
                model.weight += torch.randn(4, 4)
            ckpt.save(step).result()


@pytest.fixture
def run(tmp_path):
    save(tmp_path, 1, 2, 3)
    return WritableRun(tmp_path)


def names(run) -> dict[str, int]:
    return {tag.name: tag.step for tag in tags_of(run)}


def test_a_tag_names_its_checkpoint(run):
    set_tag(run, "best", run.file(2))
    set_tag(run, "v1.0-rc+1", run.file(2))
    set_tag(run, "a", run.file(3))
    assert names(run) == {"a": 3, "best": 2, "v1.0-rc+1": 2}
    assert tagged_file(run, "best").header.step == 2
    remove_tag(run, "best")
    assert names(run) == {"a": 3, "v1.0-rc+1": 2}


def test_a_tag_is_moved_to_another_checkpoint_only_by_force(run):
    set_tag(run, "best", run.file(1))
    set_tag(run, "best", run.file(1))  # the same tag again is no error
    with pytest.raises(dq.CheckpointError, match="best is the tag of step 1; --force"):
        set_tag(run, "best", run.file(2))
    assert names(run) == {"best": 1}
    set_tag(run, "best", run.file(2), force=True)
    assert names(run) == {"best": 2}
    assert len(list((run.folder / FOLDER).iterdir())) == 1


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_hard_links_takes_tags(run, monkeypatch, error):
    def no_links(*_, **__):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", no_links)
    set_tag(run, "best", run.file(1))
    set_tag(run, "best", run.file(1))  # the same tag again is no error
    with pytest.raises(dq.CheckpointError, match="best is the tag of step 1; --force"):
        set_tag(run, "best", run.file(2))
    (run.folder / FOLDER / "link").symlink_to("nothing")
    with pytest.raises(dq.CheckpointError, match="link is the tag of another file"):
        set_tag(run, "link", run.file(2))
    assert names(run) == {"best": 1}
    assert len(list((run.folder / FOLDER).iterdir())) == 2
    save(run.folder, 1)  # another training begins, and tags what is there
    newest = run.holding(3, next(tag.identity for tag in tags_of(run) if tag.name.startswith("earlier-3-")))
    assert newest.header.step == 3


def test_a_tag_that_a_broken_disk_does_not_write_is_an_error(run, monkeypatch):
    def broken(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", broken)
    with pytest.raises(OSError, match="Input/output error"):
        set_tag(run, "best", run.file(1))
    assert not tags_of(run)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc/x", "12", "-x", ".hidden", "a b", "ü", "a" * 101, "a\n"]
)
def test_a_name_that_is_not_allowed_is_refused(run, name):
    (run.folder.parent / "x").write_text("precious")
    with pytest.raises(dq.CheckpointError, match="cannot be a tag"):
        set_tag(run, name, run.file(1))
    with pytest.raises(dq.CheckpointError, match="no tag"):
        remove_tag(run, name)
    with pytest.raises(dq.CheckpointError, match="no tag"):
        tagged_file(run, name)
    assert (run.folder.parent / "x").read_text() == "precious"


def test_an_unknown_tag_is_an_error_that_lists_the_others(run):
    with pytest.raises(dq.CheckpointError, match=r"no tag 'best' \(tags: none\)"):
        tagged_file(run, "best")
    set_tag(run, "last", run.file(3))
    with pytest.raises(dq.CheckpointError, match=r"no tag 'best' \(tags: last\)"):
        remove_tag(run, "best")


def test_a_tag_does_not_refer_to_a_checkpoint_that_replaces_its_own(run):
    set_tag(run, "best", run.file(2))
    earlier = run.file(2).header.identity
    save(run.folder, 2)
    assert run.file(2).header.identity != earlier == tagged_file(run, "best").header.identity
    set_tag(run, "best", run.file(2), force=True)
    assert tagged_file(run, "best").header.identity == run.file(2).header.identity


def test_files_that_are_not_tags_are_skipped(run):
    set_tag(run, "best", run.file(2))
    folder = run.folder / FOLDER
    for name, content in (
        *(("a", b""), ("b", b"[]"), ("c", b"{}"), ("d", b"\xff"), ("e", b'{"step": true, "identity": ""}')),
        *((".best.1.tmp", b'{"step": 1, "identity": ""}'), ("12", b'{"step": 1, "identity": ""}')),
    ):
        (folder / name).write_bytes(content)
    (folder / "f").mkdir()
    os.mkfifo(folder / "g")
    (folder / "h").symlink_to("/dev/zero")
    (folder / "i").write_bytes(b'{"step": 1, "identity": "' + b"0" * 10**7 + b'"}')
    for i, step in enumerate((-1, 1.5, 2**63, int("9" * 400), "1", None)):
        (folder / f"step{i}").write_text(json.dumps({"step": step, "identity": ""}))
    (folder / "j").write_text('{"step": ' + "9" * 5000 + ', "identity": ""}')
    (folder / "k").write_text("[" * 900)
    (folder / "l").write_text('{"step": 1, "identity": "' + "\ud800" * 3 + '"}', errors="surrogatepass")
    assert names(run) == {"best": 2}
    for name in ("g", "step3", "j", "k"):
        with pytest.raises(dq.CheckpointError, match=f"there is no tag '{name}'"):
            dq.load(run.folder, name)
    with pytest.raises(dq.CheckpointError, match="there is no tag 'f'"):
        remove_tag(run, "f")  # a folder
    remove_tag(run, "step3")


def test_a_file_in_place_of_the_tag_folder_is_an_error(run):
    (run.folder / FOLDER).write_text("")
    assert names(run) == {}
    with pytest.raises(dq.CheckpointError, match=r"tags is a file"):
        set_tag(run, "best", run.file(1))


@pytest.mark.parametrize("step", [-1, 2**63, int("9" * 400), int("9" * 4000)], ids=["negative", "large", "400", "4000"])
def test_a_step_that_no_checkpoint_can_have_is_an_error(run, step):
    with pytest.raises(dq.CheckpointError, match=r"a step is an integer from 0 to 2\*\*63 - 1"):
        dq.load(run.folder, step)


def test_a_tag_of_a_deleted_checkpoint_is_an_error(run):
    set_tag(run, "best", run.file(3))
    run.delete(3)
    with pytest.raises(dq.CheckpointError, match="the checkpoint of step 3 no longer exists"):
        tagged_file(run, "best")


def test_pruning_keeps_tagged_checkpoints_and_their_values(run):
    set_tag(run, "best", run.file(1))
    before = dq.load(run.folder, 1)["model"]
    with run.locked():
        prune(run, Retention(dq.Keep(last=1)))
    assert run.steps() == [1, 3]
    assert all(torch.equal(before[name], value) for name, value in dq.load(run.folder, 1)["model"].items())


def test_while_a_tag_cannot_be_read_nothing_is_deleted(run, monkeypatch):
    set_tag(run, "best", run.file(1))

    def fails(path):
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    with monkeypatch.context() as patched, run.locked():
        patched.setattr(tags, "open_file", fails)
        (note,) = prune(run, Retention(dq.Keep(last=1)))
        assert re.search(r"nothing was deleted: .*best cannot be read \(Too many open files\)", note)
        run.delete_unneeded()
        with pytest.raises(dq.CheckpointError, match="make it readable, or delete it"):
            tags_of(run)
    assert run.steps() == [1, 2, 3]
    with run.locked():
        assert prune(run, Retention(dq.Keep(last=1))) == []
    assert run.steps() == [1, 3]


def test_a_training_keeps_checkpoints_that_are_tagged_while_it_writes(tmp_path):
    model = nn.Linear(4, 4)
    with dq.Checkpointer(tmp_path, model, keep=dq.Keep(last=1)) as ckpt:
        ckpt.save(1).result()
        run = WritableRun(tmp_path)
        set_tag(run, "best", run.file(1))
        for step in (2, 3):
            ckpt.save(step).result()
        assert run.steps() == [1, 3]
        remove_tag(run, "best")
        ckpt.save(4).result()
        assert run.steps() == [4]


def test_load_and_restore_accept_tags_as_steps(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with dq.Checkpointer(tmp_path, model, quality="lossless") as ckpt:
        for step in (1, 2):
            ckpt.save(step).result()
            nn.init.normal_(model.weight)
        set_tag(WritableRun(tmp_path), "first", WritableRun(tmp_path).file(1))
        assert ckpt.restore("first") == 1
        with pytest.raises(dq.CheckpointError, match="no tag 'second'"):
            ckpt.restore("second")
    other = nn.Linear(4, 4)
    dq.load_into(other, tmp_path, step="first")
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(dq.load(tmp_path, "first")["model"]["weight"], model.weight)
