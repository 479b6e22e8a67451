"""Sharded checkpoints: a file that refers to parts, each of which holds boxes of tensors."""

import json
import re
import shutil
import struct
from dataclasses import replace

import crafted
import numpy as np
import pytest
import torch
import zstandard
from sharded_checkpoints import by_columns, by_rows, commit_sharded, interleaved, random_state
from training import bits
from typer.testing import CliRunner

import dynaquant as dq
from dynaquant.cli import app
from dynaquant.engine.forms.form import stored_equal
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.forms.patchwork import patchwork
from dynaquant.engine.forms.stored import in_one, values_of
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.grid import quantize
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.codebook import Grid
from dynaquant.errors import CheckpointError
from dynaquant.report.inspection import disk_use
from dynaquant.state.tree import state_dict_tree
from dynaquant.store import commit
from dynaquant.store.commit import WritableRun
from dynaquant.store.reading import load_boxes
from dynaquant.store.recoding import branch, compact
from dynaquant.store.retention import Retention, prepare_replacement, prune
from dynaquant.store.run import Run
from dynaquant.store.verifying import verify_run
from dynaquant.store.writing import Base, Checkpoint


@pytest.fixture
def run(tmp_path):
    run = WritableRun(tmp_path)
    with run.locked():
        yield run


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, stored in wanted.items():
        assert bits(values_of(found[name])) == bits(values_of(stored)), name


@pytest.mark.parametrize("places_of", [by_rows, interleaved])
@pytest.mark.parametrize("parts", [1, 2, 5, 20])
def test_a_sharded_checkpoint_decodes_to_the_same_values_and_levels(run, places_of, parts):
    state = random_state()
    del state["step"]
    if places_of is interleaved:
        del state["empty"]
    file = commit_sharded(run, 10, state, places_of, parts)
    found = run.load(file)
    same(found, state)
    assert all(stored_equal(in_one(found[name]), state[name]) for name in ("w", "w.second", "w.first", "bias"))
    addresses = {part.address for part in file.header.parts}  # parts without boxes are the same
    assert {path.name for path in run.parts_folder.iterdir()} == {f"{address}.dqc" for address in addresses}
    assert all(re.fullmatch("[0-9a-f]{32}", address) for address in addresses)
    if len(addresses) == parts:
        assert file.total_size == sum(p.stat().st_size for p in run.folder.rglob("*.dqc"))


def test_whatever_reads_runs_reads_sharded_checkpoints(run, tmp_path):
    state = random_state()
    commit_sharded(run, 10, state)
    loaded = dq.load(tmp_path)["model"]
    assert {name: bits(tensor) for name, tensor in loaded.items()} == {n: bits(values_of(s)) for n, s in state.items()}
    assert list(verify_run(run)) == [(10, None)]


def committed_whole(run, step, tensors, parent):
    base = None if parent is None else Base.from_loaded(parent.header, run.load(parent))
    labels = dict.fromkeys(tensors, Label("exact"))
    return run.commit(Checkpoint(step, state_dict_tree(tensors), tensors, labels), base)[0]


def test_delta_chains_go_on_through_changes_of_layout_and_through_single_files(run):
    layouts = [(by_rows, 4), (by_rows, 4), (by_columns, 2), (None, 1), (interleaved, 3), (None, 1)]
    parent, states = None, {}
    for i, (places_of, parts) in enumerate(layouts):
        state = {name: stored for name, stored in random_state(i).items() if name not in ("step", "empty", "bias")}
        if places_of is None:
            parent = committed_whole(run, i, state, parent)
        else:
            parent = commit_sharded(run, i, state, places_of, parts, parent)
        states[i] = state
        assert (i == 0) == (parent.header.parent is None)
        assert parent.header.by_name["w"].needs_parent == (i > 0)
        assert parent.header.by_name["ids"].needs_parent == (i > 0)
    for step, state in states.items():
        same(Run(run.folder).load(Run(run.folder).file(step)), state)
    assert dict(verify_run(run)) == dict.fromkeys(states)


@pytest.mark.parametrize("commit_next", [commit_sharded, committed_whole])
def test_recoding_keeps_levels_of_moments_with_the_same_values_in_units_of_another_second_moment(run, commit_next):
    first, second, third = ({n: s for n, s in random_state(seed).items() if n.startswith("w")} for seed in range(3))
    for state in (first, second):  # both are zero, whatever the units are
        units = state["w.first"].units
        zeros = replace(units, levels=np.zeros_like(units.levels), codebook=Grid(0, 0))
        state["w.first"] = replace(state["w.first"], units=zeros)
    parent = commit_next(run, 1, first, parent=None)
    child = commit_next(run, 2, second, parent=parent)
    commit_next(run, 3, third, parent=child)
    prune(run, Retention(dq.Keep(last=2)))
    assert stored_equal(in_one(run.load(run.file(2))["w.first"]), second["w.first"])
    assert dict(verify_run(run)) == {2: None, 3: None}


def test_a_delta_of_the_same_boxes_is_as_small_as_without_boxes(run):
    def moved(seed):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(512, 256, generator=torch.Generator().manual_seed(1))
        return {
            "w": QuantizedTensor(
                torch.float32,
                weight.shape,
                *_levels(weight + 0.003 * torch.randn(weight.shape, generator=generator)),
            )
        }

    def _levels(tensor):
        found = quantize(tensor, -8)
        return found.levels, found.codebook, found.protected

    first, second = moved(1), moved(2)
    sharded = commit_sharded(run, 1, first, parts=4)
    sharded = commit_sharded(run, 2, second, parts=4, parent=sharded)
    whole = committed_whole(run, 11, first, None)
    whole = committed_whole(run, 12, second, whole)
    stored = sharded.header.by_name["w"].stored_size
    assert stored <= 1.05 * whole.header.by_name["w"].size


def test_parts_that_nothing_refers_to_are_deleted(run, tmp_path):
    state = random_state()
    first = commit_sharded(run, 10, state).header.parts
    abandoned = run.begin(20, None, parts=True)
    half, whole = run.parts_folder / "half.tmp", run.parts_folder / f"{'0' * 32}.dqc"
    half.write_bytes(b"half a part")
    whole.write_bytes(b"a part")
    assert abandoned.sequence == 2
    run.delete_unneeded()
    assert half.exists()  # it is being written
    assert whole.exists()
    run.abandon()
    assert len(list(run.parts_folder.iterdir())) == len(first)
    second = commit_sharded(run, 10, random_state(1), parts=2).header.parts
    assert {path.stem for path in run.parts_folder.iterdir()} == {part.address for part in second}
    run.delete(10)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_the_next_writer_deletes_what_a_killed_one_has_left(tmp_path):
    run = WritableRun(tmp_path)
    with run.locked():
        commit_sharded(run, 10, random_state())
    left = [run.parts_folder / name for name in (f"{'0' * 32}.dqc", "12-34.tmp")]
    for path in left:
        path.write_bytes(b"half a part")
    own = run.parts_folder / "of-a-user.dqc"
    own.write_bytes(b"")
    with WritableRun(tmp_path).locked():
        assert not any(path.exists() for path in left)
        assert own.exists()
        same(run.load(run.file(10)), random_state())


def test_no_parts_are_deleted_while_a_checkpoint_cannot_be_read(run, tmp_path):
    commit_sharded(run, 10, random_state())
    path = run.path(10)
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    run.delete_unneeded()
    path.write_bytes(content)
    same(Run(tmp_path).load(Run(tmp_path).file(10)), random_state())


def part_of(run, file, number=1):
    return run.parts_folder / f"{file.header.parts[number].address}.dqc"


def test_a_missing_part_is_named(run):
    file = commit_sharded(run, 10, random_state())
    part_of(run, file).unlink()
    with pytest.raises(CheckpointError, match=r"its part [0-9a-f]{32}\.dqc is not in parts"):
        Run(run.folder).load(Run(run.folder).file(10))
    assert [step for step, error in verify_run(run) if error] == [10]


def test_a_part_of_another_checkpoint_is_refused(run):
    first = commit_sharded(run, 10, random_state())
    second = commit_sharded(run, 20, random_state(1))
    shutil.copy(part_of(run, first), part_of(run, second))
    with pytest.raises(CheckpointError, match=r"is not the part that step-000000000020\.dqc refers to"):
        Run(run.folder).load(Run(run.folder).file(20))


@pytest.mark.parametrize("at", [0.2, 0.4, 0.6, 0.8, 0.99])
def test_a_changed_byte_of_a_part_is_found(run, at):
    file = commit_sharded(run, 10, random_state())
    path = part_of(run, file)
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=path.name):
        Run(run.folder).load(Run(run.folder).file(10))


def test_a_full_header_of_a_checkpoint_is_small(run):
    file = commit_sharded(run, 10, random_state(), parts=12)
    assert file.size < 4000


@pytest.mark.parametrize("seed", range(6))
def test_any_boxes_can_be_read_from_any_layout(run, seed):
    random = torch.Generator().manual_seed(seed)

    def draw(n):
        return int(torch.randint(n + 1, (), generator=random))

    layouts = [(by_rows, 4), (None, 1), (by_columns, 3), (interleaved, 2), (by_rows, 5)]
    parent = None
    for i in range(4):
        state = {name: stored for name, stored in random_state(i).items() if name not in ("step", "empty", "bias")}
        places_of, parts = layouts[draw(len(layouts) - 1)]
        if places_of is None:
            parent = committed_whole(run, i, state, parent)
        else:
            parent = commit_sharded(run, i, state, places_of, parts, parent)
    wanted = []
    for name, stored in state.items():
        boxes = []
        for _ in range(3):
            offsets = [draw(n) for n in stored.shape]
            boxes.append(Box(tuple(offsets), tuple(draw(n - o) for n, o in zip(stored.shape, offsets, strict=True))))
        wanted.append((name, boxes))
    reader = Run(run.folder)
    found = dict(load_boxes(reader.chain(reader.file(3)), wanted))
    for name, boxes in wanted:
        for box, stored in zip(boxes, found[name], strict=True):
            assert bits(values_of(stored)) == bits(values_of(state[name])[box.slices].contiguous())


def test_reading_a_box_opens_only_the_parts_that_overlap_it(run):
    state = {"w": random_state()["w"]}
    file = commit_sharded(run, 2, state, parts=4, parent=commit_sharded(run, 1, state, parts=4))
    for number in (0, 2, 3):
        part_of(run, file, number).unlink()
    reader = Run(run.folder)
    chain = reader.chain(reader.file(2))
    ((_, (stored,)),) = load_boxes(chain, [("w", [Box((4, 2), (1, 3))])])
    assert bits(values_of(stored)) == bits(values_of(state["w"])[4:5, 2:5].contiguous())
    with pytest.raises(CheckpointError, match=rf"{part_of(run, file, 2).name} is not in"):
        list(load_boxes(chain, [("w", [Box((5, 0), (2, 8))])]))


@pytest.mark.parametrize(("name", "box"), [("w", Box((0, 0), (13, 8))), ("w", Box((0,), (3,))), ("x", Box((), ()))])
def test_boxes_that_are_not_there_are_refused(run, name, box):
    commit_sharded(run, 1, random_state())
    reader = Run(run.folder)
    with pytest.raises(CheckpointError, match="there is no tensor"):
        list(load_boxes(reader.chain(reader.file(1)), [(name, [box])]))


def chain_of_three(run):
    parent = None
    for step in (1, 2, 3):
        parent = commit_sharded(run, step, random_state(step), parts=2 + step, parent=parent)
    return run.file(3)


def test_what_depends_on_a_deleted_sharded_checkpoint_is_recoded(run, tmp_path):
    chain_of_three(run)
    identity = run.file(3).header.identity
    assert prune(run, Retention(dq.Keep(last=1))) == []
    assert run.steps() == [3]
    file = run.file(3)
    assert (file.header.parent, file.header.identity) == (None, identity)
    assert not any(entry.needs_parent for entry in file.header.entries)
    same(run.load(file), random_state(3))
    assert {path.stem for path in (tmp_path / "parts").iterdir()} == {part.address for part in file.header.parts}


def test_a_sharded_step_can_be_saved_again(run):
    chain_of_three(run)
    assert prepare_replacement(run, 2, Retention()) == []
    commit_sharded(run, 2, random_state(9), parts=3, parent=run.file(1))
    same(run.load(run.file(2)), random_state(9))
    same(run.load(run.file(3)), random_state(3))
    assert dict(verify_run(run)) == dict.fromkeys([1, 2, 3])


def test_a_run_with_sharded_checkpoints_can_be_compacted_and_branched(run, tmp_path):
    chain_of_three(run)
    assert list(compact(run, 2)) == [1, 2, 3]
    assert [run.file(step).header.parent is None for step in (1, 2, 3)] == [True, False, True]
    branch(run, run.file(2), tmp_path / "other")
    found = Run(tmp_path / "other")
    same(found.load(found.file(2)), random_state(2))
    assert found.file(2).header.identity == run.file(2).header.identity
    assert dict(verify_run(run)) == dict.fromkeys([1, 2, 3])


def shown(run, *options):
    result = CliRunner().invoke(app, ["show", str(run.folder), "--tensor", *options])
    assert result.exit_code == 0
    return result.output


def test_show_counts_the_levels_of_all_boxes_if_they_fit_together(run):
    state = random_state()
    commit_sharded(run, 10, state)
    found = json.loads(shown(run, "w", "--json"))
    assert found["levels"] == [
        {"level": each.level, "value": each.value, "count": each.count} for each in state["w"].level_counts()
    ]
    assert "row means times column means" in shown(run, "w.second")
    assert "levels times the root of its second moment" in shown(run, "w.first")
    assert "its values are stored exactly" in shown(run, "ids")


def test_show_says_if_boxes_have_codebooks_of_their_own(run):
    tensor = torch.randn(12, 8)
    halves = [(Box((at, 0), (6, 8)), quantize(tensor[at : at + 6], rung)) for at, rung in ((0, -4), (6, -9))]
    commit_sharded(run, 10, {"w": patchwork(torch.float32, tensor.shape, halves)}, parts=2)
    assert "its values are in 2 boxes, each with a codebook of its own" in shown(run, "w")


def test_parts_count_as_disk_use_of_their_checkpoint(run):
    chain_of_three(run)
    found = {use.what: use for use in disk_use(run, run.files()[0])}
    everything = sum(path.stat().st_size for path in run.folder.rglob("*") if path.is_file())
    assert found["all"].size.stored == everything
    others = found.get("other files")  # the lock
    assert others is None or others.size.stored < 100
    assert (found["keyframes"].files, found["deltas"].files) == (1, 2)


def rewrite(run, step, change):
    """Change the header of a checkpoint, and write it with a correct checksum and identity."""
    path = run.path(step)
    stored_size, size = struct.unpack("<QQ", path.read_bytes()[-40:-24])
    stored = path.read_bytes()[-40 - stored_size : -40]
    data = json.loads(stored if size == stored_size else zstandard.ZstdDecompressor().decompress(stored))
    change(data)
    others = {key: value for key, value in data.items() if key not in ("tensors", "identity")}
    crafted.write(run.folder, crafted.header(*data["tensors"], **others))


def set_in(*path_and_value):
    *path, last, value = path_and_value

    def change(data):
        for key in path:
            data = data[key]
        data[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_in("parts", 0, 0, "../other"),
        set_in("parts", 0, 0, "0" * 31 + "/"),
        set_in("parts", 0, 0, "0" * 64),
        set_in("parts", 0, 0, 3),
        set_in("parts", []),
        set_in("parts", 0, ["x" * 32, 3]),
        set_in("parts", 0, 1, -1),
        set_in("layouts", []),
        set_in("layouts", 0, 0, [0, [0, 0], [99, 8]]),
        set_in("layouts", 0, 0, [0, [-1, 0], [1, 8]]),
        set_in("layouts", 0, 0, [0, [0], [4]]),
        set_in("layouts", 0, 0, [7, [0, 0], [4, 8]]),
        set_in("layouts", 0, 0, "x"),
        set_in("parts", None),
        set_in("tensors", 0, "coding", "layout", 99),
        set_in("tensors", 0, "coding", "layout", -1),
        set_in("tensors", 0, "coding", "stored", -5),
        lambda data: data.pop("parts"),
    ],
)
def test_a_header_with_impossible_parts_is_refused(run, change):
    commit_sharded(run, 10, {"w": random_state()["w"]})
    rewrite(run, 10, change)
    with pytest.raises(CheckpointError, match=r"altered|broken"):
        Run(run.folder).file(10)


@pytest.mark.parametrize(
    "change",
    [
        set_in("layouts", 0, 0, [0, [0, 0], [3, 8]]),
        set_in("layouts", 0, 0, [1, [0, 0], [4, 8]]),
        lambda data: data["layouts"][0].pop(),
        set_in("tensors", 0, "coding", "second", "other"),
        set_in("tensors", 0, "dtype", "float64"),
        lambda data: data["parts"].reverse(),
    ],
)
def test_parts_that_do_not_hold_what_the_header_says_are_refused(run, change):
    commit_sharded(run, 10, {"w": random_state()["w"]})
    rewrite(run, 10, change)
    with pytest.raises(CheckpointError, match=r"step-000000000010|parts/[0-9a-f]{32}"):
        Run(run.folder).load(Run(run.folder).file(10))


def test_an_interrupt_after_the_commit_leaves_the_parts(run, monkeypatch):
    plain = commit.sync_parent

    def interrupted(path):
        if path == run.path(10):
            raise KeyboardInterrupt
        plain(path)

    monkeypatch.setattr(commit, "sync_parent", interrupted)
    with pytest.raises(KeyboardInterrupt):
        commit_sharded(run, 10, random_state())
    assert dict(verify_run(run)) == {10: None}


def test_recoding_keeps_levels_on_which_others_depend(run):
    values = random_state()["w"]
    exact = commit_sharded(run, 1, {"w": values_of(values)})
    levels = commit_sharded(run, 2, {"w": values})
    commit_sharded(run, 3, {"w": random_state(1)["w"]}, parent=levels)
    assert exact.header.by_name["w"].hash == levels.header.by_name["w"].hash
    assert list(compact(run, 3)) == [1, 2, 3]
    assert dict(verify_run(run)) == dict.fromkeys([1, 2, 3])
    same(run.load(run.file(3)), {"w": random_state(1)["w"]})
