"""Readers beside a writer: an open checkpoint can be read to its end, and a reader retries if the run has changed."""

import multiprocessing
import os
import resource
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import readers
import torch
from committed import checkpoint_of, damage_levels, series
from crafted import entry, header, write
from readers import READERS
from training import bits

import dynaquant as dq
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.errors import CheckpointError, RunChangedError
from dynaquant.report.statistics import statistics_of
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
from dynaquant.store.chain import ATTEMPTS, detect_run_changes
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import CheckpointFile
from dynaquant.store.reading import load_tensor
from dynaquant.store.run import Run
from dynaquant.store.verifying import damage


class Training:
    """A training that saves more checkpoints when called, and keeps the newest ``keep``."""

    def __init__(self, folder: Path, keep: int = 2, exact: bool = False) -> None:
        self.folder, self.model, self.step = folder, torch.nn.Linear(60, 60), 0
        self._keep = dq.Keep(last=keep, lossless_copy=exact)
        self._quality = dq.Quality(configuration=dq.GridConfiguration(-200)) if exact else "lossless"

    def __call__(self, steps: int = 1) -> None:
        with dq.Checkpointer(self.folder, self.model, quality=self._quality, keep=self._keep) as ckpt:
            ckpt.restore()
            for _ in range(steps):
                self.step += 1
                with torch.no_grad():
                    self.model.weight += 0.01 * torch.randn(60, 60)
                ckpt.save(self.step).result()


@contextmanager
def acting_before_a_read(monkeypatch, name: str, go_on, times: int = 1):
    """Runs an action before the next headers are read from files of that name."""
    plain, left = CheckpointFile.__init__, times

    def opening(self, path):
        nonlocal left
        if path.name.startswith(name) and left:
            left -= 1
            with monkeypatch.context() as inner:
                inner.setattr(CheckpointFile, "__init__", plain)
                go_on()
        plain(self, path)

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointFile, "__init__", opening)
        yield
    assert left == 0


# Open files stay readable


@pytest.mark.parametrize("exact", [False, True])
def test_an_open_checkpoint_is_read_after_the_training_has_deleted_it(tmp_path, exact):
    training = Training(tmp_path, exact=exact)
    training(3)
    stored, weight = StoredCheckpoint(tmp_path), bits(training.model.weight)
    assert len(stored.chain) == (1 if exact else 3 - 1)
    training(5)
    assert not any(file.path.exists() and file.is_at(file.path) for file in stored.chain)
    assert bits(stored.tensors["model.weight"]) == weight
    model = torch.nn.Linear(60, 60)
    stored.with_retries(lambda: model.weight.data.copy_(stored.tensors["model.weight"]))
    assert bits(model.weight) == weight


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not list open files")
def test_no_file_stays_open(tmp_path):
    training = Training(tmp_path, keep=4)
    training(4)
    before = open_files()
    dq.load(tmp_path)
    dq.load(tmp_path, keys=["weight"])
    dq.load_into(torch.nn.Linear(60, 60), tmp_path)
    with pytest.raises(KeyError):
        dq.load(tmp_path, keys=["nope"])
    stored = StoredCheckpoint(tmp_path)
    assert open_files() == before + 4
    del stored
    files = Run(tmp_path).files()[0]
    assert len(files) == 4
    assert open_files() == before


def test_a_chain_longer_than_files_can_be_open_is_read(tmp_path):
    above = header(entry(), step=0)
    write(tmp_path, above, b"\0" * 8)
    for step in range(1, 1500):
        parent = {"step": step - 1, "identity": above["identity"]}
        reference = entry(size=0, coding={"kind": "reference"})
        above = header(reference, step=step, sequence=step + 1, parent=parent)
        write(tmp_path, above)
    run = Run(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + 100, hard))
    try:
        assert run.load(run.file(1499))["w"].tolist() == [0.0, 0.0]
        assert len(run.files()[0]) == 1500
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_closed_file_is_read_only_if_it_was_not_replaced(tmp_path):
    run = WritableRun(tmp_path)
    series(run, [1])
    file = run.files()[0][0]
    assert load_tensor([file], "b").tolist() == [1.0, 1.0, 1.0]
    run.commit(checkpoint_of(1, {"w": torch.randn(80, 50)}), None)
    with pytest.raises(RunChangedError, match=r"step-000000000001\.dqc: was replaced while it was read"):
        load_tensor([file], "b")
    run.delete(1)
    with pytest.raises(RunChangedError, match="cannot be read"), detect_run_changes([file]):
        load_tensor([file], "b")


# Retries


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_retries_if_the_training_deletes_the_checkpoint_it_looks_for(tmp_path, monkeypatch, reader, exact):
    monkeypatch.setattr(readers, "DEPTH", 0)
    monkeypatch.setattr(readers, "step_in", lambda _weights: 0)
    monkeypatch.setattr(readers, "model", lambda: torch.nn.Linear(60, 60))
    run, out = tmp_path / "run", tmp_path / "out"
    out.mkdir()
    training = Training(run, exact=exact)
    training(2)
    names = ["step-000000000001", "step-000000000002", *(["exact-"] if exact else [])]
    for name in names:
        with suppress(AssertionError), acting_before_a_read(monkeypatch, name, lambda: training(3)):
            if reader == "show --tensor":
                readers.calls("show", run, "--tensor", "model.weight")
            else:
                READERS[reader](run, out)


@pytest.mark.parametrize("exact", [False, True])
def test_load_returns_the_newest_state_even_if_the_training_commits_meanwhile(tmp_path, monkeypatch, exact):
    training = Training(tmp_path, exact=exact)
    training(2)
    for load in (lambda: dq.load(tmp_path)["model"]["weight"], lambda: dq.load(tmp_path, keys=["weight"])["weight"]):
        name = "exact-" if exact else f"step-{training.step - 1:012d}"
        with acting_before_a_read(monkeypatch, name, lambda: training(3), times=1):
            assert bits(load()) == bits(training.model.weight)


def test_the_error_for_a_step_deleted_meanwhile_says_that_it_no_longer_exists(tmp_path, monkeypatch):
    training = Training(tmp_path)
    training(2)
    with (
        acting_before_a_read(monkeypatch, "step-000000000001", lambda: training(3)),
        pytest.raises(CheckpointError) as caught,
    ):
        dq.load(tmp_path, 2)
    assert str(caught.value) == f"{tmp_path}: the checkpoint of step 2 no longer exists (available steps: 4, 5)"
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 2"):
        dq.load(tmp_path, 2)


def test_a_run_is_listed_again_if_every_listed_file_was_deleted(tmp_path, monkeypatch):
    training = Training(tmp_path, keep=1)
    training(1)
    for listed in (lambda: Run(tmp_path).steps(), lambda: [file.header.step for file in Run(tmp_path).files()[0]]):
        with acting_before_a_read(monkeypatch, "step-", lambda: training(2)):
            assert listed() == [training.step]


def test_files_deleted_during_a_report_are_not_reported_as_damaged(tmp_path):
    training = Training(tmp_path, keep=3)
    training(3)
    run = Run(tmp_path)
    files = run.files()[0]
    training(5)
    with pytest.raises(RunChangedError):
        statistics_of(run, files[1:], [])


# Damage is no reason to retry


@pytest.mark.parametrize("gone", [False, True])
def test_damage_is_reported_without_a_retry(tmp_path, monkeypatch, gone):
    run = WritableRun(tmp_path)
    series(run, [1, 2, 3])
    if gone:
        run.path(2).unlink()
    else:
        damage_levels(run, 2)
    opened = []
    plain = Run.chain
    monkeypatch.setattr(Run, "chain", lambda self, file: opened.append(file) or plain(self, file))
    for read in (lambda: dq.load(tmp_path), lambda: dq.load(tmp_path, keys=[])):
        with suppress(CheckpointError):
            read()
    assert isinstance(damage(run, 3), CheckpointError)
    assert len(opened) == 3


def test_a_run_that_keeps_changing_is_an_error_after_the_last_attempt(tmp_path, monkeypatch):
    run = WritableRun(tmp_path)
    series(run, [1, 2])
    tries = []

    def moving(_self, file):
        tries.append(file)
        raise RunChangedError("it moves on and on")

    monkeypatch.setattr(Run, "chain", moving)
    with pytest.raises(CheckpointError, match="it moves on and on"):
        dq.load(tmp_path)
    assert len(tries) == ATTEMPTS


def test_a_model_is_filled_only_with_verified_values(tmp_path):
    training = Training(tmp_path)
    training(1)
    path = Run(tmp_path).path(1)
    content = bytearray(path.read_bytes())
    entry = CheckpointFile(path).header.by_name["model.weight"]
    position = content.index(CheckpointFile(path).read(entry))
    content[position + entry.size // 2] ^= 1
    path.write_bytes(content)
    model = torch.nn.Linear(60, 60)
    before = bits(dict(model.state_dict()))
    with pytest.raises(CheckpointError, match=r"model\.weight"):
        dq.load_into(model, tmp_path)
    assert bits(dict(model.state_dict())) == before


# A real training


@pytest.mark.parametrize("exact", [False, True])
def test_no_reader_fails_while_a_training_saves_as_fast_as_it_can(tmp_path, exact):
    folder = tmp_path / "run"
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # ends the training at the end
        saves = pool.apply_async(readers.train, (folder, 600.0, exact))
        while not any(folder.glob("step-*.dqc")):
            saves.wait(0.01)
            assert not saves.ready(), saves.get()
        counts = {reader: readers.read(reader, folder, 0.2) for reader in READERS}
    assert {reader: count.error for reader, count in counts.items() if count.failed} == {}
    assert all(count.done for count in counts.values())
    assert Run(folder).newest().header.step > 3


def test_ancestors_are_decoded_to_levels_and_their_values_are_never_computed(tmp_path, monkeypatch):
    run, pieces, asked = WritableRun(tmp_path), QuantizedTensor.pieces, []
    series(run, [1, 2, 3, 4])
    monkeypatch.setattr(QuantizedTensor, "pieces", lambda self, *args: asked.append(self) or pieces(self, *args))
    found = Run(tmp_path).load(run.file(4))
    assert run.file(4).header.by_name["w"].needs_parent
    assert {id(each) for each in asked} == {id(found["w"])}
