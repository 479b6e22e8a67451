"""If the disk is full, the next call raises, the run is unchanged, and saving works again once there is space."""

import errno
import os

import pytest
import torch
from full_disk import contents, files_of_at_most
from training import bits, model_of, named_state, train

import dynaquant as dq
from dynaquant.interop import torchfile
from dynaquant.store.atomic_files import atomic_file

EVERY_WAY = pytest.mark.parametrize(
    "way",
    [{}, {"quality": "lossless"}, {"quality": dq.Quality(configuration=dq.Configuration())}],
    ids=["grid", "lossless", "published"],
)


def training():
    torch.manual_seed(0)
    model = model_of()
    return model, torch.optim.AdamW(model.parameters())


@EVERY_WAY
@pytest.mark.parametrize("room", [0, 100, 2_000])
def test_a_file_that_cannot_grow_leaves_the_run_as_it_was(tmp_path, room, way):
    model, optimizer = training()
    with dq.Checkpointer(tmp_path, model, optimizer, keep=dq.Keep(last=2), **way) as ckpt:
        for step in (1, 2):
            train(model, optimizer)
            ckpt.save(step).result()
        before = contents(tmp_path)
        assert min(map(len, before.values())) > room
        train(model, optimizer)
        with files_of_at_most(room):
            assert isinstance(ckpt.save(3).exception(), OSError)
        with pytest.raises(OSError) as caught:  # noqa: PT011
            ckpt.save(3)
        assert caught.value.errno == errno.EFBIG
        assert contents(tmp_path) == before
        state = bits(named_state(optimizer, model=model))
        assert ckpt.save(3).result().parent == 2
        assert (bits(dq.load(tmp_path)["optimizer"]) == state) == bool(way)
        assert sorted(contents(tmp_path)) == [f"step-{step:012d}.dqc" for step in (2, 3)]


@EVERY_WAY
def test_a_full_disk_raises_an_error_and_the_run_can_still_be_restored(tmp_path, way):
    model, optimizer = training()
    with dq.Checkpointer(tmp_path, model, optimizer, **way) as ckpt:
        ckpt.save(1).result()
        before = contents(tmp_path)
        (tmp_path / "step-000000000002.dqc.tmp").symlink_to("/dev/full")
        ckpt.save(2)
        with pytest.raises(OSError, match="No space left on device") as caught:
            ckpt.restore()
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(tmp_path / "step-000000000002.dqc")
        assert any(note.startswith("the disk is full: free some space") for note in caught.value.__notes__)
        assert contents(tmp_path) == before
        assert ckpt.restore() == 1
        assert ckpt.save(2).result().step == 2


@EVERY_WAY
def test_an_error_that_the_future_has_raised_does_not_end_the_next_save(tmp_path, way):
    with dq.Checkpointer(tmp_path, *training(), **way) as ckpt:
        ckpt.save(1).result()
        (tmp_path / "step-000000000002.dqc.tmp").symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left on device"):
            ckpt.save(2).result()
        assert ckpt.save(3).result().step == 3
        (tmp_path / "step-000000000004.dqc.tmp").symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left on device"):
            ckpt.save(4).result(timeout=60)
    assert dq.Checkpointer(tmp_path, *training(), **way).steps() == [1, 3]


@pytest.mark.parametrize("late", [False, True])
def test_an_error_that_a_callback_has_seen_is_raised_by_the_next_save(tmp_path, late):
    with dq.Checkpointer(tmp_path, *training()) as ckpt:
        (tmp_path / "step-000000000001.dqc.tmp").symlink_to("/dev/full")
        save = ckpt.save(1)
        if late:  # then this thread calls the callback
            assert save.exception() is not None
        save.add_done_callback(lambda done: print(done.result().step))  # what it raises is only logged
        with pytest.raises(OSError, match="No space left on device"):
            ckpt.save(2)
        assert ckpt.save(2).result().step == 2


@pytest.mark.parametrize("full", ["step-000000000002.dqc.tmp", "exact-000000000002-000000000002.dqc.tmp"])
def test_without_space_for_the_checkpoint_or_its_lossless_copy_the_last_exact_state_stays(tmp_path, full):
    model, optimizer = training()
    with dq.Checkpointer(tmp_path, model, optimizer, keep=dq.Keep(lossless_copy=True)) as ckpt:
        train(model, optimizer)
        ckpt.save(1).result()
        state = bits(model.state_dict()), bits(optimizer.state_dict())
        before = contents(tmp_path)
        (tmp_path / full).symlink_to("/dev/full")
        train(model, optimizer)
        assert ckpt.save(2).exception().errno == errno.ENOSPC
        assert contents(tmp_path) == before
        with pytest.raises(OSError, match="No space left on device"):
            ckpt.restore()
        assert ckpt.restore() == 1
        assert (bits(model.state_dict()), bits(optimizer.state_dict())) == state
        ckpt.save(2).result()
        assert sorted(contents(tmp_path)) == [
            "exact-000000000002-000000000002.dqc",
            "step-000000000001.dqc",
            "step-000000000002.dqc",
        ]


@EVERY_WAY
def test_the_error_of_a_full_disk_names_the_file(tmp_path, way):
    ckpt = dq.Checkpointer(tmp_path, *training(), **way)
    with files_of_at_most(1000):
        error = ckpt.save(7).exception()
    with pytest.raises(OSError):  # noqa: PT011
        ckpt.close()
    said = [str(error), str(getattr(error, "filename", "")), *getattr(error, "__notes__", [])]
    assert "step-000000000007" in " ".join(said)


@EVERY_WAY
def test_a_disk_that_fills_up_while_children_are_recoded_loses_nothing(tmp_path, way):
    """Re-coding writes a keyframe in place of a small delta. The disk may have space for the delta only."""
    model, optimizer = training()
    with dq.Checkpointer(tmp_path, model, optimizer, keep=dq.Keep(last=2), **way) as ckpt:
        ckpt.save(1).result()
        ckpt.save(2).result()
        keyframe = os.path.getsize(tmp_path / "step-000000000001.dqc")
        with files_of_at_most(keyframe - 5000):
            error = ckpt.save(3).exception()
        assert isinstance(error, OSError)
        assert "step 3 is saved" in " ".join(error.__notes__)
        assert sorted(contents(tmp_path)) == [f"step-{step:012d}.dqc" for step in (1, 2, 3)]
        states = [bits(dq.load(tmp_path, step)["model"]) for step in (1, 2, 3)]
        assert states[0] == states[1] == states[2]
        with pytest.raises(OSError):  # noqa: PT011
            ckpt.save(4)
        ckpt.save(4).result()
        assert sorted(contents(tmp_path)) == [f"step-{step:012d}.dqc" for step in (3, 4)]


def test_a_full_disk_in_torch_save_names_the_file_and_says_what_to_do(tmp_path):
    with pytest.raises(OSError, match=r"No space left on device: '.*model\.pt'") as caught:
        fill_disk(tmp_path / "model.pt")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.__notes__ == [
        "the disk is full: free some space and try again, or choose a path on another disk"
    ]
    assert os.listdir(tmp_path) == []


def fill_disk(out):
    with atomic_file(out) as file:
        os.dup2(os.open("/dev/full", os.O_WRONLY), file.fileno())
        torchfile.write(file, {"w": torch.randn(30_000)})
