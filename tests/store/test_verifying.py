"""Verifying a run finds the damage of each checkpoint, and decodes every file once."""

import random
import weakref

import pytest
import torch
from crafted import entry, header, write
from torch import nn
from training import model_of, train

import dynaquant as dq
from dynaquant.store.container import CheckpointFile
from dynaquant.store.run import Run
from dynaquant.store.verifying import damage, may_be_sound, verify_run


def run_with_forks(folder) -> Run:
    """1 - 2 - 3 - 4, with 5 - 6 on 2, 7 on 3 and 8 on 5; 9 is a keyframe."""
    torch.manual_seed(0)
    model = model_of(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for restored, steps in ((None, (1, 2, 3, 4)), (2, (5, 6)), (3, (7,)), (5, (8,))):
        with dq.Checkpointer(folder, model, optimizer) as ckpt:
            if restored is not None:
                ckpt.restore(restored)
            for step in steps:
                train(model, optimizer)
                ckpt.save(step).result()
    with dq.Checkpointer(folder, model, optimizer, quality="lossless", keep=dq.Keep(keyframe_every=1)) as ckpt:
        ckpt.save(9).result()
    run = Run(folder)
    parents = {summary.step: summary.parent and summary.parent.step for summary in run.summaries()[0]}
    assert parents == {1: None, 2: 1, 3: 2, 4: 3, 5: 2, 6: 5, 7: 3, 8: 5, 9: None}
    return run


def damaged_one_by_one(run: Run) -> dict[int, str | None]:
    """Finds the damage by decoding the chain of every checkpoint."""
    return {step: error and str(error) for step in run.steps() for error in [damage(run, step)]}


def verified(run: Run) -> dict[int, str | None]:
    return {step: error and str(error) for step, error in verify_run(run)}


def flip(path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    streams = sum(entry.size for entry in CheckpointFile(path).header.entries)
    content[16 + chance.randrange(streams)] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def test_a_sound_run_is_verified_and_every_stream_is_read_once(tmp_path, monkeypatch):
    run = run_with_forks(tmp_path)
    read, seen = CheckpointFile.read, []

    def counted(file, entry):
        seen.append((file.path, entry.name))
        return read(file, entry)

    monkeypatch.setattr(CheckpointFile, "read", counted)
    assert verified(run) == dict.fromkeys(range(1, 10))
    assert len(seen) == len(set(seen)) > 0


@pytest.mark.parametrize("seed", range(12))
def test_verify_run_finds_the_same_damage_as_decoding_each_checkpoint_alone(tmp_path, seed):
    run, chance = run_with_forks(tmp_path), random.Random(seed)
    damaged = chance.sample(range(1, 10), 2)
    for step in damaged:
        if chance.random() < 0.7:
            flip(run.path(step), chance)
        else:
            run.path(step).unlink()
    expected = damaged_one_by_one(run)
    assert any(expected.values())
    found = verified(run)
    assert found.keys() == expected.keys()
    for step, error in expected.items():
        # If several tensors are damaged, the error may name any of them.
        assert (found[step] is None) == (error is None), (found[step], error)
        if error is not None:
            for text in (found[step], error):
                assert any(f"step {other}" in text or str(run.path(other)) in text for other in damaged), text


def test_what_depends_on_a_file_that_the_system_refuses_to_read_may_be_sound(tmp_path):
    run = run_with_forks(tmp_path)
    keyframe = run.path(1).rename(tmp_path / "kept")
    run.path(1).symlink_to(run.path(1))
    found = dict(verify_run(run))
    assert {step for step, error in found.items() if error is None} == {9}
    assert all(may_be_sound(error) for error in found.values() if error is not None)
    keyframe.rename(run.path(1))
    flip(run.path(2), random.Random(0))
    assert not may_be_sound(dict(verify_run(run))[2])


def test_a_damaged_lossless_copy_is_found(tmp_path):
    model = nn.Linear(40, 40)
    with dq.Checkpointer(tmp_path, model, keep=dq.Keep(lossless_copy=True)) as ckpt:
        ckpt.save(1).result()
    run = Run(tmp_path)
    (copy,) = run.lossless_copy_paths()
    assert verified(run) == {1: None}
    flip(copy, random.Random(0))
    assert copy.name in verified(run)[1]


def test_no_more_than_a_checkpoint_and_its_parent_are_in_memory_along_a_chain(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = nn.Linear(40, 40)
    with dq.Checkpointer(tmp_path, model, quality="lossless") as ckpt:
        for step in range(8):
            with torch.no_grad():
                model.weight += 0.01
            ckpt.save(step).result()
    run = Run(tmp_path)
    flip(run.path(3), random.Random(0))  # tracebacks of errors must not keep tensors in memory either
    alive, most = weakref.WeakSet(), 0
    decode = CheckpointFile.__init__

    def watched(file, path):
        nonlocal most
        decode(file, path)
        alive.add(file)
        most = max(most, len(alive))

    run.steps()
    monkeypatch.setattr(CheckpointFile, "__init__", watched)
    assert sum(error is not None for error in verified(run).values()) == 5
    assert most <= 4  # two decoded files, and two files whose headers are read


def test_verifying_a_chain_of_1500_opens_each_file_a_constant_number_of_times(tmp_path, monkeypatch):
    same = entry("w", b"\0" * 8, size=0, coding={"kind": "reference"})
    plain = header(entry("w", b"\0" * 8))
    write(tmp_path, plain, b"\0" * 8)
    for step in range(2, 1501):
        parent = {"step": plain["step"], "identity": plain["identity"]}
        plain = header(same, step=step, sequence=step, parent=parent)
        write(tmp_path, plain)
    opened, opens = 0, CheckpointFile.__init__

    def counted(file, path):
        nonlocal opened
        opened += 1
        opens(file, path)

    monkeypatch.setattr(CheckpointFile, "__init__", counted)
    assert verified(Run(tmp_path)) == dict.fromkeys(range(1, 1501))
    assert opened <= 4 * 1500  # to list, to decode, and to look for a lossless copy under both names
    Run(tmp_path).path(700).unlink()
    opened = 0
    assert sum(error is not None for error in verified(Run(tmp_path)).values()) == 800
    assert opened <= 6 * 1500
