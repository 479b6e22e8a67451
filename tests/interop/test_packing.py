"""Compresses files of other programs into checkpoints, alone or in a run."""

import os
import subprocess
import sys

import pytest
import torch
from full_disk import contents, files_of_at_most
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiers import examples
from torch import nn
from training import bits, model_of, train

import dynaquant as dq
from dynaquant.engine.tensors.dtypes import DTYPES
from dynaquant.interop import any_format, dcp_folder
from dynaquant.interop.export import export, target_for
from dynaquant.interop.packing import KEYFRAME_EVERY, Packer, compress, pack, step_of
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
from dynaquant.state.flatten import unflatten
from dynaquant.store.commit import WritableRun
from dynaquant.store.run import Run, chain_lengths
from dynaquant.store.verifying import damage

LOSSLESS = "lossless"


def tensors_of(seed: int = 0, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"a.weight": torch.randn(64, 64), "a.bias": torch.randn(64), "b.weight": 0.1 * torch.randn(64, 64), **more}


def compressed(state, folder, **options):
    """Save a state with torch.save, compress and decompress it. Returns the result."""
    torch.save(state, folder / "state.pt")
    out = folder / "state.dqc"
    compress(folder / "state.pt", out, Packer(**options))
    stored = StoredCheckpoint(out)
    export(stored, target_for(stored, folder / "back.pt"), folder / "back.pt")
    return torch.load(folder / "back.pt", weights_only=True)


def shape_of(state):
    """Everything in a state except the values of its tensors."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), tuple(state.shape)
    if isinstance(state, dict):
        return [(key, shape_of(value)) for key, value in state.items()]
    return [shape_of(value) for value in state] if isinstance(state, list) else repr(state)


COPIED = {name: dtype for name, dtype in DTYPES.items() if not name.startswith(("float4", "complex32", "bcomplex32"))}


@st.composite
def tensors(draw) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = COPIED[draw(st.sampled_from(sorted(COPIED)))]
    kind = draw(st.sampled_from(["normal", "constant", "odd"]))
    values = torch.randn(shape) if kind == "normal" else torch.full(shape, 2.0)
    if kind == "odd" and values.numel() and dtype.is_floating_point:
        values.view(-1)[0] = draw(st.sampled_from([float("nan"), float("inf"), -0.0, 1e-30]))
    return values.abs().to(dtype) if kind == "normal" else values.to(dtype)


names = st.text(max_size=5) | st.sampled_from(["", ".", "a.b", "../x", "a/b", "ü", "__metadata__", "model", "state"])
states = st.dictionaries(
    names, st.recursive(tensors(), lambda s: st.dictionaries(names, s) | st.lists(s), max_leaves=6)
)


@examples(25)
@given(state=states)
def test_lossless_keeps_every_bit_of_any_state(tmp_path_factory, state):
    assert bits(compressed(state, tmp_path_factory.mktemp("t"), quality=LOSSLESS)) == bits(state)


@examples(25)
@given(state=states)
def test_load_and_decompress_agree_and_keep_names_shapes_and_dtypes(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("t")
    found = compressed(state, folder)
    assert shape_of(found) == shape_of(state)
    assert bits(dq.load(folder / "state.dqc")) == bits(found)


def test_packed_weights_are_small_and_close_to_the_originals(tmp_path):
    state = tensors_of()
    found = compressed(state, tmp_path)
    assert (tmp_path / "state.dqc").stat().st_size * 4 < (tmp_path / "state.pt").stat().st_size
    for name, tensor in state.items():
        assert 0 < float((found[name] - tensor).norm() / tensor.norm()) < 0.2


def test_tied_tensors_stay_tied_and_are_stored_once(tmp_path):
    shared = torch.randn(64, 64)
    found = compressed({"wte": shared, "lm_head": shared, "other": shared.clone()}, tmp_path)
    assert found["wte"].data_ptr() == found["lm_head"].data_ptr() != found["other"].data_ptr()
    assert len(StoredCheckpoint(tmp_path / "state.dqc").tensors) == 2


def test_a_training_continues_from_a_decompressed_file(tmp_path):
    model = model_of(16)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 3)
    state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 3}
    found = compressed(state, tmp_path, quality="high")
    assert shape_of(found) == shape_of(state)
    kinds = {entry.label.role for entry in StoredCheckpoint(tmp_path / "state.dqc").file.header.entries}
    assert kinds == {"weight", "first_moment", "second_moment", "exact"}
    model.load_state_dict(found["state_dict"])
    optimizer.load_state_dict(found["optimizer_states"][0])
    train(model, optimizer)


def test_the_configuration_follows_the_metric(tmp_path):
    state = tensors_of()

    def distance(found) -> float:
        return 1 + sum(float((found[name] - state[name]).square().mean()) for name in state)

    kept = {}
    for limit in (1e-4, 1e-2):
        found = compressed(state, tmp_path, metric=distance, quality=dq.Quality(max_degradation=limit))
        assert 1 < distance(found) <= 1 + limit
        kept[limit] = (tmp_path / "state.dqc").stat().st_size
    assert kept[1e-4] > kept[1e-2]


def test_tensors_to_which_the_metric_is_sensitive_are_kept_more_precisely(tmp_path):
    state = {"minded": torch.randn(64, 64), "not": torch.randn(64, 64)}
    found = compressed(state, tmp_path, metric=lambda s: 1 + float((s["minded"] - state["minded"]).square().mean()))
    errors = {name: float((found[name] - tensor).norm()) for name, tensor in state.items()}
    assert errors["minded"] < errors["not"]


def test_a_higher_metric_may_be_better(tmp_path):
    state = tensors_of()

    def closeness(found) -> float:
        return 1 - sum(float((found[name] - state[name]).square().mean()) for name in state)

    assert 0.99 <= closeness(compressed(state, tmp_path, metric=closeness, higher_is_better=True)) < 1


def test_a_metric_that_changes_its_arguments_has_no_effect_on_the_checkpoint(tmp_path):
    state = tensors_of(steps=torch.tensor([1, 2, 3]), mask=torch.ones(4, dtype=torch.bool))

    def destroying(found) -> float:
        for tensor in found.values():
            tensor.zero_()
        return 1.0

    found = compressed(state, tmp_path, metric=destroying)
    assert torch.equal(found["steps"], state["steps"])
    assert torch.equal(found["mask"], state["mask"])
    assert bits(torch.load(tmp_path / "state.pt")) == bits(state)


def test_a_series_evaluates_each_original_once_and_the_first_as_often_as_it_measures(tmp_path):
    states = {step: tensors_of(step) for step in (1, 2, 3)}
    for step, state in states.items():
        torch.save(state, tmp_path / f"{step}.pt")
    of_originals = []

    def metric(found) -> float:
        of_originals.extend(step for step, state in states.items() if bits(found) == bits(state))
        return 1.0 + float(found["a.weight"].square().mean())

    list(pack({step: tmp_path / f"{step}.pt" for step in states}, tmp_path / "run", Packer(metric=metric)))
    # The first: for the sensitivity of each tensor, and twice to see whether the metric repeats.
    assert [of_originals.count(step) for step in states] == [3, 1, 1]


@pytest.mark.parametrize("with_moments", [False, True])
def test_a_metric_that_fails_on_the_original_is_an_error_and_nothing_is_written(tmp_path, with_moments):
    linear = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(linear.parameters())
    linear(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    state = {"model": linear.state_dict()} | ({"optimizer": optimizer.state_dict()} if with_moments else {})
    torch.save(state, tmp_path / "state.pt")
    for wrong in (lambda _: 1 / 0, lambda _: "text", lambda _: torch.ones(3)):
        with pytest.raises(dq.EvaluateError, match="metric failed on the original weights"):
            compress(tmp_path / "state.pt", tmp_path / "state.dqc", Packer(metric=wrong))
    for score in (float("nan"), float("inf")):
        with pytest.raises(dq.EvaluateError, match="it must be finite"):
            compress(tmp_path / "state.pt", tmp_path / "state.dqc", Packer(metric=lambda _, score=score: score))
    assert os.listdir(tmp_path) == ["state.pt"]


def test_with_a_metric_that_stays_zero_the_estimate_decides(tmp_path, caplog):
    compressed(tensors_of(), tmp_path, metric=lambda _: torch.zeros(1))
    record = StoredCheckpoint(tmp_path / "state.dqc").file.header.record
    assert (record["quality"]["degradation"], record["search"]["judged_by"]) == (0.0, "distortion")
    assert caplog.messages == record["notes"]


def test_a_lossless_checkpoint_takes_no_metric():
    with pytest.raises(ValueError, match="needs no metric"):
        Packer("lossless", metric=lambda _: 1.0)


def test_compress_writes_its_output_atomically(tmp_path):
    save_file(tensors_of(), tmp_path / "m.safetensors")
    out = tmp_path / "m.dqc"
    for name in ("m.dqc", "m.dqc.tmp"):
        (tmp_path / name).write_text("precious")
    before = contents(tmp_path)
    with files_of_at_most(1000), pytest.raises(OSError, match="File too large"):
        compress(tmp_path / "m.safetensors", out, Packer())
    with pytest.raises(dq.CheckpointError, match="is a folder"):
        compress(tmp_path / "m.safetensors", tmp_path, Packer())
    with pytest.raises(dq.CheckpointError, match="is not a folder"):
        compress(tmp_path / "m.safetensors", tmp_path / "nowhere" / "m.dqc", Packer())
    assert contents(tmp_path) == before
    compress(tmp_path / "m.safetensors", out, Packer())
    assert contents(tmp_path).keys() == before.keys()
    assert (tmp_path / "m.dqc.tmp").read_text() == "precious"


def series(folder, steps, suffix="safetensors"):
    """Files of weights that change a little from step to step, by step."""
    folder.mkdir(exist_ok=True)
    files, tensors = {}, tensors_of()
    for step in steps:
        tensors = {name: tensor + 0.01 * torch.randn(tensor.shape) for name, tensor in tensors.items()}
        path = files[step] = folder / f"ckpt-{step}.{suffix}"
        if suffix == "safetensors":
            save_file(tensors, path)
        elif suffix == "pt":
            torch.save({"model": tensors, "step": step}, path)
        else:
            dcp_folder.write(path, {"model": tensors, "step": step})
    return files


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "dcp"])
def test_a_series_becomes_a_run_from_which_any_step_can_be_decompressed(tmp_path, suffix):
    files = series(tmp_path / "files", (100, 200, 300), suffix)
    records = list(pack(files, tmp_path / "run", Packer(quality=LOSSLESS)))
    assert [record.step for record in records] == [100, 200, 300]
    assert [record.parent for record in records] == [None, 100, 200]
    for step, path in files.items():
        file = any_format.read(path)
        assert bits(dq.load(tmp_path / "run", step)) == bits(unflatten(file.tree, dict(file.tensors)))


def test_deltas_are_smaller_than_the_keyframe(tmp_path):
    records = list(pack(series(tmp_path / "files", range(4)), tmp_path / "run", Packer()))
    assert all(record.total.stored * 2 < records[0].total.stored for record in records[1:])


def test_chains_have_a_bounded_length(tmp_path):
    list(pack(series(tmp_path / "files", range(KEYFRAME_EVERY + 2)), tmp_path / "run", Packer()))
    lengths = list(chain_lengths(Run(tmp_path / "run").summaries()[0]).values())
    assert max(lengths) == KEYFRAME_EVERY
    assert lengths[-2:] == [1, 2]


def test_packing_again_continues_after_an_interrupt(tmp_path):
    files = series(tmp_path / "files", (1, 2, 3))
    packing = pack(files, tmp_path / "run", Packer())
    next(packing)
    with pytest.raises(dq.CheckpointError, match="another Checkpointer"):
        next(pack(files, tmp_path / "run", Packer()))
    packing.close()
    (tmp_path / "run" / "step-000000000002.dqc.tmp").write_text("left by a killed process")
    assert [record and record.step for record in pack(files, tmp_path / "run", Packer())] == [None, 2, 3]
    assert len(os.listdir(tmp_path / "run")) == 3


def test_packing_again_repairs_a_partly_copied_run(tmp_path):
    files = series(tmp_path / "files", (1, 2, 3))
    list(pack(files, tmp_path / "run", Packer()))
    WritableRun(tmp_path / "run").delete(1)
    assert [record.step for record in pack(files, tmp_path / "run", Packer())] == [1, 2, 3]
    assert all(damage(Run(tmp_path / "run"), step) is None for step in files)


def test_files_that_cannot_be_packed_leave_no_run(tmp_path):
    files = series(tmp_path, (1,))
    (tmp_path / "ckpt-2.pt").write_text("nonsense")
    for wrong, reason in (
        ({1: files[1], 2: tmp_path / "nowhere-2.pt"}, "does not exist"),
        ({2: tmp_path / "ckpt-2.pt"}, "neither a safetensors file nor"),
        ({2**70: files[1]}, "too large for a step"),
    ):
        with pytest.raises(dq.CheckpointError, match=reason):
            list(pack(wrong, tmp_path / "run", Packer()))
        assert not (tmp_path / "run").exists()
    with pytest.raises(dq.CheckpointError, match="neither"):
        list(pack({1: files[1], 2: tmp_path / "ckpt-2.pt"}, tmp_path / "run", Packer()))
    assert Run(tmp_path / "run").steps() == [1]  # checkpoints packed earlier stay


def test_a_step_is_the_last_number_in_the_name_of_the_file_or_its_folder(tmp_path):
    names = {"ckpt-4000.safetensors": 4000, "epoch=3-step=100.ckpt": 100, "model.7": 7, "x-12.pt": 12, "model.pt": None}
    for name, step in names.items():
        for folder, of_folder in (("old", None), ("checkpoint-500", 500)):
            path = tmp_path / folder / name
            path.parent.mkdir(exist_ok=True)
            path.touch()
            assert step_of(path) == (of_folder if step is None else step)
    assert step_of(tmp_path / "checkpoint-500") == 500
    assert step_of(tmp_path / "old") is None


COMPRESS = """
import sys, pathlib, re
import torch
from dynaquant.interop.export import export
from dynaquant.interop.targets import Target
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
from dynaquant.interop.packing import Packer, compress

def most():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", status)[1])

import threading, time
folder, peak, done = pathlib.Path(sys.argv[1]), [0], threading.Event()
def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], most())
small = folder / "small"
compress(small / "m.safetensors", small / "m.dqc", Packer())  # imports and initializes everything
export(StoredCheckpoint(small / "m.dqc"), Target.SAFETENSORS, small / "back.safetensors")
start = peak[0] = most()
threading.Thread(target=watch, daemon=True).start()
compress(folder / "m.safetensors", folder / "m.dqc", Packer())
export(StoredCheckpoint(folder / "m.dqc"), Target.SAFETENSORS, folder / "back.safetensors")
done.set()
print(peak[0] - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the memory of a process")
def test_compressing_and_decompressing_take_the_memory_of_a_few_tensors(tmp_path):
    """Pages of the mapped file do not count, since the system can reclaim them at any time."""
    (tmp_path / "small").mkdir()
    save_file({"w": torch.randn(64, 64)}, tmp_path / "small" / "m.safetensors")
    size, count = 2 * 1024 * 1024, 48
    save_file({f"{i}": torch.randn(size // 4).view(512, -1) for i in range(count)}, tmp_path / "m.safetensors")
    command = [sys.executable, "-c", COMPRESS, str(tmp_path)]
    limit = {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | limit)
    assert 0 < int(done.stdout) < count * size / 4
    assert (tmp_path / "back.safetensors").stat().st_size > count * size
