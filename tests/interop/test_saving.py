"""``save``: any state to one file or file object, alone or conditioned on an earlier file."""

import io
import itertools
import multiprocessing
import os
import shutil
import time
from collections import OrderedDict

import numpy as np
import pytest
import torch
from commands import call
from format_decoder import decode_single
from full_disk import files_of_at_most
from pieces import in_pieces
from rewritten import rewrite
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from training import bits, model_of, train

import dynaquant as dq
from dynaquant.interop.packing import Packer, compress, pack
from dynaquant.store.container import CheckpointFile
from dynaquant.store.pointers import write_pointer

EVERYTHING = {
    "weights": OrderedDict(w=torch.randn(8, 8), b=torch.randn(8).bfloat16()),
    "odd": [torch.randn(6, 4).t(), torch.randn(3, dtype=torch.complex64), torch.tensor([True, False])],
    "empty": (torch.empty(0, 3), torch.tensor(2.5), torch.tensor([float("nan"), -0.0, float("inf")])),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "plain": {"step": 3, 7: None, "name": "ü", "rate": float("inf"), "bytes": b"\0", "set": {1, 2}, "c": 1j},
    "parameter": nn.Parameter(torch.ones(2)),
}
STATES = [EVERYTHING, [torch.randn(4), 1, "a"], (torch.randn(4),), torch.randn(5, 3), torch.tensor(1), 7, {}, []]


def trained(steps: int = 3):
    torch.manual_seed(0)
    model = model_of(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, steps)
    return model, optimizer


def state_of(model, optimizer, **more):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_every_state_comes_back_bit_for_bit_from_a_path_and_from_a_file_object(tmp_path, state):
    dq.save(state, tmp_path / "s.dqc", quality="lossless")
    buffer = io.BytesIO()
    dq.save(state, buffer, quality="lossless")
    buffer.seek(0)
    assert bits(dq.load(tmp_path / "s.dqc")) == bits(state) == bits(dq.load(buffer))
    with (tmp_path / "s.dqc").open("rb") as file:
        assert bits(dq.load(file)) == bits(state)


def test_tied_tensors_stay_tied(tmp_path):
    shared = torch.randn(64, 64)
    dq.save({"a": shared, "inside": [shared, nn.Parameter(shared)]}, tmp_path / "s.dqc")
    found = dq.load(tmp_path / "s.dqc")
    assert found["a"].data_ptr() == found["inside"][0].data_ptr() == found["inside"][1].data_ptr()
    assert isinstance(found["inside"][1], nn.Parameter)


@pytest.mark.parametrize("around", [lambda m, o: {"m": m, "o": o}, lambda m, o: (m, o), lambda m, o: [m, {"o": o}]])
def test_weights_and_moments_are_quantized_wherever_they_are(tmp_path, around):
    model, optimizer = trained()
    record = dq.save(around(model.state_dict(), optimizer.state_dict()), tmp_path / "s.dqc")
    assert record.roles.keys() >= {"weight", "first_moment", "second_moment"}
    assert record.ratio > 4
    assert record.total.stored == (tmp_path / "s.dqc").stat().st_size


def test_what_is_kept_exactly_is_what_the_guide_says(tmp_path):
    def tensor():
        return torch.randn(64, 64)

    data = {"x": tensor(), "losses": torch.rand(50), "double": tensor().double()}
    state = {
        "only tensors": {**data, "running_mean": torch.randn(64), "rope.inv_freq": torch.randn(64)},
        "list": [tensor(), (tensor(),)],
        "beside": {"x": tensor(), "exact": True, "inside": {"x": tensor()}},
        "arrays": {"x": tensor().numpy()},
        "scalars": {"loss": torch.tensor(0.123)},
        "single": tensor(),
    }
    dq.save(state, tmp_path / "s.dqc")
    found = dq.load(tmp_path / "s.dqc")
    original = state["only tensors"]
    assert [name for name in original if not torch.equal(found["only tensors"][name], original[name])] == list(data)
    inside = state["beside"].pop("inside")["x"]
    assert not torch.equal(found["beside"].pop("inside")["x"], inside)
    for key in ("list", "beside", "arrays", "scalars", "single"):
        assert bits(found[key]) == bits(state[key])


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_first_moments_are_zeros_except_with_high_and_lossless(tmp_path, make):
    model = model_of(32)
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    for quality in ("lossless", "high", "balanced", "small"):
        dq.save({"optimizer": optimizer.state_dict()}, tmp_path / "s.dqc", quality=quality)
        first = dq.load(tmp_path / "s.dqc")["optimizer"]["state"][0]
        moment = first["exp_avg"] if "exp_avg" in first else first["momentum_buffer"]
        assert bool(moment.any()) == (quality in ("lossless", "high"))


def test_every_quality_is_smaller_than_the_one_before(tmp_path):
    state = state_of(*trained())
    sizes = [
        dq.save(state, tmp_path / "s.dqc", quality=q).total.stored for q in ("lossless", "high", "balanced", "small")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


def test_a_training_continues_from_a_file_as_if_nothing_had_happened(tmp_path):
    model, optimizer = trained()
    dq.save(state_of(model, optimizer), tmp_path / "s.dqc", quality="lossless")
    again, other = trained(0)
    state = dq.load(tmp_path / "s.dqc")
    again.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    for each in ((model, optimizer), (again, other)):
        torch.manual_seed(1)
        train(*each, 3)
    assert bits(dict(model.state_dict())) == bits(dict(again.state_dict()))


def test_the_state_is_unchanged_also_by_a_metric_that_writes_to_it(tmp_path):
    state = state_of(*trained(), epoch=1)
    before = bits(state)

    def metric(found):
        loss = float(found["model"]["1.weight"].square().mean())
        for tensor in (found["model"]["1.weight"], found["optimizer"]["state"][0]["exp_avg_sq"]):
            tensor.zero_()
        return loss

    record = dq.save(state, tmp_path / "s.dqc", metric=metric, quality=dq.Quality(max_degradation=0.02))
    assert bits(state) == before
    assert record.judged_by == "evaluate"
    assert record.limit == 0.02


def test_the_metric_decides_and_was_measured_on_what_load_returns(tmp_path):
    model, optimizer = trained()
    weight = model[1].weight.detach().clone()

    def similarity(state):
        return float(torch.cosine_similarity(state["model"]["1.weight"].flatten(), weight.flatten(), dim=0))

    fine, coarse = (
        dq.save(
            state_of(model, optimizer),
            tmp_path / f"{e}.dqc",
            metric=similarity,
            higher_is_better=True,
            quality=dq.Quality(max_degradation=e),
        )
        for e in (0.0001, 0.01)
    )
    assert coarse.total.stored < fine.total.stored
    for record, limit in ((fine, 0.0001), (coarse, 0.01)):
        assert record.quality.restored == similarity(dq.load(tmp_path / f"{limit}.dqc"))
        assert 1 - record.quality.restored / record.quality.original <= limit


def test_decompress_makes_a_file_of_torch_save(tmp_path):
    state = state_of(*trained(), epoch=3)
    dq.save(state, tmp_path / "s.dqc", quality="lossless")
    call("decompress", tmp_path / "s.dqc", "-o", tmp_path / "s.pt")
    assert bits(torch.load(tmp_path / "s.pt", weights_only=True)) == bits(state)


# Conditioned on an earlier file


@pytest.fixture
def chain(tmp_path):
    """Three files, each conditioned on the one before, in folders of their own. Returns paths and states."""
    model, optimizer = trained()
    paths, states = [], []
    for number in range(3):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        paths.append(folder / "state.dqc")
        states.append(bits(state_of(model, optimizer)))
        before = paths[number - 1] if number else None
        dq.save(state_of(model, optimizer), paths[-1], quality="lossless", parent=before)
        train(model, optimizer)
    return paths, states


def test_a_file_with_a_parent_is_smaller_and_as_exact(chain):
    paths, states = chain
    assert [bits(dq.load(path)) for path in paths] == states
    assert paths[2].stat().st_size < 0.95 * paths[0].stat().st_size


@pytest.mark.parametrize("quality", ["high", "balanced", "small"])
def test_quantized_files_with_a_parent_are_much_smaller(tmp_path, quality):
    model, optimizer = trained(20)
    alone = dq.save(model.state_dict(), tmp_path / "1.dqc", quality=quality)
    for group in optimizer.param_groups:
        group["lr"] = 1e-5
    train(model, optimizer)
    delta = dq.save(model.state_dict(), tmp_path / "2.dqc", quality=quality, parent=tmp_path / "1.dqc")
    assert delta.total.stored < 0.7 * alone.total.stored
    assert not delta.keyframe
    for name, tensor in dq.load(tmp_path / "2.dqc").items():
        original = model.state_dict()[name]
        assert float((tensor - original).norm()) <= 0.5 * float(original.norm())


def test_the_files_may_be_moved_together_and_loaded_from_any_folder(chain, tmp_path, monkeypatch):
    paths, states = chain
    for path in paths:
        shutil.move(path.parent, tmp_path / "elsewhere" / path.parent.name)
    monkeypatch.chdir(tmp_path / "elsewhere" / "checkpoint-2")
    assert bits(dq.load("state.dqc")) == states[2]


def test_the_second_decoder_follows_the_paths_of_the_parents_too(chain):
    paths, _ = chain
    header, tensors = decode_single(paths[2])
    assert header["parents"][0]["file"] == "../checkpoint-1/state.dqc"
    assert tensors["model.1.weight"][2] == bits(dq.load(paths[2], part="model/1.weight"))[3]


def test_a_missing_or_replaced_parent_is_an_error_that_names_it_and_can_be_given(chain, tmp_path):
    paths, states = chain
    moved = tmp_path / "moved.dqc"
    paths[0].rename(moved)
    with pytest.raises(
        dq.CheckpointError, match=r"checkpoint-0/state\.dqc .* is missing; put it back there, or in Python, give it"
    ):
        dq.load(paths[2])
    assert bits(dq.load(paths[2], parent=[paths[1], moved])) == states[2]
    assert bits(dq.load(paths[1], parent=moved)) == states[1]
    dq.save({"a": 1}, paths[0])
    with pytest.raises(dq.CheckpointError, match="holds another state now"):
        dq.load(paths[1])


def test_a_parent_is_found_if_the_file_or_its_folder_is_reached_by_a_link(chain, tmp_path):
    paths, states = chain
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "latest.dqc").symlink_to(paths[2])
    assert bits(dq.load(tmp_path / "deep" / "latest.dqc")) == states[2]
    (tmp_path / "link").symlink_to("deep/er")
    dq.save(dq.load(paths[2]), tmp_path / "link" / "s.dqc", quality="lossless", parent=paths[1])
    for folder in ("link", "deep/er"):
        assert bits(dq.load(tmp_path / folder / "s.dqc")) == states[2]


def test_a_file_is_saved_where_a_link_points(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link.dqc").symlink_to("disk/state.dqc")
    for value in (1, 2):  # the link leads nowhere at first
        dq.save({"a": value}, tmp_path / "link.dqc")
        assert (tmp_path / "link.dqc").is_symlink()
        assert dq.load(tmp_path / "disk" / "state.dqc") == {"a": value}
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["disk", "link.dqc", "state.dqc"]
    (tmp_path / "lost.dqc").symlink_to("nowhere/state.dqc")
    with pytest.raises(dq.CheckpointError, match="is not a folder"):
        dq.save({"a": 1}, tmp_path / "lost.dqc")


@pytest.mark.parametrize("given", [{"cuda:0": "cpu"}, lambda storage, _: storage])
def test_a_map_location_is_one_device(chain, given):
    with pytest.raises(TypeError, match="map_location is a device or the name of one, not a "):
        dq.load(chain[0][0], map_location=given)


def test_no_parent_may_be_given_as_none(chain):
    paths, states = chain
    assert bits(dq.load(paths[1], parent=None)) == states[1]


def test_file_objects_are_conditioned_on_each_other_and_on_files(chain):
    paths, _ = chain
    buffers = [io.BytesIO() for _ in range(2)]
    state = dq.load(paths[2])
    dq.save(state, buffers[0], quality="lossless", parent=paths[2])
    for buffer in buffers:
        buffer.seek(0)
    state["model"]["1.weight"] += 1e-4
    dq.save(state, buffers[1], quality="lossless", parent=[buffers[0], paths[2]])
    for buffer in buffers:
        buffer.seek(0)
    assert bits(dq.load(buffers[1], parent=[buffers[0], paths[2]])) == bits(state)
    assert len(buffers[1].getvalue()) < 0.5 * paths[0].stat().st_size
    buffers[1].seek(0)
    with pytest.raises(dq.CheckpointError, match=r"its parent .* has no path; in Python, give it as parent="):
        dq.load(buffers[1])


def test_a_file_does_not_replace_what_it_is_conditioned_on(chain):
    paths, states = chain
    for out in paths[:2]:
        with pytest.raises(dq.CheckpointError, match="would replace a file that it is conditioned on"):
            dq.save({"a": torch.ones(3)}, out, parent=paths[1])
    assert [bits(dq.load(path)) for path in paths] == states


def test_a_checkpoint_of_a_training_cannot_be_a_parent_but_a_compressed_file_can(tmp_path):
    model, optimizer = trained()
    with dq.Checkpointer(tmp_path / "run", model, optimizer) as ckpt:
        ckpt.save(1).result()
    for parent in (tmp_path / "run", next((tmp_path / "run").glob("step-*.dqc"))):
        with pytest.raises(dq.CheckpointError, match="a checkpoint of a run, which may delete it"):
            dq.save(model.state_dict(), tmp_path / "s.dqc", parent=parent)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    compress(tmp_path / "m.pt", tmp_path / "m.dqc", Packer("lossless"))
    dq.save(model.state_dict(), tmp_path / "s.dqc", quality="lossless", parent=tmp_path / "m.dqc")
    assert bits(dq.load(tmp_path / "s.dqc")) == bits(model.state_dict())


def test_no_file_of_a_packed_run_can_be_a_parent_and_the_error_says_what_can(tmp_path):
    state = trained()[0].state_dict()
    for number in (0, 1):
        torch.save({name: tensor + 1e-4 * number for name, tensor in state.items()}, tmp_path / f"{number}.pt")
    list(pack({n: tmp_path / f"{n}.pt" for n in (0, 1)}, tmp_path / "run", Packer()))
    keyframe, delta = sorted((tmp_path / "run").glob("step-*.dqc"))
    (tmp_path / "link.dqc").symlink_to(keyframe)
    write_pointer(tmp_path / "last.ckpt", CheckpointFile(delta))
    for parent in (tmp_path / "run", keyframe, delta, tmp_path / "link.dqc", tmp_path / "last.ckpt"):
        with pytest.raises(dq.CheckpointError, match=r"of a run, .*dynaquant\.save\(dynaquant\.load\("):
            dq.save(state, tmp_path / "s.dqc", parent=parent)
    with pytest.raises(dq.CheckpointError, match="of a run"):
        dq.save(state, tmp_path / "s.dqc", parent=[io.BytesIO(delta.read_bytes()), io.BytesIO(keyframe.read_bytes())])
    dq.save(dq.load(delta), tmp_path / "parent.dqc", quality="lossless")
    dq.save(state, tmp_path / "s.dqc", quality="lossless", parent=tmp_path / "parent.dqc")
    assert bits(dq.load(tmp_path / "s.dqc")) == bits(state)


def test_a_parent_with_other_tensors_or_shapes_does_no_harm(tmp_path):
    dq.save({"w": torch.randn(30, 30), "gone": torch.randn(9), "same": torch.ones(99)}, tmp_path / "1.dqc")
    state = {"w": torch.randn(31, 30), "new": torch.randn(9).bfloat16(), "same": torch.ones(99)}
    dq.save(state, tmp_path / "2.dqc", quality="lossless", parent=tmp_path / "1.dqc")
    assert bits(dq.load(tmp_path / "2.dqc")) == bits(state)


# What cannot be saved, or loaded


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": [1, {"b": object()}]}, r"a\.1\.b: .* cannot be stored"),
        ({"model": nn.Linear(2, 2)}, r"model: .*save its state_dict\(\)"),
        (nn.Linear(2, 2), r"the state: .*save its state_dict\(\)"),
        ({"w": torch.ones(2, device="meta")}, "w: .*meta device"),
    ],
)
def test_a_value_that_cannot_be_stored_is_an_error_and_the_file_before_stays(tmp_path, state, where):
    dq.save({"a": 1}, tmp_path / "s.dqc")
    with pytest.raises(dq.StateError, match=where):
        dq.save(state, tmp_path / "s.dqc")
    assert dq.load(tmp_path / "s.dqc") == {"a": 1}
    assert os.listdir(tmp_path) == ["s.dqc"]


def test_a_dtensor_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        state = {"w": DTensor.from_local(torch.ones(2), mesh, [Replicate()])}
        with pytest.raises(dq.StateError, match=r"w: is a DTensor.*with a dynaquant\.Checkpointer"):
            dq.save(state, tmp_path / "s.dqc")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", [lambda tensor: tensor, nn.Parameter])
def test_a_plain_tensor_that_is_a_part_of_a_larger_one_is_refused(tmp_path, kind):
    part = in_pieces(torch.randn(70, 24), [(0, 20), (40, 60)])
    tensor = kind(part)
    vars(tensor).update(vars(part))  # PyTorch does not keep them
    with pytest.raises(
        dq.StateError, match=r"model\.w: is a CheckpointableTensor.*save it with dynaquant\.interop\.dcp"
    ):
        dq.save({"model": {"w": tensor}}, tmp_path / "s.dqc")
    assert os.listdir(tmp_path) == []


def test_a_file_object_that_takes_no_bytes_is_refused_before_the_work(tmp_path):
    called = []
    dq.save({"a": 1}, tmp_path / "s.dqc")
    with (tmp_path / "text").open("w") as text, (tmp_path / "s.dqc").open("rb") as read_only:
        for file in (io.StringIO(), text, read_only):
            with pytest.raises(TypeError, match="open for writing bytes"):
                dq.save({"w": torch.ones(3, 3)}, file, metric=lambda state: called.append(state) or 1.0)
    assert not called


def test_a_file_without_a_buffer_gets_every_byte_or_an_error(tmp_path):
    state = {"w": torch.randn(1 << 16)}
    with (tmp_path / "s.dqc").open("wb", buffering=0) as file:
        dq.save(state, file, quality="lossless")
    assert bits(dq.load(tmp_path / "s.dqc")) == bits(state)
    # The system takes the first bytes, up to the largest size allowed, and says how many.
    with (
        files_of_at_most(1 << 16),
        (tmp_path / "t.dqc").open("wb", buffering=0) as file,
        pytest.raises(OSError, match="File too large"),
    ):
        dq.save(state, file, quality="lossless")


def test_wrong_places_and_arguments_are_errors_that_say_what_to_do(tmp_path):
    state = {"w": torch.ones(3, 3)}
    for path, error, said in (
        (tmp_path, dq.CheckpointError, "is a folder"),
        (tmp_path / "no" / "s.dqc", dq.CheckpointError, "create it first"),
        (f"{tmp_path}/new/", dq.CheckpointError, "ends like a folder"),
        (3, TypeError, "give a path or a file object"),
    ):
        with pytest.raises(error, match=said):
            dq.save(state, path)
    for options, said in (
        ({"quality": "best"}, "quality must be one of"),
        ({"quality": dq.Quality(training_budget=0.1)}, r"save takes no training_budget in dq\.Quality"),
        ({"quality": "lossless", "metric": len}, "needs no metric"),
    ):
        with pytest.raises(ValueError, match=said):
            dq.save(state, tmp_path / "s.dqc", **options)
    with pytest.raises(dq.EvaluateError, match="the metric failed on the original weights"):
        dq.save(state, tmp_path / "s.dqc", metric=lambda found: found["nothing"])
    assert os.listdir(tmp_path) == []


def test_a_file_object_that_is_at_its_end_or_open_for_text_is_an_error():
    buffer = io.BytesIO()
    dq.save({"a": 1}, buffer)
    with pytest.raises(dq.CheckpointError, match=r"go back to its beginning with seek\(0\)"):
        dq.load(buffer)
    with pytest.raises(TypeError, match="open for reading bytes"):
        dq.load(io.StringIO("text"))
    with pytest.raises(dq.CheckpointError, match="truncated"):
        dq.load(io.BytesIO(buffer.getvalue()[:-1]))


def test_a_full_disk_leaves_the_file_before_and_nothing_else(tmp_path):
    dq.save({"a": 1}, tmp_path / "s.dqc")
    with files_of_at_most(1 << 16), pytest.raises(OSError, match="File too large") as caught:
        dq.save({"w": torch.randn(1 << 18)}, tmp_path / "s.dqc", quality="lossless")
    assert "choose a path on another disk" in " ".join(caught.value.__notes__)
    assert dq.load(tmp_path / "s.dqc") == {"a": 1}
    assert os.listdir(tmp_path) == ["s.dqc"]


def saving(path, said) -> None:
    """Save one state after another. said: a connection that gets the number of each."""
    for number in itertools.count(1):
        dq.save({"w": torch.full((1 << 18,), float(number)), "number": number}, path, quality="lossless")
        said.send(number)


def test_a_killed_save_leaves_a_whole_file(tmp_path):
    path, fork = tmp_path / "s.dqc", multiprocessing.get_context("fork")
    for pause in (0.0, 0.003, 0.006, 0.009, 0.012):
        reader, writer = fork.Pipe(duplex=False)
        process = fork.Process(target=saving, args=(path, writer))
        process.start()
        writer.close()
        said = [reader.recv() for _ in range(3)][-1]
        time.sleep(pause)
        process.kill()
        process.join()
        found = dq.load(path)
        assert found["number"] >= said
        assert bool((found["w"] == found["number"]).all())
    dq.save({"number": 0}, path)
    assert os.listdir(tmp_path) == ["s.dqc"]  # a later save deletes what killed ones have left


@pytest.mark.parametrize("file", ["/etc/passwd", "a\0b", 7, ["a"]])
def test_a_crafted_path_of_a_parent_is_an_error(chain, file):
    paths, _ = chain
    rewrite(paths[1], lambda header: header["parents"][0].update(file=file))
    with pytest.raises(dq.CheckpointError, match="altered: its step, sequence number or parent"):
        dq.load(paths[1])


def test_a_parent_that_is_no_checkpoint_or_the_file_itself_is_an_error(chain):
    paths, _ = chain
    os.mkfifo(paths[0].with_name("fifo"))
    for file, said in (("../checkpoint-0/fifo", "is a FIFO, not a file"), ("state.dqc", "holds another state now")):
        rewrite(paths[1], lambda header, file=file: header["parents"][0].update(file=file))
        with pytest.raises(dq.CheckpointError, match=said):
            dq.load(paths[1])


@pytest.mark.parametrize(
    ("parent", "error", "said"),
    [
        ([], ValueError, "parent is an empty list; leave it out"),
        ((), ValueError, "parent is an empty list; leave it out"),
        (5, TypeError, "parent must be the path of an earlier file, .* not 5"),
        ([None], TypeError, "parent must be the path of an earlier file, .* not None"),
        ({"a": 1}, TypeError, "parent must be the path of an earlier file"),
    ],
)
def test_a_parent_that_is_no_file_is_an_error_that_says_what_to_give(tmp_path, parent, error, said):
    with pytest.raises(error, match=said):
        dq.save({"a": torch.ones(2)}, tmp_path / "a.dqc", parent=parent)
    assert list(tmp_path.iterdir()) == []
